r"""Detects small objects in large images: cuts each image into overlapping tiles and merges their detections.

    python examples/tiled_inference.py --weights=runs/tiles --images='aerial/*.jpg' --output_dir=found
    python examples/tiled_inference.py --weights=runs/tiles --images=aerial --annotations=aerial.json \
        --output_dir=found --score_threshold=0.01 --nodraw

The weights are those of EfficientDet or YOLOv4, trained on images of about the size of a tile. DALI decodes
each image once and cuts all its tiles. By default, a tile has the size of the network's input, so nothing is
resized.

An object on the border of a tile is cut off there. If --overlap is at least as long as the longest side of an
object, a neighbouring tile has the whole object. So `merge` first drops boxes that touch an inner border of
their tile if a whole box of the same class covers most of them. Then it applies NMS to all boxes.

The output is that of infer.py. With --annotations, the command also prints COCO's metrics.
"""

import dataclasses
import functools
import importlib
import math
import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
from absl import flags

from common import args, errors
from common.args import InferArgs, flag
from common.errors import UserError
from common.progress import Bar, import_tensorflow

NEAR = 2.0  # pixels from an inner border of its tile within which a box counts as cut off
COVERED = 0.5  # share of a cut box's area that a whole box must cover
NAMES = {"weights", "image_size", "hparams", "images", "annotations", "image_info", "output_dir", "draw"}
NAMES |= {"score_threshold", "batch_size", "on_bad_image", "max_megapixels", "tile", "overlap"}


@dataclasses.dataclass(frozen=True)
class Args(InferArgs):
    """Some flags of infer.py, and two of this example."""

    tile: int | None = flag(None, "Side of the tiles in pixels. Default: the input of the network.", low=1)
    overlap: int = flag(64, "Pixels by which neighbouring tiles overlap.", low=0)


define_flags = functools.partial(args.define, args_class=Args, names=NAMES)

if __name__ == "__main__":  # check the flags first, because the imports below take seconds
    args.install(define_flags)
    errors.parse_flags()
    import_tensorflow()

import tensorflow as tf

from common.data.check import loader_errors
from common.data.coco import load_coco
from common.data.sources import ImageListSource
from common.evaluation import coco_metrics
from common.evaluation.inference import InferenceJob
from common.export import export_graph
from common.weights import weight_files


def corners(image_size: tuple[int, int], tile: tuple[int, int], overlap: int) -> np.ndarray:
    """Returns int32 (T, 2), top and left of each tile in pixels. The tiles cover the image.

    Neighbours overlap by at least `overlap` pixels, and no tile exceeds an image that is larger than a tile.
    """
    axes = []
    for length, side in zip(image_size, tile, strict=True):
        count = max(math.ceil((length - overlap) / (side - overlap)), 1)
        axes.append(np.linspace(0, max(length - side, 0), count).astype(np.int32))
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)


