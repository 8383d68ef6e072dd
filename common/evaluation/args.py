"""Flags of eval.py and infer.py of both apps; importing this module needs neither TensorFlow nor DALI."""

import dataclasses

from absl import flags

from common import args as shared_flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectArgs:
    """Flags of both commands; see common/args.py."""

    weights: str | None
    output_dir: str | None = None
    image_size: str | None = None
    hparams: str | None = None
    pipeline_type: str = "auto"
    batch_size: int = 8
    num_threads: int = 2
    prefetch: int = 2
    on_bad_image: str = "stop"
    max_megapixels: float = shared_flags.MAX_MEGAPIXELS


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalArgs(DetectArgs):
    """Flags of eval.py."""

    input_type: str | None = None
    eval_images: str | None = None
    eval_annotations: str | None = None
    eval_file_pattern: str | None = None
    label_map: str | None = None
    coco_backend: str = "pycocotools"


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferArgs(DetectArgs):
    """Flags of infer.py."""

    images: str | None
    annotations: str | None = None
    draw: bool = True
    submission: str | None = None
    image_info: str | None = None
    score_threshold: float = 0.3


def define_eval_flags(fv: flags.FlagValues) -> None:
    shared_flags.define_trained_flags(fv)
    shared_flags.define_data_flags(fv, ("eval",))
    shared_flags.define_evaluation_flags(fv)
    flags.DEFINE_string(
        "output_dir",
        None,
        "Where metrics.json and detections.json go. Default: the run directory; beside an exported file.",
        flag_values=fv,
    )


def define_infer_flags(fv: flags.FlagValues) -> None:
    shared_flags.define_trained_flags(fv)
    shared_flags.define_loader_flags(fv)
    shared_flags.define_picture_flags(fv)
