"""The report in a real browser: it loads alone, draws without an error, and its filters do what they say."""

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from hybrid.compare.report import is_share, style_of_methods, unit_of, write_report
from hybrid.errors import HybridError

ADVICE = "is not on PATH; on Debian and Ubuntu: apt-get install chromium chromium-driver"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    binary = next(
        filter(
            None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"))
        ),
        None,
    )
    driver_path = shutil.which("chromedriver")
    if binary is None or driver_path is None:
        pytest.fail(f"{'a Chromium browser' if binary is None else 'chromedriver'} {ADVICE}")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--force-prefers-reduced-motion",
        "--window-size=1240,1000",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(driver_path, env={**os.environ, "SE_OFFLINE": "true"})
    driver = webdriver.Chrome(options, service)
    yield driver
    driver.quit()


@pytest.fixture
def open_page(browser, tmp_path):
    def open_report(runs, **settings):
        file = write_report(runs, tmp_path / "r" / "report.html", **{"title": "Trial", "baseline": "grpo", **settings})
        browser.get_log("browser")
        browser.get_log("performance")
        browser.get(file.as_uri())
        WebDriverWait(browser, 60).until(lambda page: page.execute_script("return document.body.dataset.drawn"))
        return browser

    yield open_report
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def click(page, name, value):
    press(page, page.find_element(By.CSS_SELECTOR, f'input[name="{name}"][value="{value}"]'))


def press(page, element):
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)  # clear of the filters at the top
    element.click()


def traces(page, selector):
    """Names of the traces of a chart, bands left out."""
    names = page.execute_script(f"return document.querySelector('{selector}').data.map((trace) => trace.name)")
    return [name for name in names if not name.endswith(" band")]


def curve(page, metric, name):
    return page.execute_script(
        "return document.querySelector(arguments[0]).data.find((trace) => trace.name === arguments[1])",
        f'#curve-charts [data-metric="{metric}"]',
        name,
    )


AVG = '#curve-charts [data-metric="eval/avg_at_4"]'


def data_of(file):
    found = re.search(r'id="data">(.*?)</script>', file.read_text(encoding="utf-8"))
    assert found
    return json.loads(found[1])


