r"""YOLOv4's training pipeline (arXiv 2004.10934) in DALI, in one file to copy.

    python yolov4_pipeline.py  # draws a batch of synthetic images with their boxes
    python yolov4_pipeline.py --images=train2017 --annotations=instances_train2017.json
    python yolov4_pipeline.py --file_pattern='train-*.tfrecord' --annotations=train.label_map.json

Reads images and boxes from a COCO json or from TFRecords of the TensorFlow Object Detection API. Crop, flip,
colour and mosaic are Darknet's (github.com/AlexeyAB/darknet src/data.c). A batch of B images holds, in order:

    images     float32 (B, H, W, 3): RGB in 0..1
    boxes      float32 (B, max_instances, 4): left, top, right, bottom in 0..1; padded with -1
    classes    int32 (B, max_instances): 0-based, in the order of category ids; padded with -1
    num_boxes  int32 (B,)

On a CPU it equals, bit for bit, that of yolov4/pipeline.py, which also has MixUp, CutMix and many sizes.
yolov4_fresh_mosaic.py reads four images for each mosaic. Check new data with tools/check_data.py: DALI takes
damaged json, boxes and records without an error.
"""

import argparse
import dataclasses
import functools
import glob
import json
import pathlib
import tempfile

import numpy as np
from nvidia.dali import Pipeline, fn, math, tfrecord, types
from PIL import Image, ImageDraw

GREY = [127 / 255] * 3  # around the image: Darknet's src/image.c, letterbox_image
MAX_BOXES = 2**14  # of one image, or of the four of a mosaic
SCRATCH = tempfile.TemporaryDirectory()  # for files that only DALI reads; removed at exit

int32 = functools.partial(fn.cast, dtype=types.INT32)
constant = functools.partial(types.Constant, device="cpu")
column = functools.partial(fn.expand_dims, axes=[1])  # (N,) -> (N, 1)


@dataclasses.dataclass(frozen=True)
class Config:
    """The data, and what happens to them (Darknet's cfg/yolov4.cfg). Sizes are (height, width) in pixels."""

    annotations: str  # COCO json; with TFRecords, any json that has the same `categories`
    images: str = ""  # directory of the files that the json names
    file_pattern: str = ""  # glob of TFRecords, to read in place of `images`
    batch_size: int = 16
    image_size: tuple[int, int] = (608, 608)
    letterbox: bool = False  # keep the aspect ratio and pad; False: stretch
    jitter: float = 0.3  # above 0: each edge of the crop moves by up to this share of the image
    flip_prob: float = 0.5
    hue: float = 36.0  # above 0: degrees, -x .. x
    saturation: float = 1.5  # above 1: a factor from 1 .. x, or one over it
    exposure: float = 1.5  # of the brightness, likewise
    mosaic_prob: float = 0.5
    min_box_size: float = 1.0  # above 0: pixels of the network input; smaller boxes are dropped
    max_instances: int = 200  # boxes of an image; the largest stay
    device_id: int | None = None  # of the GPU; None for the CPU
    seed: int = 0


