"""What comes before the loop of train.py: the process, the data, its loaders, the initial weights."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import keras

from common import devices, loader, progress
from common.args import Args
from common.distributed import ranks as distributed
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.evaluation import coco_metrics
from common.labels import LabelMap
from common.loader import BaseLoader
from common.progress import log
from common.sources import Source
from common.training import model_metadata
from common.training.fine_tuning import Report, freeze

if TYPE_CHECKING:
    from common.training.run import Run


def start_process(a: Args) -> Ranks:
    """Joins this process to its run. Call it before TensorFlow does anything else.

    Raises:
        UserError: --output_dir is missing; or see distributed.start.
    """
    if not a.output_dir:
        raise UserError("--output_dir is missing: name a directory for checkpoints and results")
    devices.reproducible()
    ranks = distributed.start(a.strategy, a.compression)
    progress.be_quiet(ranks.rank > 0)
    keras.utils.set_random_seed(a.seed)
    keras.mixed_precision.set_global_policy(a.precision)
    return ranks


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
    open_checked: Callable[..., tuple[Source, Source | None]],
    *,
    max_instances: int,
    synthetic_classes: int,
) -> Data:
    """Opens and checks the data; one rank of each host first, so that the others find its caches.

    Args:
        a: the flags.
        ranks: of the run.
        open_checked: open_data.open_checked, the data check.
        max_instances: boxes of an image that are kept.
        synthetic_classes: number of classes of synthetic data.

    Raises:
        UserError: on every rank, if any rank cannot use its flags or data; it names every bad file.
    """
    train_set, eval_set, label_map = None, None, LabelMap.numbered(a.num_classes or synthetic_classes)
    with ranks.raise_on_any_rank():
        coco_metrics.check_backend(a.coco_backend)
        loader.check_dali_device(a.dali_device_id, a.pipeline_type, a.strategy)
        if a.pipeline_type != "synthetic":
            train_set, eval_set = ranks.first_on_host(
                lambda: open_checked(a, num_replicas=ranks.num_replicas, max_instances=max_instances)
            )
            label_map = train_set.label_map
        num_classes = a.num_classes or label_map.num_classes
        if num_classes < label_map.num_classes:
            raise UserError(
                f"--num_classes={num_classes}: the data have {label_map.num_classes} classes; leave the "
                "flag out"
            )
    return Data(train_set, eval_set, label_map, num_classes)


def set_initial_weights(
    a: Args, run: "Run", model: keras.Model, init_from: Callable[[], Report]
) -> Report | None:
    """Loads --init_from on rank 0 of a new run, whose weights `run.start` broadcasts, and freezes --freeze.

    Args:
        a: the flags.
        run: its `resumed` and `metadata` are read.
        model: with all layers trainable.
        init_from: loads the file into the model.

    Returns:
        What was taken from the file; None where nothing was.

    Raises:
        UserError: on every rank: the file cannot be used, or the pattern matches no layer, or all.
    """
    report = None
    with run.ranks.raise_on_any_rank():
        if a.init_from and run.resumed:
            log(f"--init_from={a.init_from} is not read again: this run continues from its checkpoint")
        elif a.init_from and run.ranks.rank == 0:
            report = init_from()
            log(str(report))
            title = f"--init_from={a.init_from} was trained otherwise"
            model_metadata.explain_file(a.init_from, run.metadata, title)
        if a.freeze:
            log(freeze(model, a.freeze))
    return report


def open_training_loader(
    classes: Mapping[str, type[BaseLoader]],
    a: Args,
    config: Any,
    source: Source | None,
    num_classes: int,
    ranks: Ranks,
    shard_id: int,
    num_shards: int,
    device_index: int,
    **of_epoch: Any,
) -> BaseLoader:
    """The training loader of one shard, for the replica `device_index` of this process.

    Args:
        classes, num_classes: as for loader.make_loader.
        a, config, source, ranks: of the run.
        shard_id, num_shards, device_index: which share of the data, and for which replica.
        of_epoch: the app's `epoch_kwargs`.
    """
    return loader.make_loader(
        classes,
        **_options(a, config, source, ranks, device_index),
        training=True,
        shard_id=shard_id,
        num_shards=num_shards,
        count_lost=True,
        name_images=True,
        num_classes=num_classes,
        **of_epoch,
    )


def open_eval_loader(
    classes: Mapping[str, type[BaseLoader]], a: Args, config: Any, source: Source | None, ranks: Ranks
) -> BaseLoader:
    """The evaluation loader of this rank's images; arguments as for `open_training_loader`."""
    return loader.make_loader(
        classes,
        **_options(a, config, source, ranks, 0),
        training=False,
        shard_id=ranks.rank,
        num_shards=ranks.world_size,
        with_targets=False,
    )


def _options(a: Args, config: Any, source: Source | None, ranks: Ranks, device_index: int) -> dict[str, Any]:
    return {
        "pipeline_type": a.pipeline_type,
        "source": source,
        "config": config,
        "batch_size": a.batch_size,
        "device_id": ranks.gpu_number(device_index),
        "dali_device_id": a.dali_device_id,
        "num_threads": a.num_threads,
        "prefetch": a.prefetch,
    }
