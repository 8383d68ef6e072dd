"""Runs one of two ranks, which take steps with a watchdog. Rank 1 fails in the seventh step.

horovodrun -np 2 python tests/distributed/watched_steps.py kill|stop|sleep|missing horovod STEP_TIMEOUT
"""

import os
import signal
import sys
import time

import tensorflow as tf

from common import errors
from common.distributed import tf_distribute
from common.distributed.start import start
from common.training.watchdog import Watchdog


def endless() -> None:
    while True:
        time.sleep(0.1)


def main(act: str, strategy: str, step_timeout: str) -> None:
    if act == "missing":
        tf_distribute.START_SECONDS = 2.0
    tf_distribute.HEARTBEAT_SECONDS = 5.0
    ranks = start(strategy)
    collective_step = tf.function(
        lambda x: ranks.run(lambda y: ranks.mean({"x": y})["x"], x), jit_compile=False
    )
    with Watchdog(ranks, step_timeout=float(step_timeout)) as watchdog:
        watchdog.beat("compiling", at_least=60)
        collective_step(tf.constant(1.0))
        for step in range(7):
            watchdog.beat("training", epoch=1, step=step)
            if step == 6 and ranks.rank == 1:
                print("FAILURE", time.time(), file=sys.stderr, flush=True)
                if act == "sleep":
                    endless()
                os.kill(os.getpid(), signal.SIGKILL if act == "kill" else signal.SIGSTOP)
            collective_step(tf.constant(1.0))


signal.signal(signal.SIGTERM, lambda *_: None)  # like the apps, which save a checkpoint first
if __name__ == "__main__":
    errors.run(main, positional=True)
