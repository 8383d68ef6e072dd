"""Batches for the replicas of this process, from a place in the data that can be saved and taken up again.

    feed = resume(saved, ranks, open_loader, plan, steps_per_epoch=steps)
    images, targets = next(feed)

Where tf.train.Checkpoint can save the loader's iterator (DALI on a CPU, tf.data), the iterator is that place.
Where it cannot (DALI on a GPU), every epoch opens its loaders anew, with a seed of its own, and a run that
stopped in the middle of an epoch reads what it had trained on once more and drops it: as exact, at the price
of part of an epoch's loading, and of the images that do not fill an epoch's last batch.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from common.distributed.ranks import Ranks
from common.loading import Loader, placement
from common.progress import log
from common.training.checkpoints import Checkpoints

# open_loader(shard_id=0, num_shards=1, device_index=0, **plan)
OpenLoader = Callable[..., Loader]


class Feed:
    """One loader for each local replica.

    Args:
        ranks: of the run: the replicas are the shards.
        open_loader: makes the training loader of one shard.
        plan: what `open_loader` is told besides the shard, as JSON can hold it: the seed, ...

    Attributes:
        plan: of the open loaders.
        loader: the first of them.
        saveable: whether tf.train.Checkpoint can save the place.
        places: the open loaders' iterators, where they can be saved; otherwise nothing.
    """

    def __init__(self, ranks: Ranks, open_loader: OpenLoader, plan: Mapping[str, Any]) -> None:
        self._ranks = ranks
        self._open_loader = open_loader
        self.open(plan)

    def open(self, plan: Mapping[str, Any]) -> None:
        """Starts anew under another plan."""
        self.plan = dict(plan)
        loaders = [
            self._open_loader(
                shard_id=replica, num_shards=self._ranks.num_replicas, device_index=index, **self.plan
            )
            for index, replica in enumerate(self._ranks.local_replicas)
        ]
        self.loader = loaders[0]
        self.saveable = self.loader.saveable
        self._iterators = [_iterate(loader, i) for i, loader in enumerate(loaders)]
        self.places: Sequence[tf.data.Iterator] = self._iterators if self.saveable else ()

    def skip(self, steps: int) -> None:
        """Reads and drops so many batches."""
        for _ in range(steps):
            for iterator in self._iterators:
                next(iterator)

    def __next__(self) -> tuple[Any, dict[str, Any]]:
        """(images, targets), one batch for each local replica.

        Raises:
            tf.errors.OpError: what the loader stumbled over (damaged_images.explain finds out which image).
        """
        batches = [next(iterator) for iterator in self._iterators]
        if self.loader.pipeline_type == "dali_gpu":
            batches = [_without_int32(batch) for batch in batches]
        return self._ranks.feed(batches)


def _iterate(loader: Loader, device_index: int) -> tf.data.Iterator:
    with placement(loader, device_index):
        return iter(loader.dataset())


def _without_int32(batch: tuple[Any, dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """The batch with int64 in place of int32, on the same device.

    TensorFlow takes the int32 arguments of a compiled function to the host, wherever they are, and back
    (tensorflow/core/common_runtime/eager/execute.cc GetDeviceForInput); an eager cast works where they are.
    """

    def without(x: tf.Tensor) -> tf.Tensor:
        if x.dtype != tf.int32:
            return x
        with tf.device(x.device):  # else it is the first GPU's work
            return tf.cast(x, tf.int64)

    return tf.nest.map_structure(without, batch)


def resume(
    saved: Checkpoints,
    ranks: Ranks,
    open_loader: OpenLoader,
    plan: Callable[[int], Mapping[str, Any]],
    *,
    steps_per_epoch: int,
) -> Feed:
    """Goes on where the run was left, or starts: restores `saved`, and returns the data at their place.

    Where the run is not quite the one that was saved (another --freeze, other ranks under --elastic), it goes
    on from the last whole epoch.

    Args:
        saved: the run's checkpoints, with the state of a new run.
        ranks: of the run.
        open_loader: see Feed.
        plan: epochs done -> how the loaders are opened after them.
        steps_per_epoch: of this sitting.

    Raises:
        UserError: there are checkpoints, and none can be used.
    """
    found = saved.find()
    if found and found["step_in_epoch"] and saved.changed():
        found = saved.find(boundary=True)
    if found is None:
        feed = Feed(ranks, open_loader, saved.state["loader"])
        saved.iterators = feed.places
        return feed
    changed = saved.changed()
    resharded = not {"num_replicas", "num_ranks"}.isdisjoint(changed)
    feed = Feed(ranks, open_loader, plan(found["epoch"]) if resharded else found["loader"])
    saved.iterators = () if resharded else feed.places
    saved.restore()
    saved.iterators = feed.places
    state = saved.state
    if resharded:
        state["step"] = state["epoch"] * steps_per_epoch
        state["loader"] = feed.plan
        saved.set_updates(state["step"])
    if not feed.saveable:
        feed.skip(state["step_in_epoch"])
    since = f"{state['step_in_epoch']} steps into epoch {state['epoch'] + 1}"
    place = since if state["step_in_epoch"] else f"after epoch {state['epoch']}"
    log(f"resumed {place} (step {state['step']})")
    if changed:
        log(f"  with another {', '.join(changed)}: from a whole epoch, and not as if it had never stopped")
    return feed


def steps_per_second(start: float | None, first: int, last: int) -> float:
    """Rate of the steps after `first`, which ended at `start` (time.monotonic); NaN where there is none."""
    if start is None or last <= first:
        return math.nan
    return (last - first) / (time.monotonic() - start)
