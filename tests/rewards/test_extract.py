import pytest

from hybrid.rewards.extract import (
    after_thinking,
    completion_text,
    last_box,
    last_line,
    last_tag,
    without_text_macro,
)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"first \boxed{5}, no: \boxed{7}", "7"),
        (r"so \fbox{42}", "42"),
        (r"\boxed{\frac{a}{\sqrt{b}}}", r"\frac{a}{\sqrt{b}}"),
        (r"\boxed{\text{E}}", r"\text{E}"),
        (r"\boxed{4", None),
        (r"\boxed{5} and then \boxed{4", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{1 + \fbox{5}}", r"1 + \fbox{5}"),
        (r"\boxed{4 \boxed{6}", "6"),
        (r"\boxed { 3 }", "3"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{1 \\} tail}", r"1 \\"),
        ("no box", None),
        ("", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_complete_box(text, box):
    assert last_box(text) == box


@pytest.mark.parametrize(
    ("answer", "inner"),
    [(r"\text{E}", "E"), (r"\textbf{\text{ A }}", "A"), (r"12\text{ cm}", r"12\text{ cm}"), (r"\text{a}\text{b}",) * 2],
)
def test_a_text_macro_is_taken_off_where_it_is_all(answer, inner):
    assert without_text_macro(answer) == inner


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("plain", "plain"),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("<think>a</think>b<think>c</think>d", "d"),
        (r"<think>\boxed{42}", None),
        ("<think>a</think>b<think>c", None),
    ],
)
def test_only_what_follows_the_thinking_counts(text, rest):
    assert after_thinking(text) == rest


def test_a_prompt_that_opens_the_thinking_makes_an_open_completion_unfinished():
    assert after_thinking("a", prompt_opens_thinking=True) is None
    assert after_thinking("a</think>b", prompt_opens_thinking=True) == "b"


def test_tags_and_lines():
    assert last_tag("<answer>1</answer> <answer> 2\n</answer>") == "2"
    assert last_tag("<answer>1</answer> <answer>2") == "1"
    assert last_tag("<answer>1 <answer>2</answer>") == "2"
    assert last_tag("1</answer>") is None
    assert last_line("a\n b \n\n") == "b"
    assert last_line(" \n") is None


def test_the_text_of_a_chat_completion_is_its_last_assistant_message():
    chat = [
        {"role": "assistant", "content": "let me see"},
        {"role": "tool", "content": "9"},
        {"role": "assistant", "content": [{"type": "text", "text": "it is "}, {"type": "text", "text": "9"}]},
    ]
    assert completion_text(chat) == "it is 9"
    assert completion_text(chat[:2]) == "let me see"
    assert completion_text([{"role": "assistant", "content": None}]) == ""
    assert completion_text([]) == ""
    assert completion_text("text") == "text"
