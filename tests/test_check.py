"""`hybrid check` on what ships, and on broken variants: one clear message, exit code 2, no traceback."""

import json
import re
from pathlib import Path

import pytest

from hybrid.check import check_experiment, is_hub_name
from hybrid.errors import ConfigError
from hybrid.read_config import read_experiment
from hybrid.sources import held_out_prompts, training_prompts
from hybrid.tiny import tiny_tokenizer
from tests.tiny_models import model, tokenizer

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = (ROOT / "experiments" / "quickstart.yaml").read_text(encoding="utf-8")
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))


@pytest.fixture
def broken(run_hybrid, tmp_path, monkeypatch):
    """What `hybrid check` says of the quickstart with something changed in its text, and the line of the change."""
    monkeypatch.chdir(tmp_path)

    def broken(old, new):
        assert QUICKSTART.count(old) == 1
        Path("broken.yaml").write_text(QUICKSTART.replace(old, new), encoding="utf-8")
        code, out, complaint = run_hybrid("check", "broken.yaml")
        assert code == 2
        assert "Traceback" not in out + complaint
        assert "fine" not in out
        place = f"broken.yaml:{QUICKSTART[: QUICKSTART.index(old)].count(chr(10)) + 1}"
        return complaint.strip(), place

    return broken


def levels(findings, level):
    return [str(finding) for finding in findings if finding.level == level]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_what_ships_is_fine(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    findings = check_experiment(path.relative_to(ROOT))
    assert levels(findings, "error") == []
    warnings = levels(findings, "warning")
    if path.stem.startswith("qwen3"):
        assert all("could not be looked at: the hub does not answer from here" in warning for warning in warnings)
        assert len(warnings) == 4  # student, teacher, prompts, held-out prompts
    elif path.stem in ("smollm2", "smollm2_sweep"):
        shared, *models = sorted(warnings, key=lambda warning: "does not exist yet" in warning)
        assert "of 32 held-out prompts stand among those of the training too" in shared  # of 200 sums in all
        assert all("does not exist yet; make it before this run" in warning for warning in models)
    elif path.stem not in ("rstg", "sft", "study"):  # which want what a teacher has written before
        assert warnings == []


def test_a_misspelt_key(broken):
    complaint, place = broken("  generations:", "  generatoins:")
    assert complaint == f"{place}: train.generatoins: unknown key; did you mean generations?"


def test_a_missing_teacher(broken):
    complaint, _ = broken("teacher: {model", "# teacher: {model")
    opdvr, opd = complaint.splitlines()
    assert "method.name: opdvr needs a teacher (scores.teacher), and the experiment has none; add teacher: {" in opdvr
    assert opdvr.endswith("or choose a method without one, such as grpo")
    assert "compare.1.name: opd needs a teacher" in opd


def test_a_wrong_type(broken):
    complaint, place = broken("lr: 1e-3", "lr: fast")
    assert complaint == f'{place}: student.lr: should be a number; got "fast"'


def test_a_negative_clip(broken):
    complaint, place = broken("method: {name: opdvr}", "method: {name: opdvr, clip_low: -0.2}")
    assert complaint == f"{place}: method.opdvr.clip_low: should be greater than or equal to 0; got -0.2"


def test_an_unknown_method(broken):
    complaint, place = broken("method: {name: opdvr}", "method: {name: opdvrr}")
    assert complaint == f"{place}: method.name: there is no 'opdvrr'; did you mean opdvr?"


def test_a_method_without_its_measurements(broken):
    complaint, _ = broken("method: {name: opdvr}", "method: {name: rstg}")
    assert (
        "data.source: has no column 'demonstration', which the method rstg needs; it has: prompt, answer" in complaint
    )
    assert "\n" not in complaint


def test_a_teacher_of_another_vocabulary(broken, tmp_path):
    other = tokenizer()
    other.save_pretrained(tmp_path / "other")
    complaint, place = broken("teacher: {model: tiny:chain_sum}", "teacher: {model: other}")
    assert complaint == (
        f"{place}: teacher.model: tokenizer: token '<pad>' is unknown for the student and id 0 for the teacher "
        f"(259 and {len(other)} tokens in all); use a teacher of the student's family, load the student's tokenizer "
        "for both, or align across tokenizers; ids of one mean something else to the other"
    )


def test_a_missing_file(broken, tmp_path):
    complaint, place = broken("data: {source: tiny:chain_sum}", "data: {source: prompts/none.jsonl}")
    assert complaint == f"{place}: data.source: prompts/none.jsonl: no such file or folder (looked in {tmp_path})"


def test_an_empty_data_set(broken):
    Path("empty.jsonl").write_text("\n", encoding="utf-8")
    complaint, place = broken("data: {source: tiny:chain_sum}", "data: {source: empty.jsonl}")
    assert complaint == f"{place}: data.source: empty.jsonl: the data set is empty; at least one prompt is needed"


def test_a_prompt_longer_than_the_limit(broken):
    complaint, _ = broken("  max_completion_length: 24", "  max_prompt_length: 7\n  max_completion_length: 24")
    assert "data.source: prompt 0 has 8 tokens and the limit is 7; raise the limit, shorten the prompt" in complaint
    assert complaint.endswith("='")
    assert "\n" not in complaint


def test_a_completion_that_leaves_no_room(broken):
    complaint, _ = broken("  max_completion_length: 24", "  max_completion_length: 256")
    assert "leaves no room for a prompt in the student's context of 256 tokens" in complaint


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "student:\n  model: tiny:chain_sum",
            "student:\n  model: tiny:sums",
            "student.model: no tiny task is called 'sums'",
        ),
        ("student:\n  model: tiny:chain_sum", "student:\n  model: ./none", "student.model: there is no model './none'"),
        ("data: {source: tiny:chain_sum}", "data: {source: tiny:sums}", "data.source: no tiny task is called 'sums'"),
        (
            "data: {source: tiny:chain_sum}",
            "data: {source: {task: chain_sun}}",
            "data.source: reasoning-gym has no task",
        ),
        (
            "data: {source: tiny:chain_sum}",
            "data: {source: tiny:chain_sum, limit: 3}",
            "a step takes 16 prompts; the data",
        ),
        ("teacher: {model: tiny:chain_sum}", "teacher: {recorded: none.jsonl}", "teacher.recorded: there is no file"),
        (
            "rewards:\n  - {name: exact",
            "rewards:\n  - {answer_column: gold, name: exact",
            "has no column 'gold', which the",
        ),
        ("rewards:\n", "rewards:\n  - {name: python, path: 'none.py:judge'}\n", "rewards: reward file "),
        (
            "evaluate: {",
            "evaluate: {data: {source: none.parquet}, ",
            "evaluate.data: none.parquet: no such file or folder",
        ),
        (
            "seed: 0",
            "seed: 0\nengine: {kind: deepspeed, config_file: none.json}",
            "engine.config_file: 'none.json' cannot be",
        ),
        (
            "teacher: {model: tiny:chain_sum}",
            "teacher: tiny:chain_sum",
            "teacher: should be a mapping with context",
        ),
        (
            "teacher: {model: tiny:chain_sum}",
            "teacher: {model: tiny:chain_sum, recorded: scores.jsonl}",
            "teacher.model: is no key of a recorded teacher, which the other keys say it is",
        ),
        (
            "rewards:\n  - {name: exact",
            "rewards:\n  - {weight: 0, name: exact",
            "rewards: all have the weight 0, so every response would be worth 0",
        ),
        (
            "seed: 0",
            "seed: 0\ntracking: {folder: broken.yaml/runs}",
            "tracking.folder: nothing can be written to 'broken.yaml/runs': ",
        ),
        (
            "seed: 0",
            "seed: 0\ntracking: {uri: 'mlfow://here'}",
            "tracking.uri: the MLflow store 'mlfow://here' cannot be used",
        ),
    ],
)
def test_other_things_that_are_not_there(broken, old, new, message):
    complaint, _ = broken(old, new)
    assert message in complaint
    assert "\n" not in complaint


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            "mix, parts: [{weight: -1, method: {name: grpo}}]",
            "parts.0.weight: is a weight, which is not negative; got -1",
        ),
        (
            "mix, parts: [{weight: {start: 1, end: -1, steps: 9}, method: {name: grpo}}]",
            "parts.0.weight: is a weight, which is not negative; got -1",
        ),
        ("mix, parts: [{weight: 0, method: {name: grpo}}]", "mix: every weight is 0, so nothing would be trained"),
        (
            "mix, parts: [{method: {name: kat}}, {weight: 2, method: {name: kat, window: 8}}]",
            "mix: kat stands in two parts and keeps a state, which only one part can; take one out",
        ),
        ("mix, parts: []", "mix.parts: should have at least 1 item"),
        ("mix, parts: [{method: {name: mix, parts: []}}]", "parts.0.method.name: there is no 'mix'"),
        (
            "mix, parts: [{method: {name: sipo}}, {method: {name: sipo, contrast_context: trajectory}}]",
            "differently (contrast_context answer; contrast_context trajectory); give them the same",
        ),
        (
            "mix, parts: [{method: {name: sipo_analytic, alpha: 1}}, {method: {name: opd, estimator: jsd}}]",
            "mix: a run measures the distributions of one scorer, and the terms of this objective want those of right",
        ),
        (
            "mix, parts: [{method: {name: kat}}, {method: {name: va_opd}}]",
            "which is measured once, and the terms want it on the top 64 (student) and on the vocabulary; give",
        ),
        ("kdrl, beta: -0.1", "kdrl.beta: is a weight, which is not negative; got -0.1"),
        ("sdpo, w: 1.5", "sdpo.w: is a share, which lies between 0 and 1"),
        ("sdpo, w: {start: 0, end: 2, steps: 3}", "sdpo.w: is a share, which lies between 0 and 1"),
        ("grpo_opd, coef: -1", "grpo_opd.coef: is a weight, which is not negative"),
        ("shaping, coef: -1", "shaping.coef: is a weight, which is not negative"),
    ],
)
def test_a_mixture_without_a_meaning(broken, method, message):
    complaint, place = broken("method: {name: opdvr}", f"method: {{name: {method}}}")
    assert complaint.startswith(f"{place}: method.")
    assert message in complaint
    assert "\n" not in complaint


