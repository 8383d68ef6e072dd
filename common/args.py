"""Flags: each one's default, help text and range stand once, as a field of a frozen dataclass.

    @dataclasses.dataclass(frozen=True)
    class Args(args.Args):                                  # an app adds its own
        letterbox: bool | None = flag(None, "Keep the aspect ratio ... Default: the recipe's.")

    define(fv, Args)                                        # the absl flags of all fields
    a = Args(**values(flags.FLAGS, define_flags))           # the command line as plain values

Importing this module defines no flag. An entry point calls `install(define_flags)` under `__main__`.
"""

import dataclasses
import os
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any

from absl import flags

PIPELINE_TYPES = ("auto", "dali_gpu", "dali_cpu", "tensorflow", "synthetic")
MAX_SEED = 2**31 - 1  # -1 makes DALI draw a random seed, larger ones lose their upper bits
MAX_THREADS = 16  # of a loader, by default
MAX_MEGAPIXELS = 100.0  # decoded, that is 300 MB
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".jp2")

# --help shows these first, and the other flags by the `group` of their class.
MOST_USED = (
    *("model_name", "train_images", "train_annotations", "eval_images", "eval_annotations"),
    *("output_dir", "init_from", "epochs", "batch_size", "image_size"),
    *("weights", "images", "score_threshold", "format", "output"),  # of eval.py, infer.py, export.py
)

# Names of fields of Args that several commands take.
IMAGE_FLAGS = ("on_bad_image", "max_megapixels")
DECODER_FLAGS = ("hw_decoder_load", "roi_decoding")
BATCH_FLAGS = ("num_threads", "prefetch", "batch_size", *IMAGE_FLAGS)


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
class NetworkArgs:
    """The size of the network and its hyper-parameters."""

    group = "Network"

    image_size: str | None = flag(None, "Network input, N or HxW in pixels. Default: the model's.")
    hparams: str | None = flag(None, "Overrides of fields of the app's config: k=v,k=v or a YAML file.")


@dataclasses.dataclass(frozen=True)
class LoaderArgs:
    """How images are read."""

    group = "Loading of images"

    pipeline_type: str = flag(
        "auto",
        "Loader. auto: dali_gpu where there is a GPU, else dali_cpu; tensorflow: the plain tf.data twin; "
        "synthetic: one batch repeated, for speed tests.",
        choices=PIPELINE_TYPES,
    )
    batch_size: int = flag(8, "Images per replica.", low=1)
    num_threads: int | None = flag(
        None, "DALI CPU threads per loader. Default: its share of the cores.", low=1
    )
    prefetch: int = flag(2, "Depth of the loader's queue in batches.", low=1)
    on_bad_image: str = flag("stop", "Unreadable images: stop, or skip and report.", choices=("stop", "skip"))
    max_megapixels: float = flag(MAX_MEGAPIXELS, "Megapixels of the largest image that is read.", low=0.0)
    hw_decoder_load: float = flag(
        0.65, "Share of the JPEGs that a GPU's JPEG engines decode (A100 and later).", low=0.0, high=1.0
    )
    roi_decoding: bool = flag(
        False, "Decode only the used part of an image on a GPU, too; may crash DALI 2.4."
    )


@dataclasses.dataclass(frozen=True)
class EvaluationArgs:
    """The evaluation data, and what computes the metrics."""

    group = "Evaluation"

    input_type: str | None = flag(None, "Kind of data. Default: by the flags.", choices=("coco", "tfrecord"))
    eval_images: str | None = flag(None, "Directory of evaluation images (COCO).")
    eval_annotations: str | None = flag(None, "COCO json of the evaluation images.")
    eval_file_pattern: str | None = flag(None, "Glob of evaluation TFRecords; missing indexes are made.")
    label_map: str | None = flag(None, "Class names of TFRecords. Default: the converter's file beside them.")
    coco_backend: str = flag(
        "pycocotools", "Metrics library; faster: faster-coco-eval.", choices=("pycocotools", "faster")
    )


