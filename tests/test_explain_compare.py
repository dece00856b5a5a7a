from html.parser import HTMLParser

import pytest
from rich.console import Console

from hybrid.errors import ConfigError
from hybrid.explain_command import run_explain
from tests.explaining import ask, explained, scored, written_to


@pytest.fixture
def file_of(tmp_path):
    return lambda *lines: written_to(tmp_path / "rollouts.jsonl", *lines)


def test_a_comparison_lists_the_tokens_that_methods_treat_differently(file_of):
    both = explained(file_of(scored(1), scored(0)), compare="opd,opdvr", method=None)
    assert both.keys() == {"methods", "differences", "agreements"}
    assert both["methods"]["opdvr"] == explained(file_of(scored(1), scored(0)), "opdvr")
    assert [(one["response_id"], one["token"]) for one in both["differences"]] == [("p/0", 1), ("p/0", 3), ("p/1", 0)]
    assert both["differences"][0] == {
        "response_id": "p/0",
        "token": 1,
        "token_id": 2,
        "treatments": {"opd": "down", "opdvr": "not trained"},
        "advantages": {"opd": -1.0, "opdvr": 0.0},
        "kl_weights": {"opd": 0.0, "opdvr": 0.0},
        "kept": {"opd": 1, "opdvr": 0},
    }
    assert both["agreements"] == [{"methods": ["opd", "opdvr"], "share": 5 / 8}]


def test_three_methods_may_be_compared_with_their_own_settings(file_of, tmp_path):
    path = tmp_path / "strict.yaml"
    path.write_text("name: opdvr\n")
    file = file_of(scored(1), scored(0))
    three = explained(file, None, "strict.thr=1", "opd.ratio_clip=0.1", compare=f"opd,opdvr,{path}")
    assert three["methods"]["strict"]["method"]["thr"] == 1
    assert three["methods"]["opd"]["method"]["ratio_clip"] == 0.1
    assert len(three["agreements"]) == 3
    table = run_explain(file, None, [], 0, None, False, "opd,opdvr,grpo", None)
    console = Console(width=150)
    with console.capture() as captured:
        console.print(table)
    assert "5 tokens treated differently" in captured.get()
    assert "opd and grpo treat 37.5% of the tokens alike" in captured.get()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": None, "compare": None}, "needs --method NAME or --compare"),
        ({"method": "opd", "compare": "opd,grpo"}, "not both"),
        ({"method": None, "compare": "opd"}, "two or more different methods"),
        ({"method": None, "compare": "opd,opd"}, "two or more different methods"),
        ({"method": None, "compare": "opd,grppo"}, "did you mean grpo?"),
    ],
)
def test_what_cannot_be_compared_is_refused(file_of, given, message):
    with pytest.raises(ConfigError) as caught:
        ask(file_of(scored(1)), **given)
    assert message in str(caught.value)


def test_a_setting_says_which_of_the_compared_methods_it_is_for(file_of):
    with pytest.raises(ConfigError, match=r"begin with the method's name, as in --set opd.key=value"):
        ask(file_of(scored(1)), None, "thr=1", compare="opd,opdvr")


class Page(HTMLParser):
    """What a browser would read of the page."""

    def __init__(self):
        super().__init__()
        self.tokens: list[tuple[str, str]] = []
        self.foreign: list[str] = []

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if "data-n" in named:
            self.tokens.append((named.get("class") or "", named["data-n"] or ""))
        self.foreign += [value for key, value in attrs if key in ("src", "href") and value]


def test_the_page_colours_each_token_and_needs_no_network(file_of, tmp_path):
    html = tmp_path / "page.html"
    line = scored(1, tokens=["<b>", " is", "\n", "2"], prompt="1 < 2 & 3", completion="...")
    printed = run_explain(file_of(line, scored(0)), None, [], 0, None, False, "opd,opdvr", html)
    assert not isinstance(printed, str)
    text = html.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert len(page.tokens) == 16
    assert page.foreign == []
    assert "http" not in text.replace("http-equiv", "")
    assert page.tokens[0] == (
        "t up",
        "token 0, id 1: up\nadvantage 0.5\nkl weight 0\nstudent -1.5\nteacher -1",
    )
    # opd lowers the second token, opdvr leaves it
    assert page.tokens[1][0] == "t down diff"
    assert page.tokens[5][0] == "t off diff"
    assert "&lt;b&gt;" in text
    assert "1 &lt; 2 &amp; 3" in text
    assert "62.5%" in text
