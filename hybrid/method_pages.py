"""A page per method, made of the method's own class: formula, needs, settings, metrics, differences from the paper.

`hybrid methods NAME` shows the page; `python -m hybrid.method_pages [FOLDER]` writes docs/methods/NAME.md. Nothing is
said here for a second time: formula, paper, settings and their sources stand in the class, the differences in its
module's first lines; needs and names of metrics are found by building the method and giving it a small batch.
"""

import inspect
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torch
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hybrid.methods import METHODS
from hybrid.methods.base import MethodConfig
from hybrid.objective.objective import Objective
from hybrid.types import Demonstration, RolloutBatch, View

FOLDER = Path("docs/methods")

GREEK = {
    name: name for name in ("alpha", "beta", "gamma", "delta", "eta", "kappa", "tau", "theta", "omega", "rho", "nu")
}
GREEK |= {"eps": "epsilon", "lam": "lamda"}
"""Words of a formula that are letters; the second is Unicode's name of the letter."""

SIGNS = {
    " - ": " \N{MINUS SIGN} ",
    " * ": " \N{DOT OPERATOR} ",
    ">=": "\N{GREATER-THAN OR EQUAL TO}",
    "<=": "\N{LESS-THAN OR EQUAL TO}",
    "!=": "\N{NOT EQUAL TO}",
    "+-": "\N{PLUS-MINUS SIGN}",
    "||": "\N{DOUBLE VERTICAL LINE}",
    "^2": "\N{SUPERSCRIPT TWO}",
}
SUBSCRIPTS = {letter: unicodedata.lookup(f"LATIN SUBSCRIPT SMALL LETTER {letter.upper()}") for letter in "ijktu"}

MEANINGS: Mapping[str, str] = {
    "gap/mean": "log pT - log pS in nats over the tokens that were scored; negative: the student is the surer one",
    "gap/at_clip": "share of scored tokens whose gap reaches ratio_clip",
    "group_advantage/uniform": "share of responses in groups of equal rewards, where reward says nothing",
    "outcome/right": "share of scored responses whose reward is above thr",
    "raised/mean": "what is left of the signal on tokens that are raised",
    "lowered/mean": "what is left of the signal on tokens that are lowered",
    "known/share": "share of response tokens that the scorer has scored; the rest leaves the denominator",
    "known/mean": "always 0: a divergence has no direction of its own",
    "contrast/mean": "kappa times the clipped evidence, over tokens with a pair of contexts",
    "contrast/at_clip": "share of tokens with a pair of contexts whose evidence reaches eps",
    "credit/right": "mean advantage of a response token where the reward is above 1/2, whatever the gates leave of it",
    "credit/wrong": "mean advantage of a response token where the reward is at most 1/2",
    "credit/kl_right": "mean weight of the divergence on a response token where the reward is above 1/2",
    "credit/kl_wrong": "mean weight of the divergence on a response token where the reward is at most 1/2",
    "kl_trap/cut": "share of responses that were cut",
    "kl_trap/threshold": "the smoothed KL below which a window is low; empty until the memory is full",
    "kl_trap/stopped": "share of responses that ended while they were written; only with the online stop",
    "kl_trap/estimated": "1 where the KL is estimated from the sampled token, which is not the paper's method",
}
"""What a metric means, where its name alone does not say it."""

COUNTING = """## What is counted

The same for every method, in training and in `hybrid explain`:

- A term's denominator counts the tokens that the term knows, whether its gates leave them open or not; KAT's counts
  the tokens that are kept. Tokens outside `token_mask` are no tokens of the response at all.
- A token or response that the teacher could not score leaves the term that needs the score, numerator and denominator,
  and keeps the terms that do not.
- An unscored response (`reward: null`) is nobody's sibling. Its reward advantage is 0 and its tokens stay in the
  denominator, as those of a group of equal rewards do; OPDVR's gate is closed on it, and the soft gate of R2-OPD is
  even, which is plain distillation. A group of one has the reward advantage 0.
- Responses at the length limit that a setting drops (`truncated: skip`, `drop_truncated`) leave numerator and
  denominator. RSTG's `exclude_truncated` takes their guidance alone: they stay in the denominator, as all-right groups
  do.
- A mean over responses counts empty ones too, with a loss of 0, and a mean over prompts those whose responses are all
  empty; neither counts what a failed teacher lost as a whole.
- A likelihood term counts one text per prompt, the first that a response of it carries.
- Log-ratios are bounded at 20 before they are exponentiated (of GSPO their mean over the response is); nothing else is
  bounded unless a setting says so.
- `kl` in a record is the divergence from the teacher. A divergence from another scorer, and one that was not measured,
  is made from the recorded supports of student and scorer, with a bucket for the tail; that on the full vocabulary must
  have been measured. A record has one `kl`: parts of a mixture that want it on other supports or temperatures all read
  the one that is there.
- A token whose sides have no candidate in common (`support: intersection`) has the signal 0 and stays in the
  denominator. These candidates are found by id in each scorer's own list of a record; every other support needs both
  scorers' log-probs of the same ids there, and is cut to `top_k` from what there is.
"""
"""The end of the index page."""

