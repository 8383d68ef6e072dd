"""One candidate of an app's bench.py, in its own process: a loader, a training step, or both.

It keeps to the protocol of rounds.py, as a baseline's script does.
"""

import json
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from common import devices, hparams
from common.datacheck.images import ImagePolicy
from common.datacheck.open_data import open_source
from common.distributed import ranks as distributed
from common.loader import BaseLoader, placement
from common.sources import CocoSource, ImageListSource, Source
from common.training import step_guard
from common.training.ema import AveragedWeights
from tools.benchmark import inference, stages
from tools.benchmark.protocol import WARM_UP, own_stdout, tell_steps

STAGE_SHARE = 1 / 3  # of --seconds for each cut in each round: CPU time needs less than a rate


class App(NamedTuple):
    """What an app's bench.py measures.

    Attributes:
        name: its folder.
        model_names: of its models.
        model_name: default of --model_name.
        num_classes: of the published model, for a synthetic batch without data.
        stages: of its DALI graph; see stages.stage_nodes.
        config: fields of the config with other values than train.py's.
        get_config, make_loader, build_model, make_schedule, make_optimizer, make_train_step,
            make_halves: the app's.
    """

    name: str
    model_names: tuple[str, ...]
    model_name: str
    num_classes: int
    stages: Mapping[str, str]
    config: Mapping[str, Any]
    get_config: Callable[[str], Any]
    make_loader: Callable[..., BaseLoader]
    build_model: Callable[..., keras.Model]
    make_schedule: Callable[..., Any]
    make_optimizer: Callable[..., keras.optimizers.Optimizer]
    make_train_step: Callable[..., Callable]
    make_halves: Callable[..., tuple[inference.Network, inference.ToDetections]]

    def make_config(self, given: dict[str, Any]) -> Any:
        """The config that train.py makes of these flags, but for `self.config`."""
        config = self.get_config(given["model_name"])
        return hparams.replace(hparams.resolve(config, types.SimpleNamespace(**given)), self.config)


def work(app: App, given: dict[str, Any], role: str) -> None:
    """Runs one candidate until it is killed, or measures stages or inference and prints JSON lines.

    Args:
        app: whose bench.py this is.
        given: the values of the flags.
        role: model, data:TYPE, both:TYPE, stages:TYPE or inference:TYPE, with a pipeline type.
    """
    what, _, pipeline_type = role.partition(":")
    devices.reproducible()
    devices.share_gpu_memory()
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy(given["precision"])
    config = app.make_config(given)
    source = open_given(given) if pipeline_type else None

    def open_loader(**options: Any) -> BaseLoader:
        like_train = {
            "source": source,
            "config": config,
            "batch_size": given["batch_size"],
            "training": True,
            "num_threads": given["num_threads"],
            "prefetch": given["prefetch"],
            "count_lost": True,
            "name_images": True,
            "num_classes": given["num_classes"],
            "dali_device_id": given["dali_device_id"] if pipeline_type == "dali_gpu" else None,
        }
        return app.make_loader(pipeline_type or "synthetic", **like_train | options)

    if what == "inference":
        model = app.build_model(config.model_name, given["num_classes"], config=config)
        _tell_inference(app, app.make_halves(model, config), source, open_loader, given)
    elif what == "stages":
        _tell_stages(stages.cuts(open_loader(), app.stages, open_loader), given)
    elif what == "data":
        tell_steps(stages.load(open_loader()), given["batch_size"])
    else:
        tell_steps(_train(app, config, open_loader(), given), given["batch_size"])


def open_given(given: dict[str, Any]) -> Source:
    """The training data that the flags name."""
    return open_source(
        given["train_images"],
        given["train_annotations"],
        given["train_file_pattern"],
        input_type=given["input_type"],
        label_map=given["label_map"],
        policy=ImagePolicy(given["on_bad_image"], given["max_megapixels"]),
    )


def _train(app: App, config: Any, loader: BaseLoader, given: dict[str, Any]) -> Callable[[], None]:
    """A function that takes a batch from the loader, and train.py's step of a new model with it."""
    ranks = distributed.start("none")
    model = app.build_model(config.model_name, given["num_classes"], config=config)
    schedule = app.make_schedule(config, given["batch_size"], loader.steps_per_epoch)
    optimizer = app.make_optimizer(config, schedule, precision=given["precision"])
    optimizer.build(model.trainable_variables)
    averaged = AveragedWeights(model, config.ema_decay)
    step = app.make_train_step(
        ranks, model, config, optimizer, averaged, precision=given["precision"], xla=given["xla"]
    )
    guard = step_guard.StepGuard(ranks, limit=0, save_batch=lambda *_: None)
    stop_requested = tf.constant(0.0)
    with placement(loader):
        batches = enumerate(loader.dataset(), start=1)

    def advance() -> None:
        number, (images, targets) = next(batches)
        guard.check(number, step(images, targets, stop_requested), images, targets)

    return advance


def _tell_stages(cuts: list[stages.Cut], given: dict[str, Any]) -> None:
    """Measures all cuts in turn; prints the values of their CutCosts, a line for each round."""
    with own_stdout() as tell:
        for cut in cuts:
            for _ in range(WARM_UP):
                cut.advance()
        for _ in range(given["rounds"]):
            costs = [
                stages.cost(
                    cut,
                    batch_size=given["batch_size"],
                    seconds=given["seconds"] * STAGE_SHARE,
                    settle=given["prefetch"] + 1,
                )
                for cut in cuts
            ]
            tell(json.dumps(costs))
        tell("null")


def _tell_inference(
    app: App,
    halves: tuple[inference.Network, inference.ToDetections],
    source: Source,
    open_loader: Callable[..., BaseLoader],
    given: dict[str, Any],
) -> None:
    """Measures detecting, one image at a time and a batch at a time; prints a line for each."""
    label_map, draw = source.label_map, None
    if isinstance(source, CocoSource):  # its files can be drawn on, as infer.py does
        files = [pathlib.Path(source.images_dir, name) for name in source.annotations.file_names]
        source, draw = ImageListSource(tuple(files)), inference.drawer(files, label_map)
    options = {"training": False, "with_targets": False, "count_lost": False, "name_images": False}
    with own_stdout() as tell:
        for batch_size in (1, given["batch_size"]):
            loader, decode = open_loader(source=source, batch_size=batch_size, **options), None
            if loader.pipeline_type != "tensorflow":
                nodes = stages.stage_nodes(loader.pipeline, app.stages)
                decode = stages.truncate_at(loader.pipeline, nodes["decode"])
            times = inference.measure(
                loader=loader,
                network=halves[0],
                to_detections=halves[1],
                label_map=label_map,
                decode=decode,
                draw=draw,
                prefetch=given["prefetch"],
                num_rounds=given["rounds"],
            )
            tell(json.dumps(times))
        tell("null")
