"""Draws what a trained YOLOv4 finds in images.

    python yolov4/infer.py --weights=runs/demo-yolov4 --images='photos/*.jpg' --output_dir=found

Boxes of one class are suppressed at an IoU of 0.45 (eval.py: 0.6); --hparams=nms_iou=0.6 changes that.
Writes one picture per image and detections.json (original pixels, original category ids). With --annotations
the truth is drawn beside the detections.
"""

import os
import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import flags

from common import devices, errors, pictures
from common import flags as shared_flags
from common.coco_json import load_coco
from common.evaluation import predict
from common.image_files import ImagePolicy
from common.loading import refuse_synthetic
from common.open_data import open_images
from common.run_directory import make_output_directory
from yolov4.loaders import make_loader
from yolov4.predict import load_trained, make_detect

# For pictures, where two boxes on one object disturb more than a lost one: darknet src/detector.c,
# test_detector. eval.py keeps the 0.6 of COCO results.
PICTURE_NMS_IOU = 0.45


def define_flags(fv: flags.FlagValues) -> None:
    shared_flags.define_trained_flags(fv)
    shared_flags.define_loader_flags(fv)
    shared_flags.define_picture_flags(fv)


def infer(
    *,
    weights: str | None,
    images: str | None,
    annotations: str | None = None,
    output_dir: str | None = None,
    score_threshold: float = 0.3,
    image_size: str | None = None,
    hparams: str | None = None,
    pipeline_type: str = "auto",
    batch_size: int = 8,
    num_threads: int = 2,
    prefetch: int = 2,
    on_bad_image: str = "stop",
    max_megapixels: float = shared_flags.MAX_MEGAPIXELS,
) -> list[dict]:
    """Detects, draws and writes; see the flags of the same names. Returns the detections (COCO results)."""
    if not images:
        raise errors.UserError("--images is missing: name an image, a directory or a glob")
    if not output_dir:
        raise errors.UserError("--output_dir is missing: name a directory for the pictures")
    devices.share_gpu_memory()
    refuse_synthetic(pipeline_type)
    source = open_images(images, ImagePolicy(on_bad_image, max_megapixels))
    files = [pathlib.Path(file) for file in source.files]
    model, config, categories, _ = load_trained(weights, image_size, hparams, PICTURE_NMS_IOU)
    truth = load_coco(annotations, None) if annotations else None
    pictures.truth_rows(pictures.relative_names(files), truth)  # complains before the work, not after it
    directory = make_output_directory(output_dir)
    pictures.check_not_over_images(directory, files)
    loader = make_loader(
        pipeline_type,
        source=source,
        config=config,
        batch_size=batch_size,
        training=False,
        num_threads=num_threads,
        prefetch=prefetch,
        with_targets=False,
    )
    found = predict(make_detect(model, config), loader, source, categories, title="detecting")
    results = pictures.write_pictures(
        files, found, categories, directory, score_threshold=score_threshold, truth=truth
    )
    print(
        f"{len(results)} detections in {len(files)} images: pictures and detections.json are in {directory}"
    )
    return results


def main() -> None:
    infer(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
