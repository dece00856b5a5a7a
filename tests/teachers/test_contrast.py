import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teachers.contrast import contrast_answers, contrast_trajectories, without_thinking
from teachers.errors import TeacherError


def wrong_shown(*arguments, **options):
    return [None if pair is None else pair[1] for pair in contrast_answers(*arguments, **options)]


def test_the_paper_s_example():
    # methods_core 6.6: answers 5, 7, none and the reference, of which only the last is right
    judged, correct = ["5", "7", None, "2"], [False, False, False, True]
    assert wrong_shown(judged, correct, "2") == ["5", "7", None, "5"]
    assert wrong_shown(judged, correct, "2", unjudged="mode") == ["5", "7", "5", "5"]
    assert wrong_shown(judged, correct, "2", negative="mode") == ["5", "5", "5", "5"]
    assert contrast_answers(judged, correct, "2")[0] == ("2", "5")


def test_the_most_common_wrong_answer_is_of_wrong_responses_only():
    judged, correct = ["2", "2", "5", "7", "7"], [True, True, False, False, False]
    assert wrong_shown(judged, correct, "2") == ["7", "7", "5", "7", "7"]


def test_an_answer_equal_to_the_reference_never_counts_as_wrong():
    # the verifier failed the first for its format: it has no wrong answer of its own, and lends none
    assert wrong_shown([" 2 ", "3", "2"], [False, False, True], "2") == [None, "3", "3"]
    assert wrong_shown(["2", "2"], [False, False], "2", unjudged="mode") == [None, None]


def test_groups_without_a_wrong_answer_get_no_pair():
    assert contrast_answers(["2", "2"], [True, True], "2") == [None, None]
    assert contrast_answers([None, None], [False, False], "2") == [None, None]
    assert contrast_answers([], [], "2") == []


def test_a_response_without_an_outcome_gets_no_pair_and_lends_no_answer():
    assert wrong_shown(["9", "2"], [None, True], "2") == [None, None]
    assert wrong_shown(["9", "5"], [None, False], "2", negative="mode") == [None, "5"]


def test_unknown_options_and_unequal_lengths_are_refused():
    with pytest.raises(TeacherError, match="negative must be 'own' or 'mode'"):
        contrast_answers([], [], "2", negative="best")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TeacherError, match="unjudged 'skip' or 'mode'; got 'own', 'none'"):
        contrast_answers([], [], "2", unjudged="none")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="zip"):
        contrast_answers(["1"], [], "2")


def slow_answers(judged, correct, reference):
    """From the definition, one response at a time."""
    shown = []
    for own, ok in zip(judged, correct, strict=True):
        if ok:
            counts = []
            for other, other_ok in zip(judged, correct, strict=True):
                if not other_ok and other not in (None, reference):
                    equal = [o for o, k in zip(judged, correct, strict=True) if not k and o == other]
                    counts.append((len(equal), other))
            best = max((n for n, _ in counts), default=0)
            shown.append(next((answer for n, answer in counts if n == best), None))
        else:
            shown.append(None if own in (None, reference) else own)
    return shown


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([None, "1", "2", "3"]), st.booleans()), max_size=6))
def test_answers_against_loops(rows):
    judged, correct = [answer for answer, _ in rows], [ok for _, ok in rows]
    assert wrong_shown(judged, correct, "2") == slow_answers(judged, correct, "2")


def test_siblings_are_taken_round_robin_and_never_the_response_itself():
    responses = ["a", "b", "c", "d", "e"]
    # good 0, 2, 4; bad 1, 3. Row 0: others good (2, 4)[0 % 2], bad (1, 3)[0 % 2]; row 1: (0, 2, 4)[1], (3)[1 % 1]; ...
    pairs = contrast_trajectories(responses, [True, False, True, False, True])
    assert pairs == [(2, 1), (2, 3), (0, 1), (0, 1), (0, 1)]


def test_a_missing_sibling_means_no_pair():
    assert contrast_trajectories(["a", "b"], [True, False]) == [None, None]
    assert contrast_trajectories(["a", "b", "c"], [True, True, False]) == [(1, 2), (0, 2), None]
    assert contrast_trajectories(["a", "b"], [False, False]) == [None, None]
    assert contrast_trajectories(["a", "b", "c", "d"], [True, False, None, False]) == [None, (0, 3), None, (0, 1)]


def test_a_sibling_that_only_thought_shows_nothing():
    responses = ["<think>seven</think>", "<think>x</think>7", "<think>unfinished", "5"]
    assert contrast_trajectories(responses, [True, True, False, False]) == [(1, 3), None, (1, 3), None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think> seven ", "seven"),
        ("a</think>seven", "seven"),
        ("<think>a</think>x<think>b</think>y", "xy"),
        ("x <think>never closed", "x"),
        ("<think>\n\n</think>\n\nseven", "seven"),
        ("seven", "seven"),
        ("", ""),
    ],
)
def test_thinking_is_taken_out(text, expected):
    assert without_thinking(text) == expected
