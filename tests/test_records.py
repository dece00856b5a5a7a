import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from hybrid.errors import DataError, HybridError, MissingMeasurement
from hybrid.explain import explain
from hybrid.methods import method_of
from hybrid.records import Texts, read_records, record_lines, write_records
from hybrid.types import Demonstration, RolloutBatch, View

FULL = {
    "prompt_id": "p1",
    "response_id": "p1/0",
    "token_ids": [5, 9, 2],
    "token_mask": [1, 1, 0],
    "reward": 1.0,
    "rewards": {"correct": 1.0, "format": None},
    "truncated": False,
    "teacher_accuracy": 0.75,
    "student_logprobs": [-1.5, -1.0, -0.5],
    "current_logprobs": None,
    "entropies": [0.3, 1.2, 0.1],
    "kl": [0.2, 0.5, 0.0],
    "scores": {
        "teacher": {
            "logprobs": [-1.0, -2.0, -0.5],
            "top_ids": [[5, 8], [9], [2, 3]],
            "top_logprobs": [[-1.0, -1.9], [-2.0], [-0.5, -1.5]],
        },
        "right": {"logprobs": [-1.0, None, -0.5]},
    },
    "demonstration": {"token_ids": [7, 7], "logprobs": [-0.25, -0.5]},
    "prompt": "1 + 1 =",
    "completion": " 2",
    "tokens": [" ", "2", "<eos>"],
}


@pytest.fixture
def file_of(tmp_path):
    def write(*lines: dict | str) -> Path:
        path = tmp_path / "rollouts.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


def some(value: Any) -> Any:
    assert value is not None
    return value


def line(**changes) -> dict:
    return {"prompt_id": "p1", "token_ids": [5, 9, 2]} | changes


def test_a_full_line_gives_every_measurement_in_float64(file_of):
    records = read_records(file_of(FULL))
    batch = records.batch
    assert batch.dtype == torch.float64
    assert batch.mask_BT.tolist() == [[True, True, False]]
    assert batch.need("reward").tolist() == [1.0]
    assert batch.need("truncated").tolist() == [False]
    assert batch.need("teacher_accuracy").tolist() == [0.75]
    assert batch.need("student_logprobs").tolist() == [[-1.5, -1.0, -0.5]]
    assert batch.need("entropies").tolist() == [[0.3, 1.2, 0.1]]
    assert batch.need("kl").tolist() == [[0.2, 0.5, 0.0]]
    assert batch.view("teacher").logprob_BT.tolist() == [[-1.0, -2.0, -0.5]]
    # A token that the mask leaves out is not known, and neither is one whose score is null.
    assert batch.view("teacher").valid_BT.tolist() == [[True, True, False]]
    assert batch.view("right").valid_BT.tolist() == [[True, False, False]]
    assert some(batch.view("teacher").top_ids_BTK).tolist() == [[[5, 8], [9, -1], [2, 3]]]
    assert some(batch.view("teacher").top_logprob_BTK).tolist() == [[[-1.0, -1.9], [-2.0, -math.inf], [-0.5, -1.5]]]
    assert some(records.current_logprob_BT).tolist() == [[-1.5, -1.0, -0.5]]
    assert some(batch.demonstration).ids_BU.tolist() == [[7, 7]]
    assert some(records.demonstration_logprob_BU).tolist() == [[-0.25, -0.5]]
    assert records.rewards == ({"correct": 1.0, "format": None},)
    assert (records.prompts, records.completions) == (("1 + 1 =",), (" 2",))
    assert records.tokens == ((" ", "2", "<eos>"),)
    assert records.lengths == (3,)


def test_only_prompt_and_tokens_are_required(file_of):
    records = read_records(file_of(line(), line(token_ids=[1]), line(prompt_id="p2", token_ids=[])))
    batch = records.batch
    assert records.response_ids == ("p1/0", "p1/1", "p2/0")
    assert batch.group_B.tolist() == [0, 0, 1]
    assert batch.mask_BT.tolist() == [[True] * 3, [True, False, False], [False] * 3]
    assert batch.max_length == 3
    measured = (batch.reward_B, batch.truncated_B, batch.student_logprob_BT, batch.entropy_BT, batch.reverse_kl_BT)
    assert measured == (None,) * 5
    assert (batch.teacher_accuracy_B, batch.demonstration, records.current_logprob_BT) == (None,) * 3
    assert batch.views == {}


