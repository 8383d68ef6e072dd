r"""From images to targets to anchors to loss to detections, as pictures: a walk along the path of one batch.

    python examples/yolov4_walkthrough.py --weights=runs/mine --images=my/images \
        --annotations=my/instances.json --output_dir=runs/walk

Reads like the training step it follows: each paragraph is one station, calls what train.py and eval.py call,
writes one picture and says what it shows.
"""

import os
import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from absl import flags

from common import args as shared_flags
from common import errors
from common.datacheck.datasets import check_labels, open_source
from common.evaluation import drawing
from common.files import make_output_directory
from yolov4 import losses, postprocess
from yolov4.loaders import make_loader
from yolov4.predict import load_trained, to_pixels
from yolov4.targets import assign_targets

SHOWN = 4  # images of a batch


def heat_map(image: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A darkened image, overlaid with the values of a grid of cells, 1 brightest.

    Args:
        image: uint8 (H, W, 3).
        values: float (h, w) in [0, 1]; each is a cell of H / h x W / w pixels.

    Returns:
        uint8 (H, W, 3).
    """
    height, width = image.shape[:2]
    rows = np.arange(height) * values.shape[0] // height
    columns = np.arange(width) * values.shape[1] // width
    share = np.clip(values, 0, 1)[rows][:, columns, np.newaxis]
    glow = np.array([255.0, 200.0, 0.0])
    return np.rint((1 - share) * image * 0.45 + share * glow).astype(np.uint8)


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_string("weights", None, "A weights file or a run directory of ours.", flag_values=fv)
    flags.DEFINE_string("images", None, "Directory of images.", flag_values=fv)
    flags.DEFINE_string("annotations", None, "COCO json.", flag_values=fv)
    flags.DEFINE_string("output_dir", None, "Where the pictures go.", flag_values=fv)
    flags.DEFINE_integer("seed", 0, "Seed of order and augmentation.", lower_bound=0, flag_values=fv)


def walk(
    *,
    weights: str | None,
    images: str | None,
    annotations: str | None,
    output_dir: str | None,
    seed: int = 0,
) -> None:
    """Writes the pictures; see the flags of the same names.

    Raises:
        UserError: flags missing, files that cannot be used.
    """
    if not output_dir:
        raise errors.UserError("--output_dir is missing: name a directory for the pictures")
    source = open_source(images, annotations, split="")
    model, config, label_map, _ = load_trained(weights)
    check_labels(label_map, source)
    directory = make_output_directory(output_dir)
    names = label_map.names
    count = min(SHOWN, source.size)

    def show(name: str, pictures: list[np.ndarray], says: str, columns: int = count) -> None:
        drawing.save_png(drawing.contact_sheet(pictures, columns=columns), directory / name)
        print(f"{directory / name}: {says}")

    # --- 1. What the loader hands to the network: mosaics of random views, their boxes moved along ----
    options = {"source": source, "config": config, "batch_size": count}
    loader = make_loader("auto", training=True, seed=seed, **options)
    batch, targets = next(iter(loader.dataset()))  # float32 (B, H, W, 3); name -> tensor
    pixels = list(to_pixels(batch).numpy())
    height, width = config.image_size
    to_px = np.float32([width, height, width, height])
    boxes_px = list(targets["boxes"].numpy() * to_px)
    truth = list(zip(pixels, boxes_px, targets["classes"].numpy(), strict=True))
    show(
        "1_network_input.png",
        [drawing.draw_boxes(image, boxes, classes, names) for image, boxes, classes in truth],
        f"{count} training images {tuple(batch.shape)} and their boxes, padded to "
        f"{tuple(targets['boxes'].shape)}",
    )

    # --- 2. Anchors: those that a box trains, where it trains them, in the colour of their head -------
    num_classes, strides = len(names), [f"stride {stride}" for stride in config.strides]
    grids = [tuple(side // stride for side in config.image_size) for stride in config.strides]
    assignments = [
        assign_targets(
            targets["boxes"], targets["classes"], config, head, grid_size=grid, num_classes=num_classes
        )
        for head, grid in enumerate(grids)
    ]
    pictures, owned = [], []
    for row, image in enumerate(pixels):
        anchors_px, heads = [np.zeros((0, 4))], []
        for head, (assignment, stride) in enumerate(zip(assignments, config.strides, strict=True)):
            box, anchor = np.nonzero(assignment.owner[row].numpy())
            cells = np.stack(
                [assignment.columns[row].numpy()[box], assignment.rows[row].numpy()[box]], axis=-1
            )
            sizes = np.array(config.anchor_sizes)[np.array(config.masks[head])[anchor]]  # width, height
            centers = (cells + 0.5) * stride
            anchors_px.append(np.concatenate([centers - sizes / 2, centers + sizes / 2], axis=-1))
            heads += [head] * len(box)
        owned.append(len(heads))
        pictures.append(drawing.draw_boxes(image, np.concatenate(anchors_px), np.array(heads, int), strides))
    show(
        "2_trained_anchors.png",
        pictures,
        f"of {sum(rows * columns for rows, columns in grids) * config.anchors_per_location} predictions an "
        f"image, boxes train {owned}: the best anchor by shape, and those above an IoU of "
        f"{config.iou_thresh:g} by shape{', in three cells' if config.neighbour_cells else ''}",
    )

    # --- 3. Targets, and what the network says, cell by cell: finest head left, coarsest right --------
    heads = model(batch, training=False)
    wanted, said = [], []
    for row, image in enumerate(pixels):
        for assignment, raw, grid in zip(assignments, heads, grids, strict=True):
            cells = np.zeros(grid)
            box = assignment.owner[row].numpy().any(-1)
            cells[assignment.rows[row].numpy()[box], assignment.columns[row].numpy()[box]] = 1
            wanted.append(heat_map(image, cells))
            objectness = tf.sigmoid(tf.reduce_max(raw[row, ..., 4], axis=-1)).numpy()
            said.append(heat_map(image, objectness))
    per_row = 2 * len(strides)
    show("3_targets.png", wanted, f"cells that a box trains, {', '.join(strides)}", per_row)
    show("4_objectness.png", said, "the best objectness of each cell, where the loss compares", per_row)

    # --- 4. The loss ----------------------------------------------------------------------------------
    values = losses.detection_loss(heads, targets, config)
    print("loss: " + ", ".join(f"{name} {float(value):.4f}" for name, value in values.items()))

    # --- 5. Candidates and detections, on whole images ------------------------------------------------
    loader = make_loader("auto", training=False, with_targets=False, **options)
    batch, _ = next(iter(loader.dataset()))
    heads = model(batch, training=False)
    best, kept = postprocess.candidates(heads, config), postprocess.detect(heads, config)
    for name, found, least_score, says in (
        ("5_candidates.png", best, 0.0, "the best 100 predictions of each image, before suppression"),
        ("6_detections.png", kept[:3], 0.3, f"after it ({config.nms_method}), with a score of 0.3 at least"),
    ):
        pictures = []
        for image, *rows in zip(to_pixels(batch).numpy(), *(values.numpy() for values in found), strict=True):
            boxes, scores, classes = (values[:100] for values in rows)
            seen = scores >= least_score
            found_px = boxes[seen] * to_px
            pictures.append(drawing.draw_boxes(image, found_px, classes[seen], names, scores[seen]))
        show(name, pictures, says)


def main() -> None:
    walk(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
