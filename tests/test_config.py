"""From YAML to an experiment: what is accepted, and the one line that each mistake gets."""

import ast
import dataclasses
from pathlib import Path

import pytest
from pydantic import BaseModel
from trl.trainer.grpo_config import GRPOConfig

from hybrid import config, teacher_config
from hybrid.config import ExperimentConfig, held_out, resolved_yaml
from hybrid.consistency import teacher_measurements
from hybrid.data import GymSource
from hybrid.errors import ConfigError
from hybrid.methods import METHODS, method_of
from hybrid.read_config import read_experiment
from hybrid.trl_fields import IDLE_NAMES, OWN_NAMES, SURROGATE_DEFAULTS, trl_field_names

ROOT = Path(__file__).parents[1]
BLOCKS = {
    "name": "name: first",
    "student": "student: {model: 'tiny:chain_sum', lr: 1e-3}",
    "teacher": "teacher: {model: 'tiny:chain_sum'}",
    "method": "method: {name: opdvr}",
    "data": "data: {source: 'tiny:chain_sum'}",
    "rewards": "rewards: [{name: exact, pattern: '#(-?\\d+)$'}]",
    "train": "train: {steps: 10}",
}


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(*settings, **blocks):
        path = tmp_path / "x.yaml"
        path.write_text("\n".join((BLOCKS | blocks).values()) + "\n", encoding="utf-8")
        return read_experiment(path.relative_to(tmp_path), settings)

    return read


@pytest.fixture
def refusal(read):
    def refusal(*settings, **blocks):
        with pytest.raises(ConfigError) as caught:
            read(*settings, **blocks)
        return str(caught.value)

    return refusal


def test_a_short_file_is_an_experiment(read):
    config = read()
    assert (config.student.lr, config.train.steps, config.seed, config.evaluate) == (1e-3, 10, 0, None)
    assert config.method.name == "opdvr"


def test_numbers_are_numbers_wherever_they_stand(read):
    config = read("student.lr=1e-6", "student.weight_decay=5e-1", "seed=010", "rewards.0.weight=2e0")
    assert (config.student.lr, config.student.weight_decay, config.seed) == (1e-6, 0.5, 10)
    assert config.rewards[0].weight == 2.0


