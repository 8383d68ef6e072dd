"""EfficientDet's training batches in DALI's Dynamic API: every step is a call whose result can be printed.

    python dynamic_detection.py --output_dir=look --steps=3
    python dynamic_detection.py --output_dir=look --images=my/images --annotations=my/instances.json

The program draws its own images or reads a COCO data set. It writes `steps.png`: a row for each image of the
last batch and a column for each step. Then it saves a checkpoint, from which the same command continues.

This file needs nvidia-dali 2.4, NumPy and Pillow, but no other file of the repository.

EfficientDet: arXiv 1911.09070. Scale jitter, anchors and constants are from google/automl efficientdet:
dataloader.py, tf2/anchors.py, hparams_config.py.
"""

import argparse
import functools
import hashlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
from nvidia.dali import types
from PIL import Image, ImageDraw

IMAGE_SIZE = (512, 512)  # of the network input, height and width
JITTER = (0.1, 2.0)  # range of the scaled image's size; 1 is the largest that fits into the input
FLIP_PROB = 0.5
COLOR = (0.3, 0.3, 0.5)  # brightness, contrast, saturation: x means factors 1 - x to 1 + x. App's default: 0.
HUE = 20.0  # degrees: x means that the hue changes by -x to x. The app's default is 0.
MEAN, STD = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]) * 255  # of ImageNet, RGB
LEVELS = range(3, 8)  # of the feature pyramid
OCTAVES, RATIOS, ANCHOR_SCALE = 2 ** (np.arange(3) / 3), (1.0, 2.0, 0.5), 4.0  # ratios are width / height
MATCH_IOU = 0.5
MIN_BOX_SIZE = 1.0  # smallest side of a box that is kept, in pixels of the network input
MAX_BOXES = 100  # number of boxes per image, with padding
SWAP_XY = np.eye(4, dtype=np.float32)[[1, 0, 3, 2]]  # dx dy dw dh -> dy dx dh dw
TILE = 256  # side of each picture in steps.png, pixels

Size = tuple[int, int]  # height, width


# --- 1. Read: images, boxes and random numbers, from a stream that can stop and continue ---


class Read(NamedTuple):
    jpegs: ndd.Batch  # uint8 (bytes,)
    boxes: ndd.Batch  # float32 (N, 4), ltrb normalised by the image; N may be 0
    labels: ndd.Batch  # int32 (N,), 1-based, in the order of the json's categories
    image_ids: ndd.Batch  # int32 (1,)


class Draws(NamedTuple):
    """All random numbers for B images, float32."""

    jitter: np.ndarray  # (B,)
    position: np.ndarray  # (B, 2), 0 to 1: top and left of the window, 1 is the largest possible
    flip: np.ndarray  # (B,), 0 or 1
    color: np.ndarray  # (B, 4): factors of brightness, contrast and saturation; hue in degrees


def draw_numbers(rng: ndd.random.RNG, batch_size: int) -> Draws:
    def uniform(low: float, high: float) -> np.ndarray:
        return to_numpy(ndd.random.uniform(range=(low, high), rng=rng, batch_size=batch_size))

    jitter, top, left, coin = uniform(*JITTER), uniform(0, 1), uniform(0, 1), uniform(0, 1)
    color = [*(uniform(1 - x, 1 + x) for x in COLOR), uniform(-HUE, HUE)]
    return Draws(jitter, np.stack([top, left], 1), np.float32(coin < FLIP_PROB), np.stack(color, 1))


