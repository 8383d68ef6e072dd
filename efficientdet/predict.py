"""From weights to detections: what evaluation during training, eval.py and infer.py share."""

import dataclasses
import pathlib

import keras
import numpy as np
import tensorflow as tf

from common import boxes as box_ops
from common import coco_metrics, damaged_images, errors, hparams, letterbox, progress, weight_files
from common.labels import LabelMap
from common.sources import Source
from efficientdet import postprocess
from efficientdet.config import DETECTION_FIELDS, EfficientDetConfig
from efficientdet.loaders import Loader, placement
from efficientdet.model import build_model


def load_trained(
    weights: str | None, image_size: str | None = None, hparams_spec: str | None = None
) -> tuple[keras.Model, EfficientDetConfig, LabelMap, pathlib.Path]:
    """The model that `weights` was saved from, with them in it.

    Args:
        weights: a `.weights.h5` file of ours, or a run directory.
        image_size: N or HxW to run it at another size.
        hparams_spec: how to detect, for example `nms_method=hard`; what was trained cannot change any more.

    Returns:
        model, config, label map, and the file that was read.
    """
    if not weights:
        raise errors.UserError("--weights is missing: name a .weights.h5 file or a run directory")
    file = weight_files.find(weights)
    metadata = weight_files.read_metadata(file)
    if metadata.get("app") != "efficientdet":
        raise errors.UserError(f"weights {file} were saved by {metadata.get('app')!r}, not by efficientdet")
    config = config_from_metadata(metadata["config"])
    if image_size:
        config = hparams.replace(config, {"image_size": hparams.parse_image_size(image_size)})
    config = hparams.override(config, hparams_spec, only=DETECTION_FIELDS)
    model = build_model(config.model_name, metadata["num_classes"], config=config)
    weight_files.load(model, file)
    return model, config, LabelMap.from_json(metadata["label_map"]), file


def config_from_metadata(fields: dict) -> EfficientDetConfig:
    """A config from the JSON form that travels with the weights (lists become tuples again)."""
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    known = {field.name for field in dataclasses.fields(EfficientDetConfig)}
    unknown = sorted(fields.keys() - known)
    if unknown:
        raise errors.UserError(
            f"the weights were saved by another version: it had the setting {unknown[0]!r}"
        )
    return EfficientDetConfig(**fields)


def make_detect(model: keras.Model, config: EfficientDetConfig) -> tf.types.experimental.GenericFunction:
    """A compiled function from a batch of the evaluation loader to detections.

    The function takes images (B, H, W, 3) and letterbox (B, 4) and returns boxes (B, D, 4) normalised to the
    original image and clipped to it, scores (B, D), classes (B, D) with -1 as padding, and whether all
    outputs of the network were finite (B,).
    """
    anchors = config.anchors

    @tf.function(reduce_retracing=True)
    def detect(images, letterbox_px):
        class_logits, box_offsets = model(images, training=False)
        boxes, scores, classes, _ = postprocess.detect(class_logits, box_offsets, config, anchors)
        boxes = letterbox.boxes_from_letterbox(boxes, letterbox_px[:, None], config.image_size)
        # a sum is finite only if all its terms are, and costs less than asking each of them
        sums = [tf.reduce_sum(output, axis=[1, 2, 3]) for output in [*class_logits, *box_offsets]]
        return box_ops.clip(boxes), scores, classes, tf.math.is_finite(tf.add_n(sums))

    return detect


def predict(
    detect: tf.types.experimental.GenericFunction,
    loader: Loader,
    source: Source,
    label_map: LabelMap,
    *,
    title: str,
) -> list[dict]:
    """Runs `detect` (make_detect) over the loader's images, each exactly once.

    Args:
        detect: what make_detect returned.
        loader: an evaluation loader.
        source: what it reads.
        label_map: of the trained classes.
        title: what the progress bar says.

    Returns:
        Detections in COCO results format.

    Raises:
        UserError: an image cannot be decoded; or the network gives NaN or infinity: such an image would count
            as one without detections (and pycocotools would give NaN boxes an AP of 1).
    """
    results: list[dict] = []
    seen: set[int] = set()  # the last batch of a shard is filled up with repeats
    bar = progress.Bar(title, loader.steps_per_epoch)
    with placement(loader):
        batches = iter(loader.dataset())
    for _ in range(loader.steps_per_epoch):
        try:
            images, extra = next(batches)
        except tf.errors.OpError as error:
            raise damaged_images.explain(error, source, loader.pipeline_type) from error
        boxes, scores, classes, finite = (np.asarray(t) for t in detect(images, extra["letterbox"]))
        image_ids = np.asarray(extra["image_ids"])
        if not finite.all():
            raise errors.UserError(
                f"the network's output for image {image_ids[~finite][0]} is not finite: the weights are "
                "damaged, or training diverged"
            )
        image_sizes = np.asarray(extra["image_sizes"])
        results += coco_metrics.to_results(boxes, scores, classes, image_ids, image_sizes, label_map, seen)
        bar.step()
    if len(seen) != source.size:
        raise RuntimeError(f"{len(seen)} of {source.size} images came out of the loader")
    return results