def test_prompts_need_not_stand_together(file_of):
    records = read_records(file_of(line(prompt_id="a"), line(prompt_id="b"), line(prompt_id="a")))
    assert records.batch.group_B.tolist() == [0, 1, 0]
    assert records.response_ids == ("a/0", "b/0", "a/1")


def test_an_unscored_response_is_nan_and_never_zero(file_of):
    records = read_records(file_of(line(reward=None), line(reward=1)))
    assert records.batch.need("reward").isnan().tolist() == [True, False]


def test_a_row_without_scores_is_a_failed_teacher_row(file_of):
    scored = line(scores={"teacher": {"logprobs": [-1, -1, -1]}})
    rows = (scored, line(scores={"teacher": None}), line(), line(scores={"teacher": {"logprobs": None}}))
    view = read_records(file_of(*rows)).batch.view("teacher")
    assert view.valid_BT.tolist() == [[True] * 3] + [[False] * 3] * 3
    assert view.logprob_BT[1:].abs().sum() == 0


def test_scores_that_are_null_in_every_line_are_not_measured(file_of):
    assert read_records(file_of(line(scores={"teacher": None}), line(scores=None))).batch.views == {}


def test_a_support_alone_makes_its_tokens_known(file_of):
    top = {"top_ids": [[5], [9], [2]], "top_logprobs": [[-0.1], [-0.2], [-0.3]]}
    batch = read_records(file_of(line(scores={"teacher": top, "student": top}, student_logprobs=[-1, -2, -3]))).batch
    assert batch.view("teacher").valid_BT.all()
    assert batch.view("teacher").logprob_BT.isnan().all()
    assert batch.view("student").logprob_BT.tolist() == [[-1, -2, -3]]


def test_the_current_student_is_that_of_the_rollout_where_a_line_has_no_other(file_of):
    first = line(student_logprobs=[-1, -2, -3], current_logprobs=[-4, -5, -6])
    records = read_records(file_of(first, line(student_logprobs=[-1, -2, -3])))
    assert some(records.current_logprob_BT).tolist() == [[-4, -5, -6], [-1, -2, -3]]


def test_a_failed_teacher_row_needs_no_kl(file_of):
    scored = line(scores={"teacher": {"logprobs": [-1, -1, -1]}}, kl=[1, 2, 3])
    failed = line(scores={"teacher": {"logprobs": [None, None, None]}})
    batch = read_records(file_of(scored, line(scores={"teacher": None}), failed)).batch
    assert batch.need("kl").tolist() == [[1, 2, 3], [0, 0, 0], [0, 0, 0]]
    partial = read_records(file_of(scored, line(scores={"teacher": {"logprobs": [-1, None, None]}}))).partial
    assert "line 2 (response p1/1): kl is missing" in partial["kl"]


def test_an_empty_response_needs_no_measurement(file_of):
    records = read_records(file_of(line(token_ids=[]), line(kl=[0, 1, 2], entropies=[0, 1, 2])))
    assert records.batch.need("kl").tolist() == [[0, 0, 0], [0, 1, 2]]


def test_a_file_of_empty_responses_has_no_tokens(file_of):
    records = read_records(file_of(line(token_ids=[], reward=1.0, student_logprobs=[])))
    assert records.batch.mask_BT.shape == (1, 0)


def test_an_empty_demonstration_is_measured_but_has_no_token(file_of):
    records = read_records(file_of(line(demonstration={"token_ids": [], "logprobs": []}), line()))
    assert some(records.batch.demonstration).mask_BU.any().item() is False
    assert read_records(file_of(line(demonstration=None))).batch.demonstration is None


def test_blank_lines_are_passed_over(file_of):
    assert read_records(file_of(line(), "", line())).response_ids == ("p1/0", "p1/1")


