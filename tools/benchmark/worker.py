"""One candidate of ours, in its own process: a loader into a sink, a training step, or both.

It keeps to the protocol of rounds.py, as a peer's script does.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from common import devices
from common.datacheck.images import ImagePolicy
from common.datacheck.open_data import open_source
from common.loading import Loader
from common.sources import CocoSource, ImageListSource, Source
from tools.benchmark import inference, stages, steps
from tools.benchmark.protocol import WARM_UP, own_stdout, tell_steps
from tools.benchmark.stages import Cut
from tools.benchmark.steps import Step

STAGE_SHARE = 1 / 3  # of --seconds for each cut in each round: CPU time needs less than a rate


class App(NamedTuple):
    """What an app's bench.py builds.

    Attributes:
        name: its folder.
        num_classes: of the published model, for a synthetic batch without data.
        make_config: the flags' values -> the app's config.
        make_loader: loaders.make_loader.
        make_step: (config, num_classes, steps_per_epoch, flags' values) -> train.py's step of a new model.
        make_halves: (config, num_classes) -> predict.make_halves of a new model.
        cuts: (loader, open_loader) -> the cuts of a DALI loader, in their order; open_loader(**options) makes
            it once more with other options of make_loader.
    """

    name: str
    num_classes: int
    make_config: Callable[[dict[str, Any]], Any]
    make_loader: Callable[..., Loader]
    make_step: Callable[[Any, int, int, dict[str, Any]], Step]
    make_halves: Callable[[Any, int], tuple[inference.Network, inference.ToDetections]]
    cuts: Callable[[Any, Callable[..., Loader]], Sequence[Cut]]


def work(app: App, given: dict[str, Any], role: str) -> None:
    """One candidate; it runs until it is killed.

    Args:
        app: whose bench.py this is.
        given: the values of the flags.
        role: model, data:TYPE, both:TYPE, stages:TYPE or inference:TYPE, with a pipeline type.
    """
    what, _, pipeline_type = role.partition(":")
    _prepare(given["precision"])
    config = app.make_config(given)
    source = open_given(given) if pipeline_type else None

    def open_loader(**options: Any) -> Loader:
        like_train = {  # but for `options`
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
        halves = app.make_halves(config, given["num_classes"])
        return _tell_inference(halves, source, open_loader, given)
    loader = open_loader()
    if what == "stages":
        return _tell_stages(app.cuts(loader, open_loader), given)
    if what == "data":
        return tell_steps(steps.load(loader), given["batch_size"])
    step = app.make_step(config, given["num_classes"], loader.steps_per_epoch, given)
    return tell_steps(steps.train(loader, step), given["batch_size"])


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


def _prepare(precision: str) -> None:
    """The settings that train.py makes before anything else."""
    devices.reproducible()
    devices.share_gpu_memory()
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy(precision)


def _tell_stages(cuts: Sequence[Cut], given: dict[str, Any]) -> None:
    """Measures all cuts in turn. Says which do not follow the one before them, then each round's costs."""
    options = {
        "batch_size": given["batch_size"],
        "seconds": given["seconds"] * STAGE_SHARE,
        "settle": given["prefetch"] + 1,
    }
    with own_stdout() as tell:
        for cut in cuts:
            for _ in range(WARM_UP):
                cut.advance()
        tell(json.dumps({cut.stage: cut.instead for cut in cuts if cut.instead}))
        for _ in range(given["rounds"]):
            tell(json.dumps([stages.cost(cut, **options) for cut in cuts]))
        tell("null")


def _tell_inference(
    halves: tuple[inference.Network, inference.ToDetections],
    source: Source,
    open_loader: Callable[..., Loader],
    given: dict[str, Any],
) -> None:
    """Measures detecting, one image at a time and a batch at a time; a line for each."""
    label_map, draw = source.label_map, None
    if isinstance(source, CocoSource):  # files can be drawn on, as infer.py does
        files = [pathlib.Path(source.images_dir, name) for name in source.annotations.file_names]
        source, draw = ImageListSource(tuple(files)), inference.drawer(files, label_map)
    with own_stdout() as tell:
        for batch_size in (1, given["batch_size"]):
            loader = open_loader(
                source=source,
                batch_size=batch_size,
                training=False,
                with_targets=False,
                count_lost=False,
                name_images=False,
            )
            times = inference.measure(
                loader=loader,
                network=halves[0],
                to_detections=halves[1],
                label_map=label_map,
                decode=None if loader.pipeline_type == "tensorflow" else loader.cut("decode"),
                draw=draw,
                prefetch=given["prefetch"],
                num_rounds=given["rounds"],
            )
            tell(json.dumps(dataclasses.asdict(times)))
        tell("null")
