"""The data of a run: opened and checked, then batches for the replicas of this process.

    data = open_data(a, ranks, open_datasets, max_instances=100, synthetic_classes=90)
    feed = InputFeed(ranks, open_loader, loader_kwargs)
    feed.resume(checkpoints, steps_per_epoch)
    images, targets = next(feed)  # from the place that a checkpoint holds

tf.train.Checkpoint can save the iterators of DALI on a CPU and of tf.data. It cannot save those of DALI on a
GPU: there every epoch opens its loaders anew, with another seed, and a run that was stopped within an epoch
reads the batches that it had trained on again and drops them. The result is as exact; it costs part of an
epoch's loading, and the images that do not fill an epoch's last batch.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from common.args import Args
from common.datasets import Source
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.evaluation import coco_metrics
from common.labels import LabelMap
from common.loader import BaseLoader, check_dali_device, make_loader, placement
from common.progress import log
from common.training.checkpoints import Checkpoints

LOADER_FLAGS = ("pipeline_type", "batch_size", "dali_device_id", "num_threads", "prefetch")


class Data(NamedTuple):
    """The data of a run.

    Attributes:
        train, evaluation: their sources; None where they are synthetic, or not given.
        label_map: the classes of the training data.
        num_classes: of the model: those, or more (--num_classes).
    """

    train: Source | None
    evaluation: Source | None
    label_map: LabelMap
    num_classes: int


def open_data(
    a: Args,
    ranks: Ranks,
    open_datasets: Callable[..., tuple[Source, Source | None]],
    *,
    max_instances: int,
    synthetic_classes: int,
) -> Data:
    """Opens and checks the data; one rank of each host first, so that the others find its caches.

    Args:
        a: the flags.
        ranks: of the run.
        open_datasets: datasets.open_datasets, the data check.
        max_instances: boxes of an image that are kept.
        synthetic_classes: number of classes of synthetic data.

    Raises:
        UserError: on every rank, if any rank cannot use its flags or data; it names every bad file.
    """
    train_set, eval_set, label_map = None, None, LabelMap.numbered(a.num_classes or synthetic_classes)
    with ranks.raise_on_any_rank():
        coco_metrics.check_backend(a.coco_backend)
        check_dali_device(a.dali_device_id, a.pipeline_type, a.strategy)
        if a.pipeline_type != "synthetic":
            train_set, eval_set = ranks.first_on_host(
                lambda: open_datasets(a, num_replicas=ranks.num_replicas, max_instances=max_instances)
            )
            label_map = train_set.label_map
        num_classes = a.num_classes or label_map.num_classes
        if num_classes < label_map.num_classes:
            raise UserError(
                f"--num_classes={num_classes}: the data have {label_map.num_classes} classes; leave the "
                "flag out"
            )
    return Data(train_set, eval_set, label_map, num_classes)


def open_training_loader(
    classes: Mapping[str, type[BaseLoader]],
    a: Args,
    config: Any,
    source: Source | None,
    num_classes: int,
    ranks: Ranks,
    device_index: int,
    **of_epoch: Any,
) -> BaseLoader:
    """The training loader of the replica `device_index` of this process, whose number is its shard.

    Args:
        classes, num_classes: as for make_loader.
        a, config, source, ranks: of the run.
        of_epoch: the app's `epoch_kwargs`.
    """
    return make_loader(
        classes,
        **_options(a, config, source, ranks, device_index),
        training=True,
        shard_id=ranks.local_replicas[device_index],
        num_shards=ranks.num_replicas,
        count_lost=True,
        name_images=True,
        num_classes=num_classes,
        **of_epoch,
    )


def open_eval_loader(
    classes: Mapping[str, type[BaseLoader]], a: Args, config: Any, source: Source | None, ranks: Ranks
) -> BaseLoader:
    """The evaluation loader of this rank's images; arguments as for `open_training_loader`."""
    return make_loader(
        classes,
        **_options(a, config, source, ranks, 0),
        training=False,
        shard_id=ranks.rank,
        num_shards=ranks.world_size,
        with_targets=False,
    )


def _options(a: Args, config: Any, source: Source | None, ranks: Ranks, device_index: int) -> dict[str, Any]:
    options = {name: getattr(a, name) for name in LOADER_FLAGS}
    return options | {"source": source, "config": config, "device_id": ranks.gpu_number(device_index)}