MALFORMED = {
    "json": ('{"prompt_id": "p1", "token_ids": [1', "line 2: not a line of JSON: EOF while parsing"),
    "no object": ("[1, 2]", "line 2: the line: input should be an object"),
    "no prompt": ({"token_ids": [1]}, "line 2: prompt_id is missing"),
    "no tokens": ({"prompt_id": "p1"}, "line 2 (prompt p1): token_ids is missing"),
    "short": (line(kl=[0.1, 0.2]), "line 2 (response p1/1): kl has 2 entries for 3 token_ids"),
    "long": (line(token_mask=[1] * 4), "line 2 (response p1/1): token_mask has 4 entries for 3 token_ids"),
    "short score": (
        line(scores={"teacher": {"logprobs": [-1.0]}}),
        "line 2 (response p1/1): scores.teacher.logprobs has 1 entries for 3 token_ids",
    ),
    "short support": (
        line(scores={"teacher": {"top_ids": [[1]], "top_logprobs": [[-1.0]]}}),
        "scores.teacher.top_ids has 1 entries for 3 token_ids",
    ),
    "uneven support": (
        line(scores={"teacher": {"top_ids": [[1], [1, 2], []], "top_logprobs": [[-1.0], [-1.0], []]}}),
        "line 2 (response p1/1): scores.teacher.top_logprobs[1] has 1 entries for 2 top_ids",
    ),
    "half a support": (
        line(scores={"teacher": {"top_ids": [[1], [1], [1]]}}),
        "scores.teacher needs both top_ids and top_logprobs, or neither",
    ),
    "short text": (
        line(demonstration={"token_ids": [1, 2], "logprobs": [-1.0]}),
        "demonstration.logprobs has 1 entries for 2 token_ids",
    ),
    "nan": (line(kl=[0.1, math.nan, 0.2]), "line 2 (prompt p1): kl[1] is not a finite number"),
    "infinite": (line(student_logprobs=[-math.inf, 0, 0]), "student_logprobs[0] is not a finite number"),
    "nan reward": (line(reward=math.nan), "line 2 (prompt p1): reward is not a finite number"),
    "nan score": (
        line(scores={"teacher": {"logprobs": [-1, math.nan, -1]}}),
        "scores.teacher.logprobs[1] is not a finite number",
    ),
    "infinite support": (
        line(scores={"teacher": {"top_ids": [[1], [1], [1]], "top_logprobs": [[-1], [-math.inf], [-1]]}}),
        "scores.teacher.top_logprobs[1][0] is not a finite number",
    ),
    "too large": ('{"prompt_id": "p1", "token_ids": [1], "kl": [1e999]}', "kl[0] is not a finite number"),
    "null number": (line(entropies=[0.1, None, 0.2]), "entropies[1]: input should be a valid number; got None"),
    "text for number": (line(reward="1.0"), "reward: input should be a valid number; got '1.0'"),
    "truth for number": (line(reward=True), "reward: input should be a valid number; got True"),
    "number for truth": (line(truncated=1), "truncated: input should be a valid boolean; got 1"),
    "fraction for id": (line(token_ids=[1.5]), "token_ids[0]: input should be a valid integer"),
    "negative id": (line(token_ids=[-1]), "token_ids[0]: input should be greater than or equal to 0; got -1"),
    "mask of two": (line(token_mask=[1, 2, 0]), "token_mask[1]: input should be less than or equal to 1; got 2"),
    "mask of half": (line(token_mask=[1, 0.5, 0]), "token_mask[1]: input should be a valid integer"),
    "accuracy above 1": (line(teacher_accuracy=1.5), "teacher_accuracy: input should be less than or equal to 1"),
    "accuracy below 0": (line(teacher_accuracy=-0.5), "teacher_accuracy: input should be greater than or equal to 0"),
    "unknown key": (line(student_logprob=[1]), "unknown key student_logprob; did you mean student_logprobs?"),
    "unknown score key": (
        line(response_id="x", scores={"teacher": {"logprob": [1]}}),
        "line 2 (response x): unknown key scores.teacher.logprob; did you mean logprobs?",
    ),
    "unknown text key": (line(demonstration={"token_ids": [], "ids": []}), "demonstration.ids; did you mean token_ids"),
    "strange key": (line(zzz=1), "unknown key zzz; there are prompt_id, response_id, token_ids"),
}


