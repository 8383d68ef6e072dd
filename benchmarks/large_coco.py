r"""Draws a large COCO data set, and measures how long it takes to open it.

    python benchmarks/large_coco.py --output_dir=/tmp/large_coco
    python benchmarks/large_coco.py --output_dir=/tmp/large_coco_10 --num_images=1182870 --num_boxes=8600010

By default, the data have the size of COCO's train2017: 118,287 images and 860,001 boxes with polygons, 480 MB
of json. The images are small grey JPEGs in folders of 10,000. Then the data are opened twice, each time in a
new process: first with an empty cache, then as a later start of a run or another rank opens them. The command
prints the CPU time of each step and the memory that the steps need in addition to the imported modules.
"""

import dataclasses
import io
import json
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import time

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import numpy as np
import PIL.Image
from absl import flags

from common import args as shared_flags
from common import errors
from common.args import flag
from common.errors import UserError
from common.files import make_output_directory, user_errors
from common.progress import import_tensorflow

NUM_CATEGORIES = 80
SIZES = ((640, 480), (480, 640), (640, 427), (500, 375))  # (width, height) of the images
POLYGONS = 4096  # different outlines
MEAN_NUMBERS = 51  # coordinates in an outline, about as many as in train2017
IN_FOLDER = 10_000  # images
IN_PART = 10_000  # images whose annotations are written at once


@dataclasses.dataclass(frozen=True)
class LargeArgs:
    output_dir: str = flag("", "Directory of the data set. If it holds one, only measures.")
    num_images: int = flag(118_287, "Number of images.", low=1)
    num_boxes: int = flag(860_001, "Number of boxes.", low=1)
    seed: int = flag(0, "Random seed.", low=0)


# --- drawing ---


def draw(directory: pathlib.Path, a: LargeArgs) -> None:
    """Writes `images/` and, last, `instances.json`. Equal arguments give equal files."""
    rng = np.random.default_rng(a.seed)
    names = [f"{i // IN_FOLDER:04}/{i:012}.jpg" for i in range(a.num_images)]
    sizes = np.array(SIZES)[rng.integers(len(SIZES), size=a.num_images)]
    _write_images(directory / "images", names, sizes)
    counts = rng.multinomial(a.num_boxes, rng.dirichlet(np.ones(a.num_images)))
    lengths = 2 * rng.integers(4, MEAN_NUMBERS - 3, POLYGONS)
    outlines = [json.dumps(np.round(rng.uniform(0, 400, length), 2).tolist()) for length in lengths]
    categories = [{"id": i, "name": f"class {i}"} for i in range(1, NUM_CATEGORIES + 1)]
    unfinished = directory / "unfinished.json"
    with open(unfinished, "w") as stream:
        stream.write('{"images": [')
        for i, (name, (width, height)) in enumerate(zip(names, sizes.tolist(), strict=True)):
            record = {"id": i + 1, "file_name": name, "width": width, "height": height, "license": 3}
            record |= {"coco_url": f"http://images.example/{name}", "date_captured": "2013-11-14 17:02:52"}
            stream.write(("," if i else "") + json.dumps(record))
        stream.write('], "annotations": [')
        rows = np.repeat(np.arange(a.num_images), counts)
        for start in range(0, a.num_boxes, IN_PART):
            part = rows[start : start + IN_PART]
            stream.write("," if start else "")
            stream.write(_annotations(rng, start + 1, part, sizes[part], outlines))
        stream.write(f'], "categories": {json.dumps(categories)}}}')
    unfinished.rename(directory / "instances.json")


