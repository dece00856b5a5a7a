"""The student's own forwards: what is measured before credit can be assigned, and what a loss asks and reads."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hybrid.collect import Plan, StudentMeasures
from hybrid.cutting import Piece, placed
from hybrid.distributions import Request
from hybrid.errors import ConfigError
from hybrid.generation import IMAGE_KEYS
from hybrid.objective.losses import Divergence, StudentPass
from hybrid.types import View
from teachers.scores import TeacherScores

Run = Callable[[Piece, Request], dict[str, Tensor]]
"""One forward of the student over some rows that answers a request."""

FILL = {"top_ids": -1, "top_logprobs": -torch.inf, "teacher_top_logprobs": -torch.inf}
"""What stands at positions that are not measured; 0 elsewhere."""


@torch.no_grad()
def measure_student(
    run: Run,
    completion_BT: Int[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    plan: Plan,
    teacher: TeacherScores | None,
    temperature: float,
    pieces: Sequence[Piece],
) -> StudentMeasures:
    """Log-probs and entropies of the rollouts; top-k candidates and the reverse KL where the plan reads them.

    Args:
      run: the forward.
      completion_BT: sampled ids.
      mask_BT: which of them count.
      plan: what the objective reads.
      teacher: the teacher's scores; with hidden states, its log-probs of the candidates are made here too, and with
        a list of its own where that is the support, the student's log-probs of it.
      temperature: of the sampler.
      pieces: rows of each forward.

    Raises:
      ConfigError: the objective gates on kl, and none of its terms says on which support.
    """
    reverse = [d for d in plan.divergences if d.kind == "reverse_kl"]
    if "kl" in plan.needs and not reverse:
        raise ConfigError("the method reads kl but has no reverse-KL term that says on which support it is meant")
    hidden_BTH = teacher.hidden_BTH if teacher is not None else None
    own_BTK = teacher.top_ids_BTK if teacher is not None and plan.support == "teacher" and plan.top_k else None
    full = hidden_BTH is not None and "kl" in plan.needs and reverse[0].support == "full"
    parts = []
    for piece in pieces:
        request = Request(
            target_BT=piece.of(completion_BT),
            mask_BT=piece.of(mask_BT),
            temperature=temperature,
            divergences=(reverse[0],) if full else (),
            teacher_hidden_BTH=None if hidden_BTH is None else piece.of(hidden_BTH).to(mask_BT.device),
            teacher_head=None if teacher is None else teacher.head,
            support_ids_BTK=None if own_BTK is None else piece.of(own_BTK).to(mask_BT.device),
            num_top=plan.top_k if own_BTK is None else 0,
            top_of="union" if plan.support == "union" else "student",
        )
        parts.append(run(piece, request))
    whole = {key: placed([part[key] for part in parts], pieces, mask_BT, FILL.get(key, 0)) for key in parts[0]}
    if teacher is not None and own_BTK is not None:
        assert teacher.top_logprob_BTK is not None
        whole["top_ids"] = own_BTK.to(mask_BT.device)
        whole["top_logprobs"] = whole["support_logprobs"].masked_fill(whole["top_ids"] < 0, -torch.inf)
        whole["teacher_top_logprobs"] = teacher.top_logprob_BTK.to(mask_BT.device)
    top = None
    if plan.top_k:
        top = View(
            logprob_BT=whole["logprobs"],
            valid_BT=mask_BT,
            top_ids_BTK=whole["top_ids"],
            top_logprob_BTK=whole["top_logprobs"],
        )
    return StudentMeasures(
        logprob_BT=whole["logprobs"],
        entropy_BT=whole["entropies"],
        reverse_kl_BT=whole.get("divergence/0"),
        top=top,
        teacher_top_BTK=whole.get("teacher_top_logprobs"),
    )


def answered(
    found: Mapping[str, Tensor], divergences: Sequence[Divergence], piece: Piece, request: Request
) -> dict[str, Tensor]:
    """Answers a request from a pass that has measured more; see `Run`.

    Args:
      found: what the pass gave, for all rows.
      divergences: which divergences it measured.
      piece: all rows.
      request: for no candidates.
    """
    wanted = {f"divergence/{i}": found[f"divergence/{divergences.index(d)}"] for i, d in enumerate(request.divergences)}
    return {"logprobs": found["logprobs"].detach(), "entropies": found["entropies"].detach()} | {
        name: value.detach() for name, value in wanted.items()
    }


def sampled_logps(
    model: Any,
    autocast: Callable[[], AbstractContextManager[Any]],
    temperature: float,
    ids: Tensor,
    attention: Tensor,
    width: int,
    *,
    compute_entropy: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None, None]:
    """Log-probs and entropies of the last `width` ids by our head, with the arguments of TRL's method.

    Args:
      model: the (wrapped) student.
      autocast: enters the precision of the run.
      temperature: of the sampler.
      ids: prompts, padded on the left, and completions, padded on the right.
      attention: their mask.
      width: of the completions.
      compute_entropy: whether entropies are wanted.
      options: image tensors, and what TRL tells beside.
    """
    request = Request(target_BT=ids[:, -width:], mask_BT=attention[:, -width:].bool(), temperature=temperature)
    images = {key: options[key] for key in IMAGE_KEYS if options.get(key) is not None}
    with autocast():
        found = model(input_ids=ids, attention_mask=attention, distribution=request, **images)
    return found["logprobs"], found["entropies"] if compute_entropy else None, None


def loss_request(
    completion_BT: Int[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    temperature: float,
    divergences: tuple[Divergence, ...],
    teacher: TeacherScores | None,
    view: View | None,
    rows: Tensor | slice = slice(None),
) -> Request:
    """What the forward of a loss must measure of some rows.

    Args:
      completion_BT: sampled ids.
      mask_BT: which of them count.
      temperature: of the sampler.
      divergences: that the loss reads.
      teacher: its scores of the whole generation batch, in which the rows stand at `rows`.
      view: its scores of these rows.
      rows: numbers of the rows; all by default.
    """
    hidden_BTH = None if teacher is None else teacher.hidden_BTH
    if hidden_BTH is not None:
        hidden_BTH = hidden_BTH.to(mask_BT.device)[rows, : mask_BT.shape[1]]
    return Request(
        target_BT=completion_BT,
        mask_BT=mask_BT,
        temperature=temperature,
        divergences=divergences,
        teacher_hidden_BTH=hidden_BTH,
        teacher_head=None if teacher is None else teacher.head,
        support_ids_BTK=None if view is None else view.top_ids_BTK,
        support_logprob_BTK=None if view is None else view.top_logprob_BTK,
    )


def student_pass(
    measured: Mapping[str, Any], divergences: Sequence[Divergence], demonstration_BU: Tensor | None
) -> StudentPass:
    """The live student in the form the objective reads.

    Args:
      measured: what the forward of a loss gave.
      divergences: that were asked for.
      demonstration_BU: the log-probs of the demonstrations; None without any.
    """
    return StudentPass(
        logprob_BT=measured["logprobs"],
        candidate_logprob_BTK=measured.get("support_logprobs"),
        divergence_BT={d: measured[f"divergence/{i}"] for i, d in enumerate(divergences)},
        demonstration_logprob_BU=demonstration_BU,
    )
