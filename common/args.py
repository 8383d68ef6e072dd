"""The flags that both apps share. Each app adds its own; importing this module defines none.

An entry point calls `install(define_flags)` under `__main__`; `values(FLAGS, define_flags)` then
hands plain values on, so that nothing below the entry point ever sees a flag.
"""

import pathlib
import sys
from collections.abc import Callable

from absl import flags

from common.files import write_bytes

PIPELINE_TYPES = ("auto", "dali_gpu", "dali_cpu", "tensorflow", "synthetic")
STRATEGIES = ("none", "mirrored", "multi_worker", "horovod")
COMPRESSIONS = ("none", "fp16")
MAX_SEED = 2**31 - 1  # -1 makes DALI draw a seed of its own, larger ones lose their upper bits
MAX_MEGAPIXELS = 100.0  # decoded, that is 300 MB
ON_BAD_IMAGE = ("stop", "skip")
PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")
COCO_BACKENDS = ("pycocotools", "faster")


def define_data_flags(fv: flags.FlagValues, splits: tuple[str, ...]) -> None:
    """Where the data lie and who loads them; `splits` of ("train", "eval")."""
    define_source_flags(fv, splits)
    define_loader_flags(fv)


def define_source_flags(fv: flags.FlagValues, splits: tuple[str, ...]) -> None:
    """Where the data lie."""
    flags.DEFINE_enum(
        "input_type",
        None,
        ("coco", "tfrecord"),
        "Kind of data. Default: follows from which data flags are given.",
        flag_values=fv,
    )
    for split in splits:
        flags.DEFINE_string(f"{split}_images", None, "Directory of images (COCO).", flag_values=fv)
        flags.DEFINE_string(f"{split}_annotations", None, "COCO json.", flag_values=fv)
        flags.DEFINE_string(
            f"{split}_file_pattern",
            None,
            "Glob of TFRecords in the TF Object Detection schema; indexes are made when missing or stale.",
            flag_values=fv,
        )
    flags.DEFINE_string(
        "label_map",
        None,
        "Class names for TFRecords. Default: the file that the converter wrote next to them.",
        flag_values=fv,
    )


def define_loader_flags(fv: flags.FlagValues) -> None:
    """Who loads, and with how many threads."""
    flags.DEFINE_enum(
        "pipeline_type",
        "auto",
        PIPELINE_TYPES,
        "Who loads. auto: dali_gpu where there is a GPU, else dali_cpu; tensorflow: the plain tf.data twin; "
        "synthetic: one batch repeated, for speed tests.",
        flag_values=fv,
    )
    define_batch_flags(fv)


def define_dali_device_flag(fv: flags.FlagValues) -> None:
    """Where the DALI GPU loader works; for train.py and bench.py."""
    flags.DEFINE_integer(
        "dali_device_id",
        None,
        "GPU of the dali_gpu loader, by its number on this host. Default: the model's.",
        lower_bound=0,
        flag_values=fv,
    )


def define_batch_flags(fv: flags.FlagValues) -> None:
    """How batches are made, whoever makes them."""
    flags.DEFINE_integer("num_threads", 2, "DALI CPU threads per rank.", lower_bound=1, flag_values=fv)
    flags.DEFINE_integer(
        "prefetch", 2, "Depth of the loader's queue in batches.", lower_bound=1, flag_values=fv
    )
    flags.DEFINE_integer("batch_size", 8, "Images per replica.", lower_bound=1, flag_values=fv)
    define_image_flags(fv)


def define_image_flags(fv: flags.FlagValues) -> None:
    """What is done about images that cannot be used."""
    flags.DEFINE_enum(
        "on_bad_image",
        "stop",
        ON_BAD_IMAGE,
        "Images that cannot be read: stop and list them all, or skip them and say so.",
        flag_values=fv,
    )
    flags.DEFINE_float(
        "max_megapixels",
        MAX_MEGAPIXELS,
        "Images with more pixels count as unreadable: a small file can decode to gigabytes.",
        lower_bound=0.0,
        flag_values=fv,
    )