class InputFeed:
    """One loader for each local replica; an iterator of (images, targets). `resume` opens the loaders.

    Args:
        ranks: of the run: the replicas are the shards.
        open_loader: (device index, **others) -> the training loader of a replica of this process.
        loader_kwargs: number of epochs done -> the other arguments of loaders that are opened then, as JSON
            can hold them: the seed, ...
    """

    def __init__(
        self,
        ranks: Ranks,
        open_loader: Callable[..., BaseLoader],
        loader_kwargs: Callable[[int], Mapping[str, Any]],
    ) -> None:
        self._ranks, self._open_loader, self._loader_kwargs = ranks, open_loader, loader_kwargs

    def resume(self, checkpoints: Checkpoints, steps_per_epoch: int) -> None:
        """Restores the newest checkpoint, if there is one, and opens the data at the place that is next.

        Args:
            checkpoints: of the run, with the state of a new run.
            steps_per_epoch: of this session.

        Raises:
            UserError: there are checkpoints, and none can be used.
        """
        state, found, changed = checkpoints.state, checkpoints.find(), checkpoints.changed()
        resharded = not {"num_replicas", "num_ranks"}.isdisjoint(changed)  # other ranks under --elastic
        done = found["epoch"] if found else 0
        self._open(checkpoints, found["loader"] if found and not resharded else self._loader_kwargs(done))
        if not found:
            return
        loader = state["loader"]
        checkpoints.restore(with_data=not resharded)
        if resharded:
            state.update(step=state["epoch"] * steps_per_epoch, loader=loader)
            checkpoints.set_updates(state["step"])
        if not checkpoints.iterators:
            for _ in range(state["step_in_epoch"]):
                next(self)
        within = f" and {state['step_in_epoch']} steps" if state["step_in_epoch"] else ""
        log(f"resumed after epoch {state['epoch']}{within} (step {state['step']})")
        if changed:
            log(f"  with another {', '.join(changed)}: from a whole epoch, not as if it had never stopped")

    def begin_epoch(self, checkpoints: Checkpoints) -> None:
        """Opens the loaders anew where they cannot go on, or where the epoch wants more than another seed."""
        old, new = checkpoints.state["loader"], self._loader_kwargs(checkpoints.state["epoch"])
        changed = [f"{name}={new[name]}" for name in new if name != "seed" and new[name] != old.get(name)]
        if changed:
            log(f"from epoch {checkpoints.state['epoch'] + 1} on: {', '.join(changed)}")
        if changed or not checkpoints.iterators:
            self._open(checkpoints, new)

    def __next__(self) -> tuple[Any, dict[str, Any]]:
        """(images, targets), one batch for each local replica.

        Raises:
            tf.errors.OpError: the loader stopped, for example at a damaged image.
        """
        batches = [next(iterator) for iterator in self._iterators]
        if self._on_gpu:
            batches = [_without_int32(batch) for batch in batches]
        return self._ranks.feed(batches)

    def _open(self, checkpoints: Checkpoints, loader_kwargs: Mapping[str, Any]) -> None:
        """Opens the loaders, and notes in the checkpoints what will be needed to go on."""
        self._iterators = []
        for index in range(len(self._ranks.local_replicas)):
            loader = self._open_loader(index, **loader_kwargs)
            with placement(loader, index):
                self._iterators.append(iter(loader.dataset()))
        self._on_gpu = loader.pipeline_type == "dali_gpu"
        checkpoints.state["loader"] = dict(loader_kwargs)
        checkpoints.iterators = self._iterators if loader.saveable else ()


def _without_int32(batch: tuple[Any, dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """The batch with int64 in place of int32, on the same device.

    TensorFlow takes the int32 arguments of a compiled function to the host, wherever they are, and back
    (tensorflow/core/common_runtime/eager/execute.cc GetDeviceForInput); an eager cast works where they are.
    """

    def without(x: tf.Tensor) -> tf.Tensor:
        with tf.device(x.device):  # else it is the first GPU's work
            return tf.cast(x, tf.int64) if x.dtype == tf.int32 else x

    return tf.nest.map_structure(without, batch)