PATTERNS: Sequence[tuple[str, str]] = (
    (r"(\w+)/mean", "mean of the signal {0} over the tokens that it knows"),
    (r"kept/(\w+)", "share of known tokens that the gate {0} leaves open"),
    (r"weight/(\w+)", "mean of the weight {0} over open tokens"),
    (r"route/(\w+)", "share of responses that the branch {0} takes"),
)


def typeset(formula: str) -> str:
    """A formula in Unicode: Greek letters, subscripts and signs in place of their names."""
    for name, letter in GREEK.items():
        formula = re.sub(rf"\b{name}(?=\b|_)", unicodedata.lookup(f"GREEK SMALL LETTER {letter.upper()}"), formula)
    letters = "".join(SUBSCRIPTS)
    formula = re.sub(
        rf"\[([{letters}])(?:, ?([{letters}]))?\]",
        lambda match: "".join(SUBSCRIPTS[letter] for letter in match.groups() if letter),
        formula,
    )
    formula = re.sub(rf"_([{letters}])\b", lambda match: SUBSCRIPTS[match[1]], formula)
    formula = re.sub(r"\bsum(?=\b|_|[\u1d62-\u2c7c])", "\N{GREEK CAPITAL LETTER SIGMA}", formula)
    for sign, symbol in SIGNS.items():
        formula = formula.replace(sign, symbol)
    return formula


def method_page(name: str) -> str:
    """All about one method, as Markdown.

    Args:
      name: a key of METHODS.
    """
    kind = METHODS[name]
    about, differences = module_notes(kind)
    formula = "\n".join(line.strip() for line in typeset(kind.formula).split(";  "))
    parts = [
        f"# {name}",
        inspect.cleandoc(kind.__doc__ or ""),
        *about,
        f"Paper: {kind.paper}.",
        f"## Formula\n\n```\n{formula}\n```",
        "## What it needs\n\n" + "\n".join(f"- {need}" for need in needs_lines(kind)),
        f"Ask what it would do with recorded rollouts: `hybrid explain --method {name} FILE`.",
        "## Settings\n\n" + settings_table(kind),
        "## Metrics\n\n" + metrics_text(kind),
        "## Where it differs from the paper, and why\n\n" + ("\n\n".join(differences) or "Nothing that we know of."),
    ]
    return "\n\n".join(parts) + "\n"


def index_page() -> str:
    """A line per method, as Markdown."""
    lines = [f"| [{name}]({name}.md) | {cell(first_line(kind))} | {cell(kind.paper)} |" for name, kind in in_order()]
    head = "# Methods\n\nMade by `python -m hybrid.method_pages` from the classes in `hybrid/methods`.\n\n"
    table = "\n".join(["| method | what it does | paper |", "| --- | --- | --- |", *lines])
    return f"{head}{table}\n\n{COUNTING}"


def in_order() -> list[tuple[str, type[MethodConfig]]]:
    """The methods by name."""
    return sorted(METHODS.items())


def first_line(kind: type[MethodConfig]) -> str:
    """What a method does, in a line."""
    return inspect.cleandoc(kind.__doc__ or "").splitlines()[0]


def module_notes(kind: type[MethodConfig]) -> tuple[list[str], list[str]]:
    """The paragraphs of the module's first lines: those about the method, and those on what differs from the paper."""
    paragraphs = inspect.cleandoc(inspect.getmodule(kind).__doc__ or "").split("\n\n")[1:]
    differs = [bool(re.match(r"Differs|No official code|No paper", paragraph)) for paragraph in paragraphs]
    return (
        [text for text, flag in zip(paragraphs, differs, strict=True) if not flag],
        [text for text, flag in zip(paragraphs, differs, strict=True) if flag],
    )


def needs_lines(kind: type[MethodConfig]) -> list[str]:
    """The measurements that a method reads, those that only some settings read, and the responses per prompt."""
    fewest = f"{kind.min_generations} or more responses per prompt"
    if "parts" in kind.model_fields:
        return ["what its parts need, and as many responses per prompt as the most demanding of them"]
    usual = kind.model_validate({}).build().needs
    lines = [", ".join(f"`{need}`" for need in sorted(usual)) or "the responses alone", fewest]
    for key, field in kind.model_fields.items():
        for value in choices(field):
            more = needs_with(kind, key, value) - usual
            if more:
                lines.append(f"with `{key}: {shown(value)}` also {', '.join(f'`{need}`' for need in sorted(more))}")
    return lines


def needs_with(kind: type[MethodConfig], key: str, value: Any) -> frozenset[str]:
    """What a method reads with one setting changed; nothing where that is refused."""
    try:
        return kind.model_validate({key: value}).build().needs
    except ValidationError:
        return frozenset()


