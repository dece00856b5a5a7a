from typing import Any, TypeVar

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen2ForCausalLM,
)

from teachers.errors import TeacherCannot, TeacherError, TeacherMismatch
from teachers.local import LocalTeacher
from teachers.protocol import Row, Teacher, Want

ROWS = [
    Row(prompt_ids=(3, 4, 5, 6, 7), completion_ids=(8, 9, 10)),
    Row(prompt_ids=(11, 12), completion_ids=(13,)),
    Row(prompt_ids=(14, 15, 16), completion_ids=(17, 18, 19, 20, 21)),
    Row(prompt_ids=(22,), completion_ids=()),
]
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "pad_token_id": 0,
}


T = TypeVar("T")


def given(value: T | None) -> T:
    assert value is not None
    return value


def is_whole(teacher):
    return given(teacher._scorer).decoder.is_whole


def slow_logprobs(model, row, temperature=1.0, vocab_size=None):
    """From the definition, one sequence and one token at a time: [T, V]."""
    with torch.no_grad():
        logits = model(torch.tensor([[*row.prompt_ids, *row.completion_ids]])).logits[0]
    rows = [
        torch.log_softmax(logits[len(row.prompt_ids) + t - 1, :vocab_size].double() / temperature, -1)
        for t in range(len(row.completion_ids))
    ]
    return torch.stack(rows) if rows else torch.zeros(0, logits.shape[-1], dtype=torch.float64)


def expected_scores(model, rows, **options):
    width = max(len(row.completion_ids) for row in rows)
    logprob_BT, valid_BT = torch.zeros(len(rows), width), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        table = slow_logprobs(model, row, **options)
        for t, token in enumerate(row.completion_ids):
            logprob_BT[i, t], valid_BT[i, t] = table[t, token], True
    return logprob_BT, valid_BT


def fixed_logits_model(make_qwen, logits, dtype=torch.float32):
    """A real model that answers with `logits` everywhere."""
    model = make_qwen(vocab_size=len(logits))
    model.lm_head = nn.Linear(32, len(logits))
    nn.init.zeros_(model.lm_head.weight)
    with torch.no_grad():
        model.lm_head.bias.copy_(torch.tensor(logits))
    return model.to(dtype)


def test_value_t_belongs_to_completion_token_t(make_qwen):
    # pitfall 1: one position off gives the last token no score, and one-token answers none at all
    model = make_qwen()
    teacher = LocalTeacher(model)
    assert isinstance(teacher, Teacher)
    scores = teacher.score(ROWS)
    logprob_BT, valid_BT = expected_scores(model, ROWS)
    assert_close(scores.logprob_BT, logprob_BT, rtol=0, atol=1e-5)
    assert_close(scores.valid_BT, valid_BT)
    one_token = teacher.score([Row(prompt_ids=(3, 4), completion_ids=(5,))])
    expected = slow_logprobs(model, Row(prompt_ids=(3, 4), completion_ids=(5,)))[0, 5]
    assert_close(one_token.logprob_BT, expected.float().reshape(1, 1), rtol=0, atol=1e-5)


def test_learned_positions_in_a_batch_equal_the_unbatched_scores():
    # pitfall 32: prompts of 2 and 5 in one batch
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.4)
    teacher = LocalTeacher(GPT2LMHeadModel(config))
    rows = [Row(prompt_ids=(1, 2), completion_ids=(3, 4, 5)), Row(prompt_ids=(6, 7, 8, 9, 10), completion_ids=(11, 12))]
    together = teacher.score(rows)
    for i, row in enumerate(rows):
        alone = teacher.score([row]).logprob_BT[0]
        assert_close(together.logprob_BT[i, : len(alone)], alone, rtol=0, atol=1e-5)
    assert_close(together.logprob_BT, expected_scores(teacher.model, rows)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1.0, -0.4076), (0.5, -0.1429)],
)
def test_temperature_divides_the_logits_not_the_logprob(make_qwen, temperature, expected):
    # pitfall 6: logits [2, 1, 0], token 0; -0.4076 / 0.5 = -0.8152 is wrong
    teacher = LocalTeacher(fixed_logits_model(make_qwen, [2.0, 1.0, 0.0]), temperature=temperature)
    scores = teacher.score([Row(prompt_ids=(1,), completion_ids=(0,))], Want(top_k=3))
    assert scores.temperature == temperature
    assert_close(scores.logprob_BT, torch.tensor([[expected]]), rtol=0, atol=1e-4)
    assert_close(given(scores.top_logprob_BTK).exp().sum(-1), torch.ones(1, 1))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_a_temperature_that_is_no_temperature_is_refused(make_qwen, temperature):
    # pitfall 7
    with pytest.raises(TeacherError, match="temperature must be above 0"):
        LocalTeacher(make_qwen(), temperature=temperature)


