"""The batches of dynamic_detection.py in DALI's capture mode: the calls of the first batch become a graph.

    python dynamic_capture.py --output_dir=look --steps=3
    python dynamic_capture.py --output_dir=look --images=my/images --annotations=my/instances.json

DALI runs the graph ahead of the loop, as in its Pipeline API. The batches are those of dynamic_detection.py,
bit for bit, and each of the two programs continues from checkpoints of the other.

Capture mode records a call only if its arguments are results of recorded calls, or constants. It does not
record arithmetic and NumPy, and runs what depends on them call by call. So a batch has three parts:
`_prepared` reads images and computes windows and boxes, `pixels` is recorded, and `encode` makes the targets.
DALI refuses to save a reader in capture mode. Here, an eager reader feeds the graph, and `_prepared` saves
its state beside each batch that is read ahead.

This file needs nvidia-dali 2.4, NumPy and Pillow, and dynamic_detection.py beside it.
"""

import argparse
import collections
import hashlib
import pathlib
from collections.abc import Iterator

import dynamic_detection as detection
import numpy as np
import nvidia.dali.experimental.dynamic as ndd
from dynamic_detection import Size, Stream, to_dali, to_numpy, xyxy
from nvidia.dali import types

# `invariant` promises that a value stays the same. DALI does not assume this of a module's variables.
MEAN, STD = (ndd.capture.invariant(tuple(x.tolist())) for x in (detection.MEAN, detection.STD))
NUM_PREPARED = 12  # outputs of `_prepared`


class CapturedStream:
    """Batches of a `Stream` whose pixels come from a captured graph. `step` counts the batches.

    Args:
        stream: the stream of dynamic_detection.py, new or restored. This object now reads from it.
        image_size: of the network input.
    """

    def __init__(self, stream: Stream, batch_size: int, image_size: Size) -> None:
        self.step = stream.step
        self._batch_size, self._image_size = batch_size, image_size
        self._states: collections.deque[str] = collections.deque()  # after batches that were read ahead
        self._state = ""  # after the last batch of the loop; DALI has no state before the first
        self._source = ndd.ExternalSource(self._prepared(stream), num_outputs=NUM_PREPARED)

    def _prepared(self, stream: Stream) -> Iterator[tuple[ndd.Batch, ...]]:
        for read, draws in stream:
            self._states.append(stream.checkpoint().serialize())
            sizes = detection.stored_sizes(read.jpegs)
            windows, shown = detection.jittered_windows(sizes, draws, self._image_size)
            coins = to_dali(draws.flip.astype(np.int32))
            boxes = detection.boxes_to_window(read.boxes, sizes, windows)
            boxes = ndd.bb_flip(boxes, horizontal=coins, ltrb=True)
            boxes = boxes * xyxy(shown / np.float32(self._image_size))
            boxes, labels = detection.select_boxes(boxes, read.labels, self._image_size)
            window = (to_dali(windows[:, :2]), to_dali(windows[:, 2:]), to_dali(np.float32(shown)))
            colors = map(to_dali, draws.color.T)
            yield (read.jpegs, *window, coins, *colors, boxes, labels, read.image_ids)

    def __iter__(self) -> Iterator[tuple[dict[str, ndd.Batch], ndd.Batch]]:
        """Yields what `training_batch` returns, and the image ids. Only one loop can be open."""
        crop = ndd.capture.invariant(tuple(map(float, self._image_size)))
        for *arguments, boxes, labels, image_ids in self._source.captured(self._batch_size):
            images = pixels(*arguments, crop=crop)
            targets = detection.encode(boxes, labels, self._image_size)
            self.step, self._state = self.step + 1, self._states.popleft()
            yield {"images": images, **targets}, image_ids

    def save(self, pattern: str) -> str:
        """Saves the state after the loop's last batch; there must be one. `Stream.restore` reads the file."""
        checkpoint = ndd.checkpoint.Checkpoint()
        checkpoint.deserialize(self._state)
        return checkpoint.save(pattern)


def pixels(
    jpegs: ndd.Batch,
    start: ndd.Batch,
    shape: ndd.Batch,
    size: ndd.Batch,
    coins: ndd.Batch,
    brightness: ndd.Batch,
    contrast: ndd.Batch,
    saturation: ndd.Batch,
    hue: ndd.Batch,
    crop: tuple[float, float],
) -> ndd.Batch:
    """Decodes a window of each image, and makes the network's input of it. Each call is recorded.

    Args:
        jpegs: uint8 (bytes,).
        start, shape: int32 (2,), (y, x) in pixels of the stored image.
        size: float32 (2,), height and width of the window in the network input.
        coins: int32 (), 1 flips the image.
        brightness, contrast, saturation, hue: float32 (), factors, and degrees.
        crop: height and width of the network input.

    Returns:
        float32 (height, width, 3).
    """
    window = ndd.decoders.image_slice(
        jpegs, start=start, shape=shape, axes=[0, 1], output_type=types.RGB, adjust_orientation=False
    )
    images = ndd.flip(ndd.resize(window, size=size), horizontal=coins)
    images = ndd.color_twist(images, brightness=brightness, contrast=contrast, saturation=saturation, hue=hue)
    return ndd.crop_mirror_normalize(
        images,
        crop=crop,
        crop_pos_x=0.0,
        crop_pos_y=0.0,
        mean=MEAN,
        std=STD,
        dtype=types.FLOAT,
        output_layout="HWC",
        out_of_bounds_policy="pad",
        fill_values=0.0,
    )


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
    data = (args.images, args.annotations) if args.images else detection.draw_data(output_dir / "data")

    stream, pattern = Stream(*data, args.batch_size), f"{output_dir}/stop-{{seq:04d}}.json"
    try:
        print(f"continues from {stream.restore(pattern)}")
    except FileNotFoundError:
        print("starts at the first batch")
    captured, last = CapturedStream(stream, args.batch_size, detection.IMAGE_SIZE), stream.step + args.steps
    for batch, image_ids in captured:
        sha256 = hashlib.sha256(b"".join(to_numpy(values).tobytes() for values in batch.values())).hexdigest()
        print(f"batch {captured.step}: images {to_numpy(image_ids).ravel().tolist()}, {sha256[:16]}")
        if captured.step >= last:
            break
    print(f"saved {captured.save(pattern)}")


if __name__ == "__main__":
    detection.run(main)
