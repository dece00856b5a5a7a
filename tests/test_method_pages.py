import functools
import re
from pathlib import Path

import pytest

from hybrid.method_pages import FOLDER, main, meaning, method_page, metric_names, pages, typeset
from hybrid.methods import METHODS
from hybrid.methods.base import MethodConfig

DOCS = Path(__file__).parent.parent / FOLDER

page_of = functools.cache(method_page)
pages_once = functools.cache(pages)

every_method = pytest.mark.parametrize("name", METHODS)


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_the_pages_are_those_of_the_classes():
    """Run `python -m hybrid.method_pages` where this fails."""
    assert {path.name for path in DOCS.glob("*.md")} == pages_once().keys()
    for name, text in pages_once().items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, name


def test_the_command_writes_the_pages(tmp_path):
    main([str(tmp_path / "pages")])
    assert {path.name for path in (tmp_path / "pages").iterdir()} == pages_once().keys()


@every_method
def test_a_page_lists_every_setting_with_its_source(name: str):
    kind = METHODS[name]
    settings = rows(page_of(name), "Settings")
    assert [row[0].strip("`") for row in settings] == [key for key in kind.model_fields if key != "name"]
    for setting, default, values, about, source in settings:
        assert default, setting
        assert values, setting
        assert about, setting
        assert source, f"{name}.sources has no {setting}"


@every_method
def test_no_source_is_of_a_setting_that_is_gone(name: str):
    assert METHODS[name].sources.keys() <= METHODS[name].model_fields.keys()


@every_method
def test_a_page_explains_every_metric(name: str):
    if name == "mix":
        assert "Those of its parts" in page_of(name)
        return
    objective = METHODS[name].model_validate({}).build()
    listed = {row[0].strip("`"): row[1] for row in rows(page_of(name), "Metrics")} if metric_names(objective) else {}
    assert listed.keys() == set(metric_names(objective))
    assert all(listed.values())


@every_method
def test_a_page_has_the_paper_the_formula_and_the_differences(name: str):
    kind, page = METHODS[name], page_of(name)
    assert kind.paper in page
    formula = page.split("```\n")[1]
    assert len(formula.splitlines()) == len(kind.formula.split(";  "))
    assert "Nothing that we know of" not in page


@every_method
def test_no_source_needs_a_file_of_ours(name: str):
    text = page_of(name)
    assert not re.search(r"methods_core|methods_catalogue|peers\.md|pitfall|\bO\d\b", text)


def test_a_metric_that_nobody_explains_is_an_error():
    objective = METHODS["grpo"].model_validate({}).build()
    with pytest.raises(KeyError, match="the metric strange has no meaning"):
        meaning("strange", objective)


@pytest.mark.parametrize(
    ("plain", "pretty"),
    [
        ("A[i,t] = R[i] - mean_g R", "Aᵢₜ = Rᵢ \N{MINUS SIGN} mean_g R"),
        ("beta_k >= eps * lam", "βₖ ≥ ε ⋅ λ"),
        ("KL(pS || pT)^2", "KL(pS ‖ pT)²"),
        ("sum_{u >= t} x, sum_t y, d_t", "Σ_{u ≥ t} x, Σₜ y, dₜ"),
        ("clip(e, +-eps) != summed", "clip(e, ±ε) ≠ summed"),
        ("theta[i, t]", "θᵢₜ"),
    ],
)
def test_formulas_are_typeset(plain: str, pretty: str):
    assert typeset(plain) == pretty


def test_needs_of_some_settings_are_told():
    page = page_of("opdvr")
    assert "- `reward`, `scores.teacher`, `student_logprobs`\n" in page
    assert "- with `truncated: skip` also `truncated`\n" in page
    assert "- with `top_k: 8` also `scores.student.top`, `scores.teacher.top`\n" in page


def test_every_method_is_a_class_with_a_name():
    assert all(
        issubclass(kind, MethodConfig) and kind.model_fields["name"].default == name for name, kind in METHODS.items()
    )
