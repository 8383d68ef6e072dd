r"""Trains EfficientDet with Keras' `fit` and callbacks on batches from DALI, with the losses of train.py.

    python examples/keras_fit.py --flagfile=efficientdet/flags/demo.txt --output_dir=runs/demo-keras-fit
    horovodrun -np 2 python examples/keras_fit.py --strategy=horovod ...
    python examples/keras_fit.py --strategy=mirrored ...

All flags of train.py work, except those in WITHOUT below. eval.py, infer.py and export.py read the weights.
The same command with the same directory continues after the last complete epoch.

`fit` cannot do the following; use train.py instead:
- Resume within an epoch: the next run repeats the whole epoch, with images in another order.
- Skip a step whose loss is not finite: the run ends.
- Save when a signal stops the run.
- End the other ranks if one rank is lost.
- Train with --strategy=multi_worker, or change the data between epochs.

docs/examples.md has a program of 20 lines without flags. For YOLOv4, import from `yolov4`, call
`FitModel(network, config)`, and use config.epochs instead of num_epochs.
"""

import dataclasses
import functools
import math
import os
import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # faster on x86 CPUs without AVX-512

import keras
import tensorflow as tf
from absl import flags

from common import args, errors, hparams
from common.data.open import open_data
from common.distributed.ranks import Ranks
from common.distributed.start import seed_per_rank
from common.evaluation import coco_metrics
from common.evaluation.evaluate import evaluate
from common.training.checkpoints import Checkpoints, Identity, RunState, check_directory, claim_directory
from common.training.early_stopping import note_metric
from common.training.ema import AveragedWeights
from common.training.results import Results
from common.training.run import start_process
from common.weights import weight_files as weights
from efficientdet.config import PRESETS, get_config
from efficientdet.fit_model import FitModel
from efficientdet.loaders import epoch_options, open_loader
from efficientdet.model_metadata import make_metadata
from efficientdet.optimization import make_optimizer, make_schedule, num_epochs
from efficientdet.predict import make_detect
from efficientdet.train import Args, make_model

WITHOUT = {"accumulate_steps", "coco_backend", "eval_every_steps", "freeze", "xla"}
WITHOUT |= {"freeze_batch_norm", "init_from", "max_skipped_steps", "patience", "save_every", "step_timeout"}
NAMES = {field.name for field in dataclasses.fields(Args)} - WITHOUT
define_flags = functools.partial(args.define, args_class=Args, names=NAMES)


def averaging(optimizer: keras.optimizers.Optimizer, ranks: Ranks) -> keras.optimizers.Optimizer:
    """Makes the optimizer average the gradients over all replicas before it clips them."""

    class Averaging(type(optimizer)):
        def apply(self, grads, trainable_variables=None):
            in_sync = tf.distribute.get_strategy().num_replicas_in_sync  # FitModel divides the loss by this
            means = ranks.average_gradients(
                grads
            )  # under Horovod: hvd.grouped_allreduce(grads, op=hvd.Average)
            super().apply([gradient * in_sync for gradient in means], trainable_variables)

    optimizer = ranks.wrap_optimizer(optimizer)
    optimizer.__class__ = Averaging
    return optimizer


class RankCallback(keras.callbacks.Callback):
    """Base class of the callbacks. All ranks call them in the same order."""

    def __init__(self, ranks: Ranks, ema: AveragedWeights, state: RunState, results: Results):
        super().__init__()
        self.ranks, self.ema, self.state, self.results = ranks, ema, state, results


class Synchronize(RankCallback):
    """Gives all ranks the same weights; averages the ranks' losses."""

    def on_train_begin(self, logs: dict | None = None) -> None:
        variables = [v.value for v in [*self.model.weights, *self.model.optimizer.variables]]
        self.ranks.broadcast([*variables, *self.ema.variables])  # under Horovod: hvd.broadcast_variables
        seed_per_rank(self.model, self.ranks.rank)

    def on_epoch_end(self, epoch: int, logs: dict) -> None:
        logs["loss"] = sum(self.ranks.gather(logs["loss"])) / self.ranks.world_size
        if not math.isfinite(logs["loss"]):
            raise errors.UserError(f"the loss of epoch {epoch + 1} is not finite: lower --learning_rate")
        self.state.step = (epoch + 1) * self.params["steps"]


class MovingAverage(RankCallback):
    """Updates the averaged weights after each step."""

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._update = tf.function(lambda moved: self.ranks.run(self.ema.update, moved))
        self._updates = tf.convert_to_tensor(self.model.optimizer.iterations)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        before, self._updates = self._updates, tf.convert_to_tensor(self.model.optimizer.iterations)
        self._update(self._updates > before)  # False: a gradient overflowed float16, so no step was made


