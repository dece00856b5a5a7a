"""What counts, and how far: denominators, far log-probs, and divergences of several scorers, through a record file."""

import math

import pytest

from hybrid.errors import MissingMeasurement
from tests.explaining import advantages, explained, written_to


@pytest.fixture
def file_of(tmp_path):
    return lambda *lines: written_to(tmp_path / "rollouts.jsonl", *lines)


def line(reward: float | None, gaps: list[float | None], *, prompt: str = "p", **more) -> dict:
    """A response whose teacher is so many nats above a student of -1; None is no score."""
    scores = {"teacher": {"logprobs": [None if gap is None else gap - 1 for gap in gaps]}}
    count = len(gaps)
    return {
        "prompt_id": prompt,
        "token_ids": [1] * count,
        "reward": reward,
        "student_logprobs": [-1.0] * count,
        "scores": scores,
    } | more


@pytest.mark.parametrize(
    ("method", "settings", "policy"),
    [
        ("opdvr", ["truncated=skip"], 1.0),
        ("opdvr", ["truncated=skip", "reduction=response_mean"], 1.0),
        ("opdvr", ["truncated=skip", "reduction=token_sum"], 4.0),
        ("opdvr", ["truncated=vanilla_opd"], 1.0),
        ("grpd", ["truncated=skip", "u=1"], 1.0),
        ("r2opd", ["truncated=skip"], 1.0),
    ],
)
def test_a_dropped_response_leaves_numerator_and_denominator(file_of, method, settings, policy):
    # pitfall 11: A has 4 finished tokens, B 6 truncated ones, loss 1 each -> 1.0; 0.4 is the bug
    file = file_of(line(0, [-1.0] * 4, truncated=False), line(0, [-1.0] * 6, truncated=True))
    one = explained(file, method, *settings)
    assert one["loss"]["policy"] == pytest.approx(policy)
    if "truncated=skip" in settings:
        assert one["responses"][1]["kept"] == [0] * 6


def test_overlong_filtering_leaves_numerator_and_denominator(file_of):
    # A = +-0.5 / (0.7071 + 1e-4) = +-0.70701; only the wrong response of 2 tokens is left
    file = file_of(line(1, [0.0] * 6, truncated=True), line(0, [0.0] * 2, truncated=False))
    one = explained(file, "dapo", "drop_truncated=true")
    assert one["loss"]["policy"] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4))
    assert one["responses"][0]["advantages"] == [0] * 6


def test_an_unscored_response_counts_with_an_advantage_of_zero(file_of):
    # the two scored ones have +-0.5 on 2 and 1 tokens; 3 + 3 tokens count
    file = file_of(line(1, [0.0] * 2), line(0, [0.0]), line(None, [1.0, -1.0, 1.0]))
    assert explained(file, "grpo", "scale=none")["loss"]["policy"] == pytest.approx(-0.5 / 6)
    # without an outcome OPDVR's gate is closed, and the soft gate of R2-OPD is even: plain distillation
    assert advantages(explained(file, "opdvr"))[2] == [0, 0, 0]
    file = file_of(*(line(None, [1.0, -3.0], truncated=False) for _ in range(2)))
    assert advantages(explained(file, "r2opd", "beta=5"))[0] == pytest.approx([1.0, -3.0])


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_a_uniform_group_has_no_advantage_without_eps_either(file_of, scale):
    lines = [
        line(reward, [0.0], prompt=prompt) for prompt, reward in (("p", 1), ("p", 1), ("alone", 1), ("none", None))
    ]
    assert advantages(explained(file_of(*lines), "grpo", "eps=0", f"scale={scale}")) == [[0], [0], [0], [0]]
    mixed = file_of(*lines, line(1, [0.0], prompt="q"), line(0, [0.0], prompt="q"))
    got = advantages(explained(mixed, "grpo", "eps=0", f"scale={scale}"))
    # the deviation of (1, 0) is 0.7071, that of (1, 1, 1, 1, 0) is 0.4472
    size = 0.5 / (math.sqrt(0.5) if scale == "group" else math.sqrt(0.2))
    assert got == [[0], [0], [0], [0], [pytest.approx(size)], [pytest.approx(-size)]]


def test_an_empty_response_counts_in_a_mean_over_responses(file_of):
    lines = (line(1, [0.0] * 2), line(0, [0.0]), line(1, []))
    file = file_of(*lines)
    # A = 1/3 on two tokens and -2/3 on one; three responses
    assert explained(file, "rloo")["loss"]["policy"] == pytest.approx(-(2 * 0.5 - 1.0) / 3)
    assert explained(file, "dr_grpo")["loss"]["policy"] == pytest.approx(-(2 / 3 - 2 / 3) / 6, abs=1e-12)
    assert explained(file_of(*(x | {"kl": [3.0] * len(x["token_ids"])} for x in lines)), "opd", "estimator=reverse_kl")[
        "loss"
    ]["kl"] == pytest.approx(2.0)


def test_the_ratio_of_a_response_is_bounded_as_a_whole(file_of):
    # mean log-ratio (-25 + 24.9) / 2 = -0.05; a bound of 20 on each token would make it 0
    far = line(1, [0.0] * 2, current_logprobs=[-26.0, 23.9])
    one = explained(file_of(far, line(0, [0.0])), "gspo", "clip_low=0.2", "clip_high=0.2", "eps=0")
    assert one["loss"]["policy"] == pytest.approx((-math.exp(-0.05) + 1) * math.sqrt(0.5) / 2)