@pytest.mark.parametrize(("bad", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_line_is_named_with_its_key(file_of, bad, message):
    with pytest.raises(DataError) as caught:
        read_records(file_of(line(), bad))
    assert message in str(caught.value)
    assert "rollouts.jsonl, line 2" in str(caught.value)


INCOMPLETE = {
    "student_logprobs": (line(student_logprobs=[-1, -1, -1]), "leave it out of every line"),
    "entropies": (line(entropies=[1, 1, 1]), "leave it out of every line"),
    "kl": (line(kl=[1, 1, 1]), "leave it out of every line"),
    "reward": (line(reward=1.0), "write null for an unscored response"),
    "truncated": (line(truncated=True), "measure it for every prompt"),
    "teacher_accuracy": (line(teacher_accuracy=0.5), "measure it for every prompt"),
}


@pytest.mark.parametrize(("key", "first", "advice"), [(k, *v) for k, v in INCOMPLETE.items()], ids=INCOMPLETE)
def test_a_measurement_of_some_lines_only_counts_as_not_made(file_of, key, first, advice):
    """It is an error for the methods that read it alone; the message names the line."""
    records = read_records(file_of(first, line()))
    told = rf"line 2 \(response p1/1\): {key} is missing, and other lines .*{advice}"
    assert re.search(told, records.partial[key])
    with pytest.raises(MissingMeasurement):
        records.batch.need(key)


def test_only_a_method_that_reads_it_minds_a_partial_measurement(file_of):
    rows = (line(reward=1.0, student_logprobs=[-1] * 3, kl=[0, 1, 2]), line(reward=0.0, student_logprobs=[-1] * 3))
    records = read_records(file_of(*rows))
    assert explain(method_of("grpo"), records)["loss"]["policy"] == 0.0
    with pytest.raises(DataError, match=r"line 2 .*kl is missing"):
        explain(method_of("kat"), records)


def test_named_rewards_do_not_stand_in_for_the_reward(file_of):
    assert read_records(file_of(line(rewards={"correct": 1.0}))).batch.reward_B is None


def test_a_scored_row_without_the_support_of_the_others_is_noted(file_of):
    top = {"logprobs": [-1, -1, -1], "top_ids": [[1]] * 3, "top_logprobs": [[-1.0]] * 3}
    rows = (line(scores={"teacher": top}), line(scores={"teacher": {"logprobs": [-1, -1, -1]}}))
    assert "scores.teacher.top is missing" in read_records(file_of(*rows)).partial["scores.teacher.top"]


def test_a_text_without_logprobs_beside_others_is_noted(file_of):
    rows = (line(demonstration={"token_ids": [1], "logprobs": [-1]}), line(demonstration={"token_ids": [1]}))
    assert "demonstration.logprobs is missing" in read_records(file_of(*rows)).partial["demonstration.logprobs"]


def test_two_responses_of_one_name_are_refused(file_of):
    with pytest.raises(DataError, match=r"line 3 \(response p1/0\): this response_id stands on line 1 already"):
        read_records(file_of(line(), line(prompt_id="p2"), line(prompt_id="p3", response_id="p1/0")))


def test_an_empty_file_is_refused(file_of):
    with pytest.raises(DataError, match="holds no response"):
        read_records(file_of(""))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"there is no record file .*none.jsonl"):
        read_records(tmp_path / "none.jsonl")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b'{"prompt_id": "p\xff1", "token_ids": []}\n')
    with pytest.raises(DataError, match="line 1: not a line of JSON"):
        read_records(path)


def batch_of(seed: int, dtype: torch.dtype = torch.float32) -> tuple[RolloutBatch, list[list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 0, 5, 2]
    B, T, K, U = len(lengths), 6, 2, 3
    inside_BT = torch.arange(T) < torch.tensor(lengths)[:, None]
    mask_BT = inside_BT & (torch.rand(B, T, generator=generator) > 0.2)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=dtype)

    top_ids = torch.randint(0, 9, (B, T, K), generator=generator)
    view = View(
        logprob_BT=-numbers(B, T),
        valid_BT=mask_BT & (torch.rand(B, T, generator=generator) > 0.3),
        top_ids_BTK=top_ids,
        top_logprob_BTK=-numbers(B, T, K),
    )
    batch = RolloutBatch(
        group_B=torch.tensor([0, 0, 1, 1]),
        mask_BT=mask_BT,
        reward_B=torch.tensor([1.0, math.nan, 0.0, 0.5], dtype=dtype),
        truncated_B=torch.tensor([True, False, False, True]),
        student_logprob_BT=(-numbers(B, T)).masked_fill(~inside_BT, -math.inf),
        entropy_BT=numbers(B, T),
        reverse_kl_BT=numbers(B, T),
        teacher_accuracy_B=numbers(B),
        views={"teacher": view, "student": View(logprob_BT=-numbers(B, T), valid_BT=mask_BT)},
        demonstration=Demonstration(
            ids_BU=torch.ones(B, U, dtype=torch.long), mask_BU=torch.arange(U) < torch.tensor([3, 0, 1, 0])[:, None]
        ),
        dtype=dtype,
    )
    return batch, [list(range(length)) for length in lengths]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([torch.float32, torch.float64]))