@pytest.mark.browser
def test_it_loads_alone(open_page, runs):
    page = open_page(runs)
    requests = [
        message["params"]["request"]["url"]
        for entry in page.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    source = re.sub(r"<script>.*?</script>", "", page.page_source, flags=re.DOTALL)
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", source)


@pytest.mark.browser
def test_sentences_and_tables_say_what_the_statistics_say(open_page, runs):
    page = open_page(runs)
    said = [item.text for item in page.find_elements(By.CSS_SELECTOR, "#sentences li")]
    assert len(said) == 2
    assert said[0].startswith("opd is better than grpo by ")
    assert said[0].endswith(
        "1 of 8 pairs lacks a result (failed, not finished or not run) and is in none of these numbers."
    )
    assert "1 of 48 runs did not finish" in page.find_element(By.ID, "failures").text
    rows = [row.text for row in page.find_elements(By.CSS_SELECTOR, "#result-tables table:first-of-type tr")]
    assert any(re.search(r"opd 8, 1 failed \d+\.\d [\d.]+ to [\d.]+ ", row) for row in rows)
    costs = [row.text for row in page.find_elements(By.CSS_SELECTOR, "#result-tables table:nth-of-type(1) tr")]
    assert any(re.search(r"^opdvr \d+ [\d?]+ to [\d?]+ .* 8 of 8$", row) for row in costs)
    assert not any("Infinity" in row or "NaN" in row for row in costs)
    click(page, "task", "words")
    said = [item.text for item in page.find_elements(By.CSS_SELECTOR, "#sentences li")]
    assert [("failed" in sentence) for sentence in said] == [False, False]


@pytest.mark.browser
def test_methods_seeds_and_metrics_can_be_chosen(open_page, runs):
    page = open_page(runs)
    assert traces(page, AVG) == ["grpo", "opd seed 3, failed", "opd", "opdvr"]
    click(page, "method", "opd")
    assert traces(page, AVG) == ["grpo", "opdvr"]
    assert traces(page, "#paired-chart") == ["opdvr", "opdvr mean"]
    assert traces(page, "#cost-chart") == ["grpo", "opdvr"]
    assert {who.text for who in page.find_elements(By.CSS_SELECTOR, ".answer .who")} == {"grpo", "opdvr"}

    for seed in range(1, 8):
        click(page, "seed", seed)
    lone = next(run for run in runs if (run.method, run.seed, run.task) == ("opdvr", 0, "sums"))
    shown = curve(page, "eval/avg_at_4", "opdvr")
    assert shown["y"] == pytest.approx(lone.curves["eval/avg_at_4"][1], abs=1e-6)
    assert {point[1] for point in shown["customdata"]} == {1}

    assert page.find_elements(By.CSS_SELECTOR, '#curve-charts [data-metric="train/loss"]')
    press(page, page.find_element(By.CSS_SELECTOR, "#metric-picker summary"))
    click(page, "metric", "train/loss")
    click(page, "metric", "entropy")
    drawn = [
        chart.get_attribute("data-metric") for chart in page.find_elements(By.CSS_SELECTOR, "#curve-charts .chart")
    ]
    assert drawn == ["eval/avg_at_4", "eval/pass_at_4", "entropy", "reward"]
    click(page, "seed", 0)
    assert traces(page, AVG) == []


@pytest.mark.browser
def test_the_mean_and_band_in_the_page_are_those_of_the_picture(open_page, runs):
    from hybrid.compare.plots import mean_band

    page = open_page(runs)
    shown = curve(page, "eval/avg_at_4", "opd")
    finished = [run for run in runs if (run.method, run.task) == ("opd", "sums") and run.finished]
    steps, mean, half = mean_band([run.curves["eval/avg_at_4"] for run in finished])
    assert shown["x"] == pytest.approx(steps)
    assert shown["y"] == pytest.approx(mean, abs=1e-6)
    assert [point[0] for point in shown["customdata"]] == pytest.approx(half, abs=1e-6)


@pytest.mark.browser
def test_every_chart_fits_its_place(open_page, runs):
    page = open_page(runs)
    too_wide = page.execute_script(
        "return [...document.querySelectorAll('.js-plotly-plot')].filter((chart) => "
        "chart.querySelector('.main-svg').getBoundingClientRect().width > chart.getBoundingClientRect().width + 1)"
        ".length"
    )
    assert too_wide == 0
    assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.browser
def test_cost_every_seed_and_the_answers_credit(open_page, runs):
    page = open_page(runs)
    click(page, "cost-kind", "teacher tokens")
    title = page.execute_script("return document.getElementById('cost-chart').layout.xaxis.title.text")
    assert title == "teacher tokens spent"
    grpo = page.execute_script("return document.getElementById('cost-chart').data[0].x")
    assert grpo == [0] * 11
    press(page, page.find_element(By.ID, "show-seeds"))
    assert len(traces(page, AVG)) == 4 + 8 + 7 + 8

    Select(page.find_element(By.ID, "prompt-choice")).select_by_visible_text("What is 5+6?")
    assert page.find_element(By.ID, "prompt-text").text == "What is 5+6?"
    cards = page.find_elements(By.CSS_SELECTOR, ".answer")
    assert len(cards) == 6
    right, wrong = cards[0], cards[1]
    assert "reward 1" in right.text
    assert "</script><b>é 😀" in right.text
    last = [card.find_elements(By.CSS_SELECTOR, ".tokens span")[-1] for card in (right, wrong)]
    assert "rgba(0, 114, 178" in last[0].get_attribute("style")
    assert "rgba(213, 94, 0" in last[1].get_attribute("style")
    first = right.find_element(By.CSS_SELECTOR, ".tokens span")
    assert first.get_attribute("title") == "advantage 0, KL weight 0, not trained on"
    click(page, "credit-kind", "kl_weights")
    wrong = page.find_elements(By.CSS_SELECTOR, ".answer")[1]
    assert "rgba(0, 114, 178" in wrong.find_elements(By.CSS_SELECTOR, ".tokens span")[-1].get_attribute("style")


@pytest.mark.browser
def test_a_label_that_looks_like_html_is_shown_as_it_is(open_page, runs, made_run):
    odd = "<b>opd</b>&amp;</script><img src=x>"
    page = open_page([*runs[:8], *(replace(made_run("opd", seed), method=odd) for seed in range(8))])
    assert odd in page.find_element(By.ID, "methods").text
    shown = page.execute_script("return document.querySelector('#paired-chart .ytick text').textContent")
    assert shown == odd
    assert page.find_elements(By.CSS_SELECTOR, "img[src=x]") == []


@pytest.mark.browser
def test_one_run_without_evaluations_makes_a_page_too(open_page, runs):
    curves = {"reward": runs[0].curves["reward"]}
    page = open_page([replace(runs[0], curves=curves, artifacts=None)], title="<i>One</i> & only \ud800")
    assert page.find_element(By.TAG_NAME, "h1").text == "<i>One</i> & only \\ud800"
    assert "nothing to compare yet" in page.find_element(By.ID, "verdict-note").text
    assert traces(page, '#curve-charts [data-metric="reward"]') == ["grpo"]
    assert "No rollouts with credit" in page.find_element(By.ID, "answer-columns").text


def test_repeated_runs_are_counted_and_mistakes_are_named(runs, made_run, tmp_path):
    file = write_report([*runs, made_run("opd", 0, start_ms=-1)], tmp_path / "r.html", title="t", baseline="grpo")
    data = data_of(file)
    assert data["num_superseded"] == 1
    assert len(data["runs"]) == len(runs)
    with pytest.raises(HybridError, match="baseline 'ppo'"):
        write_report(runs, tmp_path / "r.html", title="t", baseline="ppo")


def test_long_curves_are_thinned_and_keep_their_ends(runs, tmp_path):
    import numpy as np

    long = {**runs[0].curves, "reward": (np.arange(10_000), np.linspace(0, 1, 10_000))}
    file = write_report([replace(runs[0], curves=long)], tmp_path / "r.html", title="t", baseline="grpo")
    data = data_of(file)
    steps, values = data["runs"][0]["curves"]["reward"]
    assert len(steps) == len(values) == 400
    assert (steps[0], steps[-1], values[-1]) == (0, 9999, 1.0)


def test_a_chart_says_what_its_numbers_count(runs, tmp_path):
    data = data_of(write_report(runs, tmp_path / "r.html", title="t", baseline="grpo"))
    units = {name: data["units"][name] for name in ("eval/avg_at_4", "kept/outcome_agrees", "gap/mean", "entropy")}
    assert list(units.values()) == ["right answers", "tokens kept", "nats per token", "nats per token"]
    assert set(data["share_metrics"]) == {"eval/avg_at_4", "eval/pass_at_4", "kept/outcome_agrees"}
    assert (unit_of("response_length/mean"), unit_of("time/step_s"), unit_of("what/ever")) == ("tokens", "seconds", "")
    assert (unit_of("credit/right"), unit_of("credit/kl_right")) == ("advantage per token", "weight per token")
    assert is_share("response_length/truncated")
    assert is_share("gap/at_clip")
    assert not is_share("gap/mean")


def test_methods_look_different():
    styles = style_of_methods([str(index) for index in range(21)])
    assert len({(style["color"], style["dash"]) for style in styles}) == 21
