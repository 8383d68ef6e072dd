r"""Trains YOLOv4 (arXiv 2004.10934): DALI feeds, Keras trains, pycocotools judges.

    python yolov4/train.py --model_name=yolov4 \
        --train_images=coco/train2017 --train_annotations=coco/annotations/instances_train2017.json \
        --eval_images=coco/val2017 --eval_annotations=coco/annotations/instances_val2017.json \
        --output_dir=runs/yolov4

The same command on the same directory resumes. Recipes are flag files:
--flagfile=yolov4/flags/yolov4_coco.txt
"""

import dataclasses
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterator

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from absl import flags

from common import coco_metrics, damaged_images, devices, errors
from common import flags as shared_flags
from common import hparams as hparams_lib
from common.averaging import AveragedWeights
from common.checkpoints import Checkpoints, keep_going, read_state
from common.evaluation import evaluate, write_evaluation
from common.freezing import freeze as freeze_layers
from common.image_files import ImagePolicy
from common.labels import LabelMap
from common.loading import Loader, placement
from common.open_data import DataFlags, check_sizes, open_splits, say_source
from common.progress import Bar, say
from common.run_directory import RunDirectory
from common.run_log import RunLog
from yolov4 import init_from as init_from_lib
from yolov4 import inspect_batch, losses
from yolov4.config import DETECTION_FIELDS, MODEL_NAMES, YOLOv4Config, get_config
from yolov4.loaders import make_loader
from yolov4.model import build_model
from yolov4.optimization import make_optimizer, make_schedule
from yolov4.predict import make_detect

SHOW_EVERY = 10  # steps between two looks at the loss: looking waits for the device
SHOWN = ("loss", "box_loss", "objectness_loss", "class_loss", "l2_loss")


