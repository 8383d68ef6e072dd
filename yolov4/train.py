r"""Trains YOLOv4 (arXiv 2004.10934): DALI feeds, Keras trains, pycocotools judges.

    python yolov4/train.py --model_name=yolov4 \
        --train_images=coco/train2017 --train_annotations=coco/annotations/instances_train2017.json \
        --eval_images=coco/val2017 --eval_annotations=coco/annotations/instances_val2017.json \
        --output_dir=runs/yolov4

The same command on the same directory resumes, from any step. Recipes are flag files:
--flagfile=yolov4/flags/yolov4_coco.txt. Many GPUs (docs/many_gpus.md): horovodrun -np 8 python
yolov4/train.py --strategy=horovod ...
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from absl import flags

from common import args as shared_flags
from common import devices, errors, progress
from common import hparams as hparams_lib
from common.datacheck import damaged_images
from common.datacheck.images import ImagePolicy
from common.datacheck.open_data import DataFlags, check_sizes, log_source, open_splits
from common.distributed import elastic as elastic_lib
from common.distributed import ranks as distributed
from common.evaluation import coco_backends, coco_metrics
from common.evaluation.evaluate import evaluate, write_evaluation
from common.labels import LabelMap
from common.loading import Loader, check_dali_device
from common.progress import Bar, log
from common.training import early_stopping as patience_lib
from common.training import model_metadata, step_guard
from common.training.checkpoints import Checkpoints, try_save
from common.training.ema import AveragedWeights
from common.training.freezing import freeze as freeze_layers
from common.training.input_feed import resume, steps_per_second
from common.training.optimizers import steps_taken
from common.training.run_directory import RunDirectory
from common.training.train_log import RunLog, Totals
from common.training.watchdog import Watchdog
from tools import dry_run, replay_step
from yolov4 import init_from as init_from_lib
from yolov4 import losses, show_batch
from yolov4.config import DETECTION_FIELDS, MODEL_NAMES, YOLOv4Config, get_config
from yolov4.loaders import make_loader
from yolov4.model import build_model
from yolov4.model_metadata import make_metadata
from yolov4.optimization import make_optimizer, make_schedule
from yolov4.predict import make_detect

SLOW = 1800.0  # seconds that compiling the step, or scoring an evaluation, may take at most
SHOW_EVERY = 10  # steps between two looks at the loss: looking waits for the device
SHOWN = ("loss", "box_loss", "objectness_loss", "class_loss", "l2_loss")


def define_flags(fv: flags.FlagValues) -> None:
    shared_flags.define_model_flags(fv, MODEL_NAMES, default="yolov4")
    shared_flags.define_data_flags(fv, ("train", "eval"))
    shared_flags.define_evaluation_flags(fv)
    shared_flags.define_dali_device_flag(fv)
    shared_flags.define_run_flags(fv)
    shared_flags.define_strategy_flags(fv)
    flags.DEFINE_bool(
        "letterbox",
        None,
        "Keep the aspect ratio of images and pad; off: stretch them. Default: the recipe's, which is off.",
        flag_values=fv,
    )
    flags.DEFINE_integer(
        "close_mosaic",
        None,
        "Last epochs without mosaic, MixUp and CutMix. Default: the recipe's.",
        lower_bound=0,
        flag_values=fv,
    )


def train(
    *,
    # the network
    model_name: str = "yolov4",
    image_size: str | None = None,
    num_classes: int | None = None,
    hparams: str | None = None,
    # the data
    input_type: str | None = None,
    train_images: str | None = None,
    train_annotations: str | None = None,
    train_file_pattern: str | None = None,
    eval_images: str | None = None,
    eval_annotations: str | None = None,
    eval_file_pattern: str | None = None,
    label_map: str | None = None,
    pipeline_type: str = "auto",
    dali_device_id: int | None = None,
    batch_size: int = 8,
    num_threads: int = 2,
    prefetch: int = 2,
    on_bad_image: str = "stop",
    max_megapixels: float = shared_flags.MAX_MEGAPIXELS,
    # the run
    output_dir: str | None = None,
    overwrite: bool = False,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
    learning_rate: float | None = None,
    precision: str = "float32",
    xla: bool = False,
    ema_decay: float | None = None,
    clip_norm: float | None = None,
    accumulate_steps: int = 0,
    init_from: str | None = None,
    freeze: str | None = None,
    eval_every: int = 1,
    patience: int = 0,
    coco_backend: str = "pycocotools",
    save_every: int = 1000,
    max_skipped_steps: int = 10,
    seed: int = 0,
    # this app's own
    letterbox: bool | None = None,
    close_mosaic: int | None = None,
    # many processes
    strategy: str = "none",
    compression: str = "none",
    step_timeout: float = 600.0,
    elastic: bool = False,
    on_epoch: Callable[[int], None] | None = None,
    epochs_behind: int = 0,
) -> dict | None:
    """Trains one model from the command line's values; see the flags of the same names.

    Args:
        on_epoch: called with the number of epochs done when their checkpoint is written; elastic.py's.
        epochs_behind: that the run is known to have; a directory that knows of fewer is not the run's.

    Returns:
        The metrics of the last evaluation (coco_metrics.evaluate), or None where no evaluation data were
        given.

    Raises:
        UserError: anything that the user gave and that cannot be used, before the first step wherever
            possible.
        StoppedError: a signal came, and everything is saved.
    """
    given = {k: v for k, v in locals().items() if k not in ("on_epoch", "epochs_behind")}
    devices.reproducible()
    devices.share_gpu_memory()
    ranks = distributed.start(strategy, compression)
    progress.be_quiet(ranks.rank > 0)
    devices.use_own_gpu(ranks)
    keras.utils.set_random_seed(seed)
    keras.mixed_precision.set_global_policy(precision)

    # --- Settings: the model's row in the table, then --hparams, then the flags of the same name --
    config = get_config(model_name)
    fields = [field.name for field in dataclasses.fields(config) if field.name != "model_name"]
    config = hparams_lib.override(config, hparams, only=fields)
    chosen = {
        "epochs": epochs,
        "learning_rate": learning_rate,
        "ema_decay": ema_decay,
        "clip_norm": clip_norm,
        "letterbox": letterbox,
        "close_mosaic": close_mosaic,
    }
    if image_size:
        chosen["image_size"] = hparams_lib.parse_image_size(image_size)
    config = hparams_lib.replace(config, {name: v for name, v in chosen.items() if v is not None})
    if not output_dir:
        raise errors.UserError("--output_dir is missing: name a directory for checkpoints and results")

    # --- Data -------------------------------------------------------------------------------------
    source, eval_source = None, None
    with ranks.raise_on_any_rank():
        coco_backends.check(coco_backend)
        check_dali_device(dali_device_id, pipeline_type, strategy)
        if pipeline_type == "synthetic":
            categories = LabelMap.numbered(num_classes or 80)
        else:
            source, eval_source = ranks.first_on_host(
                lambda: open_splits(
                    DataFlags(train_images, train_annotations, train_file_pattern),
                    DataFlags(eval_images, eval_annotations, eval_file_pattern),
                    input_type=input_type,
                    label_map=label_map,
                    policy=ImagePolicy(on_bad_image, max_megapixels),
                )
            )
            categories = source.label_map
            log_source("training", source)
            check_sizes(
                source,
                batch_size=batch_size,
                num_replicas=ranks.num_replicas,
                max_instances=config.max_instances,
            )
            if eval_source:
                log_source("evaluation", eval_source)
        num_classes = num_classes or categories.num_classes
        if num_classes < categories.num_classes:
            raise errors.UserError(
                f"--num_classes={num_classes}: the data have {categories.num_classes} classes; leave the "
                "flag out"
            )

    def open_loader(shard_id: int, num_shards: int, device_index: int, seed: int, mosaic: bool) -> Loader:
        return make_loader(
            pipeline_type,
            source=source,
            config=config,
            batch_size=batch_size,
            training=True,
            device_id=devices.gpu_number(ranks, device_index),
            dali_device_id=dali_device_id,
            shard_id=shard_id,
            num_shards=num_shards,
            num_threads=num_threads,
            prefetch=prefetch,
            seed=seed,
            count_lost=True,
            name_images=True,
            num_classes=num_classes,
            mosaic=mosaic,
        )

    mixes = bool(config.mosaic_prob or config.mixup_prob or config.cutmix_prob)
    if mixes and config.epochs <= config.close_mosaic:
        log(
            f"no mosaic, MixUp or CutMix at all: close_mosaic={config.close_mosaic} of {config.epochs} epochs"
        )

    def plan(epochs_done: int) -> dict:
        """How the loaders are opened that start after so many epochs."""
        mosaic = mixes and epochs_done < config.epochs - config.close_mosaic
        return {"seed": (seed + epochs_done) % (shared_flags.MAX_SEED + 1), "mosaic": mosaic}

    loader = open_loader(ranks.local_replicas[0], ranks.num_replicas, 0, **plan(0))
    steps_per_epoch = steps_per_epoch or loader.steps_per_epoch

    # --- The run directory: new, resumed, or refused. Rank 0's alone: hosts need not share a disk ----
    identity = {
        "app": "yolov4",
        "config": _lasting(config),
        "num_classes": num_classes,
        "label_map": categories.to_json(),
        "data": source.fingerprint if source else "synthetic",
        "pipeline_type": loader.pipeline_type,
        "batch_size": batch_size,
        "num_replicas": ranks.num_replicas,
        "num_ranks": ranks.world_size,
        "steps_per_epoch": steps_per_epoch,
        "accumulate_steps": accumulate_steps,
        "precision": precision,
        "freeze": freeze,
        "seed": seed,
    }
    run = None
    with ranks.raise_on_any_rank():
        distributed.check_agreement(ranks, identity)
        if ranks.rank == 0:
            may_change = ("freeze", *(("num_replicas", "num_ranks", "steps_per_epoch") if elastic else ()))
            run = RunDirectory(output_dir, identity=identity, overwrite=overwrite, may_change=may_change)
    resumed, changed = ranks.broadcast_object(run and (run.begun, run.changed))

    # --- Model, optimizer, state ------------------------------------------------------------------
    effective_batch = ranks.num_replicas * batch_size * max(accumulate_steps, 1)
    schedule = make_schedule(config, effective_batch, steps_per_epoch, max(accumulate_steps, 1))
    with ranks.scope():
        model = build_model(model_name, num_classes, config=config, any_size=config.multi_scale > 1)
        optimizer = make_optimizer(config, schedule, precision=precision, accumulate_steps=accumulate_steps)
        optimizer = ranks.wrap_optimizer(optimizer)
        optimizer.build(model.trainable_variables)  # of all that can train: --freeze may change on the way
    log(
        f"{model_name} at {config.image_size[0]}x{config.image_size[1]}, {num_classes} classes, "
        f"{model.count_params():,} parameters; {loader.size} images by {loader.pipeline_type}"
    )
    log(
        f"learning rate {schedule.peak:.6g} = {config.learning_rate:g} x {effective_batch} images an update "
        f"/ {config.reference_batch}{ranks.describe()}"
    )
    metadata = make_metadata(config, categories, num_classes, source, eval_source, given)
    directory, origin = None, None
    with ranks.raise_on_any_rank():
        if init_from and resumed:
            log(f"--init_from={init_from} is not read again: this run goes on from its own checkpoint")
        elif init_from and ranks.rank == 0:
            origin = init_from_lib.init_from(model, categories, init_from, config)
            log(str(origin))
            model_metadata.explain_file(init_from, metadata, f"--init_from={init_from} was trained otherwise")
        if freeze:
            log(freeze_layers(model, freeze))
        if run:
            directory = run.claim()  # nothing was written before this line; the user can no longer be wrong
        if origin:
            try_save(origin.save, directory / "init_from.txt")
    ranks.broadcast([variable.value for variable in [*model.weights, *optimizer.variables]])
    distributed.seed_per_rank(model, ranks.rank)
    with ranks.scope():
        averaged = AveragedWeights(model, config.ema_decay)
    saved = Checkpoints(
        directory,
        ranks=ranks,
        model=model,
        optimizer=optimizer,
        averaged=averaged,
        state={"epoch": 0, "step": 0, "step_in_epoch": 0, "totals": {}, "loader": plan(0)},
        metadata=metadata | {"identity": identity, "flags": given},
    )
    feed = resume(saved, ranks, open_loader, plan, steps_per_epoch=steps_per_epoch)
    state = saved.state
    if elastic and state["step"] == 0:
        saved.save()  # where to go back to when a host is lost in the first epoch
    if state["epoch"] < epochs_behind:
        raise errors.UserError(
            f"--output_dir={output_dir} has {state['epoch']} of the {epochs_behind} epochs that were trained:"
            " with --elastic it must lie where all hosts see it"
        )
    if run:
        try_save(shared_flags.write_flagfile, directory / "flags.txt", given)
        train_log = RunLog(directory, done_epochs=state["epoch"])

    train_step = make_train_step(ranks, model, config, optimizer, averaged, precision=precision, xla=xla)

    # --- The loop ---------------------------------------------------------------------------------
    def save() -> None:
        guard.flush()
        watchdog.beat("saving", epoch=epoch, step=state["step"])
        with ranks.raise_on_any_rank():
            step_guard.check_weights(model, state["step"])
        state["totals"] = totals.to_json()
        saved.save()

    metrics = None
    epochs = range(state["epoch"] + 1, config.epochs + 1)
    if patience_lib.is_over(state, patience):
        log(f"{output_dir} {patience_lib.describe(state, patience)}: nothing left to train")
        epochs = range(0)
    elif not epochs:
        log(f"{output_dir} has its {state['epoch']} epochs: nothing left to train")
    if not epochs:
        metrics = coco_metrics.read_metrics(pathlib.Path(output_dir, "metrics.json"))
    eval_loader, detect, compiled = None, make_detect(model, config), False
    guard = step_guard.StepGuard(
        ranks,
        limit=max_skipped_steps,
        save_batch=lambda *batch: replay_step.save_batch(
            ranks, directory, model, metadata | {"precision": precision, "freeze": freeze}, *batch
        ),
    )
    with (
        step_guard.StopSignals() as signals,
        Watchdog(ranks, step_timeout=step_timeout, on_loss="report" if on_epoch else "exit") as watchdog,
    ):
        for epoch in epochs:
            planned = plan(epoch - 1)
            mixing_changes = planned["mosaic"] != feed.plan["mosaic"]
            if (mixing_changes or not feed.saveable) and state["step_in_epoch"] == 0:
                if mixing_changes:
                    word = "with" if planned["mosaic"] else "without"
                    log(f"from epoch {epoch} on {word} mosaic, MixUp and CutMix")
                feed.open(planned)
                state["loader"], saved.iterators = feed.plan, feed.places
            bar = Bar(f"epoch {epoch}/{config.epochs}", steps_per_epoch, done=state["step_in_epoch"])
            totals = Totals(state["totals"])
            shown: dict[str, float] = {}
            start, first = None, 0
            while state["step_in_epoch"] < steps_per_epoch:
                watchdog.beat("training", epoch=epoch, step=state["step"])
                try:
                    images, targets = next(feed)
                except tf.errors.OpError as error:
                    raise damaged_images.explain(error, source, loader.pipeline_type) from error
                if state["step"] == 0 and run:
                    batch = ranks.first(images), ranks.first(targets)
                    path = directory / "first_batch.png"
                    try_save(lambda: log(show_batch.report(*batch, config, categories, path)))  # noqa: B023
                # The first step compiles, which takes as long as it takes.
                with contextlib.nullcontext() if compiled else watchdog.allow(SLOW):
                    result = train_step(images, targets, signals.asked)
                compiled = True
                state["step"] += 1
                state["step_in_epoch"] += 1
                totals.add(result.values, result.finite)
                guard.check(state["step"], result, images, targets)
                if start is None:  # the first step compiles: it would tell nothing about speed
                    start, first = time.monotonic(), state["step_in_epoch"]
                if state["step_in_epoch"] % SHOW_EVERY == 0 or state["step_in_epoch"] == steps_per_epoch:
                    shown = {name: totals.mean(name) for name in SHOWN}
                    step_guard.check_loss_scale(optimizer)
                bar.step(shown)
                if guard.stop:
                    save()
                    raise errors.StoppedError(signals.message(state["step"]))
                in_epoch = state["step_in_epoch"] < steps_per_epoch
                if save_every and state["step"] % save_every == 0 and in_epoch:
                    save()
            row = {name: totals.mean(name) for name in SHOWN} | {
                "learning_rate": float(schedule(max(steps_taken(optimizer) - 1, 0))),
                "images_per_second": steps_per_second(start, first, steps_per_epoch)
                * batch_size
                * ranks.num_replicas,
                "boxes_dropped": totals.sum("boxes_dropped") * ranks.num_replicas,
                "boxes_truncated": totals.sum("boxes_truncated") * ranks.num_replicas,
                "skipped_steps": totals.sum("skipped_steps"),
            }

            if eval_source and (epoch == config.epochs or (eval_every and epoch % eval_every == 0)):
                if start is not None:
                    save()  # an evaluation is long: whoever stops it need not train the epoch again
                eval_loader = eval_loader or make_loader(
                    pipeline_type,
                    source=eval_source,
                    config=config,
                    batch_size=batch_size,
                    training=False,
                    device_id=devices.gpu_number(ranks, 0),
                    dali_device_id=dali_device_id,
                    shard_id=ranks.rank,
                    num_shards=ranks.world_size,
                    num_threads=num_threads,
                    prefetch=prefetch,
                    with_targets=False,
                )
                scoring = contextlib.ExitStack()

                def on_batch(done: int, total: int, epoch=epoch, scoring=scoring) -> None:
                    watchdog.beat("evaluating", epoch=epoch, step=state["step"])
                    if done == total:
                        scoring.enter_context(watchdog.allow(SLOW))
                    if signals.agreed(ranks, done):
                        raise errors.StoppedError(signals.message(state["step"]))

                with (
                    scoring,
                    averaged.swapped_in(ranks),
                ):  # 2. all evaluate, and put their detections together
                    metrics, results, curves = evaluate(
                        detect,
                        eval_loader,
                        eval_source,
                        categories,
                        ranks=ranks,
                        on_batch=on_batch,
                        coco_backend=coco_backend,
                    )
                    best = metadata | {"epoch": epoch, "AP": metrics["AP"]}
                    if run:
                        try_save(saved.save_best, metrics["AP"], best)
                if run:
                    try_save(write_evaluation, directory, metrics, results, curves)
                row |= {name: metrics[name] for name in coco_metrics.NAMES}
                log(f"epoch {epoch}: AP {100 * metrics['AP']:.1f}, AP50 {100 * metrics['AP50']:.1f}")
                patience_lib.note(state, metrics["AP"])
            with averaged.swapped_in(ranks):
                if run:
                    try_save(train_log.add, epoch, state["step"], row)
                    try_save(saved.save_last, metadata | {"epoch": epoch})
            totals = Totals({})
            state.update(epoch=epoch, step_in_epoch=0)
            save()
            if on_epoch:
                on_epoch(epoch)
            if patience_lib.is_over(state, patience):
                log(patience_lib.describe(state, patience))
                break

    if run:
        if metrics is not None:
            print(coco_metrics.format_table(metrics))
        print(f"results are in {output_dir}")
    ranks.close()
    return metrics


def make_train_step(
    ranks: distributed.Ranks,
    model: keras.Model,
    config: YOLOv4Config,
    optimizer: keras.optimizers.Optimizer,
    averaged: AveragedWeights,
    *,
    precision: str,
    xla: bool,
) -> Callable[[Any, Any, tf.Tensor], step_guard.StepResult]:
    """One step, compiled (guards.guarded_step). Where ranks matter is numbered, here and in the loop."""

    def forward_backward(images, targets):
        with tf.GradientTape() as tape:
            values = loss_values(model, config, images, targets)
            scaled_loss = optimizer.scale_loss(values["loss"])
        return tape.gradient(scaled_loss, model.trainable_variables), values

    if xla:
        forward_backward = tf.function(forward_backward, jit_compile=True, autograph=False)

    def gradients_of(images, targets):
        lost = tf.cast(tf.reduce_sum(targets["lost"], axis=0), tf.float32)
        gradients, values = forward_backward(images, targets)  # a mean over images: no matter where they are
        values |= {"boxes_dropped": lost[0], "boxes_truncated": lost[1]}
        return ranks.average(gradients), values  # 1. before they are unscaled and clipped

    def update(gradients):
        updates = tf.convert_to_tensor(optimizer.iterations)
        optimizer.apply(gradients, model.trainable_variables)
        # Neither an accumulated batch nor an overflow under float16 is an update.
        averaged.update(moved=tf.convert_to_tensor(optimizer.iterations) > updates)

    return step_guard.guarded_step(
        ranks, gradients_of, update, model, every_gradient=precision != "mixed_float16"
    )


def loss_values(
    model: keras.Model, config: YOLOv4Config, images: tf.Tensor, targets: dict[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
    """One training forward pass: "loss" and what it is made of; see losses.detection_loss."""
    heads = model(images, training=True)
    values = losses.detection_loss(heads, targets, config)
    values["l2_loss"] = losses.l2_loss(model.trainable_variables, config.weight_decay)
    values["loss"] = values["detection_loss"] + values["l2_loss"]
    return values


def run_again(file: str) -> None:
    """`--replay`: prints where the numbers of a skipped step stop being finite."""
    skipped = replay_step.read_batch(file, app="yolov4")
    keras.mixed_precision.set_global_policy(skipped.metadata["precision"])
    config = hparams_lib.from_json(YOLOv4Config, skipped.metadata["config"])
    model = build_model(
        config.model_name, skipped.metadata["num_classes"], config=config, any_size=config.multi_scale > 1
    )
    if skipped.metadata["freeze"]:
        log(freeze_layers(model, skipped.metadata["freeze"]))
    print(replay_step.run(skipped, model, functools.partial(loss_values, model, config)))


def _lasting(config: YOLOv4Config) -> dict:
    """The config without what may change between two sittings of one run."""
    free = ("epochs", "close_mosaic", *DETECTION_FIELDS)
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in free}


def start(given: dict) -> dict | None:
    """What the flags ask for: a training, under Horovod Elastic or not, its rehearsal, or a replay."""
    file, processes = given.pop("replay"), given.pop("dry_run")
    if file:
        return run_again(file)
    if processes:
        return dry_run.run("yolov4", processes, given)
    if given["elastic"]:
        return elastic_lib.run(train, given)
    return train(**given)


def main() -> None:
    start(shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