class CocoMetrics(RankCallback):
    """Evaluates the averaged weights with pycocotools."""

    def __init__(self, *run, score, eval_every: int):
        super().__init__(*run)
        self.score, self.eval_every = score, eval_every

    def on_epoch_end(self, epoch: int, logs: dict) -> None:
        if epoch + 1 < self.params["epochs"] and (not self.eval_every or (epoch + 1) % self.eval_every):
            return
        with self.ema.swapped_in(self.ranks):
            evaluation = self.score()
            is_best = note_metric(self.state, evaluation.metrics["AP"])
            self.results.save_evaluation(evaluation, is_best)
        logs.update({name: evaluation.metrics[name] for name in coco_metrics.NAMES})


class Checkpoint(RankCallback):
    """Saves a checkpoint after each epoch, and resumes."""

    def __init__(self, *run, checkpoints: Checkpoints):
        super().__init__(*run)
        self.checkpoints = checkpoints

    def on_train_begin(self, logs: dict | None = None) -> None:
        self.checkpoints.restore(self.state, iterators=[])

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        with self.ema.swapped_in(self.ranks):
            self.results.save_weights(weights.LAST)
        self.state.epoch = epoch + 1
        self.checkpoints.save(self.state, iterators=[])


def fit(a: Args) -> None:
    """Trains one model. The fields of `a` are the flags of the same names."""
    if a.strategy == "multi_worker":
        raise errors.UserError("--strategy=multi_worker does not work with Keras 3's fit: use horovod")
    ranks = start_process(a)
    config = hparams.resolve(get_config(a.model_name), a, preset=PRESETS[a.augmentation_preset])
    data = open_data(a, ranks, config.max_instances, synthetic_classes=90)
    open_train_loader = functools.partial(open_loader, a, ranks, config, data, training=True)
    loader = open_train_loader(**epoch_options(config, a.seed, 0))
    steps, batch_size = a.steps_per_epoch or loader.steps_per_epoch, ranks.num_replicas * a.batch_size
    config = hparams.replace(config, {"epochs": num_epochs(config, batch_size, steps)})

    with ranks.scope():
        network = make_model(config, data.num_classes, config.epochs * steps)
        schedule = make_schedule(config, batch_size, steps)  # the optimizer calls it at each step
        optimizer = averaging(make_optimizer(config, schedule, precision=a.precision), ranks)
        optimizer.build(network.trainable_variables)
        model = FitModel(network, config, ranks)
        model.compile(optimizer, jit_compile=False)  # XLA cannot compile messages between ranks
        ema = AveragedWeights(network, config.ema_decay)

    fields = data.label_map, data.num_classes, data.train, data.evaluation, dataclasses.asdict(a)
    metadata = make_metadata(config, *fields)
    facts = {"loop": "keras_fit", "pipeline_type": loader.pipeline_type, "steps_per_epoch": steps}
    identity = Identity.of(a, ranks, config, metadata, source=data.train, may_change=("epochs",), **facts)
    check_directory(a, ranks, identity)
    directory = claim_directory(a, ranks, identity)
    checkpoints = Checkpoints(directory, ranks, network, optimizer, ema, metadata=metadata, identity=identity)
    state = checkpoints.find() or RunState()
    epochs_done = state.epoch

    run = ranks, ema, state, Results(directory, network, metadata, state)
    # Keras calls them in this order.
    callbacks = [Synchronize(*run), Checkpoint(*run, checkpoints=checkpoints), MovingAverage(*run)]
    if data.evaluation:
        eval_loader = open_loader(a, ranks, config, data, training=False)
        detect = make_detect(network, config)
        score = functools.partial(evaluate, detect, eval_loader, data.label_map, ranks=ranks)
        callbacks.insert(1, CocoMetrics(*run, score=score, eval_every=a.eval_every))
    if directory:
        callbacks.append(keras.callbacks.TensorBoard(directory / "tensorboard", write_graph=False))
        print(f"epochs {epochs_done + 1} to {config.epochs}; results go to {directory}")

    epoch = epoch_options(config, a.seed, epochs_done, state.choose_shuffle(a.shuffle))
    mode = tf.distribute.InputReplicationMode.PER_REPLICA  # each replica has a DALI pipeline and a shard
    setup = tf.distribute.InputOptions(experimental_fetch_to_device=False, experimental_replication_mode=mode)
    batches = model.distribute_strategy.distribute_datasets_from_function(
        lambda context: open_train_loader(device_index=context.input_pipeline_id, **epoch).dataset(), setup
    )
    counts = {"epochs": config.epochs, "initial_epoch": epochs_done, "steps_per_epoch": steps}
    model.fit(batches, callbacks=callbacks, shuffle=False, verbose=0 if ranks.rank else 2, **counts)
    ranks.close()


if __name__ == "__main__":
    args.install(define_flags)
    errors.run(lambda: fit(Args(**args.values(flags.FLAGS, define_flags))))
