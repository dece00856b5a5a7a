"""Every method with its rows cut by a budget of tokens: the numbers of a run that cuts nothing, also on two ranks."""

import pytest

from tests.integration.test_engines import differences, run

FIRST = 1e-6
"""Of the first update; float32 weights then part by what their rounding makes of Adam's first steps."""


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
    return run("single", tmp_path_factory.mktemp("uncut"))


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["single-cut", "ddp-cut", "zero3-cut"])
def test_every_method_trains_alike_when_its_rows_are_cut(tmp_path, uncut, engine):
    got = run(engine, tmp_path)
    assert got.keys() == uncut.keys()
    for case, want in uncut.items():
        if "skipped" not in case:
            assert not differences(case, want[:1], got[case][:1], tolerance=FIRST)
        if "routed" not in case:  # one teacher is the student: its gradients are rounding, of which Adam makes steps
            assert not differences(case, want, got[case])
        if "loss" in want[0] and "accumulated" not in case:
            assert got[case][0]["micro_batches/number"] > 1, "a run that cuts nothing proves nothing"
