"""Stopping a run by SIGTERM or SIGINT, on all ranks after the same step.

with StopSignals() as signals:
    for ...:
        result = step(images, targets, signals.requested)  # a mean: above 0 on all ranks or none
"""

import signal
import threading
from typing import Any

import tensorflow as tf

from common import progress
from common.distributed.ranks import Ranks

ASK_EVERY = 5  # batches of an evaluation: asking waits for the slowest rank


class StopSignals:
    """While this is entered, SIGTERM and SIGINT request a stop; a second SIGINT interrupts at once.

    Attributes:
        received: name of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def requested(self) -> tf.Tensor:
        """1.0 once a signal came to this rank, else 0.0: an input of the training step."""
        return tf.constant(0.0 if self.received is None else 1.0)

    def agreed(self, ranks: Ranks, turn: int) -> bool:
        """Whether any rank was asked to stop, every few turns of an evaluation. All ranks call it."""
        if ranks.world_size == 1:
            return self.received is not None
        return turn % ASK_EVERY == 0 and any(ranks.gather(self.received is not None))

    def message(self, step: int) -> str:
        """The last line of a run that was stopped; another rank may have got the signal."""
        by = f"by {self.received}" if self.received else "because another rank was"
        return f"stopped {by}; saved after step {step}: run the same command to go on"

    def _handle(self, number: int, _: object) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        progress.log(f"\n{self.received}: stopping after this step")
