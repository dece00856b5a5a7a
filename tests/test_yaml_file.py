"""YAML as its reader means it (pitfall 54), the line of every key, and overrides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.errors import ConfigError
from hybrid.yaml_file import dump_yaml, load_document, override


@pytest.fixture
def read(tmp_path):
    def read(text, *settings):
        path = tmp_path / "x.yaml"
        path.write_text(text, encoding="utf-8")
        return override(load_document(path), settings)

    return read


@pytest.fixture
def refusal(read, tmp_path):
    def refusal(text, *settings):
        with pytest.raises(ConfigError) as caught:
            read(text, *settings)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return refusal


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("5e6", 5e6),
        ("1.5E+3", 1500.0),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("-7", -7),
        ("12:30", "12:30"),
        ("on", "on"),
        ("no", "no"),
        ("Yes", "Yes"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("2026-11-29", "2026-11-29"),
        ("1_000", "1_000"),
        ("'1e-6'", "1e-6"),
        ("tiny:chain_sum", "tiny:chain_sum"),
        ("http://host:8000", "http://host:8000"),
        (".inf", float("inf")),
    ],
)
def test_a_scalar_is_what_it_looks_like(read, text, value):
    found = read(f"key: {text}").values["key"]
    assert found == value
    assert type(found) is type(value)


def test_keys_are_texts(read):
    assert read("on: 1\n2: 2\n1e-6: 3").values == {"on": 1, "2": 2, "1e-6": 3}


def test_every_key_and_item_knows_its_line(read):
    document = read("a: 1\nb:\n  c: 2\n  d: [1,\n      2]\n")
    lines = {path: place.rpartition(":")[2] for path, place in document.places.items()}
    assert lines == {("a",): "1", ("b",): "2", ("b", "c"): "3", ("b", "d"): "4", ("b", "d", 0): "4", ("b", "d", 1): "5"}
    assert document.place(("b", "missing")).endswith("x.yaml:2")
    assert document.place(("missing",)).endswith("x.yaml")


def test_an_anchor_stands_for_its_value(read):
    assert read("a: &x {k: 1}\nb: *x").values == {"a": {"k": 1}, "b": {"k": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "x.yaml:3: a: stands here for the second time, first at x.yaml:1; keep one of them"),
        ("a: {b: 1, b: 2}", "x.yaml:1: a.b: stands here for the second time, first at x.yaml:1; keep one of them"),
        (
            "a:\n  - [1",
            "x.yaml:2: is no YAML: while parsing a flow sequence expected ',' or ']', but got '<stream end>'",
        ),
        ("a: &x [*x]", "x.yaml:1: is nested more than 50 deep"),
        ("? [1]\n: 2", "x.yaml:1: a key must be a word"),
        (
            "a: !!python/object:os.system ls",
            "x.yaml:1: the tag 'tag:yaml.org,2002:python/object:os.system' is not used",
        ),
        ("a: !!int x", "x.yaml:1: 'x' is no int"),
        ("a: 1\n---\nb: 2", "x.yaml:2: is no YAML: expected a single document"),
        ("- 1", "x.yaml: holds a list where a mapping of settings belongs"),
        ("", "x.yaml: holds nothing where a mapping of settings belongs"),
        ("a: \x01", "x.yaml: is no YAML: unacceptable character #x0001"),
    ],
)
def test_a_file_that_says_nothing_clear_is_refused_with_its_line(refusal, text, message):
    assert refusal(text).startswith(message)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_document(tmp_path / "none.yaml")


def test_a_file_of_other_bytes_is_named(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match=r"x\.yaml: is not UTF-8"):
        load_document(path)


def test_overrides_follow_the_file_and_one_another(read):
    document = read(
        "a: {b: 1}\nl: [1, {k: 2}]", "a.b=2e-3", "a.b=3e-3", "new.deep.key=[1, x]", "l.1.k=5", "l.2=z", "n="
    )
    assert document.values == {
        "a": {"b": 3e-3},
        "l": [1, {"k": 5}, "z"],
        "new": {"deep": {"key": [1, "x"]}},
        "n": None,
    }
    assert document.place(("a", "b")) == "--set a.b=3e-3"
    assert document.place(("new", "deep", "key", 1)) == "--set new.deep.key=[1, x]"


def test_another_method_drops_the_settings_of_the_old_one(read):
    text = "method: {name: kat, window: 32}\nrewards: [{name: exact, pattern: x}]\ndata: {name: a, split: b}"
    document = read(text, "method.name=opd", "method.top_k=4", "rewards.0.name=math", "data.name=c")
    assert document.values == {
        "method": {"name": "opd", "top_k": 4},
        "rewards": [{"name": "math"}],
        "data": {"name": "c", "split": "b"},
    }
    assert read(text, "method.name=kat").values["method"] == {"name": "kat", "window": 32}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps", "--set steps: write --set key.key=value, for example --set train.steps=100"),
        ("a..b=1", "--set a..b=1: write --set key.key=value, for example --set train.steps=100"),
        ("a.b=1", "--set a.b=1: a is 1, which has no key 'b'"),
        ("l.x=1", "--set l.x=1: l is a list of 1; 'x' is no index of it"),
        ("l.2=1", "--set l.2=1: l is a list of 1; '2' is no index of it"),
        ("a=[1", "--set a=[1: is no YAML: while parsing a flow sequence"),
    ],
)
def test_a_wrong_override_is_named(refusal, setting, message):
    assert refusal("a: 1\nl: [1]", setting).startswith(message)


words = st.sampled_from(
    ["", "on", "no", "1e-6", "010", "12:30", "true", "null", "~", "a: b", "- x", "#", "é\n", "2026-11-29"]
)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
trees = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3))


@given(st.dictionaries(words, trees, min_size=1, max_size=4))
def test_what_is_written_is_read_back(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    path.write_text(dump_yaml(values), encoding="utf-8")
    assert load_document(path).values == values


def test_a_written_file_keeps_the_order_of_keys():
    assert dump_yaml({"b": 1, "a": [{"x": 1e-6}]}) == "b: 1\na:\n  - x: 1.0e-06\n"
