"""Feeds batches to the replicas of this process.

    feed = InputFeed(ranks, open_loader, epoch_options, state, steps_per_epoch, num_epochs)
    checkpoints.restore(state, feed.iterators)
    images, targets = next(feed)  # the batch after the last one before the stop

tf.train.Checkpoint saves the positions of iterators on a CPU, but not those of DALI on a GPU. So on a GPU new
loaders with another seed are opened at the first epoch after a pass over the data, and a resumed run reads
the batches since then again and drops them. A thread fetches the next two batches while the device trains,
and opens these loaders.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from common.data.check import loader_errors
from common.data.loader import BaseLoader, Batch
from common.distributed.ranks import Ranks
from common.progress import log
from common.training.checkpoints import RunState

# On a GPU, DALI copies a batch to TensorFlow's memory after the step that runs. So a batch that is fetched
# during this step arrives when the step ends, and only the batch before it is ready in time.
BATCHES_AHEAD = 2


class InputFeed:
    """Iterates over (images, targets), from one loader per local replica. Opens them at the place in `state`.

    All ranks make their feeds together.

    Args:
        ranks: the ranks of the run; each replica reads one shard.
        open_loader: returns the training loader of a replica. It gets device_index and the `epoch_options`.
        epoch_options: called with the number of epochs done. Returns the options of the loaders for the next
            epoch, such as their seed, as JSON values.
        state: the feed changes its `loader_options` and `batches_read`.
        steps_per_epoch: batches per epoch and replica.
        num_epochs: number of epochs of the run.

    Attributes:
        steps_per_epoch: the argument.
        iterators: the iterators whose positions a checkpoint saves; [] on a GPU.
    """

    def __init__(
        self,
        ranks: Ranks,
        open_loader: Callable[..., BaseLoader],
        epoch_options: Callable[[int], Mapping[str, Any]],
        state: RunState,
        steps_per_epoch: int,
        num_epochs: int,
    ) -> None:
        self._ranks, self._open_loader, self._epoch_options = ranks, open_loader, epoch_options
        self._state, self.steps_per_epoch, self._num_epochs = state, steps_per_epoch, num_epochs
        self._loader = open_loader()
        self._thread = ThreadPoolExecutor(1, "input_feed")
        self._ahead: deque[Future[list[Batch]]] = deque()  # the next batches, on a GPU
        between_epochs = state.step_in_epoch == 0
        if not state.loader_options or (between_epochs and self._pass_is_over(state.batches_read)):
            state.loader_options, state.batches_read = dict(epoch_options(state.epoch)), 0
        # The first rank of a host writes the file that DALI reads.
        ranks.first_on_host(lambda: self._open(state.loader_options))
        if not self._loader.saveable:
            with ranks.raise_on_any_rank():
                for _ in range(state.batches_read):
                    self._fetch()

    @property
    def iterators(self) -> list[Iterator[Batch]]:
        return self._iterators if self._loader.saveable else []

    def begin_epoch(self) -> None:
        """Opens new loaders if the old ones cannot continue, or if an option changes."""
        state = self._state
        options, changed = self._next_options(state.epoch, state.batches_read)
        if changed:
            log(f"from epoch {state.epoch + 1} on, the loaders use {', '.join(changed)}")
        if options:
            state.loader_options, state.batches_read = options, 0
            if not self._ahead:  # otherwise the thread has opened the loaders
                with self._ranks.raise_on_any_rank():
                    self._open(options)

    def __next__(self) -> Batch:
        """Returns (images, targets), one batch for each local replica.

        Raises:
            UserError: the loader stopped, for example at a damaged image.
        """
        state = self._state
        batches = self._ahead.popleft().result() if self._ahead else self._fetch()
        state.batches_read += 1
        # Never more than the first batch of the next epoch, whose end decides about the loaders after it.
        while not self._loader.saveable and len(self._ahead) < min(BATCHES_AHEAD, self.steps_per_epoch):
            last = state.batches_read + len(self._ahead)  # number of the last batch that is fetched
            epoch_ends = last % self.steps_per_epoch == 0
            options = self._next_options(state.epoch + 1, last)[0] if epoch_ends else {}
            self._ahead.append(self._thread.submit(self._fetch, options))
        return self._ranks.feed(batches)

    def check_unchanged(self) -> None:
        """Raises UserError on all ranks if the training data are in a bucket and have changed."""
        source = self._loader.source
        if source and source.objects:
            with self._ranks.raise_on_any_rank():
                if self._ranks.rank == 0:
                    source.check_unchanged()

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _open(self, options: Mapping[str, Any]) -> None:
        self._iterators: list[Iterator[Batch]] = []  # frees the old loaders first
        for index in range(len(self._ranks.local_replicas)):
            self._iterators.append(self._open_loader(device_index=index, **options).iterator())

    def _next_options(self, epochs_done: int, batches_read: int) -> tuple[dict[str, Any], list[str]]:
        """Returns the options of an epoch's new loaders, {} to keep the open ones, and what changes."""
        old, new = self._state.loader_options, dict(self._epoch_options(epochs_done))
        changed = [f"{name}={new[name]}" for name in new if name != "seed" and new[name] != old.get(name)]
        is_needed = (changed or self._pass_is_over(batches_read)) and epochs_done != self._num_epochs
        return new if is_needed else {}, changed

    def _pass_is_over(self, batches_read: int) -> bool:
        """Whether loaders that cannot be saved have read all of their data."""
        return not self._loader.saveable and batches_read >= self._loader.steps_per_epoch

    def _fetch(self, new_options: Mapping[str, Any] | None = None) -> list[Batch]:
        if new_options:
            self._open(new_options)
        try:
            return [next(iterator) for iterator in self._iterators]
        except tf.errors.OpError as error:
            raise loader_errors.explain(error, self._loader.source, self._loader.pipeline_type) from error