def define_evaluation_flags(fv: flags.FlagValues) -> None:
    """Who computes COCO's numbers; for train.py and eval.py."""
    flags.DEFINE_enum(
        "coco_backend",
        "pycocotools",
        COCO_BACKENDS,
        "Who computes COCO's numbers: pycocotools, or faster-coco-eval, which finds the same sooner.",
        flag_values=fv,
    )


def define_model_flags(fv: flags.FlagValues, model_names: tuple[str, ...], default: str) -> None:
    """Which network, at which size, with which hyper-parameters."""
    flags.DEFINE_string("model_name", default, f"One of {', '.join(model_names)}.", flag_values=fv)
    flags.DEFINE_string("image_size", None, "N or HxW in pixels. Default: the model's.", flag_values=fv)
    flags.DEFINE_integer("num_classes", None, "Default: from the data.", lower_bound=1, flag_values=fv)
    define_hparams_flag(fv)


def define_hparams_flag(fv: flags.FlagValues) -> None:
    """Any hyper-parameter."""
    flags.DEFINE_string(
        "hparams", None, "k=v,k=v or a YAML file: overrides any field of the app's config.", flag_values=fv
    )


def define_trained_flags(fv: flags.FlagValues) -> None:
    """Which trained network, and how it detects; for eval.py and infer.py."""
    flags.DEFINE_string(
        "weights", None, "A weights file or a run directory (its best weights).", flag_values=fv
    )
    flags.DEFINE_string("image_size", None, "N or HxW in pixels. Default: the trained size.", flag_values=fv)
    define_hparams_flag(fv)


def define_picture_flags(fv: flags.FlagValues) -> None:
    """What to detect in, and what becomes of it; for infer.py."""
    flags.DEFINE_string(
        "images", None, "An image, a directory of images, a glob, or a video.", flag_values=fv
    )
    flags.DEFINE_string("annotations", None, "COCO json: draw its boxes beside ours.", flag_values=fv)
    flags.DEFINE_string("output_dir", None, "Where pictures and detections.json go.", flag_values=fv)
    flags.DEFINE_bool("draw", True, "Draw pictures, or the video with boxes.", flag_values=fv)
    flags.DEFINE_string(
        "submission",
        None,
        "Results file for the COCO server, .json or .zip, with the best 100 detections of each image.",
        flag_values=fv,
    )
    flags.DEFINE_string(
        "image_info",
        None,
        "json with the ids of the images (COCO's image_info_test-dev2017.json). Default: of --annotations; "
        "else, for --submission, file names that are numbers.",
        flag_values=fv,
    )
    flags.DEFINE_float(
        "score_threshold",
        0.3,
        "Least score of a detection, except in --submission.",
        lower_bound=0.0,
        upper_bound=1.0,
        flag_values=fv,
    )


