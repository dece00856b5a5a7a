import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from teachers.contexts import (
    TEMPLATES,
    ContextTooLong,
    PromptStyle,
    degraded_image,
    degraded_text,
    fill,
    privileged,
    privileged_prompt,
    render,
)
from teachers.errors import TeacherCannot, TeacherError, TeacherMismatch

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is two plus two"},
]
FIELDS = {
    "answer": "nine {not a place}",
    "solution": "three plus four is seven",
    "attempt": "two",
    "feedback": "too small",
    "hint": "add",
    "instruction": "think",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_block_says_its_fields_and_ends_where_the_prompt_begins(name):
    block = fill(TEMPLATES[name], FIELDS)
    assert block.endswith("\n\n")
    shown = [value for field, value in FIELDS.items() if "{" + field + "}" in TEMPLATES[name]]
    assert shown
    assert all(value in block for value in shown)


def test_right_and_wrong_answer_differ_in_the_answer_alone():
    right, wrong = (
        fill(TEMPLATES["reference_answer"], {"answer": "7"}),
        fill(TEMPLATES["wrong_answer"], {"answer": "5"}),
    )
    assert right.replace("7", "5") == wrong


def test_places_are_plain_names_and_braces_are_doubled():
    assert fill(r"\boxed{{{answer}}}", {"answer": r"\frac{1}{2}"}) == r"\boxed{\frac{1}{2}}"
    with pytest.raises(TeacherError, match="needs the field 'hint'; this row has no fields"):
        fill(TEMPLATES["hint"], {})
    with pytest.raises(TeacherError, match="write a literal brace twice"):
        fill(r"\boxed{", {})
    for template in ("{answer.strip}", "{0}", "{answer!r}", "{answer:>9}", "{}"):
        with pytest.raises(TeacherError, match="a place is one plain name"):
            fill(template, {"answer": "7"})


def test_the_block_stands_first_and_the_prompt_is_unchanged(tokenizer):
    block = fill(TEMPLATES["hint"], FIELDS)
    assert privileged("what is two", block) == block + "what is two"
    before = copy.deepcopy(CHAT)
    opened: Any = privileged(CHAT, block)
    assert before == CHAT
    assert opened[0] == CHAT[0]
    assert opened[1]["content"] == block + CHAT[1]["content"]
    parts: list[Any] = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is two"}]}]
    opened = privileged(parts, block)
    assert opened[0]["content"] == [{"type": "text", "text": block}, *parts[0]["content"]]
    turns = [*CHAT, {"role": "assistant", "content": "four"}, {"role": "user", "content": "sure"}]
    opened = privileged(turns, block)
    assert opened[:3] == turns[:3]
    assert opened[3]["content"] == block + "sure"
    with pytest.raises(TeacherError, match=r"this prompt has only \['system'\]"):
        privileged(CHAT[:1], block)


@pytest.mark.parametrize("prompt", ["what is two plus two", CHAT])
def test_both_prompts_end_identically(tokenizer, prompt):
    block = fill(TEMPLATES["reference_answer"], {"answer": "four"})
    student = render(prompt, tokenizer)
    teacher = privileged_prompt(
        prompt, block, tokenizer, student_ids=student.ids, completion_tokens=10, max_length=None
    )
    assert "four" in teacher.text
    assert teacher.text.replace(block, "") == student.text
    # what is two plus two, and what opens the answer
    num_same = 5 if isinstance(prompt, str) else 7
    assert teacher.ids[-num_same:] == student.ids[-num_same:]
    assert len(teacher.ids) > len(student.ids)


def test_a_prompt_is_never_cut_to_fit(tokenizer):
    # pitfall 26 and methods_core 2.3: a long block would silently cut the question
    student = render(CHAT, tokenizer)
    block = fill(TEMPLATES["sibling_solution"], FIELDS)
    options = {"student_ids": student.ids, "completion_tokens": 10}
    whole = privileged_prompt(CHAT, block, tokenizer, max_length=None, **options)
    fits = len(whole.ids) + 10
    assert privileged_prompt(CHAT, block, tokenizer, max_length=fits, **options) == whole
    with pytest.raises(ContextTooLong) as error:
        privileged_prompt(CHAT, block, tokenizer, max_length=fits - 1, **options)
    block_tokens = len(whole.ids) - len(student.ids)
    assert f"has {len(whole.ids)} tokens, {block_tokens} of them from its block" in str(error.value)
    assert f"with 10 completion tokens that is {fits}, and the teacher takes {fits - 1}" in str(error.value)


def test_another_thinking_mode_is_refused_unless_it_is_declared(tokenizer):
    # pitfall 21
    student = render(CHAT, tokenizer, PromptStyle(arguments={"enable_thinking": False}))
    assert student.text.endswith("<|assistant|><think></think>")
    options = {"student_ids": student.ids, "completion_tokens": 1, "max_length": None}
    block = fill(TEMPLATES["hint"], FIELDS)
    with pytest.raises(TeacherMismatch, match=r"end differently.*or declare the difference"):
        privileged_prompt(CHAT, block, tokenizer, **options)
    privileged_prompt(CHAT, block, tokenizer, style=PromptStyle(ends_differently=True), **options)
    privileged_prompt(CHAT, block, tokenizer, style=PromptStyle(arguments={"enable_thinking": False}), **options)


def test_the_teacher_may_have_its_own_system_message_and_template(tokenizer):
    style = PromptStyle(system="you teach")
    assert render(CHAT, tokenizer, style).text.startswith("<|system|>you teach<|end|><|user|>what")
    assert render(CHAT[1:], tokenizer, style).text == render(CHAT, tokenizer, style).text
    own = PromptStyle(chat_template="{{ messages[-1]['content'] }}")
    assert render(CHAT, tokenizer, own).text == "what is two plus two"
    unfinished = [*CHAT, {"role": "assistant", "content": "it is"}]
    assert render(unfinished, tokenizer).text.endswith("<|assistant|>it is")


def test_a_template_that_rewrites_the_prompt_is_refused(tokenizer):
    shouting = PromptStyle(
        chat_template="{% set c = messages[-1]['content'] %}{{ c | upper if c | length > 30 else c }}<|assistant|>"
    )
    student = render(CHAT, tokenizer, shouting)
    with pytest.raises(TeacherMismatch, match="the chat template changes the student's prompt"):
        privileged_prompt(
            CHAT,
            fill(TEMPLATES["reference_answer"], FIELDS),
            tokenizer,
            student_ids=student.ids,
            completion_tokens=1,
            max_length=None,
            style=shouting,
        )


def test_there_is_exactly_one_bos(tokenizer):
    # pitfall 22: a text that begins with BOS, and a tokenizer that adds one
    from tokenizers.processors import TemplateProcessing

    adding = copy.deepcopy(tokenizer)
    adding.backend_tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    for prompt in ("what is two", "<|bos|>what is two"):
        assert render(prompt, adding).ids.count(0) == 1
    adding.chat_template = "<|bos|>" + tokenizer.chat_template
    assert render(CHAT, adding).ids.count(0) == 1
    assert render(CHAT, tokenizer).ids.count(0) == 0


def test_what_cannot_be_rendered_is_refused(tokenizer):
    with pytest.raises(TeacherError, match="the prompt is plain text"):
        render("what", tokenizer, PromptStyle(system="you teach"))
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(TeacherError, match="the tokenizer has no chat template"):
        render(CHAT, bare)
    with pytest.raises(TeacherCannot, match="has 1 images, and there is no processor"):
        render(CHAT, tokenizer, images=[Image.new("RGB", (8, 8))])


def test_images_are_expanded_by_the_processor(tokenizer):
    def processor(text, images, add_special_tokens):
        wide = [part.replace("two", "two" * len(images)) for part in text]
        return {"input_ids": [tokenizer(part, add_special_tokens=add_special_tokens)["input_ids"] for part in wide]}

    pictures = [Image.new("RGB", (8, 8))] * 2
    rendered = render(CHAT, tokenizer, images=pictures, processor=processor)
    assert rendered.text == render(CHAT, tokenizer).text
    assert tokenizer.decode(rendered.ids).count("two") == 4


@pytest.mark.parametrize(("size", "small"), [((40, 20), (4, 2)), ((37, 31), (3, 3)), ((5, 3), (1, 1))])
def test_a_degraded_image_is_made_of_one_block_for_each_small_pixel(size, small):
    # each side to 10% rounded down, at least 1 pixel; then back with the nearest pixel
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))
    degraded = degraded_image(image, ratio=0.1)
    assert degraded.size == size
    expected = np.asarray(image.resize(small, Image.Resampling.BILINEAR))
    pixels = np.asarray(degraded)
    for y in range(size[1]):
        for x in range(size[0]):
            # the pixel's centre, on the small picture's grid
            row, column = int((y + 0.5) * small[1] / size[1]), int((x + 0.5) * small[0] / size[0])
            assert (pixels[y, x] == expected[row, column]).all()


