"""What `hybrid compare` prints."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from hybrid.compare.curves import Crossing, cost_to_target
from hybrid.compare.statistics import mean_with_interval
from hybrid.compare.summary import evaluation_metrics, summarise
from hybrid.comparison import cost_text, interval, most_tries, print_results, print_summary, stored_name

AVG = {"metric": "eval/avg_at_4", "baseline": "grpo"}


def printed(show, *arguments):
    console = Console(file=io.StringIO(), width=200)
    show(console, *arguments)
    return console.file.getvalue()


def row_of(text, method, nth=0):
    rows = [line for line in text.splitlines() if line.startswith("\u2502") and line.split()[1] == method]
    return [cell.strip() for cell in rows[nth].strip("\u2502").split("\u2502")]


def test_every_cost_stands_there_with_its_interval_and_how_many_got_there(runs):
    summary = summarise(runs, target=0.4, **AVG)
    text = printed(print_summary, summary)
    assert "cost of reaching 40.0 %: median over runs (95 % interval)" in text
    for kind in ("steps", "rollouts", "tokens", "teacher tokens", "seconds"):
        assert kind in text
    opdvr = next(one for one in summary.results if (one.method, one.task) == ("opdvr", "sums"))
    steps = opdvr.costs["steps"].median
    assert row_of(text, "opdvr", 1)[1] == f"{steps.value:.0f} ({steps.low:.0f} to {steps.high:.0f})"
    assert row_of(text, "opdvr", 1)[-1] == "8 of 8"
    grpo = next(one for one in summary.results if (one.method, one.task) == ("grpo", "sums"))
    assert row_of(text, "grpo", 1)[1:] == [*["not by half"] * 5, f"{grpo.costs['steps'].num_reached} of 8"]
    assert all(one.sentence in text for one in summary.comparisons)


def test_one_seed_has_no_interval_and_a_failed_method_no_number(made_run):
    lone = [made_run("grpo", 0), made_run("opd", 0, status="FAILED")]
    text = printed(print_results, summarise(lone, **AVG))
    assert "nan" not in text
    assert row_of(text, "opd")[2:] == ["-", "-", "1", "1"]
    assert "(" not in row_of(text, "grpo")[2]


def test_a_baseline_that_is_missing_on_a_task_leaves_no_nan(runs):
    some = [run for run in runs if (run.method, run.task) != ("grpo", "words")]
    assert "nan" not in printed(print_summary, summarise(some, **AVG))


def test_a_label_is_shown_as_it_is(made_run):
    runs = [replace(made_run("opd", seed), method="opd[red]") for seed in range(2)]
    text = printed(print_summary, summarise([*runs, made_run("grpo", 0), made_run("grpo", 1)], **AVG))
    assert text.count("opd[red]") >= 3


def test_costs_in_words():
    def got(cost):
        return Crossing(cost=cost, reached=True)

    plain = cost_to_target([got(1234.0)])
    assert cost_text(plain) == "1,234"
    assert cost_text(cost_to_target([got(10.0), got(10.0)])) == "10 [dim](10 to ?)[/dim]"
    late = [Crossing(cost=40.0, reached=False), Crossing(cost=math.nan, reached=False), got(12.34)]
    assert cost_text(cost_to_target(late[:2])) == "not by half"
    assert cost_text(cost_to_target(late)) == "12.3 [dim](12.3 to ?)[/dim]"
    assert cost_text(None) == "-"


@pytest.mark.parametrize(
    ("values", "text"), [([0.5], "50.0"), ([math.nan], "-"), ([0.5, 0.5], "50.0 [dim](50.0 to 50.0)[/dim]")]
)
def test_shares_in_words(values, text):
    assert interval(mean_with_interval(np.array(values))) == text


def test_a_metric_may_be_written_as_people_say_it(runs):
    known = evaluation_metrics(runs)
    assert stored_name("avg@4", known) == stored_name("eval/avg_at_4", known) == "eval/avg_at_4"
    assert stored_name("avg@5", known) == "avg@5"
    assert most_tries(known) == "eval/pass_at_4"
    assert most_tries(["eval/avg_at_4"]) is None