def test_padding_of_the_vocabulary_stays_out_of_the_softmax(make_qwen):
    # pitfall 18: shared ids 0..4, two padded ids with large logits
    model = fixed_logits_model(make_qwen, [1.0, 0.0, 0.0, 0.0, 0.0, 3.0, 3.0])
    row = Row(prompt_ids=(1,), completion_ids=(0,))
    cut = LocalTeacher(model, vocab_size=5).score([row], Want(top_k=7))
    assert_close(cut.logprob_BT, torch.tensor([[-0.9048]]), rtol=0, atol=1e-4)
    assert given(cut.top_ids_BTK).tolist()[0][0][5:] == [-1, -1]
    assert given(cut.top_logprob_BTK)[0, 0, 5:].tolist() == [float("-inf")] * 2
    assert_close(cut.tail_logprob_BT.exp(), torch.zeros(1, 1), rtol=0, atol=1e-6)
    whole = LocalTeacher(model).score([row])
    assert_close(whole.logprob_BT, torch.tensor([[-2.8478]]), rtol=0, atol=1e-4)
    scores = LocalTeacher(model, vocab_size=5).score([row], Want(distribution=True))
    assert given(scores.head)(given(scores.hidden_BTH)).shape == (1, 1, 5)


def test_log_softmax_of_a_bfloat16_model_is_taken_in_float32(make_qwen):
    # pitfall 36: 1000 equal classes
    teacher = LocalTeacher(fixed_logits_model(make_qwen, [0.0] * 1000, torch.bfloat16))
    scores = teacher.score([Row(prompt_ids=(1,), completion_ids=(7,))])
    assert scores.logprob_BT.dtype == torch.float32
    assert_close(scores.logprob_BT, torch.tensor([[-6.9078]]), rtol=0, atol=1e-3)


def test_scores_do_not_depend_on_batches_budget_or_chunks(make_qwen):
    model = make_qwen()
    want = Want(top_k=4)
    first = LocalTeacher(model).score(ROWS, want)
    settings: list[dict[str, Any]] = [
        {"batch_size": 1},
        {"token_budget": 8},
        {"chunk": 1},
        {"chunk": 3, "batch_size": 2},
    ]
    for options in settings:
        other = LocalTeacher(model, **options).score(ROWS, want)
        assert_close(other.logprob_BT, first.logprob_BT, rtol=0, atol=1e-5)
        assert_close(other.top_logprob_BTK, first.top_logprob_BTK, rtol=0, atol=1e-5)
        assert given(other.top_ids_BTK).tolist() == given(first.top_ids_BTK).tolist()


def test_token_budget_bounds_the_padded_positions_of_a_forward(make_qwen):
    teacher = LocalTeacher(make_qwen(), token_budget=16)
    # lengths 8, 8 and 3; the row without a completion is not run: 8 + 8 fit, 3 rows of 8 do not
    assert teacher.score(ROWS).stats == {"rows": 4, "batches": 2, "positions": 16 + 3}


