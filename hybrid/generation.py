"""What stands between a generation batch and its micro-batches: its rows of the global credit, and what a loss reads.

Pure functions and records, so that `trainer.py` holds the overridden seams alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from hybrid.collect import Plan, Scorer
from hybrid.errors import ConfigError, MissingMeasurement
from hybrid.methods.base import MethodConfig
from hybrid.objective.losses import Likelihood, PolicyLoss, SampledDivergence
from hybrid.objective.objective import Assignment, Objective, Term, TermCredit
from hybrid.rollouts import Rollout
from hybrid.trl_fields import IDLE_NAMES, SURROGATE_DEFAULTS
from hybrid.types import Demonstration, RolloutBatch, State, View, take_rows

IMAGE_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
)
"""Image tensors that a model's forward takes, as TRL's batch dictionary names them."""

PER_IMAGE_KEYS = ("pixel_values", "image_grid_thw", "pixel_attention_mask", "image_sizes")
"""Those that a forward without any picture leaves out."""

Record = TypeVar("Record")


@dataclass
class Generation:
    """The generation batch that micro-batches are taken from: credit, measurements, and what the loss needs beside."""

    assignment: Assignment
    batch: RolloutBatch
    scored: dict[str, Any] = field(default_factory=dict)
    policy_value_BT: Tensor | None = None


@dataclass
class StepWatch:
    """What an observer of a generation batch is given: global rows, credit, the method's state before it, texts."""

    step: int
    batch: RolloutBatch
    assignment: Assignment
    objective: Objective
    state: State
    rollouts: Sequence[Rollout]
    rewards: Tensor | None
    reward_names: Sequence[str]
    demonstration_logprob_BU: Tensor | None = None


def image_inputs(out: Mapping[str, Any], rows: Tensor | None = None) -> dict[str, Any]:
    """The image tensors of some rows, each with its own number of images; of all rows where none are given."""
    images = {key: out[key] for key in IMAGE_KEYS if out.get(key) is not None}
    if not images or rows is None:
        return images
    num_images = out["num_images"]
    ends = list(accumulate(num_images))
    chosen = [image for row in rows.tolist() for image in range(ends[row] - num_images[row], ends[row])]
    cut = {}
    for key, value in images.items():
        if key == "pixel_values" and "image_grid_thw" in images:
            patches = value.split(images["image_grid_thw"].prod(-1).tolist())
            cut[key] = torch.cat([value[:0], *(patches[image] for image in chosen)])
        elif key in ("image_grid_thw", "image_sizes") or (key == "pixel_values" and len(value) == sum(num_images)):
            cut[key] = value[chosen]
        else:
            cut[key] = value[rows]
    return cut


def continued(images: Mapping[str, Any], prompt_width: int, width: int) -> dict[str, Any]:
    """The image tensors of prompts that another text of `width` tokens follows: its token types are 0, text."""
    types = {key: images[key][:, :prompt_width] for key in ("token_type_ids", "mm_token_type_ids") if key in images}
    return {**images, **{key: functional.pad(value, (0, width)) for key, value in types.items()}}


def after_prompts(inputs: Mapping[str, Any], texts: Demonstration) -> tuple[Tensor, Tensor, int, dict[str, Any]]:
    """Ids and mask of each row's text after its prompt, the width of the texts, and the prompts' image tensors."""
    ids = torch.cat([inputs["prompt_ids"], texts.ids_BU], 1)
    attention = torch.cat([inputs["prompt_mask"], texts.mask_BU.to(inputs["prompt_mask"].dtype)], 1)
    width = texts.ids_BU.shape[1]
    images = continued(image_inputs(inputs), inputs["prompt_ids"].shape[1], width)
    images |= {key: inputs[key] for key in ("num_images", "num_tiles") if inputs.get(key) is not None}
    return ids, attention, width, images


def own_generation(
    assignment: Assignment, batch: RolloutBatch, scored: dict[str, Any], objective: Objective, rank: int
) -> Generation:
    """One process's rows of the global credit, at its own width.

    Args:
      assignment: of the rows of all processes, of which each has as many.
      batch: the rows of this process.
      scored: what its teachers said, by view.
      objective: whose terms these are.
      rank: number of this process.
    """
    first = rank * len(batch.group_B)
    rows, width = slice(first, first + len(batch.group_B)), batch.mask_BT.shape[1]
    width_U = 0 if batch.demonstration is None else batch.demonstration.ids_BU.shape[1]
    terms = narrowed([take_rows(term, rows) for term in assignment.terms], objective, width, width_U)
    return Generation(Assignment(terms, assignment.metrics), batch, scored)


