"""Several teachers behind one: who is asked for what, and what becomes of the answers."""

import math

import pytest
import torch

from teachers.errors import TeacherCannot, TeacherError
from teachers.local import LocalTeacher
from teachers.protocol import SAMPLED, Row, Teacher, Want
from teachers.router import RoutedTeacher, WeightedTeachers, combined, teacher_gaps
from teachers.scores import TeacherScores


class ByTable:
    """Gives each id the log-prob that stands for it in a table; ids that are not in it fail their row."""

    def __init__(self, name, table, temperature=1.0):
        self.name, self.table, self.temperature = name, table, temperature
        self.asked, self.is_closed = [], False

    def score(self, rows, want=SAMPLED):
        self.asked.append(len(rows))
        width = max((len(row.completion_ids) for row in rows), default=0)
        logprob_BT = torch.zeros(len(rows), width)
        valid_BT = torch.zeros(len(rows), width, dtype=torch.bool)
        top_ids_BTK = torch.full((len(rows), width, want.top_k), -1)
        failures = {}
        for i, row in enumerate(rows):
            if any(token not in self.table for token in row.completion_ids):
                failures[i] = "an id is in no table"
                continue
            for t, token in enumerate(row.completion_ids):
                logprob_BT[i, t], valid_BT[i, t] = self.table[token], True
                top_ids_BTK[i, t] = torch.arange(want.top_k)
        return TeacherScores(
            logprob_BT=logprob_BT,
            valid_BT=valid_BT,
            temperature=self.temperature,
            top_ids_BTK=top_ids_BTK if want.top_k else None,
            top_logprob_BTK=torch.where(top_ids_BTK < 0, -torch.inf, -1.0) if want.top_k else None,
            failures=failures,
            stats={"requests": 1},
        )

    def close(self):
        self.is_closed = True


def row(topic, *ids):
    return Row(prompt_ids=(1,), completion_ids=ids, labels=(("topic", topic),) if topic else ())


MATH, CODE = {3: -0.3, 4: -0.4, 5: -0.5}, {3: -3.0, 4: -4.0, 5: -5.0}


@pytest.fixture
def math_and_code():
    return {"math": ByTable("math", MATH), "code": ByTable("code", CODE)}


def test_each_row_goes_to_the_teacher_that_its_label_names(math_and_code):
    router = RoutedTeacher(math_and_code, "topic")
    assert isinstance(router, Teacher)
    scores = router.score([row("code", 3), row("math", 3, 4, 5), row("code", 4, 5)], Want(top_k=2))
    assert scores.logprob_BT.tolist() == [
        pytest.approx([-3.0, 0, 0]),
        pytest.approx([-0.3, -0.4, -0.5]),
        pytest.approx([-4.0, -5.0, 0]),
    ]
    assert scores.valid_BT.tolist() == [[True, False, False], [True, True, True], [True, True, False]]
    assert scores.top_ids_BTK is not None
    assert scores.top_ids_BTK.tolist()[2] == [[0, 1], [0, 1], [-1, -1]]
    assert scores.stats == {"requests": 2, "math/rows": 1, "math/tokens": 3, "code/rows": 2, "code/tokens": 3}


def test_each_teachers_gap_can_be_told(math_and_code):
    rows = [row("code", 3), row("math", 3, 4, 5), row("code", 4, 5)]
    gaps = teacher_gaps(RoutedTeacher(math_and_code, "topic").score(rows), torch.full((3, 3), -1.0))
    # math: -0.3 - 0.4 - 0.5 + 3; code: -3 - 4 - 5 + 3
    assert gaps == {"math": (pytest.approx(1.8), 3), "code": (pytest.approx(-9.0), 3)}


def test_a_label_without_a_teacher_is_an_error_that_names_the_row(math_and_code):
    router = RoutedTeacher(math_and_code, "topic")
    with pytest.raises(TeacherError, match=r"row 1: topic is 'bio', .* math, code"):
        router.score([row("math", 3), row("bio", 3)])
    with pytest.raises(TeacherError, match="row 0: has no column 'topic'"):
        router.score([row(None, 3)])


def test_a_default_takes_what_no_other_does(math_and_code):
    router = RoutedTeacher(math_and_code, "topic", default="math")
    scores = router.score([row("bio", 3), row(None, 4), row("code", 5)])
    assert scores.logprob_BT[:, 0].tolist() == pytest.approx([-0.3, -0.4, -5.0])


def test_every_teacher_is_called_though_it_has_no_row(math_and_code):
    # a teacher that is sharded over ranks would wait for this rank otherwise
    RoutedTeacher(math_and_code, "topic").score([row("math", 3)])
    assert math_and_code["code"].asked == [0]


def test_a_teacher_that_never_has_a_row_is_reported(math_and_code, caplog):
    router = RoutedTeacher(math_and_code, "topic")
    router.score([row("math", 3)])
    assert router.unused() == ["code"]
    router.close()
    assert "teacher code never had a row" in caplog.text
    assert math_and_code["code"].is_closed


def test_a_failed_row_keeps_its_place_and_says_whose_it_was(math_and_code):
    scores = RoutedTeacher(math_and_code, "topic").score([row("math", 3), row("code", 9, 3), row("code", 4)])
    assert scores.failures == {1: "code: an id is in no table"}
    assert scores.valid_BT.tolist() == [[True, False], [False, False], [True, False]]
    assert scores.parts["code"].isnan().tolist() == [[True, True], [True, True], [False, True]]


def test_teachers_of_different_temperatures_are_refused():
    teachers = {"math": ByTable("math", MATH), "code": ByTable("code", CODE, temperature=0.7)}
    with pytest.raises(TeacherError, match="different temperatures"):
        RoutedTeacher(teachers, "topic").score([row("math", 3)])
    with pytest.raises(TeacherError, match="different temperatures"):
        WeightedTeachers([(1, teacher) for teacher in teachers.values()]).score([row("math", 3)])


