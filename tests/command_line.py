"""The `hybrid` command, run in the test's own process."""

import signal
import sys

import pytest


@pytest.fixture
def run_hybrid(monkeypatch, capfd):
    """Runs a command: exit code, what it printed, what it complained of."""
    from hybrid.cli import main  # after the type checks are installed

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["hybrid", *map(str, arguments)])
        before = signal.getsignal(signal.SIGTERM)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        signal.signal(signal.SIGTERM, before)
        code = ended.value.code
        return (code, *capfd.readouterr())

    return run
