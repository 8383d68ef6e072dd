"""Opens and checks the data of a run, and feeds batches to the replicas of this process.

    data = open_splits(a, ranks, open_datasets, max_instances=100, synthetic_classes=90)
    feed = InputFeed(ranks, open_loader, loader_kwargs, steps_per_epoch)
    feed.resume(checkpoints)
    images, targets = next(feed)  # continues at the position in the checkpoint

tf.train.Checkpoint cannot save iterators of DALI on a GPU. So on a GPU new loaders with another seed are
opened at the first epoch after a pass over the data, and a resumed run reads the batches since then again and
drops them. A thread fetches the next batch while the device trains, and opens these loaders.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from common.args import DECODER_FLAGS, Args, default_threads
from common.dali_ops import check_shards
from common.data.datasets import Source
from common.data.labels import LabelMap
from common.data.loader import DALI_GRAPH, TF_GRAPH, BaseLoader, Batch, make_loader
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.evaluation import coco_metrics
from common.progress import log
from common.training.checkpoints import Checkpoints

LOADER_FLAGS = ("pipeline_type", "batch_size", "prefetch", *DECODER_FLAGS)


class Data(NamedTuple):
    """The data of a run.

    Attributes:
        train, evaluation: the sources of both data sets; None if the data are synthetic or not given.
        label_map: the classes of the training data.
        num_classes: number of classes of the model; --num_classes may be larger than the label map.
    """

    train: Source | None
    evaluation: Source | None
    label_map: LabelMap
    num_classes: int


def open_splits(
    a: Args,
    ranks: Ranks,
    open_datasets: Callable[..., tuple[Source, Source | None]],
    *,
    max_instances: int,
    synthetic_classes: int,
) -> Data:
    """Opens and checks the data. One rank per host goes first, so that the others can use its caches.

    Args:
        open_datasets: `open_datasets` of common/data/check/datasets.py.
        max_instances: largest number of boxes per image; other boxes are dropped.
        synthetic_classes: number of classes of synthetic data.

    Raises:
        UserError: on every rank, if any rank cannot use its flags or data.
    """
    train_set: Source | None = None
    eval_set: Source | None = None
    label_map = LabelMap.numbered(a.num_classes or synthetic_classes)
    with ranks.raise_on_any_rank():
        coco_metrics.check_backend(a.coco_backend)
        if a.pipeline_type != "synthetic":
            train_set, eval_set = ranks.first_on_host(
                lambda: open_datasets(a, num_replicas=ranks.num_replicas, max_instances=max_instances)
            )
            label_map = train_set.label_map
            if eval_set:
                check_shards(eval_set.size, ranks.world_size)  # fails now, not after the first epoch
        num_classes = a.num_classes or label_map.num_classes
        if num_classes < label_map.num_classes:
            raise UserError(f"omit --num_classes={num_classes}: data have {label_map.num_classes} classes")
    return Data(train_set, eval_set, label_map, num_classes)


def open_loader(
    classes: Mapping[str, type[BaseLoader]],
    a: Args,
    ranks: Ranks,
    config: Any,
    data: Data,
    *,
    training: bool,
    device_index: int = 0,
    **of_epoch: Any,
) -> BaseLoader:
    """Opens the training loader of one replica of this process, or the evaluation loader of this rank.

    Args:
        classes: the loader classes of the app, see make_loader.
        training: whether to open the training loader or the evaluation loader.
        device_index: index in `ranks.local_replicas`.
        of_epoch: further arguments of the loader, which the app's `epoch_kwargs` returns for an epoch.
    """
    if training:
        shard_id, num_shards = ranks.local_replicas[device_index], ranks.num_replicas
        options: dict[str, Any] = {"source": data.train, "count_lost": True, "name_images": True}
    else:
        shard_id, num_shards = ranks.rank, ranks.world_size
        options = {"source": data.evaluation, "with_targets": False}
    return make_loader(
        classes,
        config=config,
        training=training,
        shard_id=shard_id,
        num_shards=num_shards,
        num_classes=data.num_classes,
        device_id=ranks.gpu_number(device_index),
        num_threads=a.num_threads or default_threads(ranks.local_size * len(ranks.local_replicas)),
        **{name: getattr(a, name) for name in LOADER_FLAGS},
        **options,
        **of_epoch,
    )


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
        if checkpoints.resharded:  # --elastic: the number of ranks, and so the number of steps, has changed
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