@pytest.mark.parametrize(("estimator", "value"), [("k2", 9998.5**2 / 2), ("k3", 9997.5)])
def test_a_sampled_divergence_is_exact_where_the_teacher_has_a_sentinel(file_of, estimator, value):
    file = file_of(line(1, [-9998.5]))
    assert explained(file, "opd", f"estimator={estimator}")["loss"]["kl"] == pytest.approx(value, rel=1e-12)


def test_a_token_without_a_score_has_the_return_of_those_after_it(file_of):
    file = file_of(line(1, [None, 0.5, -2.0]), line(0, [None]))
    one = explained(file, "shaping", "estimator=return_to_go", "coef=2")
    # A_group = +-0.5; a response that the teacher never scored has that alone
    assert advantages(one) == [pytest.approx([0.5 - 3.0, 0.5 - 3.0, 0.5 - 4.0]), [-0.5]]


def contrasted(reward: float, evidence: list[float], prompt: str) -> dict:
    views = {"right": {"logprobs": [e - 3 for e in evidence]}, "wrong": {"logprobs": [-3.0] * len(evidence)}}
    return line(reward, [0.0] * len(evidence), prompt=prompt) | {"scores": views}


def test_all_wrong_groups_get_evidence_whatever_their_advantage(file_of):
    # rewards below thr that differ: A_r = +-0.1; lam is 0 from step 50 on, so A = A_r + 0.4 * clip(e, +-0.2)
    file = file_of(contrasted(0.3, [1.0, -1.0], "p"), contrasted(0.1, [0.1, 0.0], "p"))
    one = explained(file, "sipo", "form=multiplicative", "all_wrong_kappa=0.4", step=50)
    assert advantages(one) == [pytest.approx([0.18, 0.02]), pytest.approx([-0.06, -0.1])]


def test_an_imputed_advantage_needs_a_mixed_group(file_of):
    mixed = [contrasted(1, [0.0], "m"), contrasted(0, [0.0], "m")]
    failed = [contrasted(0.3, [0.0], "p"), contrasted(0.1, [0.0], "p")]
    # c = |-0.5|, so -s c = -1 on the failed group; without a mixed group it keeps what it has
    assert advantages(explained(file_of(*mixed, *failed), "sipo", "impute_group_advantage=2")) == [
        [0.5],
        [-0.5],
        [-1.0],
        [-1.0],
    ]
    alone = advantages(explained(file_of(*failed), "sipo", "impute_group_advantage=2"))
    assert alone == [pytest.approx([0.1]), pytest.approx([-0.1])]


def test_the_confidence_baseline_has_this_batch_in_it(file_of):
    # eight tokens of one bucket: their mean is taken off at once; a ninth in a bucket of its own keeps its evidence
    evidence = [0.1 * place for place in range(8)]
    one = contrasted(0, [*evidence, 0.1], "p") | {"student_logprobs": [-1.0] * 8 + [-3.0]}
    got = explained(file_of(one), "sipo", "baseline=confidence", "eps=0.9", "kappa=1")
    assert advantages(got)[0] == pytest.approx([e - 0.35 for e in evidence] + [0.1])
    # later means move by a tenth: 0.9 * 1 + 0.1 * 0.35
    state = written_to(file_of().with_name("state.json"), got["state"] | {"confidence_mean": [0, 0, 1, 0, 0, 0, 0]})
    again = explained(file_of(one), "sipo", "baseline=confidence", "eps=0.9", "kappa=1", state=state)
    assert again["state"]["confidence_mean"][2] == pytest.approx(0.935)


HALF, QUARTER = math.log(0.5), math.log(0.25)


def supported(reward: float, teacher: float, right: float, **more) -> dict:
    def top(value: float) -> dict:
        return {"logprobs": [value], "top_ids": [[7]], "top_logprobs": [[value]]}

    scores = {"student": top(HALF), "teacher": top(teacher), "right": top(right)}
    return line(reward, [0.0]) | {"scores": scores} | more


def test_each_scorer_has_its_own_reverse_kl(file_of):
    # KL((.5, .5) || (.25, .75)) = 0.1438; `kl` is the divergence from the teacher, never that from another scorer
    towards = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    measured = file_of(*(supported(reward, HALF, QUARTER, kl=[9.0]) for reward in (1, 0)))
    assert explained(measured, "sipo_analytic", "alpha=1")["loss"]["kl"] == pytest.approx(towards)
    assert explained(measured, "opd", "estimator=reverse_kl", "top_k=1")["loss"]["kl"] == pytest.approx(9.0)
    both = written_to(measured.with_name("mix.yaml"))
    both.write_text(
        "name: mix\nparts:\n- {method: {name: sipo_analytic, alpha: 1.0}}\n"
        "- {method: {name: opd, estimator: reverse_kl, top_k: 1}}\n"
    )
    unmeasured = file_of(*(supported(reward, HALF, QUARTER) for reward in (1, 0)))
    assert explained(unmeasured, str(both))["loss"]["kl"] == pytest.approx(towards)  # the teacher is the student
    both.write_text(
        "name: mix\nparts:\n- {method: {name: opd, estimator: reverse_kl, top_k: 1}}\n- {method: {name: va_opd}}\n"
    )
    degraded = [supported(reward, HALF, QUARTER) for reward in (1, 0)]
    for one in degraded:
        one["scores"]["degraded"] = {"logprobs": [-1.0]}
    with pytest.raises(MissingMeasurement, match="needs kl"):
        explained(file_of(*degraded), str(both))