def test_candidates_go_with_their_rows(make_qwen):
    teachers = {name: LocalTeacher(make_qwen(seed), name=name) for seed, name in enumerate(("math", "code"))}
    rows = [row("code", 3, 7), row("math", 5), row("code", 4)]
    candidates = torch.randint(0, 64, (3, 2, 4), generator=torch.Generator().manual_seed(0))
    want = Want(candidates_BTK=candidates)
    routed = RoutedTeacher(teachers, "topic").score(rows, want)
    assert routed.top_logprob_BTK is not None
    assert routed.top_ids_BTK is not None
    for name, own in (("code", [0, 2]), ("math", [1])):
        alone = teachers[name].score([rows[i] for i in own], Want(candidates_BTK=candidates[own]))
        width = alone.logprob_BT.shape[1]
        torch.testing.assert_close(routed.top_logprob_BTK[own, :width], alone.top_logprob_BTK)
        torch.testing.assert_close(routed.top_ids_BTK[own, :width], alone.top_ids_BTK)


def test_one_teacher_behind_a_router_keeps_its_distribution(make_qwen):
    rows = [row("math", 3, 7), row("math", 5)]
    teacher = LocalTeacher(make_qwen())
    logits = []
    for asked in (RoutedTeacher({"math": teacher}, "topic"), teacher):
        scores = asked.score(rows, Want(distribution=True))
        assert scores.head is not None
        assert scores.hidden_BTH is not None
        logits.append(scores.head(scores.hidden_BTH))
    torch.testing.assert_close(*logits)
    with pytest.raises(TeacherCannot, match="heads of their own"):
        RoutedTeacher({"math": teacher, "code": teacher}, "topic").score(rows, Want(distribution=True))


def test_no_rows_are_no_scores(math_and_code):
    assert RoutedTeacher(math_and_code, "topic").score([]).logprob_BT.shape == (0, 0)
    assert WeightedTeachers([(1, math_and_code["math"])]).score([]).logprob_BT.shape == (0, 0)


def test_the_weighted_mean_of_logprobs(math_and_code):
    # weights 3 and 1 are 0.75 and 0.25: 0.75 * -0.3 + 0.25 * -3 = -0.975
    teachers = WeightedTeachers([(3, math_and_code["math"]), (1, math_and_code["code"])])
    assert isinstance(teachers, Teacher)
    scores = teachers.score([row(None, 3), row(None, 4, 5)])
    assert scores.logprob_BT.tolist() == [pytest.approx([-0.975, 0]), pytest.approx([-1.3, -1.625])]
    assert scores.valid_BT.tolist() == [[True, False], [True, True]]
    assert scores.stats["math/tokens"] == scores.stats["code/tokens"] == 3


def test_the_mean_of_gaps_is_the_gap_of_the_mean(math_and_code):
    scores = WeightedTeachers([(3, math_and_code["math"]), (1, math_and_code["code"])]).score([row(None, 4, 5)])
    student = torch.tensor([[-1.0, -2.0]])
    gaps = teacher_gaps(scores, student)
    mean = 0.75 * gaps["math"][0] + 0.25 * gaps["code"][0]
    assert float((scores.logprob_BT - student).sum()) == pytest.approx(mean, abs=1e-6)  # float32


def test_the_mixture_is_a_distribution():
    first, second = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.1, 0.1, 0.8]).log()
    parts = {"a": first[None], "b": second[None]}
    mixed = combined(parts, {"a": 0.75, "b": 0.25}, "mixture")
    assert mixed.exp().sum().item() == pytest.approx(1.0)
    assert mixed[0, 2].item() == pytest.approx(math.log(0.75 * 0.2 + 0.25 * 0.8))
    assert combined(parts, {"a": 0.75, "b": 0.25}, "log_mean").exp().sum().item() < 1.0


def test_a_token_counts_where_every_teacher_scored_it(math_and_code):
    del math_and_code["code"].table[5]
    scores = WeightedTeachers([(1, math_and_code["math"]), (1, math_and_code["code"])]).score(
        [row(None, 3), row(None, 5)]
    )
    assert scores.valid_BT.tolist() == [[True], [False]]
    assert scores.logprob_BT.tolist() == [pytest.approx([-1.65]), [0.0]]
    assert scores.failures == {1: "code: an id is in no table"}


def test_weighted_teachers_have_no_common_support(math_and_code):
    teachers = WeightedTeachers([(1, math_and_code["math"])])
    for want in (Want(top_k=2), Want(distribution=True), Want(candidates_BTK=torch.zeros(1, 1, 2, dtype=torch.long))):
        with pytest.raises(TeacherCannot, match="sampled tokens alone"):
            teachers.score([row(None, 3)], want)


def test_settings_that_make_no_sense_are_refused(math_and_code):
    one, two = math_and_code.values()
    for teachers, message in (
        ([], "different names"),
        ([(1, one), (1, one)], "different names"),
        ([(0.0, one), (1, two)], "weight of teacher 'math'"),
        ([(math.inf, one)], "weight of teacher 'math'"),
    ):
        with pytest.raises(TeacherError, match=message):
            WeightedTeachers(teachers)
    with pytest.raises(TeacherError, match="rule"):
        WeightedTeachers(**{"teachers": [(1, one)], "rule": "median"})
    with pytest.raises(TeacherError, match="no teachers"):
        RoutedTeacher({}, "topic")
    with pytest.raises(TeacherError, match="'bio', which is none of math, code"):
        RoutedTeacher(math_and_code, "topic", default="bio")