class Stream:
    """An endless stream of shuffled batches that can be saved and restored. `step` counts the batches."""

    def __init__(self, images: str, annotations: str, batch_size: int, seed: int = 0) -> None:
        content = pathlib.Path(annotations).read_bytes()
        try:
            json.loads(content)  # DALI may not report that a json is cut off
        except ValueError as error:
            raise ValueError(f"{annotations}: {error}") from None
        self._data = f"{hashlib.sha256(content).hexdigest()[:16]}, batch size {batch_size}, seed {seed}"
        self.step, self._batch_size, self._rng = 0, batch_size, ndd.random.RNG(seed=seed)
        self._reader = ndd.readers.COCO(  # type: ignore[call-arg]  # rejects image ids of 2**31 or more
            file_root=images,
            annotations_file=annotations,
            ltrb=True,
            ratio=True,
            image_ids=True,
            include_iscrowd=False,
            size_threshold=0.0,  # by default boxes under 0.1 pixel are dropped
            shuffle_after_epoch=True,  # also shuffles the first epoch
            shuffle_after_epoch_seed=seed,
            enable_checkpointing=True,
        )

    def __iter__(self) -> Iterator[tuple[Read, Draws]]:
        while True:  # the last batch of an epoch is filled up with images of the next epoch
            for read in self._reader.next_epoch(self._batch_size):
                self.step += 1
                yield Read(*read), draw_numbers(self._rng, self._batch_size)

    def save(self, pattern: str) -> str:
        """Saves the state to the next file of a series, for example "at-{seq:04d}.json". Returns its name."""
        return self.checkpoint().save(pattern)

    def checkpoint(self) -> ndd.checkpoint.Checkpoint:
        """Returns the state after the last batch."""
        checkpoint = self._register(ndd.checkpoint.Checkpoint())
        checkpoint.collect()
        return checkpoint

    def restore(self, pattern: str) -> str:
        """Restores the state from the newest file. Returns the file's name.

        Raises:
            FileNotFoundError: there is no file.
        """
        checkpoint = ndd.checkpoint.Checkpoint()
        path = checkpoint.load(pattern)
        self._register(checkpoint)  # this also restores the states
        return path

    def _register(self, checkpoint: ndd.checkpoint.Checkpoint) -> ndd.checkpoint.Checkpoint:
        for name, stateful in (("stream", self), ("reader", self._reader), ("rng", self._rng)):
            checkpoint.register(stateful, name)
        return checkpoint

    # DALI can save any object that has these two methods.
    def get_state(self, *, cuda_stream: object = None) -> str:
        return json.dumps([self.step, self._data])

    def set_state(self, state: str) -> None:
        self.step, data = json.loads(state)
        if data != self._data:
            raise ValueError(
                f"the checkpoint is for data {data}, not for {self._data}: use another --output_dir"
            )


# --- 2. Window: which pixels of the stored image are used, and at which size ---


def stored_sizes(jpegs: ndd.Batch) -> np.ndarray:
    """Returns float32 (B, 2): height and width in the file headers, without EXIF rotation."""
    return to_numpy(ndd.peek_image_shape(jpegs, adjust_orientation=False))[:, :2].astype(np.float32)