def test_the_head_sees_no_more_positions_than_a_chunk(make_qwen):
    model = make_qwen()
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(args[0].numel() // 32))
    LocalTeacher(model, chunk=2, batch_size=2).score(ROWS, Want(top_k=2))
    # at most 2 rows of a batch pass the model's own head, at their last position only
    assert max(seen) == 2


def test_top_k_are_the_largest_logprobs_in_order(make_qwen):
    model = make_qwen()
    scores = LocalTeacher(model, temperature=0.7).score(ROWS, Want(top_k=5))
    for i, row in enumerate(ROWS):
        table = slow_logprobs(model, row, temperature=0.7)
        for t in range(len(row.completion_ids)):
            values, ids = table[t].topk(5)
            assert given(scores.top_ids_BTK)[i, t].tolist() == ids.tolist()
            assert_close(given(scores.top_logprob_BTK)[i, t], values.float(), rtol=0, atol=1e-5)
    assert given(scores.top_ids_BTK)[3].eq(-1).all()
    assert given(scores.top_logprob_BTK)[3].isneginf().all()


def test_candidates_of_the_student_are_scored_where_they_stand(make_qwen):
    model = make_qwen()
    candidates_BTK = torch.randint(0, 64, (4, 5, 3), generator=torch.Generator().manual_seed(0))
    candidates_BTK[0, 1, 2] = -1
    scores = LocalTeacher(model).score(ROWS, Want(candidates_BTK=candidates_BTK))
    for i, row in enumerate(ROWS):
        table = slow_logprobs(model, row)
        for t in range(len(row.completion_ids)):
            for k, token in enumerate(candidates_BTK[i, t].tolist()):
                expected = table[t, token].item() if token >= 0 else float("-inf")
                assert given(scores.top_logprob_BTK)[i, t, k].item() == pytest.approx(expected, abs=1e-5)
                assert given(scores.top_ids_BTK)[i, t, k] == token


def test_the_distribution_comes_as_states_and_head_usable_in_a_loss(make_qwen):
    model = make_qwen()
    scores = LocalTeacher(model, temperature=2.0).score(ROWS, Want(distribution=True))
    for i, row in enumerate(ROWS):
        num = len(row.completion_ids)
        logprob_TV = torch.log_softmax(given(scores.head)(given(given(scores.hidden_BTH))[i, :num]).double() / 2.0, -1)
        assert_close(logprob_TV, slow_logprobs(model, row, temperature=2.0), rtol=0, atol=1e-5)
    student = torch.zeros(64, requires_grad=True)
    logits_BTV = given(scores.head)(given(scores.hidden_BTH))
    (torch.log_softmax(student, -1) * logits_BTV.softmax(-1)).sum().backward()
    assert given(student.grad).isfinite().all()


FAMILIES = {
    "gemma2_softcap": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SMALL, query_pre_attn_scalar=8, final_logit_softcapping=2.0)
    ),
    "granite_divides": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)),
    "cohere_multiplies": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_scaled_and_capped_logits_go_through_the_chunked_head(family):
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    teacher = LocalTeacher(model, chunk=2)
    scores = teacher.score(ROWS)
    assert_close(scores.logprob_BT, expected_scores(model, ROWS)[0], rtol=0, atol=2e-5)
    assert is_whole(teacher) is False


class Doubled(Qwen2ForCausalLM):
    """An architecture that does something to its logits which no setting tells."""

    def forward(self, input_ids, attention_mask=None, **options):
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask, **options)
        output.logits = 2 * given(output.logits)
        return output


def test_a_head_that_cannot_be_taken_apart_is_used_whole(make_qwen):
    model = Doubled(make_qwen().config).eval()
    teacher = LocalTeacher(model)
    scores = teacher.score(ROWS, Want(distribution=True))
    assert is_whole(teacher) is True
    assert_close(scores.logprob_BT, expected_scores(model, ROWS)[0], rtol=0, atol=1e-5)
    again = torch.log_softmax(given(scores.head)(given(given(scores.hidden_BTH))[0, :3]), -1)
    assert_close(again.double(), slow_logprobs(model, ROWS[0]), rtol=0, atol=1e-5)


def test_a_model_with_trls_fused_head_scores_the_same(make_qwen):
    from trl.trainer.utils import add_fused_lm_head

    model = make_qwen()
    expected = expected_scores(model, ROWS)[0]
    add_fused_lm_head(model, temperature=0.3)
    assert_close(LocalTeacher(model).score(ROWS).logprob_BT, expected, rtol=0, atol=1e-5)


# peft reads a property that transformers 5.24 has renamed
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_model_with_a_learned_prompt_scores_the_real_tokens(make_qwen):
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(make_qwen(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    expected = []
    for row in ROWS[:3]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*row.prompt_ids, *row.completion_ids]])).logits[0, 3:]
        table = torch.log_softmax(logits, -1)
        expected.append([table[len(row.prompt_ids) + t - 1, c].item() for t, c in enumerate(row.completion_ids)])
    scores = LocalTeacher(model).score(ROWS[:3])
    for i, values in enumerate(expected):
        assert scores.logprob_BT[i, : len(values)].tolist() == pytest.approx(values, abs=1e-5)


def test_a_row_beyond_the_context_is_masked_and_named_and_the_others_keep_their_scores(make_qwen):
    # pitfall 26
    teacher = LocalTeacher(make_qwen(), max_length=6, name="math")
    scores = teacher.score(ROWS)
    assert set(scores.failures) == {0, 2}
    assert scores.failures[0] == "5 prompt and 3 completion tokens are 8, more than the 6 that teacher 'math' takes"
    assert scores.valid_BT.sum(1).tolist() == [0, 1, 0, 0]
    alone = teacher.score([ROWS[1]])
    assert_close(scores.logprob_BT[1, :1], alone.logprob_BT[0])


def test_empty_completions_and_no_rows_at_all(make_qwen):
    # pitfall 35
    teacher = LocalTeacher(make_qwen())
    empty = Row(prompt_ids=(1, 2), completion_ids=())
    assert teacher.score([empty, empty]).valid_BT.shape == (2, 0)
    mixed = teacher.score([empty, Row(prompt_ids=(1, 2), completion_ids=(3,))])
    assert mixed.valid_BT.tolist() == [[False], [True]]
    assert mixed.logprob_BT[0, 0] == 0
    assert teacher.score([]).logprob_BT.shape == (0, 0)


