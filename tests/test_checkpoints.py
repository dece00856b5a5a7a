"""Checkpoints: whole or not there, the newest good one found, the oldest gone, the best one kept."""

import errno
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybrid.checkpoints import (
    MANIFEST,
    WRITING,
    PlacedSampler,
    begin,
    best_checkpoint,
    best_value,
    checkpoints,
    disk_trouble,
    go_back_to_best,
    mark_best,
    newest_good,
    problem,
    publish,
    writing,
)
from hybrid.errors import DataError


def write(root: Path, step: int, keep: int | None = None, text: str = "weights") -> Path:
    folder = begin(root) / f"checkpoint-{step}"
    (folder / "inner").mkdir(parents=True)
    (folder / "model.bin").write_text(text * 100)
    (folder / "inner" / "optimizer.bin").write_text("state")
    return publish(folder, root, keep)


def save_too_much(root: Path, step: int, kind: str) -> None:
    with writing(root, step):
        folder = begin(root) / f"checkpoint-{step}"
        folder.mkdir()
        if kind == "torch":
            torch.save(torch.zeros(1_000_000), folder / "state.pt")
        elif kind == "safetensors":
            save_file({"weight": torch.zeros(1_000_000)}, folder / "model.safetensors")
        else:
            (folder / "state.json").write_bytes(bytes(1_000_000))
        publish(folder, root, None)


def save_elsewhere(root: Path) -> None:
    with writing(root, 1):
        raise RuntimeError("CUDA out of memory")


def tear(kind: str, checkpoint: Path) -> None:
    model = checkpoint / "model.bin"
    if kind == "shorter":
        os.truncate(model, 10)
    elif kind == "changed":
        model.write_text(model.read_text().replace("w", "v"))
    elif kind == "missing":
        (checkpoint / "inner" / "optimizer.bin").unlink()
    elif kind == "unlisted":
        (checkpoint / MANIFEST).unlink()
    else:
        (checkpoint / MANIFEST).write_text('{"files": {"mod')


def test_a_written_checkpoint_is_good_and_nothing_else_is_left(tmp_path):
    final = write(tmp_path, 7)
    assert final == tmp_path / "checkpoint-7"
    assert problem(final) is None
    assert not (tmp_path / WRITING).exists()


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("shorter", "bytes"),
        ("changed", "changed"),
        ("missing", "missing"),
        ("unlisted", "no manifest"),
        ("cut", "read"),
    ],
)
def test_a_torn_checkpoint_is_passed_over_and_named(tmp_path, kind, word):
    good, torn = write(tmp_path, 9), write(tmp_path, 10)
    tear(kind, torn)
    told: list[str] = []
    assert newest_good(tmp_path, told.append) == good
    assert len(told) == 1
    assert "checkpoint-10" in told[0]
    assert word in told[0]


def test_no_checkpoint_at_all(tmp_path):
    assert newest_good(tmp_path, print) is None
    (tmp_path / "checkpoint-final").mkdir()
    assert checkpoints(tmp_path) == []


def test_what_a_kill_left_is_swept_away(tmp_path):
    (begin(tmp_path) / "checkpoint-3").mkdir()
    assert checkpoints(tmp_path) == []
    assert list(begin(tmp_path).iterdir()) == []
    write(tmp_path, 3, text="old")
    assert (write(tmp_path, 3, text="new") / "model.bin").read_text().startswith("new")


def test_the_newest_are_kept_and_the_best(tmp_path):
    mark_best(write(tmp_path, 2, keep=2), "eval/avg_at_4", 0.5)
    for step in (4, 10, 100):
        write(tmp_path, step, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-10", "checkpoint-100"]
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert best_value(tmp_path) == 0.5
    assert (tmp_path / "best" / "model.bin").is_file()


def test_a_kill_between_the_note_of_the_best_and_its_link_parts_nothing(tmp_path):
    for step in (2, 4):
        mark_best(write(tmp_path, step), "eval/avg_at_4", step / 10)
    (tmp_path / "best").unlink()
    (tmp_path / "best").symlink_to("checkpoint-2")
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    assert best_value(tmp_path) == 0.4
    assert go_back_to_best(tmp_path) == tmp_path / "checkpoint-4"


def test_the_folder_may_be_moved(tmp_path):
    mark_best(write(tmp_path / "here", 2), "eval/avg_at_4", 0.25)
    (tmp_path / "here").rename(tmp_path / "there")
    assert best_checkpoint(tmp_path / "there") == tmp_path / "there" / "checkpoint-2"


def test_going_back_to_the_best(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    mark_best(tmp_path / "checkpoint-2", "eval/avg_at_4", 0.25)
    assert go_back_to_best(tmp_path) == tmp_path / "checkpoint-2"
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2"]
    tear("changed", tmp_path / "checkpoint-2")
    with pytest.raises(DataError, match="changed"):
        go_back_to_best(tmp_path)


def test_going_back_without_a_best(tmp_path):
    with pytest.raises(DataError, match="no best checkpoint"):
        go_back_to_best(tmp_path)


@pytest.mark.parametrize("kind", ["torch", "safetensors", "bytes"])
def test_a_disk_that_takes_no_more_leaves_the_last_checkpoint(tmp_path, kind):
    """A limit on the size of files stands for a full disk: both refuse a write in the middle."""
    write(tmp_path, 1)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(DataError, match=r"checkpoint-2 .*checkpoint-1 stands"):
            save_too_much(tmp_path, 2, kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert newest_good(tmp_path, print) == tmp_path / "checkpoint-1"
    assert not (tmp_path / WRITING).exists()


def test_other_errors_are_no_trouble_of_the_disk(tmp_path):
    assert disk_trouble(RuntimeError("CUDA out of memory")) is None
    assert disk_trouble(OSError(errno.ENOSPC, "No space left on device")) == "No space left on device"
    with pytest.raises(RuntimeError, match="CUDA"):
        save_elsewhere(tmp_path)


def test_a_sampler_finds_its_place_in_a_later_epoch():
    from trl.trainer.utils import RepeatSampler

    def sampler():
        return PlacedSampler(RepeatSampler(range(6), mini_repeat_count=2, batch_size=2, repeat_count=2, seed=5))

    unbroken = sampler()
    epochs = []
    for epoch in range(3):
        unbroken.set_epoch(epoch)
        epochs.append(list(unbroken))
    assert epochs == [list(inner) for inner in [RepeatSampler(range(6), 2, 2, 2, True, 5)] for _ in range(3)]
    resumed = sampler()
    resumed.set_epoch(2)
    assert list(resumed) == epochs[2]
    assert len(resumed) == len(epochs[2])