@dataclasses.dataclass(frozen=True)
class TrainingArgs:
    """The training data and the run."""

    group = "Training"

    train_images: str | None = flag(None, "Directory of training images (COCO).")
    train_annotations: str | None = flag(None, "COCO json of the training images.")
    train_file_pattern: str | None = flag(None, "Glob of training TFRecords; missing indexes are made.")
    augmentation_preset: str = flag(
        "default", "Random changes of training images.", choices=("none", "light", "default", "strong")
    )
    output_dir: str = flag("", "Directory of the run. The same command resumes it.")
    overwrite: bool = flag(False, "Start anew in a directory that already holds a run.")
    epochs: int | None = flag(None, "Number of epochs. Default: the recipe's.", low=1)
    steps_per_epoch: int | None = flag(None, "Batches per epoch. Default: the size of the data.", low=1)
    learning_rate: float | None = flag(
        None, "Learning rate at the reference batch; scaled with the batch. Default: the recipe's.", low=0.0
    )
    precision: str = flag(
        "float32", "Arithmetic of the network.", choices=("float32", "mixed_float16", "mixed_bfloat16")
    )
    xla: bool = flag(False, "Compile the training step with XLA.")
    ema_decay: float | None = flag(None, "Decay of the averaged weights; 0: off. Default: the recipe's.")
    clip_norm: float | None = flag(None, "Largest global gradient norm; 0: off. Default: the recipe's.")
    accumulate_steps: int = flag(0, "Batches per weight update; 0: off.", low=0)
    init_from: str | None = flag(None, "Weights to start from. Heads for other classes are made anew.")
    freeze: str | None = flag(None, "Regular expression of layer names that do not train.")
    freeze_batch_norm: bool = flag(False, "All batch norms keep their statistics, scales and offsets.")
    eval_every: int = flag(1, "Epochs between evaluations; 0: only at the end.", low=0)
    eval_every_steps: int = flag(0, "Steps between more evaluations within an epoch; 0: none.", low=0)
    patience: int = flag(0, "Evaluations without a better AP until the run ends; 0: never.", low=0)
    save_every: int = flag(1000, "Steps between checkpoints within an epoch; 0: only at its end.", low=0)
    max_skipped_steps: int = flag(10, "Steps in a row with NaN or infinity that may be skipped.", low=0)
    seed: int = flag(0, "Random seed; 0 is a seed.", low=0, high=MAX_SEED)


@dataclasses.dataclass(frozen=True)
class ProcessArgs:
    """One or many processes."""

    group = "Processes and GPUs"

    strategy: str = flag(
        "none",
        "Distribution. none: one device; horovod: one process per device, started by horovodrun; mirrored: "
        "all GPUs of this process; multi_worker: all GPUs of several processes, which TF_CONFIG names.",
        choices=("none", "mirrored", "multi_worker", "horovod"),
    )
    compression: str = flag("none", "Compression of gradients under Horovod.", choices=("none", "fp16"))
    step_timeout: float = flag(600.0, "Seconds without a step until the run ends; 0: never.", low=0.0)
    elastic: bool = flag(False, "Continue from the last whole epoch when hosts or ranks change.")
    dry_run: int | None = flag(None, "Processes on this machine that try these flags briefly.", low=1)


@dataclasses.dataclass(frozen=True)
class Args(NetworkArgs, LoaderArgs, EvaluationArgs, TrainingArgs, ProcessArgs):
    """The flags of train.py that both apps share; bench.py takes some."""

    group = "Network"

    model_name: str = flag("", "Model.")
    num_classes: int | None = flag(None, "Number of classes. Default: the data's.", low=1)


@dataclasses.dataclass(frozen=True)
class TrainedArgs(NetworkArgs):
    """The flags of every command that reads weights."""

    weights: str | None = flag(None, "Weights file or run directory (its best weights).")


@dataclasses.dataclass(frozen=True)
class EvalArgs(TrainedArgs, LoaderArgs, EvaluationArgs):
    """The flags of eval.py."""

    output_dir: str | None = flag(None, "Directory of the results. Default: the run directory.")
    errors: bool = flag(False, "Table of errors by kind, errors.json, confusion_matrix.png, errors.png.")
    errors_min_score: float | None = flag(
        None, "Least score of detections for --errors. Default: the one with the best F1.", low=0.0, high=1.0
    )