def test_what_is_written_is_read_again_to_the_last_bit(tmp_path_factory, seed, dtype):
    batch, token_ids = batch_of(seed, dtype)
    path = tmp_path_factory.mktemp("records") / "run" / "rollouts.jsonl"
    text_BU = -torch.rand(4, 3, dtype=dtype)
    lines = record_lines(
        batch,
        prompt_ids=["a", "a", "b", "b"],
        token_ids=token_ids,
        current_logprob_BT=-batch.need("kl"),
        demonstration_logprob_BU=text_BU,
    )
    assert write_records(path, lines) == 4
    records = read_records(path)
    width = max(records.lengths)
    mask_BT = batch.mask_BT[:, :width]
    assert records.token_ids == tuple(tuple(ids) for ids in token_ids)
    assert torch.equal(records.batch.mask_BT, mask_BT)
    assert_close(records.batch.need("reward"), batch.need("reward").double(), equal_nan=True, rtol=0, atol=0)
    assert torch.equal(records.batch.need("truncated"), batch.need("truncated"))
    for name in ("student_logprobs", "entropies", "kl"):
        used_BT = mask_BT & batch.view("teacher").valid_BT[:, :width] if name == "kl" else mask_BT
        written = batch.need(name)[:, :width].double().masked_fill(~used_BT, 0)
        assert torch.equal(records.batch.need(name), written)
    assert torch.equal(some(records.current_logprob_BT), -batch.need("kl")[:, :width].double().masked_fill(~mask_BT, 0))
    teacher, again = batch.view("teacher"), records.batch.view("teacher")
    valid_BT = teacher.valid_BT[:, :width]
    assert torch.equal(again.valid_BT, valid_BT)
    assert torch.equal(again.logprob_BT, teacher.logprob_BT[:, :width].double().masked_fill(~valid_BT, 0))
    assert torch.equal(some(again.top_ids_BTK)[mask_BT], some(teacher.top_ids_BTK)[:, :width][mask_BT])
    assert torch.equal(some(again.top_logprob_BTK)[mask_BT], some(teacher.top_logprob_BTK)[:, :width][mask_BT].double())
    mask_BU = some(batch.demonstration).mask_BU
    assert torch.equal(some(records.batch.demonstration).mask_BU, mask_BU)
    assert torch.equal(some(records.demonstration_logprob_BU), text_BU.double().masked_fill(~mask_BU, 0))


def test_texts_and_named_rewards_stand_beside_the_numbers(tmp_path):
    batch = RolloutBatch(group_B=torch.zeros(1, dtype=torch.long), mask_BT=torch.ones(1, 2, dtype=torch.bool))
    texts = Texts(prompts=["1 + 1 ="], completions=["2\ud800\n"], tokens=[["2", "\n"]], rewards={"right": [None]})
    lines = list(record_lines(batch, prompt_ids=["a"], token_ids=[[4, 5]], response_ids=["r"], texts=texts))
    assert json.loads(lines[0]) == {
        "prompt_id": "a",
        "response_id": "r",
        "token_ids": [4, 5],
        "token_mask": [1, 1],
        "rewards": {"right": None},
        "prompt": "1 + 1 =",
        "completion": "2?\n",
        "tokens": ["2", "\n"],
    }


def test_a_divergence_from_a_teacher_that_failed_is_not_written():
    batch, token_ids = batch_of(0)
    teacher = batch.view("teacher")
    batch.need("kl")[~teacher.valid_BT] = math.nan
    lines = list(record_lines(batch, prompt_ids=["a"] * 4, token_ids=token_ids))
    kl_T = json.loads(lines[2])["kl"]
    assert [x == 0 for x in kl_T] == (~teacher.valid_BT[2, : len(kl_T)]).tolist()


def test_lines_are_appended(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write_records(path, [json.dumps(line(response_id="a"))])
    write_records(path, [json.dumps(line(response_id="b"))])
    assert read_records(path).response_ids == ("a", "b")


def test_a_number_that_json_cannot_hold_is_not_written():
    batch, token_ids = batch_of(0)
    batch.need("entropies")[2] = math.nan
    with pytest.raises(HybridError, match="entropies must be finite to be recorded; got nan at index"):
        list(record_lines(batch, prompt_ids=["a"] * 4, token_ids=token_ids))
