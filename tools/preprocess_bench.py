r"""How fast the preprocessing of preprocess.py is, beside tf.data, Pillow and OpenCV doing the same.

    python tools/preprocess_bench.py --input=my/photos --num_threads=2 --json=runs/bench/preprocess.json
    python tools/preprocess_bench.py --candidates=pipeline,dynamic --ops="resize:128x128 | flip:p=0.5"

Each candidate lives in a process of its own that is stopped while another is timed (bench/rounds.py); before,
its pixels are compared with the pipeline's, so that nobody is fast by doing less. The rivals know the usual
chain of a classifier alone; another one is measured without them. Without --input photographs are drawn.
Two --json files side by side: python tools/bench.py OLD.json NEW.json
"""

import datetime
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import numpy as np
import PIL.Image
from absl import flags
from nvidia.dali import types

from common import args as shared_flags
from common import errors
from common.datacheck.images import ImagePolicy
from common.errors import UserError
from common.progress import log
from common.training import checkpoint_files
from tools.benchmark import environment, measuring, preprocess_report, preprocess_worker, summary
from tools.benchmark import rounds as in_rounds
from tools.benchmark.baselines import Reading, Standard
from tools.benchmark.preprocess_worker import OURS, RIVALS, SHORTCUTS, Task
from tools.benchmark.rounds import Command
from tools.preprocessing import chain
from tools.preprocessing.chain import Chain
from tools.preprocessing.image_source import ImageSource, open_image_source

OPS = "resize:short=256 | crop:224x224 | crop_mirror_normalize:mean=imagenet"
COMPARED = 64  # images whose pixels are compared
SAMPLE = 200  # images whose size is looked at


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "input", None, "Directory, file or glob of images. Default: they are drawn.", flag_values=fv
    )
    flags.DEFINE_string("ops", OPS, "Chain of operators, as in preprocess.py.", flag_values=fv)
    flags.DEFINE_list(
        "candidates",
        None,
        f"What to measure, of {','.join(OURS | RIVALS | SHORTCUTS)}. Default: all that can do --ops.",
        flag_values=fv,
    )
    shared_flags.define_batch_flags(fv)
    fv.set_default("batch_size", 32)
    measuring.define_rounds_flags(fv)


def bench(
    *,
    input: str | None = None,
    ops: str = OPS,
    candidates: Sequence[str] | None = None,
    rounds: int = 5,
    seconds: float = 5.0,
    drawn_images: int = 256,
    json: str | None = None,
    num_threads: int = 2,
    prefetch: int = 2,
    batch_size: int = 32,
    on_bad_image: str = "stop",
    max_megapixels: float = shared_flags.MAX_MEGAPIXELS,
) -> dict[str, Any]:
    """The command; see the flags of the same names.

    Returns:
        The record, as `--json` has it.

    Raises:
        UserError: flags that cannot be used, or nothing could be measured.
        DataError: images that cannot be used.
    """
    parsed = chain.parse(ops)
    standard = standard_of(parsed)
    names = _chosen(candidates, standard)
    input = input or str(measuring.draw(drawn_images) / "images")
    source = open_image_source("files", input, policy=ImagePolicy(on_bad_image, max_megapixels))
    reading = Reading(list(source.files), min(batch_size, source.size), num_threads, prefetch)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        task = Task(
            input=input,
            on_bad_image=on_bad_image,
            max_megapixels=max_megapixels,
            ops=ops,
            standard=standard,
            reading=reading,
            compared=min(COMPARED, source.size),
            pixels=directory,
        )
        measured = _measure(names, task, rounds=rounds, seconds=seconds)
        found = {name: summary.candidate(each) for name, each in measured.items()}
        pixels = _compare(found, parsed, directory)
    record = {
        "format": summary.FORMAT,
        "app": "preprocess",
        "title": f"{ops}; batch {reading.batch_size}, {num_threads} threads, prefetch {prefetch}",
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": environment.commit(),
        "versions": checkpoint_files.versions(),
        "machine": environment.machine(),
        "data": _data(source),
        "settings": {
            "ops": ops,
            "batch_size": reading.batch_size,
            "num_threads": num_threads,
            "prefetch": prefetch,
        },
        "rounds": rounds,
        "seconds": seconds,
        "candidates": found,
        "pixels": pixels,
        "stages": {},
        "inference": {},
        "other_cores": summary.other_cores(found),
        "ratios": summary.ratios(found),
    }
    record["verdict"] = preprocess_report.verdict(record)
    print(preprocess_report.text(record), flush=True)
    if json:
        measuring.write(json, record)
    if all("error" in each for each in found.values()):
        raise UserError("nothing could be measured: the lines above say why")
    return record