def _annotations(
    rng: np.random.Generator, first_id: int, image_rows: np.ndarray, sizes: np.ndarray, outlines: list[str]
) -> str:
    """Returns JSON of random boxes inside their images, separated by commas."""
    count = len(image_rows)
    sides = np.round(sizes * rng.uniform(0.02, 0.6, (count, 2)), 2)
    left_top = np.round((sizes - sides) * rng.uniform(0, 1, (count, 2)), 2)
    areas = np.round(sides.prod(axis=1) * rng.uniform(0.3, 0.9, count), 4)
    boxes = np.concatenate([left_top, sides], axis=1).tolist()
    drawn = rng.integers(len(outlines), size=count), rng.integers(1, NUM_CATEGORIES + 1, size=count)
    return ",".join(
        f'{{"segmentation": [{outlines[outline]}], "area": {area}, "iscrowd": 0, "image_id": {row + 1},'
        f' "bbox": {box}, "category_id": {category}, "id": {number}}}'
        for number, (row, box, area, outline, category) in enumerate(
            zip(image_rows.tolist(), boxes, areas.tolist(), *map(np.ndarray.tolist, drawn), strict=True),
            first_id,
        )
    )


def _write_images(directory: pathlib.Path, names: list[str], sizes: np.ndarray) -> None:
    """Writes grey JPEGs, which differ in a comment."""
    encoded = {}
    for size in SIZES:
        stream = io.BytesIO()
        PIL.Image.new("L", size, 128).save(stream, "JPEG", quality=10, optimize=True)
        encoded[size] = stream.getvalue()
    for folder in {name.partition("/")[0] for name in names}:
        (directory / folder).mkdir(parents=True, exist_ok=True)
    for i, (name, size) in enumerate(zip(names, sizes.tolist(), strict=True)):
        content, comment = encoded[tuple(size)], f"image {i:9}".encode()
        segment = b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment
        (directory / name).write_bytes(content[:2] + segment + content[2:])


# --- measuring ---


def measure(directory: str, cache: str) -> dict[str, float]:
    """Opens the data set like train.py. Returns CPU seconds of each step and the memory in MB."""
    os.environ["XDG_CACHE_HOME"] = cache
    import_tensorflow()
    from nvidia import dali

    from common.data.open import log_source, open_coco

    pathlib.Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM, the peak, to the present size
    before, result, start = _memory(), {}, time.process_time()

    def lap(step: str) -> None:
        nonlocal start
        result[step] = time.process_time() - start
        start = time.process_time()

    wall = time.monotonic()
    source = open_coco(f"{directory}/images", f"{directory}/instances.json")
    log_source("training", source)
    lap("annotations and image files, CPU s")
    assert source.fingerprint
    lap("fingerprint, CPU s")
    pipeline = dali.Pipeline(batch_size=8, num_threads=1, device_id=None)
    with pipeline:
        pipeline.set_outputs(*source.read(training=True))
    pipeline.build()
    lap("DALI's reader, CPU s")
    result["all, CPU s"] = sum(result.values())
    result["all, s"] = time.monotonic() - wall
    after = _memory()
    result["peak memory, MB"] = after["VmHWM"] - before["VmRSS"]
    result["of it not shared, at the end, MB"] = after["RssAnon"] - before["RssAnon"]
    return result


def _memory() -> dict[str, float]:
    """Returns the memory of this process in MB."""
    status = pathlib.Path("/proc/self/status").read_text()
    return {name: int(size) / 1000 for name, size in re.findall(r"(\w+):\s+(\d+) kB", status)}


def main() -> None:
    a = LargeArgs(**shared_flags.values(flags.FLAGS, define_flags))
    if not a.output_dir:
        raise UserError("--output_dir is missing: give the directory of the data set")
    directory = make_output_directory(a.output_dir)
    with user_errors(f"--output_dir={directory}"):
        if not (directory / "instances.json").exists():
            draw(directory, a)
        with tempfile.TemporaryDirectory(dir=directory) as cache:
            columns = []
            for _ in ("first", "later"):
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    columns.append(pool.apply(measure, (str(directory), cache)))
    print(f"| {a.output_dir} | first | later |\n|---|--:|--:|")
    for name in columns[0]:
        print(f"| {name} | {columns[0][name]:.1f} | {columns[1][name]:.1f} |")


def define_flags(fv: flags.FlagValues) -> None:
    shared_flags.define(fv, LargeArgs)


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
