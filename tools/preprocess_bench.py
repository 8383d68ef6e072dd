r"""Measures the preprocessing of preprocess.py beside tf.data, Pillow and OpenCV doing the same.

    python tools/preprocess_bench.py --input=my/photos --num_threads=2 --json=runs/bench/preprocess.json
    python tools/preprocess_bench.py --candidates=pipeline,dynamic --ops="resize:128x128 | flip:p=0.5"

Each candidate runs in a separate process (benchmark/rounds.py), and its pixels are compared with the
pipeline's. The other libraries can do the usual chain of a classifier only. Without --input, images are
drawn. Compare two --json files by tools/bench.py.
"""

import dataclasses
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
from common.args import flag
from common.datacheck.images import ImagePolicy
from common.errors import UserError
from common.progress import log
from tools.benchmark import measuring, preprocess_worker, record, report, rounds, summary
from tools.benchmark.preprocess_worker import CANDIDATES, OURS, Standard, Task
from tools.benchmark.rounds import Command
from tools.benchmark.summary import Record
from tools.preprocessing import chain
from tools.preprocessing.chain import Chain
from tools.preprocessing.image_source import open_image_source

OPS = "resize:short=256 | crop:224x224 | crop_mirror_normalize:mean=imagenet"
COMPARED = 64  # images whose pixels are compared
SAME = 2.5  # levels: other decoders, and filters that average over the same pixels, differ by less


@dataclasses.dataclass(frozen=True)
class BenchArgs(measuring.RoundArgs):
    """The flags, besides those of measuring.RoundArgs and of reading images (args.BATCH_FLAGS)."""

    input: str | None = flag(None, "Directory, file or glob of images. Default: they are drawn.")
    ops: str = flag(OPS, "Chain of operators, as in preprocess.py.")
    candidates: str | None = flag(
        None, f"What to measure, of {','.join(CANDIDATES)}. Default: all that can do --ops."
    )


def define_flags(fv: flags.FlagValues) -> None:
    """All flags of this command."""
    shared_flags.define(fv, BenchArgs)
    shared_flags.define(fv, shared_flags.Args, shared_flags.BATCH_FLAGS)
    fv.set_default("batch_size", 32)


def bench(a: Any) -> None:
    """The command.

    Args:
        a: the values of the flags, by their names.

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
    settings = {
        "ops": a.ops,
        "batch_size": min(a.batch_size, source.size),
        "num_threads": a.num_threads,
        "prefetch": a.prefetch,
    }
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        task = Task(
            input=path,
            files=list(source.files),
            policy=policy,
            standard=standard,
            compared=min(COMPARED, source.size),
            pixels=directory,
            **settings,
        )
        task_file = pathlib.Path(directory, "task.json")
        task_file.write_text(json.dumps(task))
        settle = a.prefetch + a.num_threads + 1  # as many batches may have been ready
        commands = [
            Command(name, [sys.executable, preprocess_worker.__file__, name, str(task_file)], settle)
            for name in names
        ]
        logs = pathlib.Path(directory)
        candidates = rounds.measure(commands, rounds=a.rounds, seconds=a.seconds, logs=logs)
        good = list(summary.succeeded(candidates))
        pixels = {} if parsed.is_random else compare_pixels(good, parsed, logs)
    kilobytes = sum(pathlib.Path(file).stat().st_size for file in source.files) / source.size / 1000
    found = record.make(
        "preprocess",
        a,
        title=f"{a.ops}; batch {task.batch_size}, {a.num_threads} threads, prefetch {a.prefetch}",
        data={
            "summary": f"{source.size} images of {kilobytes:.0f} kB",
            "images": source.size,
            "kilobytes_per_image": round(kilobytes, 1),
        },
        settings=settings,
        candidates=candidates,
    )
    found["pixels"] = pixels
    found["verdict"] = verdict(found)
    record.publish(found, text(found), a.json)


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


def _chosen(words: str | None, standard: Standard | None) -> list[str]:
    """Candidates; UserError for those that are unknown or cannot do the chain."""
    able = list(CANDIDATES if standard else OURS)
    if standard and not standard.antialias:  # they would be measured twice, and Pillow's resize cannot
        able = [name for name in able if not name.endswith("-no-antialias") and "pillow" not in name]
    if words is None:
        if standard is None:
            log(f"tf.data, Pillow and OpenCV are measured with chains like {OPS!r} only")
        return able
    names = measuring.chosen("candidate", words, CANDIDATES)
    if not names:
        raise UserError("--candidates is empty: nothing to measure")
    for name in names:
        if name not in able:
            raise UserError(f"--candidates={name} cannot do these --ops: of these, {', '.join(able)} can")
    return names


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


def verdict(found: Record) -> list[str]:
    """How fast the pipeline is beside the fastest candidate, and whose pixels differ."""
    good, pixels = summary.succeeded(found["candidates"]), found["pixels"]
    lines = report.other_work(found)
    if "pipeline" not in good:
        return lines
    same = [name for name in good if name == "pipeline" or (name in pixels and pixels[name]["mean"] <= SAME)]
    best, best_of_same = _fastest(good), _fastest({name: good[name] for name in same})
    for name, place in {best: "The fastest of all", best_of_same: "The fastest with its pixels"}.items():
        share = f" The pipeline reaches {summary.ratio(good['pipeline'], good[name]):.2f}x of it."
        lines.append(f"{place}: {name}.{'' if name == 'pipeline' else share}")
    if others := [name for name in good if name in pixels and name not in same]:
        listed = ", ".join(f"{name} by {pixels[name]['mean']:.1f}" for name in others)
        lines.append(f"Other pixels than the pipeline's, in levels on average: {listed}.")
    return lines


def text(found: Record) -> str:
    """The table and the verdict, as printed."""
    candidates = found["candidates"]
    off = {name: f"{each['mean']:.2f}" for name, each in found["pixels"].items()}
    table = report.candidate_table(candidates, beside=_fastest(candidates), more={"levels off": off})
    return "\n\n".join([report.heading(found), table, "\n".join(found["verdict"])])


def _fastest(candidates: dict[str, Record]) -> str:
    """The candidate with the highest median; "" where all failed."""
    good = summary.succeeded(candidates)
    return max(good, key=lambda name: good[name]["images_per_second"]["median"], default="")


def main() -> None:
    bench(types.SimpleNamespace(**shared_flags.values(flags.FLAGS, define_flags)))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
