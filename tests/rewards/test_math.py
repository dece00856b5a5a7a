import gc
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from hybrid.errors import RewardError
from hybrid.rewards import MathConfig
from hybrid.rewards.math_answer import plain_verdict
from hybrid.rewards.pool import WorkerPool

TOWER = r"7^{7^{7^{7^{7}}}}"


@pytest.fixture(scope="module")
def strict():
    return MathConfig(workers=1).build()


@pytest.fixture(scope="module")
def loose():
    return MathConfig(workers=1, require_box=False).build()


def judge(reward, gold, completion):
    return reward(prompts=["p"], completions=[completion], completion_ids=[[1]], answer=[gold])[0]


def boxed(answer):
    return rf"so \boxed{{{answer}}}."


def test_it_answers_from_a_worker_thread(strict):
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(judge, strict, "1/3", boxed("1/3")).result() == 1.0
        assert thread.submit(judge, strict, "1/3", boxed(r"\frac{2}{6}")).result() == 1.0
        assert thread.submit(judge, strict, "1/3", boxed(r"\frac{2}{7}")).result() == 0.0


def test_a_hang_gives_zero_and_later_rows_are_served():
    reward = MathConfig(limit_s=3.0, workers=1).build()
    metrics = {}
    values = reward(
        prompts=["p"] * 4,
        completions=[boxed(TOWER), boxed("x+1"), boxed(TOWER), boxed("3")],
        completion_ids=[[1]] * 4,
        answer=["3", "1+x", "3", "3"],
        log_metric=metrics.__setitem__,
    )
    assert values == [0.0, 1.0, 0.0, 1.0]
    assert metrics == {"math/beyond_limit": 0.5}
    assert judge(reward, "2x", boxed("x+x")) == 1.0


def test_hanging_answers_from_many_threads_share_the_workers():
    reward = MathConfig(limit_s=3.0, workers=2).build()
    rows = [("3", boxed(TOWER)), ("1+x", boxed("x+1")), ("2y", boxed("3y-y")), ("z", boxed("z+1"))]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda row: judge(reward, *row), rows)) == [0.0, 1.0, 1.0, 0.0]


def test_equal_texts_and_plain_numbers_start_no_process():
    before = set(psutil.Process().children())
    reward = MathConfig().build()
    assert judge(reward, "42", boxed("42")) == 1.0
    assert judge(reward, 42, boxed("42.0")) == 1.0
    assert judge(reward, "1,234", boxed("1234")) == 1.0
    assert judge(reward, "-7", boxed("7")) == 0.0
    assert judge(reward, "x+1", boxed(" x+1 ")) == 1.0
    assert not set(psutil.Process().children()) - before


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("a", "a", True),
        ("5", "7", False),
        ("+5", "5.000", True),
        ("0005", "5", True),
        ("0.1234567", "0.1234568", None),
        ("1/3", "0.333333", None),
        ("12,34", "1234", None),
        ("\u0665", "5", None),
        ("", "5", None),
    ],
)
def test_the_plain_verdict_leaves_the_rest_to_math_verify(gold, answer, verdict):
    assert plain_verdict(gold, answer) is verdict


def test_the_last_of_several_boxes_counts(strict):
    text = r"one gets \boxed{5} at first, but then \boxed{7}"
    assert judge(strict, "7", text) == 1.0
    assert judge(strict, "5", text) == 0.0
    assert strict.judged_answer(text) == "7"


@pytest.mark.parametrize(
    ("gold", "text"),
    [("9", "numbers 9 appear"), ("42", r"<think>\boxed{42}"), ("4", r"\boxed{4"), ("4", ""), ("4", "4")],
)
def test_no_box_no_reward(strict, gold, text):
    assert judge(strict, gold, text) == 0.0
    assert strict.judged_answer(text) is None


def test_a_setting_allows_no_box(loose):
    assert judge(loose, "5", "5") == 1.0
    assert loose.judged_answer("5") == "5"
    assert judge(loose, "1/3", r"The final answer is $\frac{1}{3}$.") == 1.0
    assert loose.judged_answer(r"The final answer is $\frac{1}{3}$.") == r"\frac{1}{3}"
    assert judge(loose, "5", r"\boxed{7} or 5") == 0.0
    assert judge(loose, "42", r"<think>\boxed{42}") == 0.0
    assert loose.judged_answer("  ") is None


@pytest.mark.parametrize(
    ("gold", "answer", "judged"),
    [
        ("42", r"\fbox{42}", "42"),
        (r"\frac{a}{\sqrt{b}}", r"\boxed{\frac{a}{\sqrt{b}}}", r"\frac{a}{\sqrt{b}}"),
        (r"a/\sqrt{b}", r"\boxed{\frac{a}{\sqrt{b}}}", r"\frac{a}{\sqrt{b}}"),
        ("E", r"\boxed{\text{E}}", "E"),
        (r"\text{E}", r"\boxed{E}", "E"),
        (r"the sum, \boxed{18}", r"\boxed{18}", "18"),
        ("$18$", r"\boxed{18.}", "18."),
        (r"\(x^2\)", r"\boxed{x \cdot x}", r"x \cdot x"),
        (12, r"\boxed{12\text{ cm}}", r"12\text{ cm}"),
        ("12", r"\boxed{12\text{ cm}}", r"12\text{ cm}"),
    ],
)
def test_boxes_of_every_kind_are_read_whole(strict, gold, answer, judged):
    assert judge(strict, gold, answer) == 1.0
    assert strict.judged_answer(answer) == judged


