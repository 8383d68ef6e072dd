"""SIGTERM and SIGINT ask a run to stop; a second SIGINT interrupts it (watchdog.py: StopSignals)."""

import os
import signal

import pytest

from common.training.watchdog import StopSignals
from tests.common.thread_ranks import together


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_ask_for_a_stop_and_leave_no_trace(number, capfd):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        name = signal.Signals(number).name
        assert signals.received == name
        assert capfd.readouterr().err == f"\n{name}: stopping after this step\n"
        assert signals.message(9) == f"stopped by {name}; saved after step 9: run the same command to go on"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signals.received  # noqa: B018  the handler runs between two instructions
    assert signal.getsignal(number) is before


def test_a_signal_to_any_rank_stops_all():
    def work(ranks):
        signals = StopSignals(quiet=True)
        first = signals.agreed(ranks)
        signals.received = "SIGTERM" if ranks.rank else None
        return first, signals.agreed(ranks), signals.message(3).partition(";")[0]

    by = ["stopped by a signal to another rank", "stopped by SIGTERM"]
    assert together(2, work) == [(False, True, by[0]), (False, True, by[1])]
