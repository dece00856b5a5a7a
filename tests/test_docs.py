"""What is written for readers agrees with what is there."""

import ast
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hybrid.methods
from hybrid.explain import explain
from hybrid.methods import METHODS, Grpo
from hybrid.methods.base import MethodConfig
from hybrid.objective.objective import Objective
from hybrid.read_config import read_experiment
from hybrid.records import read_records
from hybrid.settings_page import settings_page

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_page_of_settings_is_that_of_the_classes():
    """Run `make docs` where this fails."""
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == settings_page()


def test_the_page_of_settings_has_every_key_of_every_method():
    page = settings_page()
    for name, kind in METHODS.items():
        section = page.split(f"## method: {name}\n")[1].split("\n## ")[0]
        assert sorted(re.findall(r"^\| `method\.(\w+)` \|", section, re.MULTILINE)) == sorted(kind.model_fields)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_an_experiment(name):
    config = read_experiment(ROOT / "experiments" / f"{name}.yaml")
    assert (config.name, config.method.name) == (name, name)
    assert config.evaluate is not None


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_says_what_it_is_and_how_it_is_run(path):
    comment = path.read_text(encoding="utf-8").split("name:")[0]
    assert comment.startswith("# ")
    assert re.search(r"hybrid \w+|make \w+", comment)


def examples(page):
    """The Python blocks of a page, those of a list without its indent."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    ]


def test_the_example_of_a_new_method_works():
    names: dict[str, type[MethodConfig]] = {}
    exec(examples("CONTRIBUTING.md")[1], names)
    method = names["Mine"].model_validate({"name": "mine", "thr": 0.5})
    assert method.build().needs == {"reward", "scores.teacher", "student_logprobs"}


def test_the_example_of_an_idea_works(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    names: dict[str, Objective] = {}
    exec(examples("CONTRIBUTING.md")[0], names)
    records = read_records(ROOT / "experiments" / "smollm2_rollouts.jsonl")
    told, gated, grpo = (explain(method, records, step=100) for method in (names["idea"], names["gated"], Grpo()))
    assert ast.literal_eval(capsys.readouterr().out) == told
    assert told["method"] == {"name": "gated + grpo"}
    # half of the way: 0.6 of the gate, 0.4 of GRPO
    assert told["loss"]["total"] == pytest.approx(0.6 * gated["loss"]["total"] + 0.4 * grpo["loss"]["total"])


def test_every_method_can_be_imported_by_its_class():
    assert {name for name, kind in METHODS.items() if getattr(hybrid.methods, kind.__name__, None) is not kind} == set()
    assert {kind.__name__ for kind in METHODS.values()} <= set(hybrid.methods.__all__)


def test_the_first_commands_of_the_readme_are_targets():
    readme, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "Makefile"))
    for target in ("quickstart", "test"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("target", "last"),
    [("quickstart", "hybrid train experiments/quickstart.yaml"), ("lint", "pyright"), ("docs", "hybrid.method_pages")],
)
def test_make_would_do_it(target, last):
    # Under `make test` an inner make would inherit MAKEFLAGS and MAKELEVEL and print the folder that it leaves.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(["make", "-n", target], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert last in done.stdout.splitlines()[-1]


def imported_packages(*folders):
    """The top-level packages that the files of some folders import, those of the standard library and ours aside."""
    found = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            found |= {name.partition(".")[0] for name in names}
    return found - set(sys.stdlib_module_names) - {"hybrid", "teachers", "tests", "benchmarks"}


@pytest.mark.parametrize(
    ("folders", "extras"), [(("hybrid", "teachers"), ()), (("hybrid", "teachers", "tests", "benchmarks"), ("dev",))]
)
def test_every_package_that_is_imported_is_declared(folders, extras):
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in PROJECT["optional-dependencies"][extra])]
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    owners = metadata.packages_distributions()
    missing = {
        name for name in imported_packages(*folders) if declared.isdisjoint(map(canonicalize_name, owners[name]))
    }
    assert missing == set()


def test_every_dependency_is_pinned_within_its_range():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {}
    for line in lines[1:]:
        name, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line).groups()  # pyright: ignore
        pins[canonicalize_name(name)] = version
    for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]):
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text