def jittered_windows(sizes: np.ndarray, draws: Draws, image_size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Chooses a random scale for each image, and a random window if the scaled image exceeds the input size.

    Returns:
        windows: int32 (B, 4), top, left, height, width in pixels of the stored image.
        shown: int32 (B, 2), height and width of each window in the network input.
    """
    limit = np.float32(image_size)
    scales = draws.jitter * (limit / sizes).min(1)
    scaled = np.maximum(np.floor(sizes * scales[:, np.newaxis] + 0.5), 1)
    shown = np.minimum(scaled, limit)
    lengths = np.clip(np.floor(sizes * shown / scaled + 0.5), 1, sizes)
    starts = np.minimum(np.floor(draws.position * (sizes - lengths + 1)), sizes - lengths)
    return np.concatenate([starts, lengths], 1).astype(np.int32), shown.astype(np.int32)


# --- 3. Pixels, and the boxes on them ---


def decode(jpegs: ndd.Batch, windows: np.ndarray) -> ndd.Batch:
    """Decodes only the window of each image, to uint8 (h, w, 3) RGB."""
    part = {"start": to_dali(windows[:, :2]), "shape": to_dali(windows[:, 2:]), "axes": [0, 1]}
    return ndd.decoders.image_slice(jpegs, **part, output_type=types.RGB, adjust_orientation=False)


def boxes_to_window(boxes: ndd.Batch, sizes: np.ndarray, windows: np.ndarray) -> ndd.Batch:
    """Converts boxes from fractions of the image to fractions of the window, and clips them to the window."""
    boxes_px = boxes * xyxy(sizes) - xyxy(windows[:, :2])
    return ndd.math.clamp(boxes_px / xyxy(windows[:, 2:]), 0.0, 1.0)


def flip(images: ndd.Batch, boxes: ndd.Batch, draws: Draws) -> tuple[ndd.Batch, ndd.Batch]:
    coins = to_dali(draws.flip.astype(np.int32))
    return ndd.flip(images, horizontal=coins), ndd.bb_flip(boxes, horizontal=coins, ltrb=True)


def change_color(images: ndd.Batch, draws: Draws) -> ndd.Batch:
    brightness, contrast, saturation, hue = map(to_dali, draws.color.T)
    return ndd.color_twist(images, brightness=brightness, contrast=contrast, saturation=saturation, hue=hue)


def normalize_and_pad(images: ndd.Batch, image_size: Size) -> ndd.Batch:
    """Returns float32 (H, W, 3): the normalised image at the top left, and 0 (the mean colour) elsewhere."""
    place = {"crop": [float(side) for side in image_size], "crop_pos_x": 0.0, "crop_pos_y": 0.0}
    options = {"mean": MEAN.tolist(), "std": STD.tolist(), "dtype": types.FLOAT, "output_layout": "HWC"}
    return ndd.crop_mirror_normalize(images, **place, **options, out_of_bounds_policy="pad", fill_values=0.0)


# --- 4. Targets ---


def select_boxes(boxes: ndd.Batch, labels: ndd.Batch, image_size: Size) -> tuple[ndd.Batch, ndd.Batch]:
    """Drops boxes with a side below MIN_BOX_SIZE. Of the others, keeps at most MAX_BOXES, the largest."""
    smallest = np.float32(MIN_BOX_SIZE / np.array(image_size[::-1]))
    chosen_boxes, chosen_labels = [], []
    for rows, classes in zip(map(np.asarray, boxes.tensors), map(np.asarray, labels.tensors), strict=True):
        sides = rows[:, 2:] - rows[:, :2]
        large = np.flatnonzero((sides >= smallest).all(1))
        largest = np.sort(large[np.argsort(-sides[large].prod(1), kind="stable")[:MAX_BOXES]])
        chosen_boxes.append(rows[largest])
        chosen_labels.append(classes[largest])
    return ndd.as_batch(chosen_boxes), ndd.as_batch(chosen_labels)


class Constant(tuple):
    """The numbers of a long argument. DALI would check each number of a list in every call."""


@functools.cache
def anchor_boxes(image_size: Size) -> tuple[Constant, list[Size]]:
    """Makes the anchors of all levels.

    Returns:
        anchors: four numbers for each anchor, normalised ltrb, level by level.
        cells: (rows, columns) of each level.
    """
    boxes, cells = [], [(-(-image_size[0] // 2**level), -(-image_size[1] // 2**level)) for level in LEVELS]
    for rows, columns in cells:
        stride = np.array(image_size) / (rows, columns)  # y, x
        base, roots = ANCHOR_SCALE * stride * OCTAVES[:, np.newaxis], np.sqrt(RATIOS)
        half = np.stack([base[:, :1] / roots, base[:, 1:] * roots], -1).reshape(-1, 2) / 2  # (9, 2)
        centers = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1) + 0.5
        centers = (centers * stride)[:, :, np.newaxis]  # (rows, columns, 1, 2)
        boxes.append(np.concatenate([centers - half, centers + half], -1)[..., [1, 0, 3, 2]].reshape(-1, 4))
    normalized = np.concatenate(boxes).astype(np.float32) / np.float32([*image_size[::-1]] * 2)
    return Constant(normalized.ravel().tolist()), cells  # 4 numbers for each anchor


def encode(boxes: ndd.Batch, labels: ndd.Batch, image_size: Size) -> dict[str, ndd.Batch]:
    """Makes the targets of the loss.

    Returns:
        boxes: float32 (MAX_BOXES, 4), padded with -1.
        classes: int32 (MAX_BOXES,), 0-based, padded with -1.
        num_positives: float32 (), number of anchors that are matched to a box.
        class_targets_3 to class_targets_7: int32 (h, w, 9), 0-based, -1 for background.
        box_targets_3 to box_targets_7: float32 (h, w, 36), (dy, dx, dh, dw) for each of the 9 anchors.
    """
    anchors, cells = anchor_boxes(image_size)
    deltas, targets = ndd.box_encoder(boxes, labels, anchors=anchors, criteria=MATCH_IOU, offset=True)
    result = {
        "boxes": ndd.pad(boxes, axes=[0], shape=[MAX_BOXES], fill_value=-1),
        "classes": ndd.pad(labels - 1, axes=[0], shape=[MAX_BOXES], fill_value=-1),
        "num_positives": ndd.reductions.sum(ndd.cast(targets != 0, dtype=types.FLOAT)),
    }
    deltas, targets, start = ndd.coord_transform(deltas, M=SWAP_XY), targets - 1, 0
    for level, (rows, columns) in zip(LEVELS, cells, strict=True):
        part = slice(start, start + rows * columns * 9)
        result[f"class_targets_{level}"] = ndd.reshape(targets.slice[part], shape=[rows, columns, 9])
        result[f"box_targets_{level}"] = ndd.reshape(deltas.slice[part], shape=[rows, columns, 36])  # type: ignore[attr-defined]
        start = part.stop
    return result


# --- 5. The whole batch ---


def training_batch(
    read: Read, draws: Draws, image_size: Size, look: Callable[..., object] = lambda step, images, boxes: None
) -> dict[str, ndd.Batch]:
    """Makes `images`, float32 (H, W, 3), and targets. Calls `look(step, images, boxes)` after each step."""
    sizes = stored_sizes(read.jpegs)
    windows, shown = jittered_windows(sizes, draws, image_size)
    images = ndd.resize(decode(read.jpegs, windows), size=to_dali(np.float32(shown)))
    boxes = boxes_to_window(read.boxes, sizes, windows)
    look("window, resized", images, boxes)
    images, boxes = flip(images, boxes, draws)
    look("flip", images, boxes)
    images = change_color(images, draws)
    look("color", images, boxes)
    images = normalize_and_pad(images, image_size)
    boxes, labels = select_boxes(boxes * xyxy(shown / np.float32(image_size)), read.labels, image_size)
    look("network input, chosen boxes", images, boxes)
    return {"images": images, **encode(boxes, labels, image_size)}


def xyxy(yx: np.ndarray) -> ndd.Batch:
    """Converts B rows (y, x) to a batch of B tensors [[x, y, x, y]], float32."""
    return to_dali(np.float32(yx)[:, np.newaxis, [1, 0, 1, 0]])


def to_dali(values: np.ndarray) -> ndd.Batch:
    return ndd.as_batch(np.ascontiguousarray(values))


def to_numpy(batch: ndd.Batch) -> np.ndarray:
    return np.stack([np.asarray(tensor) for tensor in batch.tensors])


# --- Pictures, and the program ---


def draw_column(step: str, images: ndd.Batch, boxes: ndd.Batch) -> np.ndarray:
    """Draws the images and their boxes below each other. Returns uint8 (h, w, 3)."""
    tiles = []
    for pixels, rectangles in zip(
        map(np.asarray, images.tensors), map(np.asarray, boxes.tensors), strict=True
    ):
        if pixels.dtype == np.float32:
            pixels = np.clip(np.rint(pixels * STD + MEAN), 0, 255).astype(np.uint8)
        tile = Image.new("RGB", (TILE + 8, TILE + 20), "white")
        zoom = TILE / max(pixels.shape)
        picture = Image.fromarray(pixels).resize([max(round(side * zoom), 1) for side in pixels.shape[1::-1]])
        for box in rectangles * [*picture.size, *picture.size]:
            ImageDraw.Draw(picture).rectangle(box.tolist(), outline="yellow", width=2)
        tile.paste(picture, (4, 16))
        ImageDraw.Draw(tile).text((4, 2), step, "black")
        tiles.append(np.asarray(tile))
    return np.vstack(tiles)


def draw_data(directory: pathlib.Path) -> tuple[str, str]:
    random, images, annotations = np.random.default_rng(0), [], []
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(20):
        width, height = size = random.integers(200, 640, 2)
        picture = Image.fromarray(random.integers(0, 256, (4, 4, 3), np.uint8)).resize((width, height))
        for _ in range(random.integers(0, 7)):  # some images have no objects
            sides = random.integers(8, 200, 2)
            start = random.integers(0, size - sides, endpoint=True)
            color = tuple(random.integers(0, 256, 3).tolist())
            ImageDraw.Draw(picture).ellipse([*start.tolist(), *(start + sides - 1).tolist()], fill=color)
            box = {"bbox": [*start.tolist(), *sides.tolist()], "image_id": number, "category_id": 1}
            annotations.append(box | {"id": len(annotations) + 1, "iscrowd": 0})
        picture.save(directory / f"{number}.png")
        sides = {"width": int(width), "height": int(height)}
        images.append({"id": number, "file_name": f"{number}.png", **sides})
    document = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "ellipse"}]}
    (directory / "instances.json").write_text(json.dumps(document))
    return str(directory), str(directory / "instances.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="dynamic_detection", help="directory for all output")
    parser.add_argument("--images", help="directory of images; without it the program draws some")
    parser.add_argument("--annotations", help="COCO json of these images")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="batches to make before the program stops")
    args = parser.parse_args()
    if bool(args.images) != bool(args.annotations) or min(args.batch_size, args.steps) < 1:
        raise ValueError("use --images with --annotations; --batch_size and --steps must be at least 1")
    output_dir = pathlib.Path(args.output_dir)
    data = (args.images, args.annotations) if args.images else draw_data(output_dir / "data")
    output_dir.mkdir(parents=True, exist_ok=True)

    stream, pattern = Stream(*data, batch_size=args.batch_size), f"{output_dir}/stop-{{seq:04d}}.json"
    try:
        print(f"continues from {stream.restore(pattern)}")
    except FileNotFoundError:
        print("starts at the first batch")
    last, columns = stream.step + args.steps, []
    for read, draws in stream:
        looks = []
        if stream.step >= last:
            looks.append(lambda *step: columns.append(draw_column(*step)))
            stored = ndd.decoders.image(read.jpegs, output_type=types.RGB, adjust_orientation=False)
            looks[0]("stored", stored, read.boxes)
        batch = training_batch(read, draws, IMAGE_SIZE, *looks)
        sha256 = hashlib.sha256(b"".join(to_numpy(values).tobytes() for values in batch.values())).hexdigest()
        print(f"batch {stream.step}: images {to_numpy(read.image_ids).ravel().tolist()}, {sha256[:16]}")
        if looks:
            break
    Image.fromarray(np.hstack(columns)).save(output_dir / "steps.png")
    print(f"drew {output_dir / 'steps.png'}; saved {stream.save(pattern)}")


def run(program: Callable[[], None]) -> None:
    """Runs a program of this API, and reports errors in one line."""
    # In the default mode of DALI 2.4, 1 of 10 runs on a CPU aborted at exit.
    with ndd.EvalMode.sync_cpu:
        try:
            program()
        except (OSError, ValueError) as error:
            sys.exit(f"error: {error}")
        except RuntimeError as error:  # DALI raises it
            sys.exit(f"error: {error}. tools/check_data.py of the repository names bad files.")


if __name__ == "__main__":
    run(main)