def part_of(
    batch: RolloutBatch, assignment: Assignment, objective: Objective, rows: Tensor, width: int
) -> tuple[RolloutBatch, Assignment]:
    """Some rows of a batch and of its credit: the first `width` tokens, and texts as wide as these rows need."""
    texts = batch.demonstration
    width_U = 0 if texts is None else max(1, int(texts.mask_BU[rows].sum(1).max()))
    terms = tuple(take_rows(term, rows) for term in assignment.terms)
    return trimmed(batch.rows(rows), width, width_U), Assignment(narrowed(terms, objective, width, width_U))


def trimmed(record: Record, width: int, width_U: int) -> Record:
    """A frozen record with its tokens, and those of the records inside it, cut to a width."""
    changes = {}
    for spec in fields(record):  # pyright: ignore[reportArgumentType]
        value = getattr(record, spec.name)
        if isinstance(value, Tensor):
            if "_BT" in spec.name or spec.name.endswith("_BU"):
                changes[spec.name] = value[:, : width_U if spec.name.endswith("_BU") else width]
        elif isinstance(value, View | Demonstration):
            changes[spec.name] = trimmed(value, width, width_U)
        elif spec.name == "views":
            changes[spec.name] = {name: trimmed(view, width, width_U) for name, view in value.items()}
    return replace(record, **changes)  # pyright: ignore[reportArgumentType]


def narrowed(credits: Sequence[TermCredit], objective: Objective, width: int, width_U: int) -> tuple[TermCredit, ...]:
    """The credit of each term cut to a width, the shares of a likelihood term to that of the demonstrations."""
    cut = []
    for term, credit in zip(objective.terms, credits, strict=True):
        share_width = width_U if isinstance(term.loss, Likelihood) else width
        cut.append(replace(trimmed(credit, width, width_U), share_BT=credit.share_BT[:, :share_width]))
    return tuple(cut)


def parent_term(objective: Objective, args: Any) -> Term | None:
    """The term that TRL's own surrogate computes: the only policy term, unscaled and without candidates.

    With several policy terms, TRL's part is left with advantage 0 and every term is computed with its own clip,
    mask and denominator.

    Raises:
      ConfigError: a loss type other than dapo, with a method that brings its own reduction.
    """
    term = surrogate_term(objective)
    plain = term is not None and term.reduction.name == "token_mean"
    if args.loss_type != "dapo" and not (plain and len(objective.terms) == 1):
        raise ConfigError(
            f"loss_type {args.loss_type!r} is TRL's own reduction and works with methods of one policy term that leave "
            "the reduction at token_mean (grpo, opd, opdvr, ...); leave loss_type at dapo, the method brings its own"
        )
    return term


def surrogate_term(objective: Objective) -> Term | None:
    """The only policy term, where it is unscaled and without candidates; else None."""
    policy = [term for term in objective.terms if isinstance(term.loss, PolicyLoss)]
    single = len(policy) == 1 and not policy[0].scale and "scores.student.top" not in policy[0].needs
    return policy[0] if single else None


def parent_advantage(credit: TermCredit, mask_BT: Tensor, num_tokens: Tensor | None) -> Tensor:
    """The advantage under which TRL's loss is the term's: TRL's denominator is divided out again.

    Args:
      credit: of the term that TRL's surrogate computes.
      mask_BT: tokens that count.
      num_tokens: by which TRL divides; None where it reduces in another way, which the method leaves to it.
    """
    if num_tokens is None:
        return credit.value_BT
    num_tokens = num_tokens.clamp(min=1)
    uniform_BT = mask_BT.to(credit.share_BT.dtype) / num_tokens
    if torch.allclose(credit.share_BT, uniform_BT, rtol=1e-6, atol=0):
        return credit.value_BT
    return credit.value_BT * credit.share_BT * num_tokens


def corrected(assignment: Assignment, objective: Objective, ratio_BT: Tensor | None, taken: Term | None) -> Assignment:
    """Weighs sampled-token terms by how much likelier the trainer finds a token than the engine that sampled it.

    A full divergence and one over candidates sample no token, so there is nothing to correct in them.

    Args:
      assignment: credit of some rows.
      objective: whose terms these are.
      ratio_BT: TRL's truncated or masked importance ratio, [B, T] or [B, 1]; None where the trainer itself generates.
      taken: the term that TRL's surrogate computes, and weighs by itself.

    Reference:
      TRL's vLLM importance sampling correction (`GRPOTrainer._compute_loss`).
    """
    if ratio_BT is None:
        return assignment
    terms = [
        replace(credit, share_BT=credit.share_BT * ratio_BT.to(credit.share_BT.dtype))
        if isinstance(term.loss, PolicyLoss | SampledDivergence) and term is not taken and credit.candidate_BTK is None
        else credit
        for term, credit in zip(objective.terms, assignment.terms, strict=True)
    ]
    return replace(assignment, terms=tuple(terms))


