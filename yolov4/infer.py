r"""Detects objects in images or in a video with a trained YOLOv4, and draws them.

    python yolov4/infer.py --weights=runs/demo-yolov4 --images='photos/*.jpg' --output_dir=found
    python yolov4/infer.py --weights=runs/demo-yolov4 --images=clip.mp4 --output_dir=found

The command writes one picture per image, or the video with boxes, and detections.json with boxes in pixels of
the original images. For images, image_info.json has their names, sizes and the categories, and
contact_sheet.png shows six of them, those with many classes and objects first. With --annotations, each
picture shows the ground truth on the left.

For COCO's test server, read the image ids from its list and keep all detections:

    python yolov4/infer.py --weights=WEIGHTS --images=coco/test2017 --output_dir=found --nodraw \
        --image_info=coco/annotations/image_info_test-dev2017.json --score_threshold=0 --hparams=nms_iou=0.6

Then rename detections.json as https://cocodataset.org/#upload says, and zip it.

NMS has an IoU threshold of 0.45 here, but of 0.6 in eval.py. To change it:
--hparams=nms_iou=0.6
"""

import functools
import pathlib
import sys
import time
from typing import Any

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args, errors
from common.args import InferArgs
from common.progress import import_tensorflow

define_flags = functools.partial(args.define, args_class=InferArgs)

if __name__ == "__main__":  # check the flags first, because the imports below take seconds
    args.install(define_flags)
    errors.parse_flags()
    import_tensorflow(pyplot=False)

from common.data.loader import evaluation_options
from common.distributed.start import optimize_graphs_once, share_gpu_memory
from common.evaluation.detectors import open_detector
from common.evaluation.evaluate import predict
from common.evaluation.inference import InferenceJob
from yolov4.loaders import make_loader
from yolov4.predict import APP, PICTURE_NMS_IOU


def infer(a: InferArgs) -> list[dict[str, Any]]:
    """Detects objects in images or a video. Draws and writes the results.

    Returns:
        The content of detections.json: detections in COCO results format.

    Raises:
        UserError: the weights, flags or images cannot be used, or the output cannot be written.
    """
    share_gpu_memory()
    optimize_graphs_once()
    job = InferenceJob(a)  # opens the images or the video
    detect, config, label_map, weights = open_detector(
        APP, a.weights, a.image_size, a.hparams, nms_iou=PICTURE_NMS_IOU
    )
    job.check_categories(label_map)
    loader = make_loader(job.pipeline_type, source=job.source, config=config, **evaluation_options(a))
    start = time.monotonic()
    detections = predict(detect, loader, label_map, title="detecting", min_score=a.score_threshold)
    job.print_time(time.monotonic() - start, weights)
    return job.write(detections, label_map)


def main() -> None:
    infer(InferArgs(**args.values(flags.FLAGS, define_flags)))


if __name__ == "__main__":
    errors.run(main)
