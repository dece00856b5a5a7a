"""Settings of single methods: who has them, what wins over them, and what a slip in them says."""

from pathlib import Path

import pytest

from hybrid.check import check_experiment
from hybrid.config import resolved_yaml
from hybrid.errors import ConfigError
from hybrid.per_method import flat, rough_labels
from hybrid.plan import plan_lines
from hybrid.read_config import read_experiment
from hybrid.sweep_config import read_sweep
from hybrid.yaml_file import dump_yaml
from tests.experiments import QUICKSTART

EXPERIMENT = """name: rates
student:
  model: tiny:chain_sum
  lr: 1e-3
  per_method: OWN
teacher: {model: 'tiny:chain_sum'}
method: {name: opdvr}
compare: [{name: grpo}, {name: opd}]
data: {source: 'tiny:chain_sum'}
rewards: [{name: exact, pattern: '#(-?\\d+)$'}]
train: {steps: 10}
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(own, *settings):
        path = tmp_path / "x.yaml"
        path.write_text(EXPERIMENT.replace("OWN", own), encoding="utf-8")
        return read_experiment(path.relative_to(tmp_path), settings)

    return read


@pytest.fixture
def grid(tmp_path):
    def grid(*settings, **changes):
        values = {"base": str(QUICKSTART), "name": "grid", "seeds": 1, "methods": [{"name": "grpo"}, {"name": "opd"}]}
        path = tmp_path / "grid.yaml"
        path.write_text(dump_yaml(values | changes), encoding="utf-8")
        return {cell.label: cell.config for cell in read_sweep(path, settings)[1]}

    return grid


def test_a_method_has_its_own_settings_and_the_others_do_not(read):
    config = read("{grpo: {lr: 3e-4, warmup_steps: 2, weight_decay: null}}")
    grpo, opd = config.for_method("grpo"), config.for_method("opd")
    assert (grpo.student.lr, grpo.student.warmup_steps, grpo.student.weight_decay) == (3e-4, 2, 0.0)
    assert (opd.student.lr, opd.student.warmup_steps) == (1e-3, 0)
    assert dict(grpo.student.per_method) == {}
    assert grpo.for_method("grpo") == grpo


def test_what_is_resolved_keeps_them_and_that_of_one_method_has_them_in_place(read, tmp_path):
    config = read("{grpo: {lr: 3e-4}}")
    for one in (config, config.for_method("grpo")):
        (tmp_path / "y.yaml").write_text(resolved_yaml(one), encoding="utf-8")
        assert read_experiment(tmp_path / "y.yaml") == one
    assert "  lr: 0.0003\n" in resolved_yaml(config.for_method("grpo"))


def test_the_command_line_is_meant_for_every_method_and_wins(read):
    own = "{grpo: {lr: 3e-4, warmup_steps: 7}}"
    config = read(own, "student.lr=5e-4")
    assert [config.for_method(label).student.lr for label in config.methods] == [5e-4] * 3
    assert config.for_method("grpo").student.warmup_steps == 7
    config = read(own, "student={model: 'tiny:chain_sum'}")
    assert config.for_method("grpo").student.lr == config.student.lr == 1e-6
    config = read(own, "student.per_method.grpo.lr=1e-5")
    assert (config.for_method("grpo").student.lr, config.student.lr) == (1e-5, 1e-3)


def test_a_method_that_the_command_line_takes_out_takes_its_settings_along(read):
    own = "{grpo: {lr: 3e-4}, opdvr: {lr: 2e-3}}"
    assert set(read(own, "compare=[]").student.per_method) == {"opdvr"}
    assert set(read(own, "method.name=grpd").student.per_method) == {"grpo"}
    with pytest.raises(ConfigError, match=r"grpp: there is no method with this label; did you mean grpo\?"):
        read("{grpp: {lr: 3e-4}}", "compare=[]", "method.name=grpo")


@pytest.mark.parametrize(
    ("own", "line"),
    [
        ("{gpro: {lr: 1}}", ".gpro: there is no method with this label; did you mean grpo?"),
        ("{kat: {lr: 1}}", ".kat: there is no method with this label; there are opdvr, grpo, opd"),
        ("{grpo: {lrr: 1}}", ".grpo.lrr: unknown key; did you mean lr?"),
        ("{grpo: {model: x}}", ".grpo.model: unknown key"),
        ("{grpo: {lr: fast}}", '.grpo.lr: should be a number; got "fast"'),
        ("{grpo: {lr: 0}}", ".grpo.lr: should be greater than 0; got 0"),
        (
            "{grpo: 3}",
            ".grpo: should be a mapping with lr, scheduler, warmup_steps, weight_decay, max_grad_norm; got 3",
        ),
    ],
)
def test_a_slip_is_one_line_with_its_place(read, own, line):
    with pytest.raises(ConfigError) as caught:
        read(own)
    message = str(caught.value)
    assert message.startswith(f"x.yaml:5: student.per_method{line}")
    assert "\n" not in message


def test_a_check_lets_the_command_line_win_too(read, tmp_path):
    read("{grpo: {lr: 3e-4}}")
    assert not [
        str(one)
        for one in check_experiment(Path("x.yaml"), ["compare=[]", "train.max_completion_length=24"])
        if one.level == "error"
    ]


def test_the_plan_tells_them(read):
    lines = plan_lines(read("{grpo: {lr: 3e-4, scheduler: linear}, opd: {}}", "student.model=nowhere/none"))
    assert lines[-3:-1] == ["grpo: lr 0.0003, scheduler linear", "opd: as the others"]


def test_a_cell_takes_the_nearest_word(grid):
    rates = {"per_method": {"grpo": {"student.lr": 2e-4}}, "settings": {"student.lr": 5e-3, "student": {"lr": 4e-3}}}
    assert {label: config.student.lr for label, config in grid(**rates).items()} == {"grpo": 2e-4, "opd": 4e-3}
    rates["tasks"] = {"a": {"student": {"lr": 3e-3}}}
    assert {label: config.student.lr for label, config in grid(**rates).items()} == {"grpo": 2e-4, "opd": 3e-3}
    given = grid("settings.student.lr=6e-3", **{**rates, "tasks": {}})
    assert {label: config.student.lr for label, config in given.items()} == {"grpo": 6e-3, "opd": 6e-3}
    varied = grid(**rates, vary={"student.lr": [0.5]})
    assert {label: config.student.lr for label, config in varied.items()} == {"grpo_lr=0.5": 0.5, "opd_lr=0.5": 0.5}


def test_a_sweep_has_those_of_its_experiment_where_it_says_nothing_else(grid, tmp_path):
    (tmp_path / "base.yaml").write_text(EXPERIMENT.replace("OWN", "{grpo: {lr: 3e-4}}"), encoding="utf-8")
    of_base = grid(base="base.yaml", methods=[])
    assert {label: config.student.lr for label, config in of_base.items()} == {"opdvr": 1e-3, "grpo": 3e-4, "opd": 1e-3}
    given = grid(base="base.yaml", settings={"student.lr": 0.5})
    assert {label: config.student.lr for label, config in given.items()} == {"grpo": 0.5, "opd": 0.5}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"per_method": {"gpro": {}}}, r"per_method\.gpro: there is no method with this label; did you mean grpo\?"),
        ({"only": {"odp": ["a"]}}, r"only\.odp: there is no method with this label; did you mean opd\?"),
        ({"baseline": "rloo"}, r"baseline: there is no method with this label; there are grpo, opd"),
        (
            {"per_method": {"opd": {"student.lrr": 1}}},
            r"cell  opd seed 0: .*student\.lrr: unknown key; did you mean lr\?",
        ),
    ],
)
def test_a_slip_in_a_sweep_is_refused(grid, changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        grid(**changes)


def test_blocks_and_dotted_keys_are_one():
    assert flat({"a.b": 1, "a": {"b": 2, "c": {"d": 3}}, "e": {"name": "x", "y": 1}, "f": {}}) == {
        "a.b": 2,
        "a.c.d": 3,
        "e": {"name": "x", "y": 1},
        "f": {},
    }


def test_labels_of_an_unchecked_file():
    values = {"method": {"name": "a"}, "compare": [{"name": "b"}, {"name": "a", "x": 1}, "nonsense"]}
    assert rough_labels(values) == ["a", "b", "a_2"]
    assert rough_labels({"compare": 3}) == []
