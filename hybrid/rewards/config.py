"""The rewards of a run as its YAML names them: one class a kind, each of which builds a checked reward function."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from hybrid.errors import ConfigError
from hybrid.rewards.extract import AnswerPlace, after_thinking, completion_text
from hybrid.rewards.function import Raised, RewardFunction
from hybrid.rewards.gym import GYM_COLUMN, GymReward
from hybrid.rewards.math_answer import MathReward, Percent, reference_text


def _is_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from error
    return pattern


def _has_one_group(pattern: str) -> str:
    groups = re.compile(pattern).groups
    if groups != 1:
        raise ValueError(f"needs exactly one group (...), the answer; it has {groups}. Write others as (?:...)")
    return pattern


Pattern = Annotated[str, AfterValidator(_is_pattern)]

_THINKING = (
    "The prompt itself ends with `<think>` (as some chat templates write it), so a completion without `</think>` is "
    "unfinished and has no answer. A `<think>` in the completion is always seen."
)
_LIMIT = "Seconds of processor time one answer may take; a longer one is killed and gives 0.0 (metric `beyond_limit`)."
_WORKERS = "Verifier processes that may run at once; they start when first needed."


class _Reward(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = Field(
        default=1.0,
        allow_inf_nan=False,
        description="Factor of this reward in the sum over rewards; negative is a penalty.",
    )


class MathConfig(_Reward):
    r"""Judges the last complete `\boxed{}` or `\fbox{}` after the thinking block by math-verify: 1.0 or 0.0."""

    name: Literal["math"] = "math"
    answer_column: str = Field(
        default="answer", description="Column of the reference answer; it may stand in a box itself."
    )
    require_box: bool = Field(
        default=True,
        description="No box, no reward. If false, math-verify searches the text for an answer where there is no box.",
    )
    percent: Percent = Field(
        default="either",
        description="What `25%` equals beside itself: `either` 0.25 or 25 (more than math-verify, which lets only "
        "whole percentages equal the plain number), `fraction` 0.25 alone.",
    )
    prompt_opens_thinking: bool = Field(default=False, description=_THINKING)
    limit_s: float = Field(default=5.0, gt=0, allow_inf_nan=False, description=_LIMIT)
    workers: int = Field(default=2, ge=1, description=_WORKERS)

    def build(self) -> RewardFunction:
        """The checked reward function; it starts no process before the first answer that needs one."""
        reward = MathReward(**self.model_dump(exclude={"name", "weight"}))
        return RewardFunction(
            self.name,
            reward,
            weight=self.weight,
            columns=(self.answer_column,),
            judged_answer=reward.judged_answer,
        )


class ReasoningGymConfig(_Reward):
    """Scores by the verifier of the reasoning-gym task that the prompt comes from, in [0, 1]."""

    name: Literal["reasoning_gym"] = "reasoning_gym"
    answer_in: AnswerPlace = Field(
        default="tags",
        description="Where the answer stands, after any thinking block: the last `<answer>...</answer>` (`tags`), the "
        r"last complete `\boxed{}` (`box`), or the last line that is not blank (`last_line`).",
    )
    success_at: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Turns the score into 1.0 where it reaches this value and 0.0 elsewhere; null keeps partial "
        "credit. Methods that gate on a right or wrong outcome want 1.0.",
    )
    prompt_opens_thinking: bool = Field(default=False, description=_THINKING)
    limit_s: float = Field(default=5.0, gt=0, allow_inf_nan=False, description=_LIMIT)
    workers: int = Field(default=2, ge=1, description=_WORKERS)

    def build(self) -> RewardFunction:
        """The checked reward function; it starts no process before the first answer."""
        reward = GymReward(**self.model_dump(exclude={"name", "weight"}))
        return RewardFunction(
            self.name, reward, weight=self.weight, columns=(GYM_COLUMN,), judged_answer=reward.judged_answer
        )


class ExactConfig(_Reward):
    """1.0 where the answer that a pattern captures is, blanks around it aside, the reference; else 0.0."""

    name: Literal["exact"] = "exact"
    pattern: Annotated[Pattern, AfterValidator(_has_one_group)] = Field(
        default=r"(?s)<answer>(.*?)</answer>",
        description="Regular expression with one group, the answer; its last match after any thinking block counts.",
    )
    answer_column: str = Field(default="answer", description="Column of the reference answer, a text or a number.")
    prompt_opens_thinking: bool = Field(default=False, description=_THINKING)

    def build(self) -> RewardFunction:
        """The checked reward function."""

        def judged_answer(text: str) -> str | None:
            answer = after_thinking(text, prompt_opens_thinking=self.prompt_opens_thinking)
            found = [] if answer is None else re.findall(self.pattern, answer)
            return found[-1].strip() if found else None

        def score(*, completions: Sequence[Any], **columns: Any) -> list[float]:
            golds = [reference_text(value, self.answer_column) for value in columns[self.answer_column]]
            return [
                float(judged_answer(completion_text(completion)) == gold)
                for gold, completion in zip(golds, completions, strict=True)
            ]

        return RewardFunction(
            self.name, score, weight=self.weight, columns=(self.answer_column,), judged_answer=judged_answer
        )


class FormatConfig(_Reward):
    """1.0 where the completion has a form, 0.0 where it has not; the thinking block is part of the form."""

    name: Literal["format"] = "format"
    pattern: Pattern = Field(
        description=r"Regular expression, e.g. `(?s)<think>.*</think>.*\\boxed\{.*\}.*`; `(?s)` lets `.` match "
        "newlines."
    )
    match: Literal["full", "search"] = Field(
        default="full", description="`full`: the pattern describes the whole completion; `search`: it occurs somewhere."
    )

    def build(self) -> RewardFunction:
        """The checked reward function."""
        matches = re.compile(self.pattern).fullmatch if self.match == "full" else re.compile(self.pattern).search

        def score(*, completions: Sequence[Any], **_: Any) -> list[float]:
            return [float(matches(completion_text(completion)) is not None) for completion in completions]

        return RewardFunction(self.name, score, weight=self.weight)


class PythonConfig(_Reward):
    """A function of yours with TRL's signature: `fn(prompts, completions, **columns) -> list[float | None]`."""

    name: Literal["python"] = "python"
    path: str = Field(
        pattern=r".+:[A-Za-z_]\w*$",
        description="`file.py:function`, the file seen from the folder of the call, or `package.module:function`. The "
        "function may be async. Where it has an attribute `judged_answer` (text -> answer or None), methods that need "
        "the answer a student gave use it.",
    )

    def build(self) -> RewardFunction:
        """The checked reward function, under the function's own name.

        Raises:
          ConfigError: the file, the module or the function is not there, or importing it raises.
        """
        place, _, name = self.path.rpartition(":")
        function = getattr(_module(place), name, None)
        if not callable(function):
            raise ConfigError(f"reward path '{self.path}': '{place}' has no function '{name}'")
        judged: Callable[[str], str | None] | None = getattr(function, "judged_answer", None)
        return RewardFunction(name, function, weight=self.weight, judged_answer=judged)