def largest_gap(out: Mapping[str, Any], mask_BT: Tensor) -> Tensor | None:
    """How far the engine's weights can be from the trainer's: the largest difference of a sampled token's log-prob.

    Args:
      out: what TRL measured of a generation: `sampling_per_token_logps` of the engine, `old_per_token_logps` of the
        trainer, in nats.
      mask_BT: tokens that count.

    Returns:
      The difference in nats; None where the trainer itself generates, or measures no log-probs of its own.
    """
    engine_BT, own_BT = out.get("sampling_per_token_logps"), out.get("old_per_token_logps")
    if engine_BT is None or own_BT is None:
        return None
    return torch.nan_to_num(engine_BT - own_BT, nan=0.0).abs().masked_fill(~mask_BT, 0).max()


def set_clipping(trainer: Any, loss: Any) -> None:
    """Gives TRL's surrogate the method's clip, unless the method has TRL's defaults: then the config's own values hold.

    Raises:
      ConfigError: both the method and the config ask for a clip of their own.
    """
    if loss == PolicyLoss():
        return
    args = trainer.args
    own = (args.epsilon, args.epsilon_high, args.delta, args.importance_sampling_level)
    if own != (0.2, None, None, "token"):
        raise ConfigError(
            f"epsilon, epsilon_high, delta and importance_sampling_level are {own} in the config, and the method has "
            f"{loss}; set them in the method alone"
        )
    trainer.epsilon_low, trainer.epsilon_high = loss.clip_low, loss.clip_high
    args.delta, trainer.importance_sampling_level = loss.dual_clip, loss.level


def check_run(method: MethodConfig | Objective, plan: Plan, args: Any, *, rewarded: bool) -> None:
    """Refuses a run that cannot measure what its method reads, before a model is loaded."""
    name = getattr(method, "name", "the objective")
    if "reward" in plan.needs and not rewarded:
        raise MissingMeasurement(f"{name} needs reward, and no reward function is given; pass reward_funcs")
    least = getattr(method, "smallest_group", getattr(method, "min_generations", 1))
    if args.num_generations < least:
        raise ConfigError(
            f"{name} compares at least {least} responses per prompt, and num_generations is {args.num_generations}"
        )
    if args.temperature <= 0:
        raise ConfigError(f"temperature is {args.temperature}: training samples need a temperature above 0")
    refuse_idle(method, args)


def check_rows(rows: Any, args: Any) -> None:
    """Refuses a data set that is too small for a single step, of which TRL would make none and say nothing.

    Raises:
      ConfigError: says how many prompts a step takes.
    """
    wanted = args.generation_batch_size // args.num_generations
    if hasattr(rows, "__len__") and len(rows) < wanted:
        raise ConfigError(
            f"a step takes {wanted} different prompts, and train_dataset has {len(rows)}; give more, or lower "
            "per_device_train_batch_size, gradient_accumulation_steps or steps_per_generation"
        )


def refuse_idle(method: MethodConfig | Objective, args: Any) -> None:
    """Refuses fields of TRL's config that are set and would change nothing.

    Raises:
      ConfigError: names the field, and the setting of the method that takes its place.
    """
    name = getattr(method, "name", "the objective")
    for key, default in (("scale_rewards", "group"), ("multi_objective_aggregation", "sum_then_normalize")):
        if getattr(args, key) != default:
            raise ConfigError(f"{key} {getattr(args, key)!r} would change nothing: {IDLE_NAMES[key]}; leave {key} out")
    wanted = [key for key, default in SURROGATE_DEFAULTS.items() if getattr(args, key) != default]
    if wanted and surrogate_term(method if isinstance(method, Objective) else method.build()) is None:
        raise ConfigError(f"{wanted[0]} {without_surrogate(name)}")


def without_surrogate(name: str) -> str:
    """Why a field of TRL's surrogate is refused with the method of that name."""
    return (
        "would change nothing: it belongs to TRL's surrogate, which works for methods of one policy term (grpo, opd, "
        f"opdvr, ...), and {name} has none or several, or one over candidates; leave it out"
    )


def check_scorers(method: MethodConfig | Objective, plan: Plan, scorers: Mapping[str, Scorer]) -> None:
    """Refuses a run in which nobody scores a view that the method reads."""
    views = set(plan.views) | ({plan.distribution_view} if plan.distribution else set())
    missing = sorted(views - set(scorers))
    if missing:
        name = getattr(method, "name", "the objective")
        raise MissingMeasurement(f"{name} needs scores.{missing[0]}, and no teacher gives it; pass teacher=")