@pytest.mark.parametrize(
    ("block", "text", "line"),
    [
        ("method", "method: {name: kat, windw: 3}", "x.yaml:4: method.kat.windw: unknown key; did you mean window?"),
        (
            "method",
            "method: {name: mix, parts: [{method: {name: opd, estimater: k1}}]}",
            "x.yaml:4: method.mix.parts.0.method.opd.estimater: unknown key; did you mean estimator?",
        ),
        ("method", "method: {name: opdv}", "x.yaml:4: method.name: there is no 'opdv'; did you mean opdvr?"),
        ("method", "method: {thr: 0}", "x.yaml:4: method: has no name, which would say what it is; there are constant"),
        ("method", "method: opdvr", 'x.yaml:4: method: should be a mapping; got "opdvr"'),
        ("teacher", "teacher: {modle: x}", "x.yaml:3: teacher.modle: unknown key; did you mean model?"),
        (
            "teacher",
            "teacher: {teachers: {a: {model: x, urll: y}}, by: topic}",
            "x.yaml:3: teacher.teachers.a.urll: unknown key; did you mean url?",
        ),
        (
            "teacher",
            "teacher: {self: {sync: lve}}",
            "x.yaml:3: teacher.self.sync: should be 'live', 'snapshot', 'ema' or 'base'; got \"lve\"",
        ),
        (
            "teacher",
            "teacher: {url: 'node2:8000', model: z}",
            "x.yaml:3: teacher.url: is no server address: 'node2:8000'; write http://host:port",
        ),
        (
            "teacher",
            "teacher: {url: 'http://me:secret@node2', model: z}",
            "x.yaml:3: teacher.url: holds a password; put the key into the environment variable that api_key_env names",
        ),
        ("data", "data: {sorce: x}", "x.yaml:5: data.sorce: unknown key; did you mean source?"),
        (
            "data",
            "data: {source: {task: chain_sum, sise: 5}}",
            "x.yaml:5: data.source.sise: unknown key; did you mean size?",
        ),
        (
            "data",
            "data: {source: 5}",
            "x.yaml:5: data.source: should be a text or should be a mapping with task, params,",
        ),
        ("data", "data:\n  subset: main", "x.yaml:5: data.source: is missing: A `.jsonl`"),
        ("rewards", "rewards: [{name: exat}]", "x.yaml:6: rewards.0.name: there is no 'exat'; did you mean exact?"),
        ("rewards", "rewards: {name: exact}", 'x.yaml:6: rewards: should be a list; got {"name":"exact"}'),
        ("train", "train: {lr: 1}", "x.yaml:7: train.lr: unknown key here; did you mean student.lr?"),
        (
            "train",
            "train: {learning_rate: 1}",
            "x.yaml:7: train.learning_rate: unknown key here; did you mean student.lr?",
        ),
        ("train", "train:\n  steps: ten", 'x.yaml:8: train.steps: should be a whole number; got "ten"'),
        ("train", "train: {steps: true}", "x.yaml:7: train.steps: should be a whole number; got true"),
        ("train", "train: {steps: 0}", "x.yaml:7: train.steps: should be greater than or equal to 1; got 0"),
        ("train", "train: {temperature: 0}", "x.yaml:7: train.temperature: is 0.0, greedy decoding"),
        ("student", "student: {model: x, lr: .nan}", "x.yaml:2: student.lr: should be a finite number; got NaN"),
        ("name", "name: a/b", "x.yaml:1: name: should match pattern"),
        ("name", "nme: a", "x.yaml:1: nme: unknown key; did you mean name?"),
    ],
)
def test_a_slip_is_one_line_with_file_line_key_and_remedy(refusal, block, text, line):
    message = refusal(**{block: text})
    assert message.startswith(line)
    assert "\n" not in message


def test_several_slips_are_several_lines_in_the_order_of_the_file(refusal):
    message = refusal(student="student: {model: x, lr: fast}", train="train: {stps: 3, generations: 1.5}")
    assert [line.split(": ")[1] for line in message.splitlines()] == ["student.lr", "train.generations", "train.stps"]


def test_a_union_of_number_and_schedule_says_both(refusal):
    message = refusal(method="method: {name: mix, parts: [{weight: much, method: {name: grpo}}]}")
    assert message == (
        "x.yaml:4: method.mix.parts.0.weight: should be a number or should be a mapping with start, end, steps, shape; "
        'got "much"'
    )
    message = refusal(
        method="method: {name: mix, parts: [{weight: {start: 1, stop: 0, steps: 5}, method: {name: grpo}}]}"
    )
    assert [line.split(": ")[1] for line in message.splitlines()] == [
        "method.mix.parts.0.weight.end",
        "method.mix.parts.0.weight.stop",
    ]


def test_an_error_of_the_command_line_names_its_setting(refusal):
    assert refusal("train.steps=ten") == '--set train.steps=ten: train.steps: should be a whole number; got "ten"'
    assert refusal("train.stepps=3") == "--set train.stepps=3: train.stepps: unknown key; did you mean steps?"


def test_another_method_can_be_chosen_on_the_command_line(read):
    config = read("method.name=opd", "seed=3", method="method: {name: opdvr, thr: 0.5}")
    assert (config.method.name, config.seed) == ("opd", 3)