@dataclasses.dataclass(frozen=True)
class InferArgs(TrainedArgs, LoaderArgs):
    """The flags of infer.py."""

    images: str = flag("", "Image, directory of images, glob, or video to detect in.")
    annotations: str | None = flag(None, "COCO json: draw its boxes beside the detections.")
    output_dir: str = flag("", "Directory of the pictures and detections.json.")
    draw: bool = flag(True, "Draw pictures, or the video with boxes.")
    submission: str | None = flag(None, "Results file for the COCO server, .json or .zip.")
    image_info: str | None = flag(
        None, "json of image ids. Default: --annotations, or numbers as file names."
    )
    score_threshold: float = flag(0.3, "Least score, except in --submission.", low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True)
class ImagePolicy:
    """What is done about images that cannot be used.

    Attributes:
        on_bad_image: "stop", or "skip": unreadable images are left out and reported.
        max_megapixels: larger images count as unreadable (a 48 KB PNG can decode to 3.3 GB).
        decode: decode every image, not just read headers and ends of files.
    """

    on_bad_image: str = "stop"
    max_megapixels: float = MAX_MEGAPIXELS
    decode: bool = False


def default_threads(loaders: int = 1) -> int:
    """--num_threads of each of this host's `loaders` by default: its share of the cores."""
    cores = len(os.sched_getaffinity(0))
    if cores * loaders > (os.cpu_count() or 1):  # else a launcher has assigned cores to each rank
        cores //= loaders
    return min(max(cores, 1), MAX_THREADS)


def define(fv: flags.FlagValues, args_class: type, names: Collection[str] | None = None) -> None:
    """Defines the absl flags of a dataclass' fields; `names`: of these fields only."""
    for field in dataclasses.fields(args_class):
        if names is None or field.name in names:
            define_flag(fv, field.name, field.type, field)
            fv.register_key_flag_for_module(_group(args_class, field.name), fv[field.name])


def _group(args_class: type, name: str) -> str:
    """The heading of a field in --help."""
    owners = [c for c in args_class.__mro__ if name in vars(c).get("__annotations__", ())]
    return "Most used" if name in MOST_USED else vars(owners[-1]).get("group", "Other flags")


def define_flag(fv: flags.FlagValues, name: str, annotation: Any, field: dataclasses.Field[Any]) -> None:
    """Defines one absl flag from what `flag` returned."""
    default: Any = field.default
    about, types = field.metadata, typing.get_args(annotation) or (annotation,)
    common: dict[str, Any] = {"help": about["help"], "flag_values": fv}
    if about["choices"]:
        flags.DEFINE_enum(name, default, about["choices"], **common)
    elif bool in types:
        flags.DEFINE_bool(name, default, **common)
    elif str in types:
        flags.DEFINE_string(name, default, **common)
    else:
        number = flags.DEFINE_integer if int in types else flags.DEFINE_float
        number(name, default, lower_bound=about["low"], upper_bound=about["high"], **common)


# --- from the command line to values ---------------------------------------------------------------------


def install(define_flags: Callable[[flags.FlagValues], None]) -> None:
    """Defines an entry point's flags; --help shows them in groups."""
    define_flags(flags.FLAGS)
    own = flags.FlagValues()
    define_flags(own)
    grouped = own.key_flags_by_module_dict()
    for name in set(own) - {flag.name for members in grouped.values() for flag in members}:
        flags.FLAGS.register_key_flag_for_module("Other flags", flags.FLAGS[name])
    titles = ["Most used", *sorted({*grouped} - {"Most used", "Other flags"}), "Other flags"]
    # What absl's --help prints.
    vars(flags.FLAGS)["main_module_help"] = lambda: "\n".join(map(flags.FLAGS.module_help, titles))


def values(fv: flags.FlagValues, define_flags: Callable[[flags.FlagValues], None]) -> dict:
    """The values of the flags that `define_flags` defines, by name; absl's own are left out."""
    own = flags.FlagValues()
    define_flags(own)
    return {name: fv[name].value for name in own}


def flagfile(flag_values: dict) -> bytes:
    """`--name=value` lines, which `--flagfile=` reads back; flags without a value are left out.

    So is --overwrite: repeating a run must not erase it.
    """
    given = {k: v for k, v in sorted(flag_values.items()) if v is not None and k != "overwrite"}
    return "".join(f"--{name}={value}\n" for name, value in given.items()).encode()
