import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from teachers.cache import CachedTeacher, identity_of
from teachers.errors import TeacherCannot, TeacherError
from teachers.local import LocalTeacher
from teachers.protocol import Row, Teacher, Want
from teachers.recorded import RecordedTeacher
from teachers.scores import TeacherScores
from teachers.selves import LiveTeacher
from teachers.store import ScoreStore

ROWS = [
    Row(prompt_ids=(3, 4, 5), completion_ids=(8, 9, 10)),
    Row(prompt_ids=(11, 12), completion_ids=(13,)),
    Row(prompt_ids=(14,), completion_ids=()),
]
CANDIDATES_BTK = torch.tensor([[[1, 2], [3, -1], [5, 6]], [[7, 8], [0, 0], [0, 0]], [[0, 0], [0, 0], [0, 0]]])


def assert_same(first: TeacherScores, second: TeacherScores, atol: float = 0.0):
    assert_close(first.logprob_BT, second.logprob_BT, rtol=0, atol=atol)
    assert_close(first.valid_BT, second.valid_BT)
    assert first.temperature == second.temperature
    assert (first.top_ids_BTK is None) == (second.top_ids_BTK is None)
    if first.top_ids_BTK is not None:
        assert_close(first.top_ids_BTK, second.top_ids_BTK)
        assert_close(first.top_logprob_BTK, second.top_logprob_BTK, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "want", [Want(), Want(top_k=4), Want(candidates_BTK=CANDIDATES_BTK)], ids=["one", "top", "own"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_cache_gives_back_every_bit(make_qwen, tmp_path, want, dtype):
    inner = LocalTeacher(make_qwen(dtype=dtype), temperature=0.7)
    cached = CachedTeacher(inner, tmp_path)
    assert isinstance(cached, Teacher)
    expected = inner.score(ROWS, want)
    first, second = cached.score(ROWS, want), cached.score(ROWS, want)
    assert_same(first, expected)
    assert_same(second, expected)
    assert (first.stats["cache_hits"], first.stats["cache_misses"]) == (0, 3)
    assert dict(second.stats) == {"cache_hits": 3, "cache_misses": 0}


def test_only_what_is_missing_is_asked_for_and_twins_once(make_qwen, tmp_path):
    inner = LocalTeacher(make_qwen())
    cached = CachedTeacher(inner, tmp_path)
    cached.score(ROWS[:1], Want(candidates_BTK=CANDIDATES_BTK[:1]))
    rows, candidates_BTK = [ROWS[1], ROWS[0], ROWS[1]], CANDIDATES_BTK[[1, 0, 1]]
    scores = cached.score(rows, Want(candidates_BTK=candidates_BTK))
    assert (scores.stats["cache_hits"], scores.stats["cache_misses"], scores.stats["rows"]) == (1, 1, 1)
    # the batches had other shapes
    assert_same(scores, inner.score(rows, Want(candidates_BTK=candidates_BTK)), atol=1e-5)


def test_another_question_is_another_entry(make_qwen, tmp_path):
    cached = CachedTeacher(LocalTeacher(make_qwen()), tmp_path)
    cached.score(ROWS[:1])
    others = [
        (ROWS[:1], Want(top_k=1)),
        (ROWS[:1], Want(top_k=2)),
        (ROWS[:1], Want(candidates_BTK=CANDIDATES_BTK[:1])),
        ([replace(ROWS[0], completion_ids=(8, 9))], Want()),
        # the same ids, parted elsewhere
        ([Row(prompt_ids=(3, 4), completion_ids=(5, 8, 9, 10))], Want()),
    ]
    for rows, want in others:
        assert cached.score(rows, want).stats["cache_hits"] == 0
        assert cached.score(rows, want).stats["cache_hits"] == 1


def test_another_teacher_in_the_same_folder_never_answers(make_qwen, tmp_path):
    first = CachedTeacher(LocalTeacher(make_qwen(seed=0)), tmp_path)
    other = CachedTeacher(LocalTeacher(make_qwen(seed=1)), tmp_path)
    warmer = CachedTeacher(LocalTeacher(make_qwen(seed=0), temperature=2.0), tmp_path)
    first.score(ROWS)
    assert other.score(ROWS).stats["cache_hits"] == 0
    assert warmer.score(ROWS).stats["cache_hits"] == 0
    assert CachedTeacher(LocalTeacher(make_qwen(seed=0)), tmp_path).score(ROWS).stats["cache_hits"] == 3


def test_pixels_are_part_of_the_question(tmp_path):
    class Brightness:
        name = "eye"
        fingerprint = "1"

        def score(self, rows, want=None):
            logprob_BT = torch.tensor([[-float(row.images[0].getpixel((0, 0)))] for row in rows])
            return TeacherScores(logprob_BT=logprob_BT, valid_BT=torch.ones(len(rows), 1, dtype=torch.bool))

        def close(self):
            pass

    cached = CachedTeacher(Brightness(), tmp_path)
    dark, bright = (Row(prompt_ids=(1,), completion_ids=(2,), images=(Image.new("L", (2, 2), v),)) for v in (3, 200))
    assert cached.score([dark, bright, dark]).logprob_BT.tolist() == [[-3.0], [-200.0], [-3.0]]
    assert cached.score([bright]).stats["cache_hits"] == 1
    with pytest.raises(TeacherCannot, match="an image is a str"):
        cached.score([replace(dark, images=("picture.png",))])


def test_failed_rows_are_named_and_asked_for_again(make_qwen, tmp_path):
    # pitfall 28: never a zero in the place of a score, least of all one that is kept
    short = LocalTeacher(make_qwen(), max_length=4)
    cached = CachedTeacher(short, tmp_path)
    for _ in range(2):
        scores = cached.score([ROWS[0], ROWS[1], ROWS[0]], Want(top_k=2))
        assert set(scores.failures) == {0, 2}
        assert "more than the 4" in scores.failures[2]
        assert scores.valid_BT.tolist() == [[False] * 3, [True, False, False], [False] * 3]
        assert scores.top_ids_BTK is not None
        assert scores.top_ids_BTK[0].eq(-1).all()
    assert cached.export(tmp_path / "all.jsonl") == 1
    alone = cached.score([ROWS[0]], Want(top_k=2))
    assert alone.logprob_BT.shape == (1, 3)
    assert set(alone.failures) == {0}


def test_tokens_that_could_not_be_scored_stay_so(tmp_path):
    class Half:
        name = "half"
        fingerprint = "1"

        def score(self, rows, want=None):
            return TeacherScores(
                logprob_BT=torch.tensor([[-1.0, 0.0, float("-inf")]]), valid_BT=torch.tensor([[True, False, True]])
            )

        def close(self):
            pass

    cached = CachedTeacher(Half(), tmp_path)
    for _ in range(2):
        scores = cached.score(ROWS[:1])
        assert scores.valid_BT.tolist() == [[True, False, True]]
        assert scores.logprob_BT.tolist() == [[-1.0, 0.0, float("-inf")]]


def test_a_score_that_is_no_number_is_not_kept(make_qwen, tmp_path):
    model = make_qwen()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    cached = CachedTeacher(LocalTeacher(model), tmp_path)
    with pytest.raises(TeacherError, match="logprob_BT of row 0 is not a number"):
        cached.score(ROWS)


def test_teachers_that_cannot_be_kept_are_refused(make_qwen, tmp_path):
    with pytest.raises(TeacherCannot, match="its weights change"):
        CachedTeacher(LiveTeacher(make_qwen()), tmp_path)
    cached = CachedTeacher(LocalTeacher(make_qwen()), tmp_path)
    with pytest.raises(TeacherCannot, match="hidden states and heads are not recorded"):
        cached.score(ROWS, Want(distribution=True))


def test_identity_of_a_served_teacher_is_what_its_servers_say():
    def facts(*roots):
        return [SimpleNamespace(root=root, fingerprint="ab", version="0.20") for root in roots]

    assert identity_of(SimpleNamespace(name="t", facts=lambda: facts("m", "m"))) == "t-m-ab"
    with pytest.raises(TeacherError, match="differ"):
        identity_of(SimpleNamespace(name="t", facts=lambda: facts("m", "n")))
    with pytest.raises(TeacherCannot, match="pass identity="):
        identity_of(SimpleNamespace(name="t"))


def test_a_folder_with_something_else_in_it_is_refused(make_qwen, tmp_path):
    (tmp_path / "scores.sqlite").write_text("this is a text, and long enough to be told from a database " * 20)
    with pytest.raises(TeacherError, match="cannot be used"):
        CachedTeacher(LocalTeacher(make_qwen()), tmp_path)


def test_a_folder_may_be_opened_by_many_at_once(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        for number in range(20):
            stores = list(threads.map(ScoreStore, [tmp_path / f"{number}.sqlite"] * 8))
            assert [len(store) for store in stores] == [0] * 8


WORKER = """
import sys, torch
from teachers.cache import CachedTeacher
from teachers.protocol import Row
from teachers.scores import TeacherScores

class Sum:
    name, fingerprint = "sum", "1"
    def score(self, rows, want=None):
        values = [[-float(sum(row.prompt_ids) + row.completion_ids[0])] for row in rows]
        return TeacherScores(logprob_BT=torch.tensor(values), valid_BT=torch.ones(len(rows), 1, dtype=torch.bool))
    def close(self): pass

cached = CachedTeacher(Sum(), sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for start in range(0, 200, 10):
    rows = [Row(prompt_ids=(i,), completion_ids=(1,)) for i in range(start, start + 20)]
    assert cached.score(rows).logprob_BT[:, 0].tolist() == [-float(i + 1) for i in range(start, start + 20)]
"""


@pytest.mark.processes
def test_processes_share_a_folder_without_losing_or_tearing_anything(tmp_path):
    command = [sys.executable, "-W", "error", "-c", WORKER, str(tmp_path / "shared")]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(3)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:  # all at once
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.close()
    for worker in workers:
        assert worker.wait(timeout=1500) == 0
        assert worker.stdout is not None
        worker.stdout.close()
    teacher = RecordedTeacher(tmp_path / "shared")
    rows = [Row(prompt_ids=(i,), completion_ids=(1,)) for i in range(210)]
    assert teacher.score(rows).logprob_BT[:, 0].tolist() == [-float(i + 1) for i in range(210)]
