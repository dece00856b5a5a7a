"""A signal is noted whatever the program is doing at that moment."""

import signal

import pytest

from hybrid.stopping import Stop


def test_a_signal_counts_also_where_it_cannot_be_told():
    def writes_already(line):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    with Stop(writes_already) as stop:
        signal.raise_signal(signal.SIGTERM)
    assert stop.exit_code == 143


def test_a_second_ctrl_c_stops_at_once():
    told = []
    with Stop(told.append) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.received is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert len(told) == 1