def standard_of(parsed: Chain) -> Standard | None:
    """The chain, if it is one that the rivals know: resize by the shorter side, crop the middle, normalise.

    How a JPEG is decoded may be chosen as well: it is DALI's alone.
    """
    names = [step.operator.name for step in parsed.steps]
    if parsed.decoder.operator.name != "decode" or parsed.color != types.RGB or parsed.layout != "HWC":
        return None
    if names not in (["resize", "crop", "crop_mirror_normalize"], ["resize", "crop_mirror_normalize"]):
        return None
    resize, normalize = parsed.steps[0].arguments, dict(parsed.steps[-1].arguments)
    crop = parsed.steps[1].arguments if len(names) == 3 else {"crop": normalize.pop("crop", None)}
    if not resize.keys() <= {"resize_shorter", "interp_type", "antialias"} or crop.keys() != {"crop"}:
        return None
    if resize.get("interp_type", types.INTERP_LINEAR) != types.INTERP_LINEAR:
        return None
    mean, std = (normalize.pop(name, ()) for name in ("mean", "std"))
    if not normalize.keys() <= {"output_layout"} or not _are_numbers(mean) or not _are_numbers(std):
        return None
    short, sides = resize.get("resize_shorter"), crop["crop"]
    if not isinstance(short, float) or sides is None or not short >= max(sides):
        return None
    return Standard(int(short), tuple(map(int, sides)), mean, std, resize.get("antialias", True))


def _are_numbers(values: tuple[Any, ...]) -> bool:
    return len(values) == 3 and all(isinstance(value, float) for value in values)


def _chosen(names: Sequence[str] | None, standard: Standard | None) -> list[str]:
    """Candidates; UserError for those that are unknown or cannot do the chain."""
    known = OURS | RIVALS | SHORTCUTS
    able = list(OURS) if standard is None else list(known)
    if standard and not standard.antialias:  # they would be measured twice, and Pillow's resize cannot
        able = [name for name in able if not name.endswith("-no-antialias") and "pillow" not in name]
    if names is None:
        if standard is None:
            log(f"tf.data, Pillow and OpenCV are measured with chains like {OPS!r} alone")
        return able
    for name in names:
        if name not in known:
            raise errors.unknown("candidate", name, known)
        if name not in able:
            raise UserError(f"--candidates={name} cannot do these --ops: of these, {', '.join(able)} can")
    if not names:
        raise UserError("--candidates is empty: nothing to measure")
    return list(dict.fromkeys(names))


def _measure(
    names: Sequence[str], task: Task, *, rounds: int, seconds: float
) -> dict[str, in_rounds.Measured]:
    path = pathlib.Path(task.pixels, "task.json")
    task.save(path)
    ahead = task.reading.prefetch + task.reading.num_threads  # as many batches may have been ready
    commands = [
        Command(name, [sys.executable, preprocess_worker.__file__, name, str(path)], settle=ahead + 1)
        for name in names
    ]
    return in_rounds.measure(
        commands, rounds=rounds, seconds=seconds, logs=pathlib.Path(task.pixels), log=log
    )


def _compare(found: dict[str, summary.Record], parsed: Chain, directory: str) -> dict[str, summary.Record]:
    """How far the candidates' pixels are from the first one's, in levels of an image.

    Returns:
        By name, of all that were measured: `mean` and `max` absolute difference; nothing where there is
        nothing to compare: other sizes, or images that chance made.
    """
    names = [name for name, each in found.items() if "error" not in each]
    if not names or parsed.is_random:
        return {}
    images = {name: _images(pathlib.Path(directory, f"{name}.npz")) for name in names}
    levels = np.float32(1.0)  # that a 1 of the result stands for, of each channel
    for operator, arguments in parsed.steps:
        std = arguments.get("std", ())
        if operator.name == "crop_mirror_normalize" and std and _are_numbers(std):
            levels = np.float32(std) if parsed.layout == "HWC" else np.float32(std)[:, None, None]
    first = images[names[0]]
    pixels = {}
    for name in names:
        pairs = list(zip(first, images[name], strict=True))
        if all(one.shape == other.shape for one, other in pairs):
            off = [np.abs(one.astype(np.float32) - other) * levels for one, other in pairs]
            pixels[name] = {
                "mean": float(np.mean([each.mean() for each in off])),
                "max": float(max(each.max() for each in off)),
            }
    return pixels


def _images(path: pathlib.Path) -> list[np.ndarray]:
    with np.load(path) as file:
        return list(file.values())


def _data(source: ImageSource) -> dict[str, Any]:
    """What the images are like."""
    rows = np.unique(np.linspace(0, source.size - 1, min(source.size, SAMPLE)).astype(int)).tolist()
    sizes = []
    for row in rows:
        with PIL.Image.open(source.files[row]) as image:
            sizes.append(image.size)
    kilobytes = sum(len(source.encoded(row)) for row in rows) / len(rows) / 1000
    megapixels = float(np.prod(sizes, axis=1).mean()) / 1e6
    return {
        "summary": f"{source.size} images of {megapixels:.2f} megapixels and {kilobytes:.0f} kB",
        "images": source.size,
        "kilobytes_per_image": round(kilobytes, 1),
        "megapixels_per_image": round(megapixels, 3),
    }


def main() -> None:
    bench(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