ODD = [None, 3, 2.5, True, "text", [], [1], ["a"], [None], [[]], {}, {"a": 1}, {"name": 3}, {"model": 3}, {"self": 3}]
ODD += [{"teachers": [1]}, {"teachers": {"a": "b"}, "by": "x"}, {"kind": 3}, {"task": 3}, {"url": 3}, [{"name": None}]]
PLACES = ["student", "teacher", "method", "compare", "data", "data.source", "rewards", "train", "evaluate", "tracking"]
PLACES += ["evaluate.data", "engine", "student.lora", "teacher.context", "teacher.prompt", "train.trl", "data.columns"]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_a_value_of_any_other_kind_is_told_and_never_a_traceback(tmp_path, odd):
    path = tmp_path / "x.yaml"
    path.write_text(QUICKSTART, encoding="utf-8")
    said = []
    for place in PLACES:
        try:
            read_experiment(path, [f"{place}={json.dumps(odd)}"])
        except ConfigError as error:
            said.append(str(error))
    assert said
    assert all(said)


def test_a_deepspeed_file_that_is_no_json(broken):
    Path("ds.json").write_text("{", encoding="utf-8")
    complaint, _ = broken("seed: 0", "seed: 0\nengine: {kind: deepspeed, config_file: ds.json}")
    assert "engine.config_file: 'ds.json' is no JSON" in complaint


