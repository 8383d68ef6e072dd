"""Batches for the replicas of this process, from a place in the data that a checkpoint holds.

    feed = resume(checkpoints, ranks, open_loader, loader_kwargs, steps_per_epoch=steps)
    images, targets = next(feed)

tf.train.Checkpoint can save the iterators of DALI on a CPU and of tf.data. It cannot save those of DALI on a
GPU: there every epoch opens its loaders anew, with another seed, and a run that was stopped within an epoch
reads the batches that it had trained on again and drops them. The result is as exact; it costs part of an
epoch's loading, and the images that do not fill an epoch's last batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from common.distributed.ranks import Ranks
from common.loader import BaseLoader, placement
from common.progress import log
from common.training.checkpoints import Checkpoints

# open_loader(shard_id=0, num_shards=1, device_index=0, **loader_kwargs)
OpenLoader = Callable[..., BaseLoader]


class InputFeed:
    """One loader for each local replica.

    Args:
        ranks: of the run: the replicas are the shards.
        open_loader: makes the training loader of one shard.
        loader_kwargs: the other arguments of `open_loader`, as JSON can hold them: the seed, ...

    Attributes:
        loader_kwargs: of the open loaders.
        loader: the first of them.
        saveable: whether tf.train.Checkpoint can save the iterators.
        iterators: of the open loaders, where they can be saved; otherwise empty.
    """

    def __init__(self, ranks: Ranks, open_loader: OpenLoader, loader_kwargs: Mapping[str, Any]) -> None:
        self._ranks = ranks
        self._open_loader = open_loader
        self.open(loader_kwargs)

    def open(self, loader_kwargs: Mapping[str, Any]) -> None:
        """Opens the loaders anew, with other arguments."""
        self.loader_kwargs = dict(loader_kwargs)
        loaders = [
            self._open_loader(
                shard_id=replica,
                num_shards=self._ranks.num_replicas,
                device_index=index,
                **self.loader_kwargs,
            )
            for index, replica in enumerate(self._ranks.local_replicas)
        ]
        self.loader = loaders[0]
        self.saveable = self.loader.saveable
        self._iterators = [_iterate(loader, i) for i, loader in enumerate(loaders)]
        self.iterators: Sequence[tf.data.Iterator] = self._iterators if self.saveable else ()

    def begin_epoch(self, epoch: int, loader_kwargs: Mapping[str, Any]) -> None:
        """Opens the loaders anew where they cannot go on, or where the epoch wants more than another seed."""
        old = self.loader_kwargs
        changed = {k: v for k, v in loader_kwargs.items() if k != "seed" and v != old.get(k)}
        if changed:
            log(f"from epoch {epoch} on: {', '.join(f'{name}={value}' for name, value in changed.items())}")
        if changed or not self.saveable:
            self.open(loader_kwargs)

    def skip(self, steps: int) -> None:
        """Reads and drops so many batches."""
        for _ in range(steps):
            for iterator in self._iterators:
                next(iterator)

    def __next__(self) -> tuple[Any, dict[str, Any]]:
        """(images, targets), one batch for each local replica.

        Raises:
            tf.errors.OpError: the loader stopped, for example at a damaged image.
        """
        batches = [next(iterator) for iterator in self._iterators]
        if self.loader.pipeline_type == "dali_gpu":
            batches = [_without_int32(batch) for batch in batches]
        return self._ranks.feed(batches)


def _iterate(loader: BaseLoader, device_index: int) -> tf.data.Iterator:
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
    checkpoints: Checkpoints,
    ranks: Ranks,
    open_loader: OpenLoader,
    loader_kwargs: Callable[[int], Mapping[str, Any]],
    *,
    steps_per_epoch: int,
) -> InputFeed:
    """Continues where the run stopped, or starts it. Returns the data at the place that is next.

    Where the run is not quite the one that was saved (another --freeze, other ranks under --elastic), it
    continues from the last whole epoch.

    Args:
        checkpoints: of the run, with the state of a new run.
        ranks: of the run.
        open_loader: see InputFeed.
        loader_kwargs: epochs done -> arguments of the loaders that are opened after them.
        steps_per_epoch: of this session.

    Raises:
        UserError: there are checkpoints, and none can be used.
    """
    found = checkpoints.find()
    if found and found["step_in_epoch"] and checkpoints.changed():
        found = checkpoints.find(boundary=True)
    if found is None:
        feed = InputFeed(ranks, open_loader, checkpoints.state["loader"])
        checkpoints.iterators = feed.iterators
        return feed
    changed = checkpoints.changed()
    resharded = not {"num_replicas", "num_ranks"}.isdisjoint(changed)
    feed = InputFeed(ranks, open_loader, loader_kwargs(found["epoch"]) if resharded else found["loader"])
    checkpoints.iterators = () if resharded else feed.iterators
    checkpoints.restore()
    checkpoints.iterators = feed.iterators
    state = checkpoints.state
    if resharded:
        state["step"] = state["epoch"] * steps_per_epoch
        state["loader"] = feed.loader_kwargs
        checkpoints.set_updates(state["step"])
    if not feed.saveable:
        feed.skip(state["step_in_epoch"])
    since = f"{state['step_in_epoch']} steps into epoch {state['epoch'] + 1}"
    place = since if state["step_in_epoch"] else f"after epoch {state['epoch']}"
    log(f"resumed {place} (step {state['step']})")
    if changed:
        log(f"  with another {', '.join(changed)}: from a whole epoch, and not as if it had never stopped")
    return feed
