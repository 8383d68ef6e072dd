"""Feeds batches to the replicas of this process.

    feed = InputFeed(ranks, open_loader, loader_kwargs, steps_per_epoch)
    feed.resume(checkpoints)
    images, targets = next(feed)  # continues at the position in the checkpoint

tf.train.Checkpoint cannot save iterators of DALI on a GPU. So on a GPU new loaders with another seed are
opened at the first epoch after a pass over the data, and a resumed run reads the batches since then again and
drops them. A thread fetches the next batch while the device trains, and opens these loaders.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from common.data.loader import DALI_GRAPH, TF_GRAPH, BaseLoader, Batch
from common.distributed.ranks import Ranks
from common.progress import log
from common.training.checkpoints import Checkpoints


class InputFeed:
    """Iterates over (images, targets), from one loader per local replica. `resume` opens the loaders.

    Args:
        ranks: the ranks of the run; each replica reads one shard.
        open_loader: opens the training loader of a replica. It gets device_index and the `loader_kwargs`.
        loader_kwargs: called with the number of epochs done. Returns further arguments of the loaders for the
            next epoch, such as the seed, as JSON values.
        steps_per_epoch: batches per epoch and replica. If None, an epoch is one pass over the data.

    Attributes:
        size: number of images in all shards together.
        pipeline_type: the loaders' pipeline type.
        steps_per_epoch: the argument or, if it is None, the number of batches for one pass over the data.
        identity: values that must be the same when the run resumes.
        num_epochs: number of epochs of the run, or None if it is not known.
    """

    def __init__(
        self,
        ranks: Ranks,
        open_loader: Callable[..., BaseLoader],
        loader_kwargs: Callable[[int], Mapping[str, Any]],
        steps_per_epoch: int | None = None,
    ) -> None:
        self._ranks, self._open_loader, self._loader_kwargs = ranks, open_loader, loader_kwargs
        loader = open_loader(**loader_kwargs(0))
        self.size, self.pipeline_type = loader.size, loader.pipeline_type
        self.steps_per_epoch = steps_per_epoch or loader.steps_per_epoch
        self.identity = {"pipeline_type": self.pipeline_type, "steps_per_epoch": self.steps_per_epoch}
        if self.pipeline_type.startswith("dali"):
            self.identity["dali_graph"] = DALI_GRAPH
        if self.pipeline_type == "tensorflow":
            self.identity["tf_graph"] = TF_GRAPH
        self._saveable, self._pass = loader.saveable, loader.steps_per_epoch
        self._taken = 0  # number of batches from the open loaders
        self.num_epochs: int | None = None
        self._thread = ThreadPoolExecutor(1, "input_feed")
        self._ahead: Future[list[Batch]] | None = None

    def resume(self, checkpoints: Checkpoints) -> None:
        """Restores the newest checkpoint, if there is one, and opens the data at the next step's batch.

        Raises:
            UserError: there are checkpoints, but none can be used.
        """
        self._checkpoints, state, changed = checkpoints, checkpoints.state, checkpoints.find()
        if checkpoints.resharded:  # the number of ranks, and so of steps per epoch, has changed
            state["step"] = state["epoch"] * self.steps_per_epoch
        # Older versions did not save `taken`, and opened new loaders at every epoch.
        taken = state.get("taken", state["step_in_epoch"])
        continues = self._saveable or state["step_in_epoch"] or 0 < taken < self._pass
        if changed is None or checkpoints.data_anew or not continues:
            state["loader"], taken = dict(self._loader_kwargs(state["epoch"])), 0
        self._ranks.first_on_host(self._open)  # the first rank writes the file that DALI reads
        if changed is None:
            return
        checkpoints.restore()
        if not self._saveable:
            for _ in range(taken):
                self._fetch()
            self._taken = taken
        within = f" and {state['step_in_epoch']} steps" if state["step_in_epoch"] else ""
        log(f"resumed after epoch {state['epoch']}{within} (step {state['step']})")
        if changed:
            log(f"  changed: {', '.join(changed)}; the run continues from an epoch's end, results may differ")

    def begin_epoch(self) -> None:
        """Opens new loaders if the old ones cannot continue, or if an argument changes."""
        state = self._checkpoints.state
        new, changed = self._next_loader(state["epoch"])
        if changed:
            log(f"from epoch {state['epoch'] + 1} on, the loaders use {', '.join(changed)}")
        if new:
            state["loader"] = new
            self._open()

    def __next__(self) -> Batch:
        """Returns (images, targets), one batch for each local replica.

        Raises:
            tf.errors.OpError: the loader stopped, for example at a damaged image.
        """
        batches = self._ahead.result() if self._ahead else self._fetch()
        self._taken += 1
        if not self._saveable:
            state = self._checkpoints.state
            state["taken"], epoch_ends = self._taken, self._taken % self.steps_per_epoch == 0
            new = self._next_loader(state["epoch"] + 1)[0] if epoch_ends else {}
            self._ahead = self._thread.submit(self._fetch, new)
        return self._ranks.feed(batches)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _open(self) -> None:
        kwargs, self._taken = self._checkpoints.state["loader"], 0
        if self._ahead is None:  # otherwise the thread opens the loaders
            self._open_loaders(kwargs)
        self._checkpoints.iterators = self._iterators if self._saveable else ()

    def _open_loaders(self, kwargs: Mapping[str, Any]) -> None:
        replicas, self._iterators = range(len(self._ranks.local_replicas)), []  # frees the old loaders first
        self._iterators = [self._open_loader(device_index=i, **kwargs).iterator() for i in replicas]

    def _next_loader(self, epochs_done: int) -> tuple[dict[str, Any], list[str]]:
        """Returns the arguments of an epoch's new loaders, {} to keep the open ones, and what changes."""
        old, new = self._checkpoints.state["loader"], dict(self._loader_kwargs(epochs_done))
        changed = [f"{name}={new[name]}" for name in new if name != "seed" and new[name] != old.get(name)]
        is_over = not self._saveable and self._taken >= self._pass
        return new if (changed or is_over) and epochs_done != self.num_epochs else {}, changed

    def _fetch(self, new: Mapping[str, Any] | None = None) -> list[Batch]:
        if new:  # the arguments of new loaders
            self._open_loaders(new)
        return [next(iterator) for iterator in self._iterators]
