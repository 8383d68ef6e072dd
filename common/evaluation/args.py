"""Flags of eval.py and infer.py of both apps; importing this module needs neither TensorFlow nor DALI."""

import dataclasses
from typing import Any

from common.args import Args, DetectionArgs, flag

_Field = tuple[str, Any, Any]  # name, type, default


def shared(args_class: type, *names: str) -> list[_Field]:
    """The fields of these names, with their flags, for `dataclasses.make_dataclass`."""
    return [
        (field.name, field.type, dataclasses.field(default=field.default, metadata=field.metadata))
        for field in dataclasses.fields(args_class)
        if field.name in names
    ]


_DETECTOR = [
    *shared(DetectionArgs, "weights", "image_size"),
    *shared(Args, "hparams", "pipeline_type", "batch_size", "num_threads", "prefetch"),
    *shared(Args, "on_bad_image", "max_megapixels"),
]
_RESULTS = "Where metrics.json and detections.json go. Default: the run directory; beside an exported file."

EvalArgs = dataclasses.make_dataclass(
    "EvalArgs",
    [
        *_DETECTOR,
        *shared(Args, "input_type", "eval_images", "eval_annotations", "eval_file_pattern", "label_map"),
        *shared(Args, "coco_backend"),
        ("output_dir", str | None, flag(None, _RESULTS)),
    ],
    frozen=True,
)
InferArgs = dataclasses.make_dataclass(
    "InferArgs",
    [
        *_DETECTOR,
        *shared(DetectionArgs, "images", "annotations", "output_dir", "draw"),
        *shared(DetectionArgs, "submission", "image_info", "score_threshold"),
    ],
    frozen=True,
)