def test_what_cannot_be_scored_is_refused_by_name(make_qwen):
    teacher = LocalTeacher(make_qwen(), vocab_size=60)
    with pytest.raises(TeacherMismatch, match=r"row 1 has id 64, and this teacher knows ids 0\.\.63"):
        teacher.score([ROWS[0], Row(prompt_ids=(64,), completion_ids=(1,))])
    with pytest.raises(TeacherMismatch, match=r"row 0 has id 61, and this teacher knows ids 0\.\.59"):
        teacher.score([Row(prompt_ids=(1,), completion_ids=(61,))])
    with pytest.raises(TeacherMismatch, match="row 0 has an empty prompt"):
        teacher.score([Row(prompt_ids=(), completion_ids=(1,))])
    with pytest.raises(TeacherMismatch, match=r"row 0 has id 63"):
        teacher.score([ROWS[1]], Want(candidates_BTK=torch.tensor([[[63]]])))
    with pytest.raises(TeacherError, match="2 rows of at least 3 tokens"):
        teacher.score(ROWS[:2], Want(candidates_BTK=torch.zeros(2, 2, 1, dtype=torch.long)))
    with pytest.raises(TeacherError, match="not for both at once"):
        teacher.score(ROWS[1:2], Want(top_k=1, candidates_BTK=torch.zeros(1, 1, 1, dtype=torch.long)))
    with pytest.raises(TeacherCannot, match="row 0 has images"):
        teacher.score([Row(prompt_ids=(1,), completion_ids=(2,), images=("picture",))])
    with pytest.raises(TeacherError, match="chunk must be at least 1; got 0"):
        LocalTeacher(make_qwen(), chunk=0)


def test_the_teacher_is_frozen_and_without_dropout(make_qwen):
    model = make_qwen()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    teacher = LocalTeacher(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.train()
    first, second = teacher.score(ROWS), teacher.score(ROWS)
    assert_close(first.logprob_BT, second.logprob_BT, rtol=0, atol=0)
    assert not first.logprob_BT.requires_grad
    assert model.training


def test_load_reads_a_folder_in_the_dtype_asked_for(make_qwen, tokenizer, tmp_path):
    make_qwen(vocab_size=300).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    teacher = LocalTeacher.load(tmp_path, dtype="bfloat16", device="cpu", temperature=0.5, name="t")
    assert next(teacher.model.parameters()).dtype == torch.bfloat16
    assert teacher.model_name == str(tmp_path)
    assert teacher.max_model_len == 256
    assert teacher.vocab_size == 300
    assert teacher.tokenizer.convert_tokens_to_ids("<|end|>") == 1
    assert teacher.score(ROWS).temperature == 0.5
    teacher.close()
    with pytest.raises(TeacherError, match="teacher 't' was closed"):
        teacher.score(ROWS)


def test_the_folder_of_an_adapter_is_its_model(make_qwen, tokenizer, tmp_path):
    """What a LoRA training leaves: no configuration of a model, but the name of the one below."""
    make_qwen(0).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    expected = LocalTeacher(model.eval()).score(ROWS).logprob_BT
    loaded = LocalTeacher.load(tmp_path / "adapter").score(ROWS).logprob_BT
    assert_close(loaded, expected)
    plain = LocalTeacher.load(make_saved(make_qwen(0), tokenizer, tmp_path / "plain")).score(ROWS).logprob_BT
    assert (plain - expected).abs().max() > 0.1


def make_saved(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_load_says_what_is_missing(tmp_path):
    with pytest.raises(TeacherError, match="no model could be loaded from"):
        LocalTeacher.load(tmp_path / "nothing")
    with pytest.raises(TeacherError, match=r"no model could be loaded .* for teacher 'teacher': Unrecognized model"):
        LocalTeacher.load(tmp_path)
    with pytest.raises(TeacherCannot, match="needs the package bitsandbytes"):
        LocalTeacher.load(tmp_path, quantization="4bit")


def test_the_fingerprint_follows_weights_and_settings_but_not_the_folder(make_qwen, tmp_path):
    model = make_qwen()
    model.save_pretrained(tmp_path)
    first = LocalTeacher(model).fingerprint
    assert LocalTeacher(AutoModelForCausalLM.from_pretrained(tmp_path)).fingerprint == first
    others = {
        LocalTeacher(make_qwen(seed=1)).fingerprint,
        LocalTeacher(make_qwen(), temperature=0.5).fingerprint,
        LocalTeacher(make_qwen(), vocab_size=60).fingerprint,
    }
    assert len(others | {first}) == 4
