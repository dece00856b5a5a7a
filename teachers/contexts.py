"""What a teacher may see and the student may not: privileged blocks before an unchanged prompt, and blurred views.

A block stands first and the student's own prompt after it, so that both prompts end identically and the completion
continues the same text on both sides. Nothing is ever cut to fit: a prompt that is too long is an error with its
lengths. Which answers and siblings are shown is chosen in `teachers.contrast`.
"""

import random
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from PIL.Image import Image, Resampling

from teachers.contrast import contrast_answers, contrast_trajectories, without_thinking
from teachers.errors import TeacherCannot, TeacherError, TeacherMismatch

__all__ = [
    "SAME_ENDING",
    "TEMPLATES",
    "ContextTooLong",
    "PromptStyle",
    "Rendered",
    "contrast_answers",
    "contrast_trajectories",
    "degraded_image",
    "degraded_text",
    "fill",
    "privileged",
    "privileged_prompt",
    "render",
    "without_thinking",
]

Prompt = str | Sequence[Mapping[str, Any]]
"""A plain text, or chat messages with `role` and `content` (a text, or parts of which each has a `type`)."""

SAME_ENDING = 8
"""Ids at the end of both prompts that must agree; half of those after the block, where these are few."""

_ANSWER = (
    "A reference solution to the problem below arrives at this answer:\n{answer}\n"
    "Solve the problem in your own way, step by step, without mentioning the reference.\n\n"
)
TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        "reference_answer": _ANSWER,
        # the same words for a wrong answer: the two prompts of a contrast differ in the answer alone
        "wrong_answer": _ANSWER,
        "sibling_solution": (
            "A reference solution to the problem below:\n{solution}\n"
            "Solve the problem in your own way, step by step, without mentioning the reference.\n\n"
        ),
        "reflection": (
            "An earlier attempt at the problem below:\n{attempt}\nWhat was found to be wrong with it:\n{feedback}\n"
            "Solve the problem again, and avoid that mistake.\n\n"
        ),
        "hint": "A hint for the problem below:\n{hint}\n\n",
        "instruction": "{instruction}\n\n",
    }
)
"""Blocks by name; each ends where the student's prompt begins."""


class ContextTooLong(TeacherMismatch):
    """A privileged prompt and its completion do not fit the teacher; the row can be left out, but is not cut."""


@dataclass(frozen=True, kw_only=True)
class PromptStyle:
    """How a side turns messages into text; the student has one, and each teacher may have its own.

    Attributes:
      chat_template: Jinja text; None for the tokenizer's own.
      system: system message that replaces the prompt's, or is added to it; None leaves it.
      arguments: variables of the template, such as {"enable_thinking": False}.
      ends_differently: the prompt is meant to end otherwise than the student's (another thinking mode, say).
    """

    chat_template: str | None = None
    system: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ends_differently: bool = False


