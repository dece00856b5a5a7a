"""The supervised training of the embedded models: two optimizers, one schedule, until a held-out target is reached."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hybrid.errors import HybridError
from hybrid.tiny_cache import Progress

WARMUP_STEPS = 20
VALIDATE_EVERY = 10

Model = TypeVar("Model", bound=nn.Module)


@runtime_checkable
class Supervised(Protocol):
    """What a recipe says of its training; see `hybrid.tiny.Recipe`."""

    @property
    def target(self) -> float: ...  # noqa: D102 - the recipes say what these are
    @property
    def matrix_lr(self) -> float: ...  # noqa: D102
    @property
    def other_lr(self) -> float: ...  # noqa: D102
    @property
    def decay_steps(self) -> int: ...  # noqa: D102
    @property
    def max_steps(self) -> int: ...  # noqa: D102


def optimizers(
    model: nn.Module, matrices: Sequence[nn.Parameter], recipe: Supervised
) -> list[tuple[Optimizer, LambdaLR]]:
    """Muon for the matrices of the layers, which halves the time of AdamW alone here, and AdamW for the rest."""
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in chosen]

    def share(step: int) -> float:
        return min(1.0, (step + 1) / WARMUP_STEPS) * max(0.1, 1 - step / recipe.decay_steps)

    pair = (
        torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True),
    )
    return [(optimizer, LambdaLR(optimizer, share)) for optimizer in pair]


def train_until(
    model: Model,
    matrices: Sequence[nn.Parameter],
    recipe: Supervised,
    *,
    loss: Callable[[], Tensor],
    reached: Callable[[], float],
    what: str,
    report: Progress,
) -> tuple[Model, dict[str, float]]:
    """Trains a model until what it reaches on held-out rows is the recipe's target.

    Args:
      model: is trained in place.
      matrices: the weights that Muon moves.
      recipe: target, learning rates and steps.
      loss: of the next batch, to be called once per step.
      reached: on held-out rows, in [0, 1].
      what: is trained, for messages.
      report: told how far it is.

    Returns:
      The model, and in how many steps it reached what.

    Raises:
      HybridError: it did not reach its target.
    """
    pair, value = optimizers(model, matrices, recipe), 0.0
    for step in range(1, recipe.max_steps + 1):
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in pair:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step % VALIDATE_EVERY == 0:
            report(what, step, recipe.max_steps)
            with torch.no_grad():
                value = reached()
            if value >= recipe.target:
                report(what, recipe.max_steps, recipe.max_steps)
                return model.eval(), {"steps": step, "validation_probability": value}
    raise HybridError(
        f"the {what} reached {value:.3f} of its target {recipe.target} in {recipe.max_steps} steps; "
        "another version of torch may need another seed in its RECIPES (hybrid/tiny.py, hybrid/tiny_vision.py)"
    )
