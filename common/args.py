"""Defines flags as fields of frozen dataclasses. A field has the default, help text and range of its flag.

    @dataclasses.dataclass(frozen=True)
    class Args(args.Args):                                  # an app adds flags
        letterbox: bool | None = flag(None, "Keep the aspect ratio ... Default: as in the recipe.")

    define(fv, Args)                                        # defines the absl flags of all fields
    a = Args(**values(flags.FLAGS, define_flags))           # the command line as plain values

An entry point calls `install(define_flags)` under `__main__`. Importing this module defines no flag.
"""

import dataclasses
import math
import os
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any

from absl import flags

SHUFFLES = ("global", "buffer")
PIPELINE_TYPES = ("auto", "dali_gpu", "dali_cpu", "tensorflow", "synthetic")
MAX_SEED = 2**31 - 1  # DALI drops the upper bits of larger seeds
MAX_THREADS = 16  # upper limit of the default of --num_threads
MAX_MEGAPIXELS = 100.0  # 300 MB of RGB
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".tif", ".tiff", ".jp2")
VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".3gp", ".3g2", ".flv"),
    *(".asf", ".mts", ".m2ts", ".ts", ".ogv", ".vob"),
)

# --help shows these flags first. The others follow, grouped by the attribute `group` of their class.
MOST_USED = (
    *("model_name", "train_images", "train_annotations", "eval_images", "eval_annotations"),
    *("output_dir", "init_from", "epochs", "batch_size", "image_size"),
    *("weights", "images", "score_threshold", "format", "output"),  # flags of eval.py, infer.py, export.py
)

# Names of flags (fields of Args) that several commands use.
IMAGE_FLAGS = ("on_bad_image", "max_megapixels")
DECODER_FLAGS = ("hw_decoder_load", "fancy_upsampling", "roi_decoding")
BATCH_FLAGS = ("num_threads", "prefetch", "batch_size", *IMAGE_FLAGS)