def define_flags(fv: flags.FlagValues) -> None:
    shared_flags.define_model_flags(fv, MODEL_NAMES, default="yolov4")
    shared_flags.define_data_flags(fv, ("train", "eval"))
    shared_flags.define_run_flags(fv)
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
    batch_size: int = 8,
    num_threads: int = 2,
    prefetch: int = 2,
    on_bad_image: str = "stop",
    max_megapixels: float = 100.0,
    # the run
    output_dir: str | None = None,
    overwrite: bool = False,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
    learning_rate: float | None = None,
    strategy: str = "none",
    precision: str = "float32",
    xla: bool = False,
    ema_decay: float | None = None,
    clip_norm: float | None = None,
    accumulate_steps: int = 0,
    init_from: str | None = None,
    freeze: str | None = None,
    eval_every: int = 1,
    seed: int = 0,
    # this app's own
    letterbox: bool | None = None,
    close_mosaic: int | None = None,
) -> dict | None:
    """Trains one model from the command line's values; see the flags of the same names.

    Returns:
        The metrics of the last evaluation (coco_metrics.evaluate), or None where no evaluation data were
        given.

    Raises:
        UserError: anything that the user gave and that cannot be used, before the first step wherever
            possible.
    """
    given = dict(locals())
    devices.share_gpu_memory()
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
    replicas = 1
    source, eval_source = None, None
    if pipeline_type == "synthetic":
        categories = LabelMap.numbered(num_classes or 80)
    else:
        source, eval_source = open_splits(
            DataFlags(train_images, train_annotations, train_file_pattern),
            DataFlags(eval_images, eval_annotations, eval_file_pattern),
            input_type=input_type,
            label_map=label_map,
            policy=ImagePolicy(on_bad_image, max_megapixels),
        )
        categories = source.label_map
        say_source("training", source)
        check_sizes(source, batch_size=batch_size, num_replicas=replicas, max_instances=config.max_instances)
        if eval_source:
            say_source("evaluation", eval_source)
    num_classes = num_classes or categories.num_classes
    if num_classes < categories.num_classes:
        raise errors.UserError(
            f"--num_classes={num_classes}: the data have {categories.num_classes} classes; leave the flag out"
        )

    def open_loader(seed: int, mosaic: bool) -> Loader:
        return make_loader(
            pipeline_type,
            source=source,
            config=config,
            batch_size=batch_size,
            training=True,
            num_threads=num_threads,
            prefetch=prefetch,
            seed=seed,
            count_lost=True,
            num_classes=num_classes,
            mosaic=mosaic,
        )

    mixes = bool(config.mosaic_prob or config.mixup_prob or config.cutmix_prob)
    if mixes and config.epochs <= config.close_mosaic:
        say(
            f"no mosaic, MixUp or CutMix at all: close_mosaic={config.close_mosaic} of {config.epochs} epochs"
        )

    def plan(epochs_done: int) -> dict:
        """How the loader is opened that starts after so many epochs."""
        mosaic = mixes and epochs_done < config.epochs - config.close_mosaic
        return {"seed": (seed + epochs_done) % (shared_flags.MAX_SEED + 1), "mosaic": mosaic}

    loader = open_loader(**plan(0))
    steps_per_epoch = steps_per_epoch or loader.steps_per_epoch

    # --- The run directory: new, resumed, or refused ----------------------------------------------
    identity = {
        "app": "yolov4",
        "config": _lasting(config),
        "num_classes": num_classes,
        "label_map": categories.to_json(),
        "data": source.fingerprint if source else "synthetic",
        "pipeline_type": loader.pipeline_type,
        "batch_size": batch_size,
        "steps_per_epoch": steps_per_epoch,
        "accumulate_steps": accumulate_steps,
        "precision": precision,
        "freeze": freeze,
        "seed": seed,
    }
    run = RunDirectory(output_dir, identity=identity, overwrite=overwrite)

    # --- Model, optimizer, state ------------------------------------------------------------------
    model = build_model(model_name, num_classes, config=config, any_size=config.multi_scale > 1)
    effective_batch = replicas * batch_size * max(accumulate_steps, 1)
    schedule = make_schedule(config, effective_batch, steps_per_epoch, max(accumulate_steps, 1))
    optimizer = make_optimizer(config, schedule, precision=precision, accumulate_steps=accumulate_steps)
    say(
        f"{model_name} at {config.image_size[0]}x{config.image_size[1]}, {num_classes} classes, "
        f"{model.count_params():,} parameters; {loader.size} images by {loader.pipeline_type}"
    )
    say(
        f"learning rate {schedule.peak:.6g} = {config.learning_rate:g} x {effective_batch} images an update "
        f"/ {config.reference_batch}"
    )
    if init_from and not run.resumed:
        say(init_from_lib.init_from(model, categories, init_from, config))
    elif init_from:
        say(f"--init_from={init_from} is not read again: this run goes on from its own checkpoint")
    if freeze:
        say(freeze_layers(model, freeze))
    directory = run.claim()  # nothing was written before this line, and the user can no longer be wrong
    optimizer.build(model.trainable_variables)
    averaged = AveragedWeights(model, config.ema_decay)
    # A saved place is one in the loader that was open then.
    opened = (read_state(directory) or {"loader": plan(0)})["loader"]
    batches = _iterate(open_loader(**opened)) if loader.saveable else None
    saved = Checkpoints(
        directory,
        model=model,
        optimizer=optimizer,
        averaged=averaged,
        iterator=batches,
        state={"epoch": 0, "step": 0, "loader": opened},
    )
    if saved.restore_latest():
        say(f"resumed after epoch {saved.state['epoch']} (step {saved.state['step']})")
    if batches is None:  # a place that cannot be saved: each sitting goes through the data in its own order
        saved.state["loader"] = plan(saved.state["epoch"])
        batches = _iterate(open_loader(**saved.state["loader"]))
    shared_flags.write_flagfile(directory / "flags.txt", given)
    log = RunLog(directory, done_epochs=saved.state["epoch"])
    metadata = {
        "app": "yolov4",
        "num_classes": num_classes,
        "label_map": categories.to_json(),
        "config": dataclasses.asdict(config),
        "eval_data": eval_source.fingerprint if eval_source else None,
    }

    # --- One step ---------------------------------------------------------------------------------
    @tf.function(jit_compile=xla, reduce_retracing=not xla)
    def train_step(images, targets):
        with tf.GradientTape() as tape:
            heads = model(images, training=True)
            values = losses.detection_loss(heads, targets, config)
            values["l2_loss"] = losses.l2_loss(model.trainable_variables, config.weight_decay)
            values["loss"] = values["detection_loss"] + values["l2_loss"]
            scaled_loss = optimizer.scale_loss(values["loss"])
        gradients = tape.gradient(scaled_loss, model.trainable_variables)
        updates = tf.convert_to_tensor(optimizer.iterations)
        optimizer.apply(gradients, model.trainable_variables)
        if tf.convert_to_tensor(optimizer.iterations) > updates:
            averaged.update()  # neither an accumulated batch nor an overflow under float16 is an update
        return values

    # --- The loop ---------------------------------------------------------------------------------
    metrics = None
    if saved.state["epoch"] >= config.epochs:
        say(f"{directory} has its {saved.state['epoch']} epochs: nothing left to train")
        metrics = coco_metrics.read_metrics(directory / "metrics.json")
    eval_loader, detect = None, make_detect(model, config)
    for epoch in range(saved.state["epoch"] + 1, config.epochs + 1):
        planned = plan(epoch - 1)
        if planned["mosaic"] != saved.state["loader"]["mosaic"]:
            word = "with" if planned["mosaic"] else "without"
            say(f"from epoch {epoch} on {word} mosaic, MixUp and CutMix")
            saved.state["loader"] = planned
            batches = _iterate(open_loader(**planned))
            if loader.saveable:
                saved.iterator = batches
        bar = Bar(f"epoch {epoch}/{config.epochs}", steps_per_epoch)
        sums: dict[str, tf.Tensor] = {}
        shown: dict[str, float] = {}
        updates = int(optimizer.iterations)
        for step in range(1, steps_per_epoch + 1):
            try:
                images, targets = next(batches)
            except tf.errors.OpError as error:
                raise damaged_images.explain(error, source, loader.pipeline_type) from error
            if saved.state["step"] == 0:
                path = directory / "first_batch.png"
                say(inspect_batch.report(images, targets, config, categories, path))
            lost = tf.cast(tf.reduce_sum(targets.pop("lost"), axis=0), tf.float32)
            values = train_step(images, targets)
            values |= {"boxes_dropped": lost[0], "boxes_truncated": lost[1]}
            sums = {name: value + sums.get(name, 0.0) for name, value in values.items()}
            saved.state["step"] += 1
            if step == 1:  # the first step compiles: it would tell nothing about speed
                start = time.monotonic()
            if step % SHOW_EVERY == 0 or step == steps_per_epoch:
                shown = {name: float(sums[name]) / step for name in SHOWN}
                if not math.isfinite(shown["loss"]):
                    raise errors.UserError(
                        f"the loss is {shown['loss']} in epoch {epoch}, before step {saved.state['step']}: "
                        f"lower --learning_rate (now {config.learning_rate:g}) or check the data; "
                        "the checkpoints before it stand"
                    )
            bar.step(shown)
        if int(optimizer.iterations) == updates and steps_per_epoch >= accumulate_steps:
            raise errors.UserError(
                f"no step of epoch {epoch} was applied: the gradients overflow {precision}; "
                "use mixed_bfloat16 or float32"
            )
        row = shown | {
            "learning_rate": float(schedule(saved.state["step"] - 1)),
            "images_per_second": (steps_per_epoch - 1) * batch_size / (time.monotonic() - start),
            "boxes_dropped": float(sums["boxes_dropped"]),
            "boxes_truncated": float(sums["boxes_truncated"]),
        }

        if eval_source and (epoch == config.epochs or (eval_every and epoch % eval_every == 0)):
            eval_loader = eval_loader or make_loader(
                pipeline_type,
                source=eval_source,
                config=config,
                batch_size=batch_size,
                training=False,
                num_threads=num_threads,
                prefetch=prefetch,
                with_targets=False,
            )
            truth = eval_source.annotations.ground_truth()
            with averaged.swapped_in():
                metrics, results = evaluate(detect, eval_loader, eval_source, categories)
                best = metadata | {"epoch": epoch, "AP": metrics["AP"]}
                keep_going(saved.save_best, metrics["AP"], best)
            keep_going(write_evaluation, directory, metrics, results, truth)
            row |= {name: metrics[name] for name in coco_metrics.NAMES}
            say(f"epoch {epoch}: AP {100 * metrics['AP']:.1f}, AP50 {100 * metrics['AP50']:.1f}")
        keep_going(log.add, epoch, saved.state["step"], row)
        with averaged.swapped_in():
            keep_going(saved.save_last, metadata | {"epoch": epoch})
        saved.state["epoch"] = epoch
        keep_going(saved.save)

    if metrics is not None:
        print(coco_metrics.format_table(metrics))
    print(f"results are in {directory}")
    return metrics


def _iterate(loader: Loader) -> Iterator:
    with placement(loader):
        return iter(loader.dataset())


def _lasting(config: YOLOv4Config) -> dict:
    """The config without what may change between two sittings of one run."""
    free = ("epochs", "close_mosaic", *DETECTION_FIELDS)
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in free}


def main() -> None:
    train(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