def cut(image: ndd.Tensor, top_left: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """Cuts tiles out of an image; returns uint8 (T, height, width, 3). Outside the image, tiles are grey."""
    tiles = ndd.slice(
        image,
        start=ndd.as_batch(top_left),
        shape=np.array(tile, np.int32),
        axes=[0, 1],
        out_of_bounds_policy="pad",
        fill_values=[114.0],
    )
    return np.asarray(ndd.as_tensor(tiles))


def merge(
    boxes: np.ndarray,
    scores: np.ndarray,
    classes: np.ndarray,
    tiles: np.ndarray,
    image_size: tuple[int, int],
    iou: float,
) -> np.ndarray:
    """Merges the detections of all tiles of an image.

    Args:
        boxes: float32 (N, 4), ltrb in pixels of the image.
        scores, classes: (N,).
        tiles: (N, 4), ltrb in pixels: the tile of each box.
        image_size: height and width in pixels. Borders of the image cut off nothing.
        iou: threshold of NMS.

    Returns:
        int (M,), the indices of the boxes that stay, the best first.
    """
    height, width = image_size
    is_inner = np.stack([tiles[:, :2] > 0, tiles[:, 2:] < [width, height]], axis=1).reshape(-1, 4)
    is_cut = (is_inner & (np.abs(boxes - tiles) < NEAR)).any(axis=1)
    stays = np.ones(len(boxes), np.bool_)
    whole = np.flatnonzero(~is_cut)
    for row in np.flatnonzero(is_cut):
        others = boxes[whole[classes[whole] == classes[row]]]
        left_top, right_bottom = (
            np.maximum(others[:, :2], boxes[row, :2]),
            np.minimum(others[:, 2:], boxes[row, 2:]),
        )
        covered = np.maximum(right_bottom - left_top, 0).prod(axis=1)
        stays[row] = not (covered > COVERED * (boxes[row, 2:] - boxes[row, :2]).prod()).any()
    rows = np.flatnonzero(stays)
    apart = boxes[rows] + classes[rows, None] * (2.0 * max(image_size))  # boxes of two classes do not overlap
    return rows[tf.image.non_max_suppression(apart, scores[rows], len(rows), iou).numpy()]


def load_detector(a: Args):
    """Returns the network's parts, its classes, and a function: tiles -> boxes, scores, classes, count."""
    app = weight_files.read_metadata(weight_files.find(a.weights or ""))["app"]
    predict, export_parts = (importlib.import_module(f"{app}.{name}") for name in ("predict", "export_parts"))
    model, config, label_map, _ = predict.load_trained(a.weights, a.image_size, a.hparams)
    parts = export_parts.make_exportable(model, config)

    @tf.function(reduce_retracing=True, autograph=False)
    def detect(tiles: tf.Tensor) -> export_graph.Outputs:
        sizes = tf.repeat(tf.shape(tiles)[tf.newaxis, 1:3], tf.shape(tiles)[0], axis=0)
        images = tiles if tuple(tiles.shape[1:3]) == parts.image_size else parts.resize(tiles)
        return export_graph.detect(parts, images, sizes)

    return parts, label_map, detect


def detect_objects(a: Args) -> list[dict]:
    """Detects objects in all images, and writes the results. Returns the content of detections.json."""
    job = InferenceJob(a)
    if not isinstance(job.source, ImageListSource):
        raise UserError(f"--images={a.images} is a video: infer.py reads videos")
    parts, label_map, detect = load_detector(a)
    job.check_categories(label_map)
    tile = (a.tile, a.tile) if a.tile else parts.image_size
    if a.overlap >= min(tile):
        raise UserError(f"--overlap={a.overlap}: the tiles of {tile[0]}x{tile[1]} pixels must be larger")
    results, bar = [], Bar("detecting", job.source.size)
    for index, file in enumerate(job.source.files):
        try:
            image = ndd.decoders.image(np.fromfile(file, np.uint8), adjust_orientation=False)
            height, width, _ = image.shape
        except RuntimeError as error:
            raise loader_errors.explain(error, job.source, "dali_cpu") from error
        top_left = corners((height, width), tile, a.overlap)
        batches = np.array_split(cut(image, top_left, tile), math.ceil(len(top_left) / a.batch_size))
        outputs = [
            {key: value.numpy() for key, value in detect(tf.constant(tiles)).items()} for tiles in batches
        ]
        boxes, scores, classes = (
            np.concatenate([o[key] for o in outputs]) for key in ("boxes", "scores", "classes")
        )
        tile_of, number = np.nonzero((classes >= 0) & (scores >= a.score_threshold))
        tiles = np.concatenate([top_left, top_left + tile], axis=1)[:, [1, 0, 3, 2]][tile_of]
        boxes = boxes[tile_of, number] + tiles[:, [0, 1, 0, 1]].astype(np.float32)
        scores, classes = scores[tile_of, number], classes[tile_of, number]
        best = merge(boxes, scores, classes, tiles, (height, width), parts.nms_iou)
        normalised = boxes[best] / np.float32([width, height, width, height])
        arrays = (normalised, scores[best], classes[best], np.array(index), np.array([height, width]))
        results += coco_metrics.to_results(
            *(array[np.newaxis] for array in arrays), label_map=label_map, seen=set()
        )
        bar.step()
    results = job.write(results, label_map)
    if a.annotations:
        evaluation = coco_metrics.score(load_coco(a.annotations).ground_truth(), results)
        print(coco_metrics.format_table(evaluation.metrics))
    return results


def main() -> None:
    values = args.values(flags.FLAGS, define_flags)
    detect_objects(Args(**values))


if __name__ == "__main__":
    errors.run(main)
