"""Tests the batches that input_feed.py fetches ahead, as on a GPU. test_run.py tests it in the loop."""

import threading

from common.distributed.ranks import Ranks
from common.training.checkpoints import RunState
from common.training.input_feed import InputFeed

TIMEOUT = 10.0  # seconds


class Loader:
    """A loader as on a GPU. Its batches are (seed, number). `fetched` is released once for each batch."""

    saveable, source, pipeline_type = False, None, "dali_gpu"
    steps_per_epoch = 3

    def __init__(self, fetched, seed):
        self._fetched, self._seed = fetched, seed

    def iterator(self):
        for number in range(100):
            self._fetched.release()
            yield self._seed, number


def make_feed(fetched, steps_per_epoch, num_epochs=4):
    def open_loader(device_index=0, seed=0):
        return Loader(fetched, seed)

    state = RunState()
    feed = InputFeed(Ranks(), open_loader, lambda epoch: {"seed": epoch}, state, steps_per_epoch, num_epochs)
    return feed, state


def test_feed_on_a_gpu_fetches_two_batches_while_a_step_runs_and_not_three():
    fetched = threading.Semaphore(0)
    feed, _ = make_feed(fetched, steps_per_epoch=10)
    next(feed)  # the step with this batch runs until the next call
    assert all(fetched.acquire(timeout=TIMEOUT) for _ in range(3))
    assert not fetched.acquire(timeout=0.2)
    feed.close()


def test_batches_ahead_come_from_the_loaders_of_their_epoch_for_every_length_of_an_epoch():
    for steps in (1, 2, 3, 4):
        feed, state = make_feed(threading.Semaphore(0), steps)
        batches, expected, read = [], [], 0
        for epoch in range(4):
            feed.begin_epoch()
            if read >= Loader.steps_per_epoch:  # new loaders after a pass over the data
                read = 0
            seed = epoch if not read else expected[-1][0]
            for _ in range(steps):
                batches.append(next(feed))
                expected.append((seed, read))
                read += 1
            assert state.batches_read == read
            state.epoch += 1
        assert batches == expected
        feed.close()
