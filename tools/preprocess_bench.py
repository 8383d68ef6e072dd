r"""Measures the preprocessing of preprocess.py beside tf.data, Pillow and OpenCV doing the same.

    python tools/preprocess_bench.py --input=my/photos --num_threads=2 --json=runs/bench/preprocess.json
    python tools/preprocess_bench.py --candidates=pipeline,dynamic --ops="resize:128x128 | flip:p=0.5"

Each candidate runs in a separate process (benchmark/rounds.py), and its pixels are compared with the
pipeline's. The other libraries can do the usual chain of a classifier only. Without --input, images are
drawn. Compare two --json files by tools/bench.py.
"""

import datetime
import json
import pathlib
import sys
import tempfile
import types
from collections.abc import Sequence
from typing import Any

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import numpy as np
from absl import flags
from nvidia.dali import types as dali_types

from common import args as shared_flags
from common import errors
from common.datacheck.images import ImagePolicy
from common.errors import UserError
from common.progress import log
from common.training import checkpoint_files
from tools.benchmark import environment, measuring, preprocess_worker, report, rounds, summary
from tools.benchmark.baselines import Standard
from tools.benchmark.preprocess_worker import CANDIDATES, OURS, Task
from tools.benchmark.rounds import Command
from tools.preprocessing import chain
from tools.preprocessing.chain import Chain
from tools.preprocessing.formats.base import ImageSource
from tools.preprocessing.image_source import open_image_source

OPS = "resize:short=256 | crop:224x224 | crop_mirror_normalize:mean=imagenet"
COMPARED = 64  # images whose pixels are compared
SAME = 2.5  # levels: other decoders, and filters that average over the same pixels, differ by less


def define_flags(fv: flags.FlagValues) -> None:
    """All flags of this command."""
    flags.DEFINE_string(
        "input", None, "Directory, file or glob of images. Default: they are drawn.", flag_values=fv
    )
    flags.DEFINE_string("ops", OPS, "Chain of operators, as in preprocess.py.", flag_values=fv)
    flags.DEFINE_list(
        "candidates",
        None,
        f"What to measure, of {','.join(CANDIDATES)}. Default: all that can do --ops.",
        flag_values=fv,
    )
    shared_flags.define_batch_flags(fv)
    fv.set_default("batch_size", 32)
    measuring.define_rounds_flags(fv)


def bench(a: types.SimpleNamespace) -> dict[str, Any]:
    """The command.

    Args:
        a: the values of the flags, by their names.

    Returns:
        The record, as `--json` has it.

    Raises:
        UserError: flags that cannot be used, or nothing could be measured.
        DataError: images that cannot be used.
    """
    parsed = chain.parse(a.ops)
    standard = standard_of(parsed)
    names = _chosen(a.candidates, standard)
    path = a.input or str(measuring.draw(a.drawn_images) / "images")
    policy = (a.on_bad_image, a.max_megapixels)
    source = open_image_source("files", path, policy=ImagePolicy(*policy))
    batch_size = min(a.batch_size, source.size)
    reading = (list(source.files), batch_size, a.num_threads, a.prefetch)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        task = Task(path, policy, a.ops, standard, reading, min(COMPARED, source.size), directory)
        task_file = pathlib.Path(directory, "task.json")
        task_file.write_text(json.dumps(task))
        settle = a.prefetch + a.num_threads + 1  # as many batches may have been ready
        commands = [
            Command(name, [sys.executable, preprocess_worker.__file__, name, str(task_file)], settle)
            for name in names
        ]
        logs = pathlib.Path(directory)
        measured = rounds.measure(commands, rounds=a.rounds, seconds=a.seconds, logs=logs, log=log)
        candidates = {name: summary.candidate(each) for name, each in measured.items()}
        good = [name for name, each in candidates.items() if "error" not in each]
        pixels = {} if parsed.is_random else compare_pixels(good, parsed, logs)
    record = _record(a, source, batch_size) | {"candidates": candidates, "pixels": pixels}
    record |= {"other_cores": summary.other_cores(candidates), "ratios": summary.ratios(candidates)}
    record["verdict"] = verdict(record)
    print(text(record), flush=True)
    if a.json:
        measuring.write(a.json, record)
    if not good:
        raise UserError("nothing could be measured: the lines above have the reasons")
    return record


def standard_of(parsed: Chain) -> Standard | None:
    """The chain, if it is the one that the other libraries can do.

    It resizes by the shorter side, crops the middle and normalises; how DALI decodes a JPEG may be chosen.
    """
    names = [step.operator.name for step in parsed.steps]
    if parsed.decoder.operator.name != "decode" or parsed.color != dali_types.RGB or parsed.layout != "HWC":
        return None
    if names not in (["resize", "crop", "crop_mirror_normalize"], ["resize", "crop_mirror_normalize"]):
        return None
    resize, normalize = parsed.steps[0].arguments, dict(parsed.steps[-1].arguments)
    crop = parsed.steps[1].arguments if len(names) == 3 else {"crop": normalize.pop("crop", None)}
    mean, std = (normalize.pop(name, ()) for name in ("mean", "std"))
    is_linear = resize.get("interp_type", dali_types.INTERP_LINEAR) == dali_types.INTERP_LINEAR
    are_known = resize.keys() <= {"resize_shorter", "interp_type", "antialias"} and crop.keys() == {"crop"}
    if not (is_linear and are_known and normalize.keys() <= {"output_layout"}):
        return None
    short, sides = resize.get("resize_shorter"), crop["crop"]
    if sides is None or not isinstance(short, float) or short < max(sides) or len(mean) != 3 or len(std) != 3:
        return None
    if not all(isinstance(value, float) for value in (*mean, *std)):
        return None
    return Standard(int(short), tuple(map(int, sides)), mean, std, resize.get("antialias", True))