def test_the_answer_counts_only_after_the_thinking(strict):
    assert judge(strict, "7", r"<think>\boxed{5}</think>\boxed{7}") == 1.0
    assert judge(strict, "5", r"<think>\boxed{5}</think> done") == 0.0
    opened = MathConfig(prompt_opens_thinking=True).build()
    assert judge(opened, "5", r"hm \boxed{5}") == 0.0
    assert judge(opened, "5", r"hm</think>\boxed{5}") == 1.0


def test_gold_comes_first(strict):
    assert judge(strict, "0<x<12.5", boxed("(0,12.5)")) == 1.0
    assert judge(strict, "(0,12.5)", boxed("0<x<12.5")) == 0.0


@pytest.mark.parametrize(
    ("gold", "answer", "either", "fraction"),
    [
        ("0.25", r"25\%", 1.0, 1.0),
        ("1/4", r"25\%", 1.0, 1.0),
        ("25", r"25\%", 1.0, 0.0),
        (r"25\%", "25", 1.0, 0.0),
        (r"25\%", "0.25", 1.0, 1.0),
        ("25.5", r"25.5\%", 1.0, 0.0),
        (r"25\%", r"25.0\%", 1.0, 1.0),
        ("25%", r"25\text{ percent}", 1.0, 1.0),
        ("26", r"25\%", 0.0, 0.0),
        ("x", r"25\%", 0.0, 0.0),
    ],
)
def test_percent_against_a_plain_number_is_a_setting(strict, gold, answer, either, fraction):
    strictly = MathConfig(percent="fraction", workers=1).build()
    assert judge(strict, gold, boxed(answer)) == either
    assert judge(strictly, gold, boxed(answer)) == fraction


@pytest.mark.parametrize("gold", [None, "", "  ", ["5"], True])
def test_a_missing_reference_is_an_error_that_names_the_row(strict, gold):
    with pytest.raises(RewardError, match=r"reward 'math': column 'answer' holds .*; on row 1 \(completion"):
        strict(prompts=["p"] * 2, completions=[boxed("5")] * 2, completion_ids=[[1]] * 2, answer=["5", gold])


def test_an_unreadable_reference_is_an_error_and_an_unreadable_answer_is_wrong(strict):
    with pytest.raises(RewardError, match=r"math-verify cannot read the reference 'a\{b'"):
        judge(strict, "a{b", boxed("5"))
    assert judge(strict, "5", boxed(r"\left\{ x \right.")) == 0.0
    assert judge(strict, "5", boxed("\ud800")) == 0.0


def test_chat_completions_and_another_column(strict):
    reward = MathConfig(answer_column="gold").build()
    chat = [{"role": "assistant", "content": boxed("5")}]
    assert reward([[{"role": "user", "content": "q"}]], [chat], [[1]], gold=["5"]) == [1.0]


def test_a_closed_pool_starts_again_and_leaves_no_process():
    before = set(psutil.Process().children())
    pool = WorkerPool("math", workers=1, limit_s=60.0)
    request = {"gold": "x+1", "answer": "1+x", "percent": "either"}
    assert pool.ask(request) == {"equal": True}
    pool.close()
    assert pool.ask(request) == {"equal": True}
    pool.close()
    with pytest.raises(RuntimeError, match="the verifier raised KeyError"):
        pool.ask({"gold": "x"})
    assert pool.ask_all([request, request]) == [{"equal": True}] * 2
    pool.close()
    assert not set(psutil.Process().children()) - before


def test_a_worker_that_died_while_idle_is_replaced():
    before = set(psutil.Process().children())
    pool = WorkerPool("math", workers=1, limit_s=60.0)
    request = {"gold": "x+1", "answer": "1+x", "percent": "either"}
    assert pool.ask(request) == {"equal": True}
    (worker,) = set(psutil.Process().children()) - before
    worker.kill()
    worker.wait()
    assert pool.ask(request) == {"equal": True}
    pool.close()


def test_a_worker_that_was_killed_behind_its_reply_costs_the_next_question_nothing():
    pool = WorkerPool("math", workers=1, limit_s=60.0)
    request = {"gold": "x+1", "answer": "1+x", "percent": "either"}
    assert pool.ask(request) == {"equal": True}
    worker = pool._slots().get()
    assert worker is not None
    worker._kill_late()  # its time was over in the moment in which it replied
    pool._slots().put(worker)
    assert pool.ask(request) == {"equal": True}
    pool.close()


def test_a_pool_that_nobody_holds_ends_its_workers():
    before = set(psutil.Process().children())
    reward = MathConfig(workers=1).build()
    assert judge(reward, "x+1", boxed("1+x")) == 1.0
    (worker,) = set(psutil.Process().children()) - before
    del reward
    gc.collect()
    assert not worker.is_running()
