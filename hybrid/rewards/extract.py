"""What a verifier reads of a completion: the text after the thinking block, and the answer that stands in it."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

AnswerPlace = Literal["tags", "box", "last_line"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TEXT_MACRO = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{")


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """The text of a completion as TRL hands it over.

    Args:
      completion: a string, or the chat messages that the student added (tool turns may stand between).

    Returns:
      The string itself, or the content of the last assistant message; "" where there is none.
    """
    if isinstance(completion, str):
        return completion
    contents = [message.get("content") for message in completion if message.get("role") == "assistant"]
    content = contents[-1] if contents else ""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part.get("text") or "" for part in content if part.get("type") == "text")


def after_thinking(text: str, *, prompt_opens_thinking: bool = False) -> str | None:
    """The part of a completion that counts as its answer.

    Args:
      text: the completion.
      prompt_opens_thinking: the prompt ends with `<think>`, so that a completion without `</think>` never left it.

    Returns:
      What follows the last `</think>`, the whole text where nothing was thought, or None for an unfinished block.
    """
    _, closed, answer = text.rpartition("</think>")
    if "<think>" in answer or (prompt_opens_thinking and not closed):
        return None
    return answer


def last_box(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` or `\fbox{...}`, with its braces matched.

    Escaped braces do not count, a box that never closes is passed over, and a box inside a box is part of the outer
    one unless it is all that the outer one holds.

    Args:
      text: any text.

    Returns:
      The content without surrounding blanks, or None where no box is complete.
    """
    content, position = None, 0
    while opening := _BOX.search(text, position):
        end = _closing_brace(text, opening.end())
        if end is None:
            position = opening.end()
        else:
            content, position = text[opening.end() : end].strip(), end
    return None if content is None else _unwrapped(content, _BOX)


def without_text_macro(answer: str) -> str:
    r"""`\text{E}` as `E`; an answer that is more than one such macro is returned as it is."""
    return _unwrapped(answer, _TEXT_MACRO)


def last_tag(text: str) -> str | None:
    """The content of the last complete `<answer>...</answer>`, stripped; None where there is none."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def last_line(text: str) -> str | None:
    """The last line that is not blank, stripped; None where every line is blank."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


ANSWER_PLACES: dict[AnswerPlace, Callable[[str], str | None]] = {
    "tags": last_tag,
    "box": last_box,
    "last_line": last_line,
}


def _closing_brace(text: str, start: int) -> int | None:
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None


def _unwrapped(content: str, macro: re.Pattern[str]) -> str:
    while opening := macro.match(content):
        if _closing_brace(content, opening.end()) != len(content) - 1:
            break
        content = content[opening.end() : -1].strip()
    return content