def make_pipeline(config: Config, shard_id: int = 0, num_shards: int = 1) -> Pipeline:
    """The pipeline of one rank. Ranks read disjoint parts of the data and draw different augmentations."""
    order = {"shard_id": shard_id, "num_shards": num_shards, "name": "reader"}
    order |= {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": config.seed}
    seed = int(np.random.SeedSequence([config.seed, shard_id, 1]).generate_state(1)[0])
    on_gpu = config.device_id is not None
    with Pipeline(config.batch_size, 4, config.device_id, seed=seed, enable_checkpointing=True) as pipeline:
        # From here on, a node stands for one image or the boxes of one image.
        jpegs, boxes, labels = (read_tfrecords if config.file_pattern else read_coco)(config, order)
        size = int32(fn.peek_image_shape(jpegs, adjust_orientation=False)[0:2])  # (height, width) as stored
        window, place, mirrored = random_view(config, size)
        images = decode_and_resize(jpegs, window, place[2:4], mirrored, on_gpu)
        canvas = {"start": -place[0:2], "shape": config.image_size, "axes": [0, 1], "fill_values": GREY}
        images = fn.slice(random_colors(config, images), **canvas, out_of_bounds_policy="pad")
        # Of the image in 0..1 -> of the window in 0..1, clipped to it -> in pixels of the network input.
        boxes = math.clamp((boxes * xyxy(size) - xyxy(window[0:2])) / xyxy(window[2:4]), 0.0, 1.0)
        boxes_px = fn.bb_flip(boxes, horizontal=mirrored, ltrb=True) * xyxy(place[2:4]) + xyxy(place[0:2])
        if config.mosaic_prob:
            images, boxes_px, labels = mosaic(config, images, boxes_px, labels, place)
        outputs = images, *select_boxes(config, boxes_px, labels)
        pipeline.set_outputs(*(node.gpu() if on_gpu else node for node in outputs))
    return pipeline


# Readers return encoded images; boxes float32 (N, 4) in 0..1, some without area; labels int32 (N,), from 1.
def read_coco(config: Config, order: dict):
    """Reads a json without crowds and with images numbered: DALI sorts by id, refuses ids above 2**31."""
    document = json.loads(pathlib.Path(config.annotations).read_bytes())
    label_of = {i: label for label, i in enumerate(sorted(c["id"] for c in document["categories"]), 1)}
    row_of = {image["id"]: row for row, image in enumerate(document["images"])}
    objects = [entry for entry in document["annotations"] if not entry.get("iscrowd")]
    rows = [row_of[entry["image_id"]] for entry in objects]
    scale = np.array([(image["width"], image["height"]) * 2 for image in document["images"]], float)[rows]
    boxes_px = np.array([entry["bbox"] for entry in objects], float).reshape(-1, 4)
    boxes_px[:, 2:] += boxes_px[:, :2]
    boxes_px = np.clip(np.float32(boxes_px / scale), 0, 1) * scale  # float32 as in TFRecords
    boxes_px[:, 2:] -= boxes_px[:, :2]
    document["images"] = [image | {"id": row} for row, image in enumerate(document["images"])]
    document["annotations"] = [
        {"image_id": row, "category_id": label_of[entry["category_id"]], "bbox": box}
        for row, entry, box in zip(rows, objects, boxes_px.tolist(), strict=True)
    ]
    path = tempfile.mkdtemp(dir=SCRATCH.name) + "/clean.json"
    pathlib.Path(path).write_text(json.dumps(document))
    # By default labels follow the order of `categories`, and boxes below 0.1 pixels disappear.
    options = {"avoid_class_remapping": True, "size_threshold": 0.0, "ltrb": True, "ratio": True}
    jpegs, boxes, labels = fn.readers.coco(file_root=config.images, annotations_file=path, **options, **order)
    return jpegs, math.clamp(boxes, 0.0, 1.0), labels


def read_tfrecords(config: Config, order: dict):
    """Every record needs all of these keys, and each file <file>.idx, made by DALI's tfrecord2idx."""
    sides = [f"image/object/bbox/{side}" for side in ("xmin", "ymin", "xmax", "ymax")]
    category, crowd = "image/object/class/label", "image/object/is_crowd"
    features = {"image/encoded": tfrecord.FixedLenFeature([], tfrecord.string, "")}
    features |= dict.fromkeys(sides, tfrecord.VarLenFeature(tfrecord.float32, 0.0))
    features |= dict.fromkeys([category, crowd], tfrecord.VarLenFeature(tfrecord.int64, 0))
    files = sorted(glob.glob(config.file_pattern))
    if not files:
        raise SystemExit(f"--file_pattern={config.file_pattern} matches no file: name TFRecords")
    options = {"path": files, "index_path": [f"{file}.idx" for file in files], "features": features}
    options |= {"random_shuffle": True, "initial_fill": 1024, "seed": config.seed}
    record = fn.readers.tfrecord(**options, **order)  # `order` shuffles files, `options` shuffle records
    categories = json.loads(pathlib.Path(config.annotations).read_bytes())["categories"]
    ids = np.int32(sorted(category["id"] for category in categories))
    is_same = int32(column(record[category]) == constant(ids))  # (N, categories)
    labels = fn.reductions.sum(is_same * constant(np.arange(1, len(ids) + 1, dtype=np.int32)), axes=[1])
    boxes = math.clamp(fn.stack(*(record[side] for side in sides), axis=1), 0.0, 1.0)
    boxes = boxes * column((record[crowd] == 0) & (labels > 0))  # crowds and other categories lose their area
    return record["image/encoded"], boxes, int32(labels)


def random_view(config: Config, size):
    """Draws the window of the image that is used, its place in the network input, and 1 if it is mirrored.

    Both are int32 (4,): top, left, height, width. Each edge of the window moves in or out by up to `jitter`
    times the image's side. What is then outside the image becomes padding.
    """
    height, width = config.image_size
    input_size, growth = constant(np.int32(config.image_size)), 0.0
    if config.letterbox:  # first the window grows to the shape of the network input, at both ends
        growth = math.max(fn.stack(size[1] * height / width, size[0] * width / height) - size, 0.0) / 2
    moves = [fn.random.uniform(range=(-config.jitter, config.jitter), shape=[2]) * size for _ in range(2)]
    start, inset = (int32(math.floor(move - growth + 0.5)) for move in moves)  # half up
    length = math.max(size - inset - start, 1)
    first, last = math.max(start, 0), math.min(start + length, size)  # inside the image
    low, high = ((2 * input_size * (edge - start) + length) // (2 * length) for edge in (first, last))
    low = math.min(low, input_size - 1)
    new_size = math.max(high - low, 1)
    mirrored = fn.random.coin_flip(probability=config.flip_prob) if config.flip_prob else 0
    left = low[1] + mirrored * (width - new_size[1] - 2 * low[1])
    return fn.cat(first, last - first), fn.stack(low[0], left, new_size[0], new_size[1]), mirrored


def decode_and_resize(jpegs, window, size, mirrored, on_gpu: bool):
    """uint8 (h, w, 3) RGB. EXIF must not turn the pixels: boxes would stay behind."""
    part = {"start": window[0:2], "shape": window[2:4], "axes": [0, 1]}
    if on_gpu:
        images = fn.slice(fn.decoders.image(jpegs, device="mixed", adjust_orientation=False), **part)
    else:
        images = fn.decoders.image_slice(jpegs, adjust_orientation=False, **part)
    size = fn.stack(size[0], size[1] * (1 - 2 * mirrored)) * 1.0  # a negative width mirrors
    return fn.resize(images, size=size, interp_type=types.INTERP_LINEAR)


def xyxy(yx):
    """(2,) or (n, 2) -> float32 (1, 4) or (n, 4), to scale or to move boxes."""
    return fn.coord_transform(fn.reshape(yx, shape=[-1, 2]), M=[0, 1, 1, 0, 0, 1, 1, 0])


def random_colors(config: Config, images):
    """uint8 0..255 -> float32 0..1, with another hue, saturation and brightness."""
    hue = fn.random.uniform(range=(-config.hue, config.hue))
    saturation, brightness = (
        fn.random.uniform(range=(1.0, limit)) ** (1 - 2 * fn.random.coin_flip(probability=0.5))
        for limit in (config.saturation, config.exposure)
    )
    images = fn.hsv(images, hue=hue, saturation=saturation, value=brightness / 255.0, dtype=types.FLOAT)
    return math.min(math.max(images, 0.0), 1.0)  # `clamp` takes three times as long


def mosaic(config: Config, images, boxes_px, labels, place):
    """Makes some samples of four canvases of the batch, which comes in another order.

    A cut point divides the sample into four tiles. The upper left one shows the lower right part of its
    canvas, or what is above and left of the padding there; the others likewise. So padding shows only
    where an image is smaller than its tile. Boxes are clipped to their tile.
    """
    # A sample does not know its number in the batch. So its own is drawn too, and the others differ from it.
    own = fn.batch_permutation()
    others = [fn.batch_permutation(no_fixed_points=True) for _ in range(3)]
    sources = [own, *(fn.permute_batch(own, indices=other) for other in others)]
    input_size = constant(np.int32(config.image_size))
    is_mosaic = fn.random.coin_flip(probability=config.mosaic_prob)
    cut = int32(math.floor(fn.random.uniform(range=(0.2, 0.8), shape=[2]) * input_size + 0.5))
    cut = input_size + (cut - input_size) * is_mosaic  # else the first tile is the whole canvas
    rest = input_size - cut
    # (4, 2), y and x of each tile: the padding on either side of its image; its start, size and target.
    place = fn.stack(*(fn.permute_batch(place, indices=source) for source in sources))
    before, after = place[:, 0:2], input_size - place[:, 0:2] - place[:, 2:4]
    is_first = constant(np.int32([[1, 1], [1, 0], [0, 1], [0, 0]]))
    start = is_first * (rest - math.min(rest, after)) + (1 - is_first) * math.min(cut, before)
    size = is_first * cut + (1 - is_first) * rest
    target = (1 - is_first) * cut
    tiles = {"in_ids": fn.stack(*sources), "in_anchors": start, "shapes": size, "out_anchors": target}
    images = fn.multi_paste(images, **{name: rows[: 1 + 3 * is_mosaic] for name, rows in tiles.items()})
    low, high, shift = xyxy(start), xyxy(start + size), xyxy(target - start)  # (4, 4)
    boxes_px = [fn.permute_batch(boxes_px, indices=source) for source in sources]
    boxes_px = [math.clamp(boxes_px[tile], low[tile], high[tile]) + shift[tile] for tile in range(4)]
    labels = fn.cat(*(fn.permute_batch(labels, indices=source) for source in sources))
    return images, fn.cat(*boxes_px), labels


def select_boxes(config: Config, boxes_px, labels):
    """The largest boxes in their order, normalised and padded; their classes; their number."""
    input_size = constant(np.float32([config.image_size[::-1] * 2]))
    # A last row without area, which becomes -1: the rows of the padding are copies of it.
    boxes_px, classes = fn.cat(boxes_px, -input_size), fn.cat(labels - 1, constant([-1]))
    numbers = constant(np.arange(MAX_BOXES, dtype=np.int32))
    number = numbers[: boxes_px.shape()[0]]  # (N,)
    sides = boxes_px[:, 2:4] - boxes_px[:, 0:2]
    is_large = fn.reductions.min(int32(sides >= config.min_box_size), axes=[1])
    area = sides[:, 0] * sides[:, 1] * is_large
    is_before = column(number) < number  # (N, N)
    is_larger = (column(area) > area) | ((column(area) == area) & is_before)
    kept = is_large * (fn.reductions.sum(int32(is_larger), axes=[0]) < config.max_instances)
    # DALI has no boxes[kept]. So each row of the result, (M, 1), finds the box that goes there.
    row = fn.reductions.sum(is_before * column(kept), axes=[0])
    is_source = kept * (column(numbers[: config.max_instances]) == row)  # (M, N)
    source = int32(number[-1] - fn.reductions.sum(is_source * (number[-1] - number), axes=[1]))
    rows = boxes_px / input_size, column(classes)
    boxes, classes = (fn.sequence_rearrange(values, new_order=source) for values in rows)
    return boxes, fn.squeeze(classes, axes=[1]), int32(fn.reductions.sum(kept))


def make_dataset(config: Config, shard_id: int = 0, num_shards: int = 1):
    """tf.data of (images, boxes, classes, num_boxes), without end."""
    import nvidia.dali.plugin.tf as dali_tf
    import tensorflow as tf

    shapes = (*config.image_size, 3), (config.max_instances, 4), (config.max_instances,), ()
    spec = {"output_shapes": tuple((config.batch_size, *shape) for shape in shapes)}
    spec["output_dtypes"] = (tf.float32, tf.float32, tf.int32, tf.int32)
    options = {"batch_size": config.batch_size, "device_id": config.device_id}
    with tf.device("/cpu:0" if config.device_id is None else f"/gpu:{config.device_id}"):
        return dali_tf.DALIDataset(make_pipeline(config, shard_id, num_shards), **options, **spec)


def draw_synthetic(directory: str) -> dict:
    """Writes images of two kinds of objects with their json; returns the fields of Config that name them."""
    random, images, objects = np.random.default_rng(0), [], []
    for number in range(16):
        width, height = random.integers(200, 600, 2).tolist()
        image = Image.new("RGB", (width, height), f"hsl({22 * number}, 30%, 60%)")
        for category in random.integers(1, 3, number % 4 + 1).tolist():
            left, top, w, h = box = np.int32(random.uniform(0.1, 0.45, 4) * ([width, height] * 2)).tolist()
            draw = ImageDraw.Draw(image).rectangle if category == 1 else ImageDraw.Draw(image).ellipse
            draw([left, top, left + w - 1, top + h - 1], fill="teal" if category == 1 else "maroon")
            objects.append({"image_id": number, "category_id": category, "bbox": box})
        image.save(f"{directory}/{number}.jpg")
        images.append({"id": number, "file_name": f"{number}.jpg", "width": width, "height": height})
    document = {"images": images, "annotations": objects, "categories": [{"id": 1}, {"id": 2}]}
    pathlib.Path(directory, "all.json").write_text(json.dumps(document))
    return {"images": directory, "annotations": f"{directory}/all.json"}


def draw_batch(images: np.ndarray, boxes: np.ndarray, classes: np.ndarray) -> Image.Image:
    """The images of a batch in four columns, their boxes in a colour for each class."""
    (height, width), pictures = images.shape[1:3], []
    for pixels, rows, numbers in zip(images, boxes, classes.tolist(), strict=True):
        picture = Image.fromarray(np.uint8(pixels * 255 + 0.5))
        for box, number in zip(rows * [width, height, width, height], numbers, strict=True):
            if number >= 0:
                color = f"hsl({67 * number % 360}, 100%, 50%)"
                ImageDraw.Draw(picture).rectangle(box.tolist(), outline=color, width=2)
        pictures.append(np.asarray(picture))
    return Image.fromarray(np.hstack(np.reshape(pictures, (4, -1, width, 3))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws a batch with its boxes.")
    parser.add_argument("--images", help="directory of images (default: synthetic images)")
    parser.add_argument("--file_pattern", help="TFRecords, in place of --images")
    parser.add_argument("--annotations", help="COCO json; for TFRecords, one with their categories")
    parser.add_argument("--image_size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), default=(416, 416))
    parser.add_argument("--letterbox", action="store_true", help="keep the aspect ratio")
    parser.add_argument("--mosaic_prob", type=float, default=0.5, help="share of the images that are mosaics")
    parser.add_argument("--output", default="batch.png", help="the picture")
    fields = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    output = fields.pop("output")
    if not {"images", "file_pattern"} & set(fields):
        fields |= draw_synthetic(SCRATCH.name)
    elif "annotations" not in fields:
        parser.exit(1, "--annotations is missing: name the json with the categories\n")
    pipeline = make_pipeline(Config(**fields, batch_size=8))
    images, boxes, classes, _ = (np.asarray(node.as_tensor()) for node in pipeline.run())
    draw_batch(images, boxes, classes).save(output)
    print(f"{output}: {len(images)} images, {(classes >= 0).sum()} boxes")