@pytest.mark.parametrize(
    ("blocks", "settings", "line"),
    [
        ({"teacher": "teacher: null"}, (), "x.yaml:4: method.name: opdvr needs a teacher (scores.teacher)"),
        (
            {"rewards": "rewards: []"},
            (),
            "x.yaml:4: method.name: opdvr needs a reward, and the experiment has no rewards",
        ),
        (
            {"method": "method: {name: grpo}"},
            ("train.generations=1",),
            "--set train.generations=1: train.generations: is 1, and grpo compares at least 2 responses per prompt",
        ),
        (
            {"method": "method: {name: mix, parts: [{method: {name: opd}}, {method: {name: rloo}}]}"},
            ("train.generations=1",),
            "--set train.generations=1: train.generations: is 1, and mix compares at least 2 responses per prompt",
        ),
        (
            {},
            ("compare=[{name: grpo}]", "rewards=[]", "method.name=opd"),
            "--set compare=[{name: grpo}]: compare.0.name: grpo needs a reward",
        ),
        (
            {},
            ("train.micro_batch=7",),
            "--set train.micro_batch=7: train.micro_batch: a step has 8 * 8 / 1 = 64 responses",
        ),
        (
            {},
            ("engine={kind: ddp, processes: 3}",),
            "x.yaml:7: train.prompts_per_step: a step has 8 * 8 = 64 responses",
        ),
        (
            {"teacher": "teacher: {self: {sync: live}}"},
            (),
            "x.yaml:3: teacher: is the live student under the student's own",
        ),
        ({"teacher": "teacher: {self: {sync: base}}"}, (), "x.yaml:3: teacher: is the model under the LoRA adapter"),
        ({}, ("evaluate={}", "rewards=[]", "method.name=opd"), "--set evaluate={}: evaluate: needs rewards to judge"),
        (
            {},
            ("data.columns=[answer]", "method.name=sft"),
            "--set method.name=sft: method.name: sft needs the data column demonstration, and data.columns",
        ),
        (
            {"teacher": "teacher: {url: 'http://n:1', model: z, temperature: 0.7}"},
            (),
            "x.yaml:3: teacher.temperature: is 0.7, and a vLLM server scores prompts at temperature 1",
        ),
        (
            {"teacher": "teacher: {url: 'http://n:1', model: z}"},
            ("train.temperature=0.7",),
            "--set train.temperature=0.7: train.temperature: is 0.7, and a vLLM server scores at temperature 1",
        ),
        (
            {},
            ("train.trl.mask_truncated=true",),
            "--set train.trl.mask_truncated=true: train.trl.mask_truncated: is no field",
        ),
        (
            {},
            ("train.trl.num_generations=4",),
            "--set train.trl.num_generations=4: train.trl.num_generations: is set by train",
        ),
        ({}, ("train.trl.hub_token=x",), "--set train.trl.hub_token=x: train.trl.hub_token: is a secret"),
        (
            {},
            ("train.trl.loss_type=cispo",),
            "--set train.trl.loss_type=cispo: train.trl.loss_type: cispo clips every ratio",
        ),
        (
            {},
            ("train.trl.scale_rewards=none",),
            "--set train.trl.scale_rewards=none: train.trl.scale_rewards: would change nothing: the method says what a",
        ),
        (
            {"method": "method: {name: opd, estimator: reverse_kl}"},
            ("train.trl.epsilon=0.1",),
            "--set train.trl.epsilon=0.1: train.trl.epsilon: would change nothing: it belongs to TRL's surrogate",
        ),
        ({}, ("engine={stage: 2}",), "--set engine={stage: 2}: engine: stage belongs to kind: deepspeed"),
        (
            {},
            ("engine.rollouts={engine: vllm_server}",),
            "--set engine.rollouts={engine: vllm_server}: engine.rollouts: url",
        ),
        (
            {"teacher": "teacher: {model: x, align: true}", "method": "method: {name: opd, estimator: reverse_kl}"},
            (),
            "x.yaml:4: method.name: opd needs reverse_kl, which compares distributions over one vocabulary",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(refusal, blocks, settings, line):
    message = refusal(*settings, **blocks)
    assert message.startswith(line)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("method", "what"),
    [
        (
            "{name: opd, estimator: reverse_kl, top_k: 16}",
            "reverse_kl on the student's top 16, which a vLLM server cannot",
        ),
        ("{name: opd, estimator: reverse_kl}", "full distributions for reverse_kl, which a vLLM server cannot give"),
        (
            "{name: opd, estimator: reverse_kl, top_k: 8, support: teacher}",
            "reverse_kl, whose support is the student's",
        ),
        ("{name: opdvr, top_k: 8}", "the teacher's scores of the student's own top_k, which a vLLM server cannot give"),
        (
            "{name: opd, top_k: 8, support: union}",
            "the teacher's own top_k and its scores of the student's, which a vLLM server",
        ),
        (
            "{name: random_cut, support: union}",
            "reverse_kl on the top 64 of both sides, which a vLLM server cannot give",
        ),
        ("{name: kat}", "reverse_kl on the student's top 64, which a vLLM server cannot give"),
    ],
)
def test_a_server_is_not_asked_for_what_it_cannot_give(refusal, method, what):
    # pitfall 9
    message = refusal(teacher="teacher: {url: 'http://n:1', model: z}", method=f"method: {method}")
    assert what in message
    assert "its choices are: log-probs of the sampled tokens" in message
    assert "or a local teacher" in message


@pytest.mark.parametrize(
    ("method", "teacher", "what"),
    [
        (
            "{name: opd, estimator: reverse_kl}",
            "{model: z, cache: scores}",
            "full distributions for reverse_kl, which a cache",
        ),
        (
            "{name: kat, support: union}",
            "{url: 'http://n:1', model: z, candidates: true}",
            "on the top 64 of both sides, which a vLLM server cannot give",
        ),
        (
            "{name: grpd, top_k: 8, support: union}",
            "{model: z, cache: scores}",
            "the teacher's own top_k and its scores of the student's, which a cache cannot give at once",
        ),
    ],
)
def test_neither_a_cache_nor_a_server_gives_a_whole_distribution(refusal, method, teacher, what):
    assert what in refusal(teacher=f"teacher: {teacher}", method=f"method: {method}")


@pytest.mark.parametrize(
    ("method", "teacher"),
    [
        ("{name: opd}", "{url: 'http://n:1', model: z}"),
        ("{name: opd, estimator: forward_kl, top_k: 16, support: teacher}", "{url: 'http://n:1', model: z}"),
        ("{name: kat}", "{url: ['http://n:1', 'http://m:1'], model: z, candidates: true}"),
        ("{name: kat}", "{model: z, cache: scores}"),
        ("{name: opdvr, top_k: 8}", "{url: 'http://n:1', model: z, candidates: true}"),
        ("{name: opdvr, top_k: 8, support: teacher}", "{url: 'http://n:1', model: z}"),
        ("{name: grpd, top_k: 8, support: intersection}", "{recorded: y}"),
        ("{name: opd, top_k: 8, support: intersection}", "{model: z, cache: scores}"),
        ("{name: opdvr, top_k: 8, support: union}", "{model: z}"),
        ("{name: kat, support: union}", "{model: z}"),
        ("{name: opd, estimator: reverse_kl}", "{model: z}"),
        ("{name: sipo}", "{url: 'http://n:1', model: z}"),
        ("{name: opd}", "{self: {sync: snapshot, every: 5}}"),
        ("{name: opd}", "{self: {sync: live}, context: {kind: answer}}"),
        ("{name: opd}", "{teachers: {a: {model: x}, b: {recorded: y}}, weights: {a: 1, b: 0.5}}"),
        ("{name: opd}", "{model: z, serve: {gpus: '6,7', flags: ['--tensor-parallel-size', '2']}}"),
    ],
)
def test_what_a_teacher_can_give_is_accepted(read, method, teacher):
    config = read(teacher=f"teacher: {teacher}", method=f"method: {method}")
    assert config.teacher is not None


def test_a_method_whose_student_teaches_itself_needs_no_teacher(read):
    config = read(teacher="teacher: null", method="method: {name: sipo}")
    objective = config.method.build()
    assert teacher_measurements(config.method, objective.needs) == []


def test_what_is_resolved_reads_back_the_same(read, tmp_path):
    config = read(
        "teacher={self: {sync: ema, decay: 0.9}, context: {kind: hint, template: 'on {hint} {prompt}'}}",
        "compare=[{name: grpo}, {name: mix, parts: [{weight: {start: 1, end: 0, steps: 5}, method: {name: opd}}]}]",
        "evaluate.every=5",
        "student.lora.target_modules=[q_proj]",
        "tracking.tags={no: '1e-6'}",
        "engine={kind: deepspeed, processes: 2, rollouts: {engine: vllm_colocate}}",
        "train.trl={mask_truncated_completions: true}",
    )
    (tmp_path / "y.yaml").write_text(resolved_yaml(config), encoding="utf-8")
    again = read_experiment(tmp_path / "y.yaml")
    assert again == config
    assert resolved_yaml(again) == resolved_yaml(config)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_can_be_written_down_and_read(read, tmp_path, name):
    block = "{name: mix, parts: [{method: {name: grpo}}]}" if name == "mix" else f"{{name: {name}}}"
    config = read(method=f"method: {block}")
    (tmp_path / "y.yaml").write_text(resolved_yaml(config), encoding="utf-8")
    assert read_experiment(tmp_path / "y.yaml") == config


def test_methods_are_labelled_and_trained_once(read):
    config = read("compare=[{name: grpo}, {name: opdvr}, {name: opdvr, thr: 0.5}, {name: grpo}]")
    assert list(config.methods) == ["opdvr", "grpo", "opdvr_2"]
    assert config.methods["opdvr_2"] == method_of({"name": "opdvr", "thr": 0.5})
    assert list(config.for_method("grpo").methods) == ["grpo"]


def test_held_out_prompts_are_others_and_the_same_for_every_seed(read):
    config = read("evaluate.prompts=7")
    source = held_out(config)
    assert source is not None
    assert (source.source, source.split, source.limit) == ("tiny:chain_sum", "eval", 7)
    gym = [
        held_out(read("data.source={task: chain_sum, size: 9}", "evaluate={prompts: 7}", f"seed={s}")) for s in (0, 5)
    ]
    assert gym[0] == gym[1]
    assert gym[0] is not None
    assert isinstance(gym[0].source, GymSource)
    assert gym[0].source.size == 7
    assert gym[0].source.seed not in (None, 0, 5)
    assert held_out(read()) is None


def test_settings_are_frozen_and_hold_at_most_twelve_keys():
    def kinds(kind):
        found = [kind]
        for inner in kind.__subclasses__():
            found += kinds(inner)
        return found

    settings = [kind for kind in kinds(ExperimentConfig.__mro__[1]) if kind.__module__.startswith("hybrid.")]
    assert len(settings) > 10
    for kind in settings:
        assert len(kind.model_fields) <= 12, kind
        assert kind.model_config.get("frozen"), kind
        assert all(field.description for field in kind.model_fields.values()), kind


def test_the_names_of_trl_are_those_of_the_installed_trl():
    fields = {field.name for field in dataclasses.fields(GRPOConfig) if not field.name.startswith("_")}
    assert trl_field_names() == fields
    assert set(OWN_NAMES) - fields <= {"max_prompt_length"}  # TRL had it until 1.0
    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    assert {name: defaults[name] for name in SURROGATE_DEFAULTS} == SURROGATE_DEFAULTS
    assert {name: defaults[name] for name in IDLE_NAMES} == {
        "scale_rewards": "group",
        "multi_objective_aggregation": "sum_then_normalize",
    }


def read_names(*folders):
    """Every attribute and every string key that the program reads, those of the settings' own files and plans aside."""
    found = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        if path.name in ("config.py", "teacher_config.py", "plan.py", "describe.py", "settings_page.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
    return found


@pytest.mark.parametrize("module", [config, teacher_config])
def test_every_setting_has_an_effect(module):
    settings = {
        name: group
        for group in vars(module).values()
        if isinstance(group, type) and issubclass(group, BaseModel) and group.__module__ == module.__name__
        for name in group.model_fields
    }
    effective = read_names("hybrid", "teachers") | {"candidates"}  # of which `hybrid.consistency` alone reads
    assert {name: group.__name__ for name, group in settings.items() if name not in effective} == {}