def choices(field: FieldInfo) -> tuple[Any, ...]:
    """The values of a setting that has a few; those of a size are 0 and something else."""
    if field.annotation is bool:
        return (True, False)
    if field.annotation is int and field.default == 0:
        return (8,)
    return tuple(value for member in members(field.annotation) for value in literals(member))


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation by itself."""
    inner = getattr(annotation, "__value__", annotation)
    args = get_args(inner)
    return args if args and get_origin(inner) is not Literal and type(None) in args else (inner,)


def literals(annotation: Any) -> tuple[Any, ...]:
    """The values of a Literal."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def settings_table(kind: type[MethodConfig]) -> str:
    """Every setting: default, allowed values, meaning, and where the default was read."""
    rows = ["| setting | default | values | meaning | where the default was read |", "| --- | --- | --- | --- | --- |"]
    for key, field in kind.model_fields.items():
        if key != "name":
            default = "required" if field.default is PydanticUndefined else f"`{shown(field.default)}`"
            source = kind.sources.get(key, "")
            columns = (f"`{key}`", default, values_of(field), field.description or "", source)
            rows.append("| " + " | ".join(cell(text) for text in columns) + " |")
    return "\n".join(rows) if len(rows) > 2 else "None."


def shown(value: Any) -> str:
    """A value as it stands in a YAML."""
    if isinstance(value, BaseModel):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.model_dump().items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def values_of(field: FieldInfo) -> str:
    """What a setting may be: its choices, or its kind and bounds."""
    if get_origin(field.annotation) is tuple:
        return "list"
    found = [shown(value) for member in members(field.annotation) for value in literals(member)]
    if found:
        nothing = ["null"] if type(None) in get_args(field.annotation) else []
        return ", ".join(found + nothing)
    words = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    kinds = [words[member] for member in get_args(field.annotation) or (field.annotation,) if member in words]
    if any(isinstance(member, type) and issubclass(member, BaseModel) for member in get_args(field.annotation)):
        kinds.append("schedule")
    if type(None) in get_args(field.annotation):
        kinds.append("null")
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{signs[name]} {getattr(note, name):g}" for note in field.metadata for name in signs if hasattr(note, name)
    ]
    return ", ".join([" or ".join(kinds) or "list", *bounds])


def metrics_text(kind: type[MethodConfig]) -> str:
    """What a method logs with its default settings, and what each number means."""
    losses = "`loss/policy`, `loss/kl` and `loss/sft` are its three sums."
    if "parts" in kind.model_fields:
        return f"Those of its parts, each with the part's name before it, as in `grpo/group_advantage/mean`. {losses}"
    objective = kind.model_validate({}).build()
    rows = [f"| `{name}` | {cell(meaning(name, objective))} |" for name in metric_names(objective)]
    table = "\n".join(["| metric | what it means |", "| --- | --- |", *rows]) + "\n\n" if rows else ""
    return table + losses


def metric_names(objective: Objective) -> list[str]:
    """The metrics that an objective notes, found by giving it a batch in which everything is measured."""
    assignment, _ = objective.assign(probe(), objective.init())
    return sorted(assignment.metrics)


def meaning(name: str, objective: Objective) -> str:
    """What a metric means.

    Raises:
      KeyError: it is not said anywhere.
    """
    prefixes = {f"{term.name}/" for term in objective.terms}
    prefix = next((p for p in sorted(prefixes) if name.startswith(p) and len(prefixes) > 1), "")
    own = name.removeprefix(prefix)
    words = MEANINGS.get(own)
    if words is None:
        matches = ((re.fullmatch(pattern, own), text) for pattern, text in PATTERNS)
        found = next(((match, text) for match, text in matches if match), None)
        if found is None:
            raise KeyError(f"the metric {name} has no meaning; add it to MEANINGS")
        words = found[1].format(found[0][1])
    return words + (f" (part {prefix[:-1]})" if prefix else "")


def probe() -> RolloutBatch:
    """Two responses to one prompt, right and wrong, with every measurement there is."""
    value_BT = torch.full((2, 2), -1.0)
    mask_BT = torch.ones(2, 2, dtype=torch.bool)
    top_BTK = torch.full((2, 2, 2), -1.0)
    ids_BTK = torch.arange(2).expand(2, 2, 2)
    view = View(logprob_BT=value_BT, valid_BT=mask_BT, top_ids_BTK=ids_BTK, top_logprob_BTK=top_BTK)
    names = ("teacher", "right", "wrong", "degraded", "reference", "student")
    return RolloutBatch(
        group_B=torch.zeros(2, dtype=torch.long),
        mask_BT=mask_BT,
        reward_B=torch.tensor([1.0, 0.0]),
        truncated_B=torch.tensor([False, False]),
        student_logprob_BT=value_BT,
        entropy_BT=-value_BT,
        reverse_kl_BT=-value_BT,
        teacher_accuracy_B=torch.ones(2),
        views=dict.fromkeys(names, view),
        demonstration=Demonstration(ids_BU=torch.zeros(2, 1, dtype=torch.long), mask_BU=mask_BT[:, :1]),
        max_length=2,
        dtype=value_BT.dtype,
    )


def cell(text: str) -> str:
    """A text that may stand in a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def pages() -> dict[str, str]:
    """File name -> content of every page."""
    return {"index.md": index_page()} | {f"{name}.md": method_page(name) for name, _ in in_order()}


def main(arguments: Sequence[str]) -> None:
    """Writes the pages into a folder."""
    folder = Path(arguments[0]) if arguments else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
