import json

import pytest
import torch
from torch.testing import assert_close

from teachers.cache import CachedTeacher
from teachers.errors import TeacherCannot, TeacherError
from teachers.local import LocalTeacher
from teachers.protocol import Row, Teacher, Want
from teachers.recorded import RecordedTeacher

ROWS = [Row(prompt_ids=(3, 4, 5), completion_ids=(8, 9, 10)), Row(prompt_ids=(11, 12), completion_ids=(13,))]


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_recording_written_by_hand(tmp_path):
    path = written(
        tmp_path / "r.jsonl",
        {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-0.5, None]},
        {
            "prompt_ids": [1, 2],
            "completion_ids": [3],
            "logprobs": [-0.5],
            "top_k": 2,
            "top_ids": [[3, 7]],
            "top_logprobs": [[-0.5, -1.0]],
        },
    )
    teacher = RecordedTeacher(path)
    assert isinstance(teacher, Teacher)
    scores = teacher.score([Row(prompt_ids=(1, 2), completion_ids=(3, 4))])
    assert scores.logprob_BT.tolist() == [[-0.5, float("-inf")]]
    assert scores.valid_BT.tolist() == [[True, True]]
    top = teacher.score([Row(prompt_ids=(1, 2), completion_ids=(3,))], Want(top_k=2))
    assert top.top_ids_BTK is not None
    assert top.top_ids_BTK.tolist() == [[[3, 7]]]
    # 1 - exp(-0.5) - exp(-1.0)
    assert_close(top.tail_logprob_BT.exp(), torch.tensor([[0.02559]]), rtol=0, atol=1e-5)


def test_a_cache_is_exported_and_read_back_bit_by_bit(make_qwen, tmp_path):
    inner = LocalTeacher(make_qwen(), temperature=0.5)
    cached = CachedTeacher(inner, tmp_path / "cache")
    wants = [Want(), Want(top_k=3)]
    expected = [cached.score(ROWS, want) for want in wants]
    assert cached.export(tmp_path / "out" / "r.jsonl") == 4
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["r.jsonl"]
    for teacher in (RecordedTeacher(tmp_path / "out" / "r.jsonl"), RecordedTeacher(tmp_path / "cache")):
        for want, scores in zip(wants, expected, strict=True):
            again = teacher.score(list(reversed(ROWS)), want)
            assert_close(again.logprob_BT, scores.logprob_BT.flip(0), rtol=0, atol=0)
            assert again.temperature == 0.5
            assert (again.top_logprob_BTK is None) == (scores.top_logprob_BTK is None)
            if again.top_logprob_BTK is not None and scores.top_logprob_BTK is not None:
                assert_close(again.top_logprob_BTK, scores.top_logprob_BTK.flip(0), rtol=0, atol=0)
        teacher.close()


def test_an_unknown_sequence_is_refused_and_said_what_is_known(tmp_path):
    path = written(tmp_path / "r.jsonl", {"prompt_ids": [1, 2], "completion_ids": [3], "logprobs": [-0.5]})
    teacher = RecordedTeacher(path)
    with pytest.raises(TeacherCannot) as error:
        teacher.score([Row(prompt_ids=(1, 2), completion_ids=(3,)), Row(prompt_ids=(1, 2), completion_ids=(4,))])
    assert "row 1 (prompt of 2 ids that ends in (1, 2), completion of 1 ids that begins with (4,))" in str(error.value)
    assert "was asked for with top_k=0" in str(error.value)
    assert "has it not at all" in str(error.value)
    with pytest.raises(TeacherCannot, match=r"asked for with top_k=5; .* has it only with top_k=0"):
        teacher.score([Row(prompt_ids=(1, 2), completion_ids=(3,))], Want(top_k=5))


def test_it_must_be_clear_whose_scores_are_meant(tmp_path):
    record = {"prompt_ids": [1], "completion_ids": [3], "logprobs": [-0.5]}
    path = written(tmp_path / "r.jsonl", {"teacher": "a", **record}, {"teacher": "b", **record, "logprobs": [-2.0]})
    with pytest.raises(TeacherError, match=r"holds scores of \['a', 'b'\]; say whose"):
        RecordedTeacher(path)
    with pytest.raises(TeacherError, match="holds no scores of 'c'"):
        RecordedTeacher(path, teacher="c")
    row = Row(prompt_ids=(1,), completion_ids=(3,))
    assert RecordedTeacher(path, teacher="b").score([row]).logprob_BT.item() == -2.0


GOOD = {"prompt_ids": [1], "completion_ids": [3, 4], "logprobs": [-0.5, -1]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "it is not JSON"),
        ("[1]", "it is a list, not an object"),
        (json.dumps({"prompt_ids": [1], "completion_ids": [3]}), "it needs 'logprobs', a list"),
        (json.dumps(GOOD | {"completion_ids": [3, 4.5]}), "'completion_ids' must be whole numbers"),
        # pitfall 19: 5 scores for 4 tokens are never cut to the shorter
        (json.dumps(GOOD | {"logprobs": [-1] * 3}), "it has 2 completion_ids and 3 logprobs"),
        (json.dumps(GOOD | {"top_ids": [[1], [2]]}), "top_ids and top_logprobs go together"),
        (json.dumps(GOOD | {"top_k": 3}), "with top_k or candidates both are needed"),
        (json.dumps(GOOD | {"top_ids": [[1], [2]], "top_logprobs": [[-1], []]}), "the same length at each token"),
        (json.dumps(GOOD | {"dtype": "float8"}), "dtype must be one of"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, line, message):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    with pytest.raises(TeacherError, match=r"r\.jsonl, line 3: .*" + message):
        RecordedTeacher(path)


def test_missing_and_empty_recordings_are_refused(tmp_path):
    with pytest.raises(TeacherError, match="there is no recording"):
        RecordedTeacher(tmp_path / "none.jsonl")
    with pytest.raises(TeacherError, match="is no score cache"):
        RecordedTeacher(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TeacherError, match="holds no scores"):
        RecordedTeacher(tmp_path / "empty.jsonl")


def test_scores_at_two_temperatures_do_not_mix(tmp_path):
    path = written(tmp_path / "r.jsonl", GOOD, GOOD | {"prompt_ids": [2], "temperature": 0.5})
    rows = [Row(prompt_ids=(i,), completion_ids=(3, 4)) for i in (1, 2)]
    with pytest.raises(TeacherError, match=r"hold at temperatures \[0.5, 1.0\]"):
        RecordedTeacher(path).score(rows)