def test_a_ratio_means_what_it_says_in_decimal():
    # 0.29 * 100 is 28.999... in binary
    image = Image.fromarray((np.arange(100 * 100) % 251).astype(np.uint8).reshape(100, 100))
    assert np.asarray(degraded_image(image, ratio=1.0)).tolist() == np.asarray(image).tolist()
    degraded = np.asarray(degraded_image(image, ratio=0.29))
    assert len({row.tobytes() for row in degraded}) == 29
    with pytest.raises(TeacherError, match=r"ratio must be in \(0, 1\]; got 0"):
        degraded_image(image, ratio=0.0)


def test_degraded_text_keeps_a_share_of_the_words_and_all_white_space():
    text = "one two\n three  four five"
    degraded = degraded_text(text, ratio=0.4, seed=3)
    assert degraded == degraded_text(text, ratio=0.4, seed=3)
    assert sum(word != "_" for word in degraded.split()) == 2
    assert degraded_text(text, ratio=1.0) == text
    assert len(degraded_text(text, ratio=0.01).split()) == 5
    assert sum(word != "_" for word in degraded_text(text, ratio=0.01).split()) == 1
    assert degraded_text("  ", ratio=0.5) == "  "
    with pytest.raises(TeacherError, match=r"ratio must be in \(0, 1\]; got 2"):
        degraded_text(text, ratio=2.0)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.text(alphabet="ab \n_", max_size=30), st.floats(0.01, 1), st.integers(0, 5))
def test_degraded_text_never_moves_a_word(text, ratio, seed):
    degraded = degraded_text(text, ratio=ratio, seed=seed)
    before, after = text.split(), degraded.split()
    assert len(before) == len(after)
    assert all(new in (old, "_") for old, new in zip(before, after, strict=True))