def test_a_folder_without_a_tokenizer(broken, tmp_path):
    (tmp_path / "model").mkdir()
    complaint, _ = broken("student:\n  model: tiny:chain_sum", "student:\n  model: model")
    assert "student.model: the folder 'model' holds no tokenizer" in complaint


def test_an_idle_teacher_and_no_evaluation_are_worth_a_warning(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(QUICKSTART, encoding="utf-8")
    warnings = levels(check_experiment(path, ["method.name=grpo", "compare=[]", "evaluate="]), "warning")
    assert [warning.partition(": ")[2] for warning in warnings] == [
        "nothing is evaluated on held-out prompts; `evaluate: {}` does it",
        "teacher: is asked by no method of this experiment",
    ]


@pytest.fixture
def made_here(tmp_path, monkeypatch):
    """A student and a teacher of random weights as folders, and an experiment with them."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("student", "teacher")):
        model(seed, vocab_size=48).save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    rows = [f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(40)]
    Path("rows.jsonl").write_text("".join(rows), encoding="utf-8")
    text = QUICKSTART.replace("source: tiny:chain_sum", "source: rows.jsonl")
    text = text.replace("  model: tiny:chain_sum", "  model: student").replace(
        "{model: tiny:chain_sum}", "{model: teacher}"
    )
    Path("x.yaml").write_text(text, encoding="utf-8")
    return Path("x.yaml")


def test_a_live_check_asks_the_teacher(made_here):
    findings = check_experiment(made_here, ["evaluate.prompts=8"], live=True)
    assert levels(findings, "error") == []
    facts = "\n".join(levels(findings, "fact"))
    assert "teacher: tokenizer: " in facts
    assert "teacher: context length: 28 of 256" in facts
    assert "teacher: prompts: the same for both: student (4 ids) '0+1='" in facts
    assert re.search(r"teacher: gap to the student: at most \d+\.\d+ nats on one token", facts)


def test_a_live_check_warns_of_a_teacher_that_is_the_student(made_here):
    findings = check_experiment(made_here, ["evaluate.prompts=8", "teacher.model=student"], live=True)
    assert levels(findings, "error") == []
    assert "the distillation signal is identically zero" in "\n".join(levels(findings, "warning"))


def test_a_live_check_tells_what_the_teacher_cannot(made_here):
    settings = [
        "evaluate=",
        "teacher={model: teacher, url: 'http://127.0.0.1:9', requests: {retries: 0, timeout_s: 1}}",
    ]
    findings = check_experiment(made_here, settings, live=True)
    errors = "\n".join(levels(findings, "error"))
    assert "teacher: context length: the teacher does not answer" in errors
    assert "start its server, or mend its address" in errors


def test_what_a_run_will_write_is_worth_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(QUICKSTART, encoding="utf-8")
    settings = ["data.source=runs/demonstrations/x.jsonl", "evaluate.data={source: 'tiny:chain_sum', split: eval}"]
    findings = check_experiment(Path("x.yaml"), settings)
    assert levels(findings, "error") == []
    assert (
        "data.source: runs/demonstrations/x.jsonl does not exist yet; write it first" in levels(findings, "warning")[0]
    )


def test_a_model_that_another_command_will_make_is_worth_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(QUICKSTART, encoding="utf-8")
    findings = check_experiment(Path("x.yaml"), ["student.model=runs/models/none"])
    assert levels(findings, "error") == []
    assert [text.partition(": ")[2] for text in levels(findings, "warning")] == [
        "student.model: runs/models/none does not exist yet; make it before this run"
    ]
    findings = check_experiment(Path("x.yaml"), ["student.model=./none"])
    assert "there is no model './none', neither as a folder nor on the hub" in levels(findings, "error")[0]


def test_a_teacher_of_another_family_needs_a_template_for_chats(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(QUICKSTART, encoding="utf-8")
    base = tiny_tokenizer()
    base.chat_template = None
    base.save_pretrained("base")
    settings = ["teacher={model: ./base, align: true}", "compare=[]", "data.chat=true"]
    missing = "teacher.model: './base' has no chat template, and the prompts are chats (data.chat); give it one"
    assert any(missing in text for text in levels(check_experiment(Path("x.yaml"), settings), "error"))
    Path("plain.jinja").write_text(
        "{% for message in messages %}{{ message['content'] }}{% endfor %}", encoding="utf-8"
    )
    settings.append("teacher.prompt.chat_template=plain.jinja")
    assert not any(
        "has no chat template" in text for text in levels(check_experiment(Path("x.yaml"), settings), "error")
    )


def test_the_cells_of_a_sweep_are_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(QUICKSTART, encoding="utf-8")
    sweep = "base: base.yaml\nname: grid\nseeds: 2\nmethods: [{name: grpo}, {name: opd}]\n"
    Path("grid.yaml").write_text(sweep, encoding="utf-8")
    findings = check_experiment(Path("grid.yaml"))
    assert levels(findings, "error") == []
    assert levels(findings, "fact")[-1] == "grid.yaml: 4 cells, compared with the first method"
    few = "grid.yaml:3: seeds: with 2 seeds no difference can be shown at 95 %, however large, among 1 comparisons"
    (warning,) = levels(findings, "warning")  # and none that grpo asks no teacher, for opd does
    assert warning.startswith(few)
    assert "no difference" not in str(levels(check_experiment(Path("grid.yaml"), ["seeds=6"]), "warning"))
    Path("grid.yaml").write_text(sweep + "settings: {data.source: none.jsonl}\n", encoding="utf-8")
    (error,) = levels(check_experiment(Path("grid.yaml")), "error")
    assert error.startswith("grid.yaml: grpo/seed0: data.source: none.jsonl: no such file or folder")


def test_the_last_rows_of_a_file_are_held_out(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(10)), encoding="utf-8")
    path = tmp_path / "x.yaml"
    path.write_text(QUICKSTART, encoding="utf-8")
    config = read_experiment(path, [f"data.source={rows}", "evaluate.prompts=3", "data.shuffle_seed=4"])
    trained, held = training_prompts(config)["prompt"], held_out_prompts(config)
    assert held is not None
    assert (len(trained), len(held)) == (7, 3)
    assert sorted([*trained, *held["prompt"]]) == sorted(f"{n}+1=" for n in range(10))
    again = held_out_prompts(
        read_experiment(path, [f"data.source={rows}", "evaluate.prompts=3", "data.shuffle_seed=4", "seed=9"])
    )
    assert again is not None
    assert again["prompt"] == held["prompt"]
    findings = check_experiment(path, [f"data.source={rows}", "evaluate.prompts=3"])
    assert not any("among those of the training" in str(finding) for finding in findings)
    findings = check_experiment(path, [f"data.source={rows}", "evaluate.prompts=10"])
    assert "10 of them are held out, so none is left to train on" in levels(findings, "error")[0]


def test_held_out_prompts_that_are_trained_on_are_counted(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n % 8}+1=", "answer": "{n % 8 + 1}"}}\n' for n in range(10)))
    path = tmp_path / "x.yaml"
    path.write_text(QUICKSTART, encoding="utf-8")
    findings = check_experiment(path, [f"data.source={rows}", "evaluate.prompts=3", "train.prompts_per_step=2"])
    (warning,) = levels(findings, "warning")
    assert "2 of 3 held-out prompts stand among those of the training too" in warning  # 0+1= and 1+1=, not 7+1=


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("gpt2", True),
        ("./model", False),
        ("/model", False),
        ("runs/a/b", False),
        ("data/prompts.jsonl", False),
        ("prompts.json", False),
        ("tests", False),
    ],
)
def test_a_name_on_the_hub_is_told_from_a_file(monkeypatch, name, expected):
    monkeypatch.chdir(ROOT)
    assert is_hub_name(name) == expected