def flag(
    default: Any,
    help_text: str,
    *,
    choices: Sequence[str] | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """Returns a dataclass field, which `define` turns into an absl flag of the same name and type.

    Args:
        default: the flag's default value. None means that there is no fixed default.
        help_text: what the flag sets and its unit. If `default` is None, also which value is then used.
        choices: allowed values of a flag of type str. None allows any value.
        low, high: smallest and largest allowed value of a number. None means no limit.
    """
    metadata = {"help": help_text, "choices": choices, "low": low, "high": high}
    return dataclasses.field(default=default, metadata=metadata)


def model_name_flag(model_names: Sequence[str], default: str, note: str) -> Any:
    """Returns the field of --model_name. Any name is accepted here; a later check rejects unknown names.

    `note` is added to the help.
    """
    return flag(default, f"Model: one of {', '.join(model_names)}. {note}")


@dataclasses.dataclass(frozen=True)
class NetworkArgs:
    group = "Network"

    image_size: str | None = flag(None, "Network input size in pixels, N or HxW. Default: the model's size.")
    hparams: str | None = flag(None, "Changes of hyper-parameters: name=value,name=value or a YAML file.")


@dataclasses.dataclass(frozen=True)
class ImageArgs:
    group = "Loading of images"

    on_bad_image: str = flag("stop", "On unreadable images: stop, or skip and log.", choices=("stop", "skip"))
    max_megapixels: float = flag(MAX_MEGAPIXELS, "Images with more megapixels count as unreadable.", low=0.0)


@dataclasses.dataclass(frozen=True)
class LoaderArgs(ImageArgs):
    pipeline_type: str = flag(
        "auto",
        "Type of loader. auto: dali_gpu if there is a GPU, else dali_cpu; tensorflow: tf.data without DALI; "
        "synthetic: one random batch, repeated, for speed tests.",
        choices=PIPELINE_TYPES,
    )
    batch_size: int = flag(8, "Images per batch of each replica (device).", low=1)
    num_threads: int | None = flag(None, "Loader threads. Default: a share of the cores, at most 16.", low=1)
    prefetch: int = flag(2, "Number of batches that the loader prepares ahead.", low=1)
    hw_decoder_load: float = flag(
        0.65, "Fraction of JPEGs that the GPU's JPEG engines decode (A100 and later).", low=0.0, high=1.0
    )
    fancy_upsampling: bool = flag(
        True, "On a GPU, interpolate the colours of JPEGs as CPUs do. Off: pixels differ from those of a CPU."
    )
    roi_decoding: bool = flag(
        False, "On a GPU, decode only the needed part of an image, as CPUs do. Can crash with DALI 2.4."
    )


@dataclasses.dataclass(frozen=True)
class EvaluationArgs:
    group = "Evaluation"

    input_type: str | None = flag(
        None, "Data format. Default: auto-detected.", choices=("coco", "tfrecord", "webdataset")
    )
    eval_images: str | None = flag(None, "Directory of evaluation images (COCO).")
    eval_annotations: str | None = flag(None, "COCO json of the evaluation images.")
    eval_file_pattern: str | None = flag(None, "Glob of evaluation TFRecords or WebDataset shards.")
    label_map: str | None = flag(None, "Class names file. Default: .label_map.json next to the data files.")
    coco_pixels: str | None = flag(
        None,
        "Whether boxes of COCO jsons refer to the images as stored, or as turned by their EXIF orientation.",
        choices=("stored", "turned"),
    )
    check: str = flag(
        "all",
        "Image files of COCO data that are checked before the run. sample: 5,000 files, drawn at random.",
        choices=("all", "sample", "none"),
    )
    box_areas: bool = flag(False, "For APs, APm, APl use the areas of the boxes, not those of the data.")
    coco_backend: str = flag(
        "pycocotools", "COCO metrics library. faster: faster-coco-eval.", choices=("pycocotools", "faster")
    )


@dataclasses.dataclass(frozen=True)
class TrainingArgs:
    group = "Training"

    train_images: str | None = flag(None, "Directory of training images (COCO).")
    train_annotations: str | None = flag(None, "COCO json of the training images.")
    train_file_pattern: str | None = flag(None, "Glob of training TFRecords or WebDataset shards.")
    shuffle: str | None = flag(
        None,
        "Order of TFRecords and WebDataset. global: the images of all files are mixed; buffer: each file is "
        "read from start to end, for slow disks. Default: global, or as in the run that is resumed.",
        choices=SHUFFLES,
    )
    augmentation_preset: str = flag(
        "default", "Strength of the training augmentation.", choices=("none", "light", "default", "strong")
    )
    output_dir: str = flag("", "Directory for the files of the run. The same command resumes the run.")
    overwrite: bool = flag(False, "Delete the run in --output_dir, if there is one, and start again.")
    epochs: int | None = flag(None, "Number of epochs. Default: as in the recipe.", low=1)
    steps_per_epoch: int | None = flag(None, "Batches per epoch. Default: one pass over the data.", low=1)
    learning_rate: float | None = flag(
        None,
        "Learning rate for `reference_batch` images per update; scales linearly. Default: as in the recipe.",
        low=0,
    )
    precision: str = flag(
        "float32", "Dtype policy of the network.", choices=("float32", "mixed_float16", "mixed_bfloat16")
    )
    xla: bool = flag(False, "Compile the training step with XLA.")
    ema_decay: float | None = flag(None, "Decay of the weights' EMA; 0: off. Default: as in the recipe.")
    clip_norm: float | None = flag(None, "Largest gradient norm; 0: no limit. Default: as in the recipe.")
    accumulate_steps: int = flag(0, "Batches per weight update (gradient accumulation); 0: off.", low=0)
    init_from: str | None = flag(None, "Weights to start from. Head outputs for new classes start untrained.")
    freeze: str | None = flag(None, "Regular expression. Layers with a matching name are not trained.")
    freeze_batch_norm: bool = flag(False, "Keep statistics, scales and offsets of all batch norms unchanged.")
    eval_every: int = flag(1, "Epochs between evaluations; 0: only after the last epoch.", low=0)
    eval_every_steps: int = flag(0, "Steps between extra evaluations within an epoch; 0: none.", low=0)
    patience: int = flag(0, "Stop after this many evaluations without a better AP; 0: never.", low=0)
    save_every: int = flag(1000, "Steps between checkpoints; 0: only at the end of each epoch.", low=0)
    max_skipped_steps: int = flag(10, "Consecutive steps that may be skipped due to NaN or infinity.", low=0)
    seed: int = flag(0, "Random seed; 0 is a valid seed.", low=0, high=MAX_SEED)


@dataclasses.dataclass(frozen=True)
class ProcessArgs:
    group = "Processes and GPUs"

    strategy: str = flag(
        "none",
        "Distribution. none: one device; horovod: one process per device, started by horovodrun; mirrored: "
        "all GPUs of this process; multi_worker: all GPUs of several processes, listed in TF_CONFIG.",
        choices=("none", "mirrored", "multi_worker", "horovod"),
    )
    compression: str = flag("none", "Compression of gradients with Horovod.", choices=("none", "fp16"))
    step_timeout: float = flag(600.0, "End a run after this many seconds without a step; 0: never.", low=0.0)


@dataclasses.dataclass(frozen=True)
class Args(NetworkArgs, LoaderArgs, EvaluationArgs, TrainingArgs, ProcessArgs):
    """The flags of train.py that both apps share."""

    group = "Network"

    model_name: str = flag("", "Name of the model.")
    num_classes: int | None = flag(None, "Number of classes. Default: the data's.", low=1)


@dataclasses.dataclass(frozen=True)
class TrainedArgs(NetworkArgs):
    """The flags of every command that reads weights."""

    weights: str | None = flag(None, "Weights file, or a run directory, whose best weights are used.")


@dataclasses.dataclass(frozen=True)
class EvalArgs(TrainedArgs, LoaderArgs, EvaluationArgs):
    """The flags of eval.py."""

    output_dir: str | None = flag(None, "Directory for the results. Default: the run directory.")
    errors: bool = flag(False, "Print the error types; write errors.json, confusion_matrix.png, errors.png.")
    errors_min_score: float | None = flag(
        None, "Minimum score for --errors. Default: the score with the best F1.", low=0.0, high=1.0
    )


@dataclasses.dataclass(frozen=True)
class InferArgs(TrainedArgs, LoaderArgs):
    """The flags of infer.py."""

    images: str = flag("", "Input: an image, a directory of images, a glob or a video.")
    annotations: str | None = flag(None, "COCO json whose boxes are drawn next to the detections.")
    output_dir: str = flag("", "Directory for detections.json and for the images or video with boxes.")
    draw: bool = flag(True, "Draw the detections on the images or on the video.")
    image_info: str | None = flag(
        None, "COCO json with the image ids. Default: --annotations, or else 0, 1, ... in file order."
    )
    score_threshold: float = flag(0.3, "Minimum score.", low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True)
class ImagePolicy:
    """What to do about images that cannot be used.

    Attributes:
        on_bad_image: what to do if an image is unreadable. "stop" raises an error. "skip" leaves the image
            out and reports it.
        max_megapixels: larger images count as unreadable.
        decode: whether to decode every image. If False, only the header and the end of most images are read.
        coco_pixels: what the boxes of a COCO json refer to: "stored" or "turned" images; None if unknown.
        check: which image files of a COCO json are checked: "all", "sample" (always the same) or "none".
    """

    on_bad_image: str = "stop"
    max_megapixels: float = MAX_MEGAPIXELS
    decode: bool = False
    coco_pixels: str | None = None
    check: str = "all"


def default_threads(loaders: int = 1) -> int:
    """Returns the default of --num_threads: an equal share of this host's cores for each loader."""
    cores = len(os.sched_getaffinity(0))
    if cores * loaders > (os.cpu_count() or 1):  # otherwise each rank has its own cores
        cores //= loaders
    return min(max(cores, 1), MAX_THREADS)


def define(fv: flags.FlagValues, args_class: type, names: Collection[str] | None = None) -> None:
    """Defines an absl flag for each field of a dataclass, or only for the fields in `names`."""
    for field in dataclasses.fields(args_class):
        if names is None or field.name in names:
            define_flag(fv, field.name, field.type, field)
            owners = [c for c in args_class.__mro__ if field.name in vars(c).get("__annotations__", ())]
            group = "Most used" if field.name in MOST_USED else vars(owners[-1]).get("group", "Other flags")
            fv.register_key_flag_for_module(group, fv[field.name])


def define_flag(fv: flags.FlagValues, name: str, annotation: Any, field: dataclasses.Field[Any]) -> None:
    """Defines one absl flag from a field of `flag`."""
    default: Any = field.default
    metadata, types = field.metadata, typing.get_args(annotation) or (annotation,)
    common: dict[str, Any] = {"help": metadata["help"], "flag_values": fv}
    if metadata["choices"]:
        flags.DEFINE_enum(name, default, metadata["choices"], **common)
    elif bool in types:
        flags.DEFINE_bool(name, default, **common)
    elif str in types:
        flags.DEFINE_string(name, default, **common)
    else:
        number = flags.DEFINE_integer if int in types else flags.DEFINE_float
        number(name, default, lower_bound=metadata["low"], upper_bound=metadata["high"], **common)
        # Every comparison with NaN is false, so the limits alone let it pass.
        is_number = {"message": "give a number", "flag_values": fv}
        flags.register_validator(name, lambda value: value is None or not math.isnan(value), **is_number)


# --- from the command line to values ---------------------------------------------------------------------


def install(define_flags: Callable[[flags.FlagValues], None]) -> None:
    """Defines the flags of an entry point, and makes --help show them in groups."""
    define_flags(flags.FLAGS)
    command_flags = flags.FlagValues()
    define_flags(command_flags)
    grouped = command_flags.key_flags_by_module_dict()
    for name in set(command_flags) - {flag.name for members in grouped.values() for flag in members}:
        flags.FLAGS.register_key_flag_for_module("Other flags", flags.FLAGS[name])
    titles = ["Most used", *sorted({*grouped} - {"Most used", "Other flags"}), "Other flags"]
    # absl's --help prints the result of this function.
    vars(flags.FLAGS)["main_module_help"] = lambda: "\n".join(map(flags.FLAGS.module_help, titles))


def values(fv: flags.FlagValues, define_flags: Callable[[flags.FlagValues], None]) -> dict:
    """Returns name -> value of the flags of `define_flags`."""
    command_flags = flags.FlagValues()
    define_flags(command_flags)
    return {name: fv[name].value for name in command_flags}


def flagfile(flag_values: dict) -> bytes:
    """Returns `--name=value` lines for `--flagfile=`. Omits --overwrite and all flags that are None."""
    values = {k: v for k, v in sorted(flag_values.items()) if v is not None and k != "overwrite"}
    return "".join(f"--{name}={value}\n" for name, value in values.items()).encode()
