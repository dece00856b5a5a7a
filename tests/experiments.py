"""Real experiments in small: the quickstart cut to seconds, and one cache of tiny models for all tests of a session."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "experiments" / "quickstart.yaml"
SMALL = [
    "train.steps=2",
    "train.prompts_per_step=2",
    "train.generations=2",
    "data.limit=12",
    "evaluate.every=1",
    "evaluate.prompts=4",
    "evaluate.samples=2",
    "tracking.completions_every=1",
]


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory):
    """Where this session keeps its tiny models, shared by its xdist workers; a HYBRID_CACHE that is set stays."""
    if "HYBRID_CACHE" in os.environ:
        yield Path(os.environ["HYBRID_CACHE"])
        return
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRID_CACHE", str(root / "tiny_models"))
        yield root / "tiny_models"


def small(folder: Path, *changes: str) -> list[str]:
    """Overrides that cut the quickstart to two steps of four responses, written to `folder`."""
    return [*SMALL, f"tracking.folder={folder}", *changes]


def as_options(overrides: list[str]) -> list[str]:
    """The overrides as options of the command line."""
    return [word for override in overrides for word in ("--set", override)]


def losses_of(uri: str, run_id: str) -> dict[int, float]:
    """The loss of every step of a run."""
    from hybrid.mlflow_store import open_client

    return {point.step: point.value for point in open_client(uri).get_metric_history(run_id, "train/loss")}


def recorded_steps(runs: Path, method: str = "opdvr") -> list[int]:
    """The steps of the rollouts that a small quickstart has written so far, one entry per step of four responses."""
    import orjson

    lines = [
        line
        for path in runs.glob(f"quickstart/*/{method}/rollouts.jsonl")
        for line in path.read_bytes().splitlines(keepends=True)
    ]
    return [orjson.loads(line)["step"] for line in lines if line.endswith(b"\n")][3::4]