def define_run_flags(fv: flags.FlagValues) -> None:
    """How long, how fast, where to."""
    flags.DEFINE_integer("epochs", None, "Default: the recipe's.", lower_bound=1, flag_values=fv)
    flags.DEFINE_integer(
        "steps_per_epoch", None, "Default: the size of the data.", lower_bound=1, flag_values=fv
    )
    flags.DEFINE_float(
        "learning_rate",
        None,
        "At the recipe's reference batch; scaled by the effective batch. Default: the recipe's.",
        lower_bound=0.0,
        flag_values=fv,
    )
    define_arithmetic_flags(fv)
    flags.DEFINE_float(
        "ema_decay", None, "Averaging of the weights; 0: off. Default: the recipe's.", flag_values=fv
    )
    flags.DEFINE_float(
        "clip_norm", None, "Global gradient norm; 0: off. Default: the recipe's.", flag_values=fv
    )
    flags.DEFINE_integer(
        "accumulate_steps", 0, "Batches per weight update; 0: off.", lower_bound=0, flag_values=fv
    )
    flags.DEFINE_string(
        "init_from",
        None,
        "Weights to start from, any class count: heads that differ are re-made.",
        flag_values=fv,
    )
    flags.DEFINE_string("freeze", None, "Regex of layer names that do not train.", flag_values=fv)
    flags.DEFINE_string(
        "output_dir",
        None,
        "Checkpoints, flags.txt, results.csv, TensorBoard events, pictures. The same command on the same "
        "directory resumes.",
        flag_values=fv,
    )
    flags.DEFINE_bool(
        "overwrite", False, "Start anew in a directory that already holds a run.", flag_values=fv
    )
    flags.DEFINE_integer(
        "eval_every", 1, "Epochs between evaluations; 0: only at the end.", lower_bound=0, flag_values=fv
    )
    flags.DEFINE_integer(
        "patience",
        0,
        "Evaluations without a better AP after which a run ends; 0: it has all its epochs.",
        lower_bound=0,
        flag_values=fv,
    )
    flags.DEFINE_integer(
        "save_every",
        1000,
        "Steps between two checkpoints within an epoch; 0: only at its end.",
        lower_bound=0,
        flag_values=fv,
    )
    flags.DEFINE_integer(
        "max_skipped_steps",
        10,
        "Steps in a row that may be skipped because a loss or gradient is not finite.",
        lower_bound=0,
        flag_values=fv,
    )
    flags.DEFINE_string(
        "replay", None, "Run the step of this file again, which a run skipped; nothing else.", flag_values=fv
    )
    flags.DEFINE_integer("seed", 0, "0 is a seed.", lower_bound=0, upper_bound=MAX_SEED, flag_values=fv)


def define_arithmetic_flags(fv: flags.FlagValues) -> None:
    """How the network computes."""
    flags.DEFINE_enum("precision", "float32", PRECISIONS, "Arithmetic of the network.", flag_values=fv)
    flags.DEFINE_bool("xla", False, "Compile the training step with XLA.", flag_values=fv)


def define_strategy_flags(fv: flags.FlagValues) -> None:
    """How processes and devices work together."""
    flags.DEFINE_enum(
        "strategy",
        "none",
        STRATEGIES,
        "none: one device; horovod: one process per device, started by horovodrun; mirrored: all GPUs of "
        "this process; multi_worker: all GPUs of several, which TF_CONFIG names.",
        flag_values=fv,
    )
    flags.DEFINE_enum(
        "compression", "none", COMPRESSIONS, "Of gradients between ranks, under Horovod.", flag_values=fv
    )
    flags.DEFINE_float(
        "step_timeout",
        600.0,
        "Seconds without a step after which a run ends and says where each rank is; 0: never.",
        lower_bound=0.0,
        flag_values=fv,
    )
    flags.DEFINE_bool(
        "elastic",
        False,
        "Go on with another number of ranks, from the last whole epoch: when Horovod loses or gains hosts, "
        "and when a run is resumed.",
        flag_values=fv,
    )
    flags.DEFINE_integer(
        "dry_run",
        None,
        "Try these flags with so many processes on this machine: a few small steps, saved nowhere.",
        lower_bound=1,
        flag_values=fv,
    )


def install(define_flags: Callable[[flags.FlagValues], None]) -> None:
    """Defines an entry point's flags as its own, which makes --help show them."""
    define_flags(flags.FLAGS)
    own = flags.FlagValues()
    define_flags(own)
    for name in own:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])


def values(fv: flags.FlagValues, define_flags: Callable[[flags.FlagValues], None]) -> dict:
    """The values of the flags that `define_flags` defines, as keyword arguments; absl's own are left out."""
    own = flags.FlagValues()
    define_flags(own)
    return {name: fv[name].value for name in own}


def write_flagfile(path: pathlib.Path, flag_values: dict) -> None:
    """Writes `--name=value` lines that `--flagfile=` reads back; flags without a value are left out.

    So is --overwrite: repeating a run must not erase it.
    """
    given = {k: v for k, v in sorted(flag_values.items()) if v is not None and k != "overwrite"}
    write_bytes(path, "".join(f"--{name}={value}\n" for name, value in given.items()).encode())