def _record(a: types.SimpleNamespace, source: ImageSource, batch_size: int) -> dict[str, Any]:
    """What is measured, when and where."""
    kilobytes = sum(pathlib.Path(file).stat().st_size for file in source.files) / source.size / 1000
    return {
        "format": summary.FORMAT,
        "app": "preprocess",
        "title": f"{a.ops}; batch {batch_size}, {a.num_threads} threads, prefetch {a.prefetch}",
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": environment.commit(),
        "versions": checkpoint_files.versions(),
        "machine": environment.machine(),
        "data": {
            "summary": f"{source.size} images of {kilobytes:.0f} kB",
            "images": source.size,
            "kilobytes_per_image": round(kilobytes, 1),
        },
        "settings": {
            "ops": a.ops,
            "batch_size": batch_size,
            "num_threads": a.num_threads,
            "prefetch": a.prefetch,
        },
        "rounds": a.rounds,
        "seconds": a.seconds,
        "stages": {},
        "inference": {},
    }


def _chosen(names: Sequence[str] | None, standard: Standard | None) -> list[str]:
    """Candidates; UserError for those that are unknown or cannot do the chain."""
    able = list(CANDIDATES if standard else OURS)
    if standard and not standard.antialias:  # they would be measured twice, and Pillow's resize cannot
        able = [name for name in able if not name.endswith("-no-antialias") and "pillow" not in name]
    if names is None:
        if standard is None:
            log(f"tf.data, Pillow and OpenCV are measured with chains like {OPS!r} only")
        return able
    for name in names:
        if name not in CANDIDATES:
            raise errors.unknown("candidate", name, CANDIDATES)
        if name not in able:
            raise UserError(f"--candidates={name} cannot do these --ops: of these, {', '.join(able)} can")
    if not names:
        raise UserError("--candidates is empty: nothing to measure")
    return list(dict.fromkeys(names))


def compare_pixels(
    names: Sequence[str], parsed: Chain, directory: pathlib.Path
) -> dict[str, dict[str, float]]:
    """`mean` and `max` absolute difference of the candidates' images from the first one's, in levels.

    Args:
        names: of the candidates; one whose images have other sizes is left out of the result.
        parsed: the chain.
        directory: holds `<name>.npz` of each.
    """
    levels = np.float32(1.0)  # levels of an image for a difference of 1 in each channel
    for operator, arguments in parsed.steps:
        std = arguments.get("std", ())
        if operator.name == "crop_mirror_normalize" and len(std) == 3:
            levels = np.float32(std) if parsed.layout == "HWC" else np.float32(std)[:, None, None]
    images = {}
    for name in names:
        with np.load(directory / f"{name}.npz") as file:
            images[name] = list(file.values())
    pixels = {}
    for name in names:
        pairs = list(zip(images[names[0]], images[name], strict=True))
        if all(one.shape == other.shape for one, other in pairs):
            off = [np.abs(one.astype(np.float32) - other) * levels for one, other in pairs]
            mean, largest = np.mean([each.mean() for each in off]), max(each.max() for each in off)
            pixels[name] = {"mean": float(mean), "max": float(largest)}
    return pixels


def verdict(record: dict[str, Any]) -> list[str]:
    """How fast the pipeline is beside the fastest candidate, and whose pixels differ."""
    good = {name: each for name, each in record["candidates"].items() if "error" not in each}
    cores, pixels, lines = record["machine"]["cores"], record["pixels"], []
    if record["other_cores"] > report.QUIET * cores:
        lines.append(
            f"Other work took {record['other_cores']:.2g} of {cores:g} cores: measure again where nothing"
            " else runs."
        )
    if "pipeline" not in good:
        return lines
    same = {
        name for name in good if name == "pipeline" or pixels.get(name, {"mean": SAME + 1})["mean"] <= SAME
    }
    best = _fastest(good)
    best_of_same = _fastest({name: good[name] for name in good if name in same})
    for name, place in {best: "The fastest of all", best_of_same: "The fastest with its pixels"}.items():
        share = f" The pipeline reaches {summary.ratio(good['pipeline'], good[name]):.2f}x of it."
        lines.append(f"{place}: {name}.{'' if name == 'pipeline' else share}")
    if others := [name for name in good if name in pixels and name not in same]:
        listed = ", ".join(f"{name} by {pixels[name]['mean']:.1f}" for name in others)
        lines.append(f"Other pixels than the pipeline's, in levels on average: {listed}.")
    return lines


def text(record: dict[str, Any]) -> str:
    """The table and the verdict, as printed."""
    machine, candidates = record["machine"], record["candidates"]
    head = f"{record['title']}\n{machine['cpu']}, {machine['cores']:g} cores; {record['data']['summary']}"
    off = {name: f"{each['mean']:.2f}" for name, each in record["pixels"].items()}
    table = report.candidate_table(candidates, beside=_fastest(candidates), more={"levels off": off})
    return "\n\n".join([head, table, "\n".join(record["verdict"])])


def _fastest(candidates: dict[str, Any]) -> str:
    """The candidate with the highest median; "" where all failed."""
    good = {name: each for name, each in candidates.items() if "error" not in each}
    return max(good, key=lambda name: good[name]["images_per_second"]["median"], default="")


def main() -> None:
    bench(types.SimpleNamespace(**shared_flags.values(flags.FLAGS, define_flags)))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
