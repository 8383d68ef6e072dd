"""Flags: each one's default, help text and range stand once, as a field of a frozen dataclass.

    @dataclasses.dataclass(frozen=True)
    class Args(args.Args):                                  # an app adds its own
        letterbox: bool | None = flag(None, "Keep the aspect ratio ... Default: the recipe's.")

    define(fv, Args)                                        # the absl flags of all fields
    a = Args(**values(flags.FLAGS, define_flags))           # the command line as plain values

Importing this module defines no flag. An entry point calls `install(define_flags)` under `__main__`.
"""

import dataclasses
import pathlib
import sys
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any

from absl import flags

from common.errors import UserError
from common.files import write_bytes

PIPELINE_TYPES = ("auto", "dali_gpu", "dali_cpu", "tensorflow", "synthetic")
STRATEGIES = ("none", "mirrored", "multi_worker", "horovod")
COMPRESSIONS = ("none", "fp16")
MAX_SEED = 2**31 - 1  # -1 makes DALI draw a seed of its own, larger ones lose their upper bits
MAX_MEGAPIXELS = 100.0  # decoded, that is 300 MB
ON_BAD_IMAGE = ("stop", "skip")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".jp2")
PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")
COCO_BACKENDS = ("pycocotools", "faster")


def flag(
    default: Any,
    help_text: str,
    *,
    choices: Sequence[str] | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A dataclass field that `define` turns into an absl flag of the field's name and type.

    Args:
        default: the flag's default; None for a flag that need not be given.
        help_text: the thing, its unit and, where `default` does not tell, its default.
        choices: the words that a flag of type str may hold; None: any.
        low, high: the least and the greatest value of a number; None: no limit.
    """
    metadata = {"help": help_text, "choices": choices, "low": low, "high": high}
    return dataclasses.field(default=default, metadata=metadata)


def model_name_flag(model_names: Sequence[str], default: str) -> Any:
    """The field of --model_name. Not an enum: an unknown name is answered with the nearest right one."""
    return flag(default, f"Model: one of {', '.join(model_names)}.")


@dataclasses.dataclass(frozen=True)
class Args:
    """The flags of train.py that both apps share; eval.py, infer.py, export.py and bench.py take some."""

    # --- the network ---
    model_name: str = flag("", "Model.")
    image_size: str | None = flag(None, "Network input, N or HxW in pixels. Default: the model's.")
    num_classes: int | None = flag(None, "Number of classes. Default: the data's.", low=1)
    hparams: str | None = flag(
        None, "Hyper-parameters, k=v,k=v or a YAML file: overrides any field of the app's config."
    )

    # --- the data ---
    input_type: str | None = flag(
        None, "Kind of data. Default: follows from which data flags are given.", choices=("coco", "tfrecord")
    )
    train_images: str | None = flag(None, "Directory of training images (COCO).")
    train_annotations: str | None = flag(None, "COCO json of the training images.")
    train_file_pattern: str | None = flag(
        None,
        "Glob of training TFRecords in the TF Object Detection schema; indexes are made when missing or "
        "stale.",
    )
    eval_images: str | None = flag(None, "Directory of evaluation images (COCO).")
    eval_annotations: str | None = flag(None, "COCO json of the evaluation images.")
    eval_file_pattern: str | None = flag(
        None,
        "Glob of evaluation TFRecords in the TF Object Detection schema; indexes are made when missing or "
        "stale.",
    )
    label_map: str | None = flag(
        None, "File of class names for TFRecords. Default: the one that the converter wrote next to them."
    )
    pipeline_type: str = flag(
        "auto",
        "Loader. auto: dali_gpu where there is a GPU, else dali_cpu; tensorflow: the plain tf.data twin; "
        "synthetic: one batch repeated, for speed tests.",
        choices=PIPELINE_TYPES,
    )
    dali_device_id: int | None = flag(
        None, "GPU of the dali_gpu loader, by its number on this host. Default: the model's.", low=0
    )
    batch_size: int = flag(8, "Images per replica.", low=1)
    num_threads: int = flag(2, "DALI CPU threads per rank.", low=1)
    prefetch: int = flag(2, "Depth of the loader's queue in batches.", low=1)
    on_bad_image: str = flag(
        "stop",
        "Images that cannot be read: stop and list them all, or skip and report them.",
        choices=ON_BAD_IMAGE,
    )
    max_megapixels: float = flag(
        MAX_MEGAPIXELS,
        "Images with more megapixels count as unreadable: a small file can decode to gigabytes.",
        low=0.0,
    )

    # --- the run ---
    output_dir: str | None = flag(
        None,
        "Directory of checkpoints, flags.txt, results.csv, TensorBoard events and pictures. The same command "
        "on the same directory resumes.",
    )
    overwrite: bool = flag(False, "Start anew in a directory that already holds a run.")
    epochs: int | None = flag(None, "Number of epochs. Default: the recipe's.", low=1)
    steps_per_epoch: int | None = flag(None, "Batches per epoch. Default: the size of the data.", low=1)
    learning_rate: float | None = flag(
        None,
        "Learning rate at the recipe's reference batch; scaled by the effective batch. Default: the "
        "recipe's.",
        low=0.0,
    )
    precision: str = flag("float32", "Arithmetic of the network.", choices=PRECISIONS)
    xla: bool = flag(False, "Compile the training step with XLA.")
    ema_decay: float | None = flag(
        None, "Decay of the weights' moving average; 0: off. Default: the recipe's."
    )
    clip_norm: float | None = flag(
        None, "Largest global norm of the gradients; 0: off. Default: the recipe's."
    )
    accumulate_steps: int = flag(0, "Batches per weight update; 0: off.", low=0)
    init_from: str | None = flag(
        None, "Weights to start from, with any number of classes: heads that differ are re-made."
    )
    freeze: str | None = flag(None, "Regular expression of layer names that do not train.")
    eval_every: int = flag(1, "Epochs between evaluations; 0: only at the end.", low=0)
    eval_every_steps: int = flag(
        0, "Steps between evaluations within an epoch, besides --eval_every; 0: none.", low=0
    )
    patience: int = flag(
        0,
        "Evaluations without a better AP after which a run ends with its epoch; 0: it trains all epochs.",
        low=0,
    )
    coco_backend: str = flag(
        "pycocotools",
        "Library that computes the COCO metrics: pycocotools, or faster: faster-coco-eval, same results.",
        choices=COCO_BACKENDS,
    )
    save_every: int = flag(1000, "Steps between checkpoints within an epoch; 0: only at its end.", low=0)
    max_skipped_steps: int = flag(
        10, "Steps in a row that may be skipped because a loss or gradient is not finite.", low=0
    )
    seed: int = flag(0, "Random seed; 0 is a seed.", low=0, high=MAX_SEED)

    # --- many processes ---
    strategy: str = flag(
        "none",
        "Distribution. none: one device; horovod: one process per device, started by horovodrun; mirrored: "
        "all GPUs of this process; multi_worker: all GPUs of several processes, which TF_CONFIG names.",
        choices=STRATEGIES,
    )
    compression: str = flag(
        "none", "Compression of gradients between ranks, under Horovod.", choices=COMPRESSIONS
    )
    step_timeout: float = flag(
        600.0,
        "Seconds without a step after which a run ends and shows where each rank is; 0: never.",
        low=0.0,
    )
    elastic: bool = flag(
        False,
        "Go on with another number of ranks, from the last whole epoch: when Horovod loses or gains hosts, "
        "and when a run is resumed.",
    )
    dry_run: int | None = flag(
        None,
        "Number of processes: try these flags with so many on this machine, for a few small steps that are "
        "saved nowhere.",
        low=1,
    )


@dataclasses.dataclass(frozen=True)
class DetectionArgs:
    """The flags of eval.py, infer.py and export.py that train.py does not have."""

    weights: str | None = flag(None, "Weights file or run directory (its best weights).")
    image_size: str | None = flag(None, "Network input, N or HxW in pixels. Default: the trained size.")
    images: str | None = flag(None, "Image, directory of images, glob, or video to detect in.")
    annotations: str | None = flag(None, "COCO json: draw its boxes beside the detections.")
    output_dir: str | None = flag(None, "Directory of the pictures and detections.json.")
    draw: bool = flag(True, "Draw pictures, or the video with boxes.")
    submission: str | None = flag(
        None, "Results file for the COCO server, .json or .zip, with the best 100 detections of each image."
    )
    image_info: str | None = flag(
        None,
        "json with the ids of the images (COCO's image_info_test-dev2017.json). Default: --annotations; "
        "else, for --submission, file names that are numbers.",
    )
    score_threshold: float = flag(
        0.3, "Least score of a detection, except in --submission.", low=0.0, high=1.0
    )


@dataclasses.dataclass(frozen=True)
class ImagePolicy:
    """What is done about images that cannot be used.

    Attributes:
        on_bad_image: "stop", or "skip": unreadable images are left out and reported.
        max_megapixels: larger images count as unreadable (a 48 KB PNG can decode to 3.3 GB).
        decode: look at every pixel, not just at headers and ends of files.
    """

    on_bad_image: str = "stop"
    max_megapixels: float = MAX_MEGAPIXELS
    decode: bool = False

    def __post_init__(self) -> None:
        if not self.max_megapixels > 0:
            raise UserError(f"--max_megapixels={self.max_megapixels:g}: it must be above 0")


def define(fv: flags.FlagValues, args_class: type, names: Collection[str] | None = None) -> None:
    """Defines the absl flags of a dataclass' fields; `names`: of these fields only."""
    for field in dataclasses.fields(args_class):
        if names is None or field.name in names:
            _define(fv, field.name, field.type, field)


def _define(fv: flags.FlagValues, name: str, annotation: Any, field: dataclasses.Field) -> None:
    about, types = field.metadata, typing.get_args(annotation) or (annotation,)
    common: dict[str, Any] = {"help": about["help"], "flag_values": fv}
    if about["choices"]:
        flags.DEFINE_enum(name, field.default, about["choices"], **common)
    elif bool in types:
        flags.DEFINE_bool(name, field.default, **common)
    elif str in types:
        flags.DEFINE_string(name, field.default, **common)
    else:
        number = flags.DEFINE_integer if int in types else flags.DEFINE_float
        number(name, field.default, lower_bound=about["low"], upper_bound=about["high"], **common)


# --- the flags of commands that take some of train.py's --------------------------------------------------


def define_source_flags(fv: flags.FlagValues, splits: tuple[str, ...]) -> None:
    """The data."""
    parts = ("images", "annotations", "file_pattern")
    define(fv, Args, ["input_type", "label_map", *(f"{split}_{part}" for split in splits for part in parts)])


def define_dali_device_flag(fv: flags.FlagValues) -> None:
    """The GPU of the DALI loader."""
    define(fv, Args, ["dali_device_id"])


def define_batch_flags(fv: flags.FlagValues) -> None:
    """How batches are made."""
    define(fv, Args, ["num_threads", "prefetch", "batch_size"])
    define_image_flags(fv)


def define_image_flags(fv: flags.FlagValues) -> None:
    """Which images are usable, and what happens to the others."""
    define(fv, Args, ["on_bad_image", "max_megapixels"])


def define_model_flags(fv: flags.FlagValues, model_names: Sequence[str], default: str) -> None:
    """The network, its size and its hyper-parameters."""
    _define(fv, "model_name", str, model_name_flag(model_names, default))
    define(fv, Args, ["image_size", "num_classes", "hparams"])


def define_hparams_flag(fv: flags.FlagValues) -> None:
    """Any hyper-parameter."""
    define(fv, Args, ["hparams"])


def define_arithmetic_flags(fv: flags.FlagValues) -> None:
    """How the network computes."""
    define(fv, Args, ["precision", "xla"])


# --- from the command line to values ---------------------------------------------------------------------


def install(define_flags: Callable[[flags.FlagValues], None]) -> None:
    """Defines an entry point's flags as key flags of its file, which makes --help show them."""
    define_flags(flags.FLAGS)
    own = flags.FlagValues()
    define_flags(own)
    for name in own:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])


def values(fv: flags.FlagValues, define_flags: Callable[[flags.FlagValues], None]) -> dict:
    """The values of the flags that `define_flags` defines, by name; absl's own are left out."""
    own = flags.FlagValues()
    define_flags(own)
    return {name: fv[name].value for name in own}


def write_flagfile(path: pathlib.Path, flag_values: dict) -> None:
    """Writes `--name=value` lines that `--flagfile=` reads back; flags without a value are left out.

    So is --overwrite: repeating a run must not erase it.
    """
    given = {k: v for k, v in sorted(flag_values.items()) if v is not None and k != "overwrite"}
    write_bytes(path, "".join(f"--{name}={value}\n" for name, value in given.items()).encode())
