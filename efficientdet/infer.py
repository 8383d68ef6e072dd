"""Draws what a trained EfficientDet finds in images, or in a video.

    python efficientdet/infer.py --weights=runs/demo-efficientdet --images='photos/*.jpg' --output_dir=found
    python efficientdet/infer.py --weights=runs/demo-efficientdet --images=clip.mp4 --output_dir=found

Writes one picture per image, or the video with boxes, and detections.json (original pixels, original category
ids; images in sorted order). With --annotations the truth is drawn beside the detections. --submission writes
a results file for the COCO server (common/evaluation/submission.py).
"""

import os
import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import flags

from common import args as shared_flags
from common import devices, errors
from common.datacheck.images import ImagePolicy
from common.evaluation.evaluate import predict
from common.evaluation.inference import open_job
from common.evaluation.throughput import Throughput
from efficientdet.loaders import make_loader
from efficientdet.predict import open_detector


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
    draw: bool = True,
    submission: str | None = None,
    image_info: str | None = None,
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
    devices.share_gpu_memory()
    job = open_job(
        images,
        output_dir=output_dir,
        annotations=annotations,
        image_info=image_info,
        submission_file=submission,
        score_threshold=score_threshold,
        draw=draw,
        pipeline_type=pipeline_type,
        policy=ImagePolicy(on_bad_image, max_megapixels),
    )
    detector = open_detector(weights, image_size, hparams)
    job.check_labels(detector.label_map)
    loader = make_loader(
        job.pipeline_type,
        source=job.source,
        config=detector.config,
        batch_size=batch_size,
        training=False,
        num_threads=num_threads,
        prefetch=prefetch,
        with_targets=False,
    )
    throughput = Throughput(job.source.size, batch_size, prefetch)
    found = predict(
        job.only_wanted(detector.detect),
        loader,
        job.source,
        detector.label_map,
        title="detecting",
        on_batch=throughput,
    )
    results = job.write(found, detector.label_map)
    print(throughput.describe())
    return results


def main() -> None:
    infer(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