RewardConfig = Annotated[
    MathConfig | ReasoningGymConfig | ExactConfig | FormatConfig | PythonConfig, Field(discriminator="name")
]


def build_rewards(configs: Sequence[RewardConfig]) -> list[RewardFunction]:
    """Builds the rewards of a run.

    Args:
      configs: at least one; two of the same name become `name` and `name_2`, since TRL's metrics go by name.

    Returns:
      The functions for TRL's `reward_funcs`; `[reward.weight for reward in rewards]` is its `reward_weights`.

    Raises:
      ConfigError: there is none, or a user's function cannot be loaded.
    """
    if not configs:
        raise ConfigError("rewards: name at least one, e.g. rewards: [{name: math}]")
    rewards = [config.build() for config in configs]
    names = [reward.__name__ for reward in rewards]
    for row, reward in enumerate(rewards):
        if earlier := names[:row].count(reward.__name__):
            reward.__name__ = f"{reward.__name__}_{earlier + 1}"
    return rewards


def _module(place: str) -> ModuleType:
    raised = Raised()
    if place.endswith(".py"):
        file = Path(place).expanduser().resolve()
        spec = importlib.util.spec_from_file_location(f"hybrid_reward_{file.stem}", file) if file.is_file() else None
        if spec is None or spec.loader is None:
            raise ConfigError(f"reward file '{file}' does not exist")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        with raised:
            spec.loader.exec_module(module)
    else:
        with raised:
            module = importlib.import_module(place)
    if raised.error is not None:
        kind = type(raised.error).__name__
        raise ConfigError(f"reward module '{place}' cannot be imported: {kind}: {raised.error}") from raised.error
    return module
