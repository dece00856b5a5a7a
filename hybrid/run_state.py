"""What a resumed run needs beside TRL's own checkpoint: one file for each process."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybrid.collect import Scorer, head_of
from hybrid.errors import ConfigError
from hybrid.generation import Generation
from teachers.decoder import KeptHead

STATE_FILE = "hybrid_state_rank{rank}.pt"


def write_state(state: Mapping[str, Any], checkpoint: Path, rank: int) -> None:
    """Writes what a process needs into a checkpoint."""
    torch.save(state, checkpoint / STATE_FILE.format(rank=rank))


def read_state(checkpoint: Path, rank: int, device: torch.device) -> dict[str, Any]:
    """What `write_state` wrote.

    Raises:
      ConfigError: there is nothing of such a process.
    """
    path = checkpoint / STATE_FILE.format(rank=rank)
    if not path.exists():
        raise ConfigError(
            f"{path} is missing: {checkpoint} was not written by HybridTrainer with as many processes as now; "
            "resume with the same number of processes"
        )
    return torch.load(path, map_location=device, weights_only=False)


def teachers_with_state(scorers: Mapping[str, Scorer]) -> dict[str, Any]:
    """The teachers that have a state, each under the first view that it scores."""
    found: dict[int, tuple[str, Any]] = {}
    for name, scorer in scorers.items():
        if hasattr(scorer.teacher, "state_dict"):
            found.setdefault(id(scorer.teacher), (name, scorer.teacher))
    return dict(found.values())


def without_heads(generation: Generation | None) -> Generation | None:
    """The generation without the heads of frozen teachers, which give them again; a student's earlier head stays."""
    if generation is None:
        return None
    kept = {
        name: scores if isinstance(scores.head, KeptHead) and scores.head.is_earlier else replace(scores, head=None)
        for name, scores in generation.scored.items()
    }
    return replace(generation, scored=kept)


def with_heads(generation: Generation | None, scorers: Mapping[str, Scorer]) -> Generation | None:
    """What `without_heads` was given: a head is code, not state, and the teacher that has it gives it again."""
    if generation is None:
        return None
    whole = {
        name: replace(scores, head=head_of(scorers[name]))
        if scores.hidden_BTH is not None and scores.head is None
        else scores
        for name, scores in generation.scored.items()
    }
    return replace(generation, scored=whole)
