r"""Trains YOLOv4 (arXiv 2004.10934): DALI loads, Keras trains, pycocotools evaluates.

    python yolov4/train.py --model_name=yolov4 \
        --train_images=coco/train2017 --train_annotations=coco/annotations/instances_train2017.json \
        --eval_images=coco/val2017 --eval_annotations=coco/annotations/instances_val2017.json \
        --output_dir=runs/yolov4

Run the same command again to resume the run. For recipes: --flagfile=yolov4/flags/yolov4_coco.txt.
A whole training in one file: examples/train_yolov4.py.
Many GPUs (docs/distributed.md): horovodrun -np 8 python yolov4/train.py --strategy=horovod ...
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args, errors
from common.progress import counted, import_tensorflow, log
from yolov4.config import DETECTION_FIELDS, MODEL_NAMES, PRESETS, YOLOv4Config, get_configs


@dataclasses.dataclass(frozen=True)
class Args(args.Args):
    """The flags of train.py. common/args.py has the flags that both apps share."""

    model_name: str = args.model_name_flag(
        MODEL_NAMES,
        "yolov4",
        "yolov4-nano is not one of Darknet's models, but a narrow yolov4-tiny with three heads.",
    )
    letterbox: bool | None = args.flag(
        None,
        "Keep the aspect ratio of images and pad them; off: stretch them. Default: off, as in the recipe.",
    )
    close_mosaic: int | None = args.flag(
        None, "Number of last epochs without mosaic, MixUp and CutMix. Default: as in the recipe.", low=0
    )


define_flags = functools.partial(args.define, args_class=Args)


if __name__ == "__main__":  # check the flags first, because the imports below take seconds
    args.install(define_flags)
    errors.parse_flags()
    import_tensorflow(pyplot=False)

import keras
import tensorflow as tf

from common import hparams
from common.data.open import open_data
from common.distributed.ranks import Ranks
from common.distributed.start import synchronize
from common.evaluation.evaluate import evaluate
from common.layers import limit_bn_momentum
from common.training import step_guard
from common.training.checkpoints import (
    Checkpoints,
    Identity,
    RunState,
    check_directory,
    choose_config,
    claim_directory,
)
from common.training.ema import AveragedWeights
from common.training.input_feed import InputFeed
from common.training.optimizers import apply_if
from common.training.results import Results
from common.training.run import Run, start_process
from common.weights.fine_tuning import set_initial_weights
from yolov4 import losses, show_batch
from yolov4.init_from import init_from
from yolov4.loaders import epoch_options, open_loader
from yolov4.model import build_model
from yolov4.model_metadata import make_metadata
from yolov4.optimization import make_optimizer, make_schedule
from yolov4.predict import make_detect


def train(a: Args) -> dict | None:
    """Trains one model.

    Returns:
        `metrics` of the last evaluation (coco_metrics.Evaluation), or None without evaluation data.

    Raises:
        UserError: flags or data cannot be used.
        StoppedError: a signal stopped the run, after everything was saved.
    """
    ranks = start_process(a)
    # Priority, from low to high: the model's row in config.py, --augmentation_preset, --hparams, other flags.
    preset = PRESETS[a.augmentation_preset]
    configs = [hparams.resolve(row, a, preset=preset) for row in get_configs(a.model_name)]
    # A resumed run has the defaults of the version that started it.
    may_change = ("epochs", "close_mosaic", *DETECTION_FIELDS)  # not compared with the run
    config = choose_config(a, ranks, configs, may_change)

    # --- Data -------------------------------------------------------------------------------------
    data = open_data(a, ranks, config.max_instances, synthetic_classes=80)
    mixes = config.mosaic_prob or config.mixup_prob or config.cutmix_prob
    if mixes and config.epochs <= config.close_mosaic:
        log(f"no mosaic, MixUp or CutMix in this run: close_mosaic={config.close_mosaic} covers all epochs")
    # yolov4/pipeline.py has the DALI graph. It reads the boxes of `Annotations.target_boxes`.
    open_train_loader = functools.partial(open_loader, a, ranks, config, data, training=True)
    loader = open_train_loader()  # reads no data yet
    steps_per_epoch = a.steps_per_epoch or loader.steps_per_epoch
    accumulate_steps = max(a.accumulate_steps, 1)
    effective_batch = ranks.num_replicas * a.batch_size * accumulate_steps

    # --- Run: check whether it is new or can be resumed ---------------------------------------------
    metadata = make_metadata(
        config, data.label_map, data.num_classes, data.train, data.evaluation, dataclasses.asdict(a)
    )
    loading = {"pipeline_type": loader.pipeline_type, "steps_per_epoch": steps_per_epoch}
    identity = Identity.of(a, ranks, config, metadata, source=data.train, may_change=may_change, **loading)
    resumed = check_directory(a, ranks, identity)

    # --- Model ------------------------------------------------------------------------------------
    schedule = make_schedule(config, effective_batch, steps_per_epoch, accumulate_steps)
    with ranks.scope():
        model = make_model(config, data.num_classes, config.epochs * steps_per_epoch)
        optimizer = ranks.wrap_optimizer(
            make_optimizer(config, schedule, precision=a.precision, accumulate_steps=accumulate_steps)
        )
        optimizer.build(model.trainable_variables)  # includes frozen layers: a resumed run may unfreeze them
    log(
        f"{a.model_name} at {config.image_size[0]}x{config.image_size[1]}, "
        f"{counted(data.num_classes, 'class', 'es')}, {model.count_params():,} parameters; "
        f"{loader.size} images, loaded by {loader.pipeline_type}\n"
        f"learning rate {schedule.peak:.6g} = {config.learning_rate:g} x {effective_batch} images per update "
        f"/ {config.reference_batch}{ranks.describe()}"
    )
    load = functools.partial(init_from, model, data.label_map, config=config)
    if a.init_from or a.freeze or a.freeze_batch_norm:
        set_initial_weights(a, ranks, resumed, model, load)
    synchronize(ranks, model, optimizer)  # only rank 0 has read --init_from
    with ranks.scope():
        ema = AveragedWeights(model, config.ema_decay)

    # --- Checkpoint: find the newest, open the data there, restore -----------------------------------
    directory = claim_directory(a, ranks, identity)  # None on all ranks but rank 0
    manifest = metadata | {"flags": dataclasses.asdict(a)}
    checkpoints = Checkpoints(directory, ranks, model, optimizer, ema, metadata=manifest, identity=identity)
    state = checkpoints.find() or RunState()
    # The options of the loaders change from epoch to epoch: a new seed, mosaics or none.
    options = functools.partial(epoch_options, config, a.seed, shuffle=state.choose_shuffle(a.shuffle))
    feed = InputFeed(ranks, open_train_loader, options, state, steps_per_epoch, config.epochs)
    checkpoints.restore(state, feed.iterators)

    # --- Steps, evaluation, files --------------------------------------------------------------------
    train_step = make_train_step(ranks, model, config, optimizer, ema, precision=a.precision, xla=a.xla)
    open_eval_loader = functools.cache(lambda: open_loader(a, ranks, config, data, training=False))
    evaluate_model = functools.partial(
        evaluate,
        make_detect(model, config),
        label_map=data.label_map,
        ranks=ranks,
        coco_backend=a.coco_backend,
    )
    show = functools.partial(show_batch.report, config=config, label_map=data.label_map)
    results = Results(directory, model, metadata, state, show, data.evaluation)

    # --- The loop: every rank makes the same calls in the same order -----------------------------------
    with Run(a, ranks, model, optimizer, ema, state, feed, checkpoints, results) as run:  # handles signals
        for _ in run.epochs(config.epochs):  # starts at the resumed epoch; --patience may end the loop
            while run.epoch_is_unfinished():  # once, or once per evaluation of --eval_every_steps
                for images, targets in run.batches():
                    result = train_step(images, targets, run.stop_requested)
                    run.after_step(result, targets)  # shows progress, saves, stops
                if run.is_evaluation_due():
                    with run.evaluating() as on_batch:  # here the model has the averaged weights
                        run.save_evaluation(evaluate_model(open_eval_loader(), on_batch=on_batch))
            run.end_epoch()  # writes results.csv, last weights and a checkpoint
    return run.metrics


def make_train_step(
    ranks: Ranks,
    model: keras.Model,
    config: YOLOv4Config,
    optimizer: keras.optimizers.Optimizer,
    ema: AveragedWeights,
    *,
    precision: str,
    xla: bool,
) -> Callable[[Any, Any, tf.Tensor], step_guard.StepResult]:
    """Returns the compiled training step. The step skips non-finite updates, and returns values to log."""

    def forward_backward(images: tf.Tensor, targets: dict) -> tuple[list, dict]:
        with tf.GradientTape() as tape:
            values = loss_values(model, config, images, targets)
            scaled_loss = optimizer.scale_loss(values["loss"])
        return tape.gradient(scaled_loss, model.trainable_variables), values

    if xla:
        forward_backward = tf.function(forward_backward, jit_compile=True, autograph=False)

    def gradients_of(images: tf.Tensor, targets: dict) -> tuple[list, dict]:
        gradients, values = forward_backward(images, targets)  # the loss is a mean over images
        lost = tf.cast(tf.reduce_sum(targets["lost"], axis=0), tf.float32)
        values |= {"boxes_dropped": lost[0], "boxes_over_limit": lost[1]}
        # Averages over all replicas: common/distributed/ has the collective operations. The optimizer then
        # unscales and clips: common/training/optimizers.py.
        return ranks.average_gradients(gradients), values

    def update(gradients: list[tf.Tensor], condition: tf.Tensor | None) -> None:
        updates = tf.convert_to_tensor(optimizer.iterations)
        apply_if(condition, optimizer, gradients, model.trainable_variables)
        # Move the averages only if the weights changed.
        ema.update(moved=tf.convert_to_tensor(optimizer.iterations) > updates)

    return step_guard.guarded_step(
        ranks, gradients_of, update, model, xla=xla, every_gradient=precision != "mixed_float16"
    )


def loss_values(
    model: keras.Model, config: YOLOv4Config, images: tf.Tensor, targets: dict[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
    """Runs one forward pass in training mode. Returns the loss to minimise as "loss", and also its parts.

    Args:
        images: float32 (B, H, W, 3), in [0, 1].
        targets: the outputs of the training loader.
    """
    heads = model(images, training=True)
    parts = losses.detection_loss(heads, targets, config)
    l2_loss = losses.l2_loss(model.trainable_variables, config.weight_decay)
    return {"loss": parts["detection_loss"] + l2_loss, **parts, "l2_loss": l2_loss}


def make_model(config: YOLOv4Config, num_classes: int, num_steps: int = 10**9) -> keras.Model:
    """Builds the network for a run of `num_steps` steps. With multi_scale, any input size fits."""
    model = build_model(config.model_name, num_classes, config=config, any_size=config.multi_scale > 1)
    return limit_bn_momentum(model, num_steps)


def main() -> None:
    train(Args(**args.values(flags.FLAGS, define_flags)))


if __name__ == "__main__":
    errors.run(main)