PLAIN = PromptStyle()


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A prompt as text, to be shown, and as ids, to be scored."""

    text: str
    ids: tuple[int, ...]


def fill(template: str, fields: Mapping[str, str]) -> str:
    r"""Puts `fields` into the named places of a template; what they contain is taken literally.

    Args:
      template: text with places such as {answer}; a literal brace is written twice, as in \boxed{{{answer}}}.
      fields: at least those that the template names.

    Raises:
      TeacherError: a field is missing, or a place is not a plain name.
    """
    try:
        places = [(name, form, conversion) for _, name, form, conversion in string.Formatter().parse(template)]
    except ValueError as error:
        raise TeacherError(f"template {template!r}: {error}; write a literal brace twice") from error
    names = [name for name, _, _ in places if name is not None]
    for name, form, conversion in places:
        if name is not None and (not name.isidentifier() or form or conversion):
            raise TeacherError(
                f"template {template!r} has the place {{{name}}}; a place is one plain name, and a literal brace is "
                "written twice"
            )
    missing = [name for name in names if name not in fields]
    if missing:
        raise TeacherError(
            f"template {template!r} needs the field {missing[0]!r}; this row has {sorted(fields) or 'no fields'}"
        )
    return template.format_map({name: fields[name] for name in names})


def privileged(prompt: Prompt, block: str) -> Prompt:
    """Puts `block` before the student's words, which stay as they are.

    Args:
      prompt: a text, or messages; the block then opens the last user message, as in SIPO's published commands.
      block: the privileged text, with the blank lines that part it from the prompt.

    Returns:
      A new prompt of the same kind.

    Raises:
      TeacherError: the messages have no user's message.

    Reference:
      SIPO, its repository's launcher and context builder (arXiv 2609.36742). Differs: nothing is ever truncated.
    """
    if isinstance(prompt, str):
        return block + prompt
    users = [i for i, message in enumerate(prompt) if message["role"] == "user"]
    if not users:
        raise TeacherError(
            f"a privileged block opens the user's message, and this prompt has only {[m['role'] for m in prompt]}"
        )
    last = prompt[users[-1]]
    content = last["content"]
    opened = block + content if isinstance(content, str) else [{"type": "text", "text": block}, *content]
    return [*prompt[: users[-1]], {**last, "content": opened}, *prompt[users[-1] + 1 :]]


def render(
    prompt: Prompt,
    tokenizer: Any,
    style: PromptStyle = PLAIN,
    *,
    images: Sequence[Image] = (),
    processor: Any = None,
) -> Rendered:
    """Turns a prompt into text and ids, with exactly one BOS where the tokenizer or the template puts one.

    Args:
      prompt: a text, taken as it is, or messages, which go through the chat template with the opening of an answer.
      tokenizer: of transformers.
      style: template, system message and template variables.
      images: pictures of the prompt, in order.
      processor: expands the pictures' placeholders; needed only with `images`.

    Raises:
      TeacherError: a system message or template variables are set for a plain text, or there is no chat template.
      TeacherCannot: images without a processor.
    """
    if isinstance(prompt, str):
        if style.system is not None or style.arguments or style.chat_template is not None:
            raise TeacherError("a chat template, system message or thinking mode is set, and the prompt is plain text")
        text, adds_bos = prompt, not (tokenizer.bos_token and prompt.startswith(tokenizer.bos_token))
    else:
        if style.chat_template is None and tokenizer.chat_template is None:
            raise TeacherError("the prompt is a chat, and the tokenizer has no chat template; set one, or give text")
        messages = list(prompt)
        if style.system is not None:
            rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
            messages = [{"role": "system", "content": style.system}, *rest]
        continues = bool(messages) and messages[-1]["role"] == "assistant"
        text = tokenizer.apply_chat_template(
            messages,
            chat_template=style.chat_template,
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **style.arguments,
        )
        adds_bos = False
    if images:
        if processor is None:
            raise TeacherCannot(f"the prompt has {len(images)} images, and there is no processor to expand them")
        encoded = processor(text=[text], images=list(images), add_special_tokens=adds_bos)
        return Rendered(text=text, ids=tuple(int(i) for i in encoded["input_ids"][0]))
    return Rendered(text=text, ids=tuple(tokenizer(text, add_special_tokens=adds_bos)["input_ids"]))


def privileged_prompt(
    prompt: Prompt,
    block: str,
    tokenizer: Any,
    *,
    student_ids: Sequence[int],
    completion_tokens: int,
    max_length: int | None,
    style: PromptStyle = PLAIN,
    images: Sequence[Image] = (),
    processor: Any = None,
) -> Rendered:
    """Renders the teacher's prompt and makes sure of what a contrast rests on.

    Args:
      prompt: the student's prompt.
      block: see `privileged`; a filled template.
      tokenizer: the teacher's, which is the student's as well.
      student_ids: the prompt that the student was sampled from.
      completion_tokens: longest completion that will be scored under the prompt.
      max_length: tokens that the teacher takes, prompt and completion together; None for no limit.
      style: the teacher's.
      images: see `render`.
      processor: see `render`.

    Returns:
      The prompt with the block, whole.

    Raises:
      ContextTooLong: prompt and completion do not fit; both lengths and the block's are named.
      TeacherMismatch: the template changed the student's words, or the two prompts end differently.
    """
    own = render(prompt, tokenizer, style, images=images, processor=processor)
    teacher = render(privileged(prompt, block), tokenizer, style, images=images, processor=processor)
    where = _insertion_point(teacher.text, own.text)
    if where is None:
        raise TeacherMismatch(
            "the chat template changes the student's prompt when a block stands before it: without the block it is\n"
            f"{own.text!r}\nand with it\n{teacher.text!r}"
        )
    num_after = len(tokenizer(own.text[where:], add_special_tokens=False)["input_ids"])
    num_same = min(SAME_ENDING, max(1, num_after // 2))
    if not style.ends_differently and tuple(teacher.ids[-num_same:]) != tuple(student_ids[-num_same:]):
        raise TeacherMismatch(
            f"student and teacher prompts end differently: {tokenizer.decode(list(student_ids[-num_same:]))!r} and "
            f"{tokenizer.decode(list(teacher.ids[-num_same:]))!r}. Give the teacher the student's template and "
            "thinking mode, or declare the difference (ends_differently)"
        )
    length = len(teacher.ids) + completion_tokens
    if max_length is not None and length > max_length:
        raise ContextTooLong(
            f"the privileged prompt has {len(teacher.ids)} tokens, {len(teacher.ids) - len(own.ids)} of them from its "
            f"block; with {completion_tokens} completion tokens that is {length}, and the teacher takes {max_length}. "
            "Shorten what the block shows, serve the teacher with a longer context, or leave such rows out"
        )
    return teacher


def degraded_image(image: Image, *, ratio: float) -> Image:
    """The picture with its detail gone and its size, hence its tokens, kept.

    Each side is scaled to `ratio` of its length (rounded down, at least 1 pixel) with bilinear weights, and back to the
    original size with the nearest pixel.

    Args:
      image: any picture of PIL.
      ratio: in (0, 1]; 1 changes nothing.

    Raises:
      TeacherError: `ratio` is out of range.

    Reference:
      VA-OPD's repository, `images.py` (arXiv 2605.21924). Differs: nothing.
    """
    if not 0 < ratio <= 1:
        raise TeacherError(f"ratio must be in (0, 1]; got {ratio}")
    # 0.29 * 100 is 28.999... in binary, and means 29
    small = tuple(max(1, int(side * ratio + 1e-9)) for side in image.size)
    return image.resize((small[0], small[1]), Resampling.BILINEAR).resize(image.size, Resampling.NEAREST)


def degraded_text(text: str, *, ratio: float, seed: int = 0, mask: str = "_") -> str:
    """The text with all but `ratio` of its words masked: what `degraded_image` is to a picture.

    Args:
      text: words and the white space between them, which stays.
      ratio: share of words that are kept, in (0, 1]; rounded down, at least 1 word.
      seed: chooses the words; the same text and seed give the same words.
      mask: stands for each word that is gone.

    Raises:
      TeacherError: `ratio` is out of range.

    Reference:
      Our own, after the text-only reading of VA-OPD.
    """
    if not 0 < ratio <= 1:
        raise TeacherError(f"ratio must be in (0, 1]; got {ratio}")
    pieces = re.split(r"(\s+)", text)
    words = [i for i, piece in enumerate(pieces) if piece and not piece.isspace()]
    num_kept = min(len(words), max(1, int(len(words) * ratio + 1e-9)))
    gone = set(words) - set(random.Random(seed).sample(words, num_kept))
    return "".join(mask if i in gone else piece for i, piece in enumerate(pieces))


def _insertion_point(longer: str, shorter: str) -> int | None:
    """Where `longer` has a piece more than `shorter`; None where it differs in any other way."""
    extra = len(longer) - len(shorter)
    same = next((i for i, (a, b) in enumerate(zip(longer, shorter, strict=False)) if a != b), len(shorter))
    return same if extra >= 0 and longer[same + extra :] == shorter[same:] else None
