"""SIGTERM and SIGINT."""

import os
import signal

import pytest

from common.training.watchdog import StopSignals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_ask_for_a_stop_and_leave_no_trace(number):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == signal.Signals(number).name
        assert "saved after step 9: run the same command" in signals.message(9)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signals.received  # noqa: B018  the handler runs between two instructions
    assert signal.getsignal(number) is before
