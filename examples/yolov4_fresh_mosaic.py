r"""YOLOv4's training pipeline in DALI with mosaics of freshly read images, in one file to copy.

    python yolov4_fresh_mosaic.py  # draws a batch of synthetic images with their boxes
    python yolov4_fresh_mosaic.py --images=train2017 --annotations=instances_train2017.json

As in Darknet (github.com/AlexeyAB/darknet src/data.c), each mosaic is of four images that are read for it, in
four orders. Only what a tile shows is decoded and resized. Read yolov4_pipeline.py first: it has mosaics of
images of the batch, and reads TFRecords, too. A batch of B images holds, in this order:

    images     float32 (B, H, W, 3): RGB in 0..1
    boxes      float32 (B, max_instances, 4): left, top, right, bottom in 0..1; padded with -1
    classes    int32 (B, max_instances): 0-based, in the order of category ids; padded with -1
    num_boxes  int32 (B,)

On a CPU it equals that of yolov4/pipeline.py with mosaic_tiles=fresh, bit for bit.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import tempfile

import numpy as np
from nvidia.dali import Pipeline, fn, math, types
from PIL import Image, ImageDraw

MAX_BOXES = 2**14  # of the four images of a mosaic
SCRATCH = tempfile.TemporaryDirectory()  # for files that only DALI reads; removed at exit

PIXEL = np.frombuffer(b"P6\n1 1\n255\n\0\0\0", np.uint8)  # an image of one pixel

int32 = functools.partial(fn.cast, dtype=types.INT32)
constant = functools.partial(types.Constant, device="cpu")
column = functools.partial(fn.expand_dims, axes=[1])  # (N,) -> (N, 1)


@dataclasses.dataclass(frozen=True)
class Config:
    """The data, and what happens to them (Darknet's cfg/yolov4.cfg). Sizes are (height, width) in pixels."""

    annotations: str  # COCO json
    images: str = ""  # directory of the files that the json names
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
    on_gpu, json_file = config.device_id is not None, write_clean_json(config.annotations)
    seed = draw_seed(config.seed, shard_id, 1)
    orders = [config.seed, *(draw_seed(config.seed, reader) % 2**31 for reader in (1, 2, 3))]
    with Pipeline(config.batch_size, 4, config.device_id, seed=seed, enable_checkpointing=True) as pipeline:
        # From here on, a node stands for one image, the boxes of one image, or numbers of the four images.
        shard = {"shard_id": shard_id, "num_shards": num_shards, "shuffle_after_epoch": True}
        readers = [read_coco(config, json_file, shard, order) for order in orders]
        jpegs, boxes, labels = map(list, zip(*readers, strict=True))
        is_mosaic = fn.random.coin_flip(probability=config.mosaic_prob)
        if config.mosaic_prob < 1:  # elsewhere the others are images of one pixel, which cost nothing
            pixel = constant(PIXEL)[: len(PIXEL) * (1 - is_mosaic)]
            jpegs[1:] = [fn.cat(file[: file.shape()[0] * is_mosaic], pixel) for file in jpegs[1:]]
        shapes = [fn.peek_image_shape(file, adjust_orientation=False) for file in jpegs]
        sizes = int32(fn.stack(*shapes, axis=1)[0:2])  # (2, 4)
        views, maps, targets = tiles_of(config, sizes, is_mosaic)
        images, boxes_px = [], []
        for tile in range(4):
            images.append(decode_and_resize(jpegs[tile], *(columns[:, tile] for columns in views), on_gpu))
            boxes_px.append(boxes_to_tile(boxes[tile], *(rows[tile] for rows in maps)))
        first, *others = random_colors(config, images)
        grey = fn.reshape(fn.full(127 / 255, shape=[*config.image_size, 3]), layout="HWC")
        grey = grey.gpu() if on_gpu else grey
        # The first image is pasted last: it covers the others where there is no mosaic.
        corners = fn.cat(0 * targets[:1], targets[1:], targets[:1])
        images = fn.multi_paste(grey, *others, first, out_anchors=corners, output_size=config.image_size)
        outputs = images, *select_boxes(config, fn.cat(*boxes_px), fn.cat(*labels))
        pipeline.set_outputs(*(node.gpu() if on_gpu else node for node in outputs))
    return pipeline


def draw_seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def write_clean_json(path: str) -> str:
    """Writes a json without crowds and with images numbered: DALI sorts by id, refuses ids above 2**31."""
    document = json.loads(pathlib.Path(path).read_bytes())
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
    clean_path = tempfile.mkdtemp(dir=SCRATCH.name) + "/clean.json"
    pathlib.Path(clean_path).write_text(json.dumps(document))
    return clean_path


def read_coco(config: Config, json_file: str, shard: dict, order: int):
    """An encoded image; boxes float32 (N, 4), ltrb in 0..1, some without area; labels int32 (N,), from 1."""
    # By default labels follow the order of `categories`, and boxes below 0.1 pixels disappear.
    options = {"avoid_class_remapping": True, "size_threshold": 0.0, "ltrb": True, "ratio": True}
    options |= {"file_root": config.images, "annotations_file": json_file, "shuffle_after_epoch_seed": order}
    jpegs, boxes, labels = fn.readers.coco(**options, **shard)
    return jpegs, math.clamp(boxes, 0.0, 1.0), labels


# Numbers of the four images are columns: (2, 4) is a row of four y and a row of four x.
def random_crop(config: Config, sizes, input_size):
    """The windows of the images and their places in the network input, (4, 4): top, left, height, width."""
    growth = 0.0
    if config.letterbox:  # first the window grows to the shape of the network input, at both ends
        height, width = config.image_size
        growth = math.max(fn.stack(sizes[1] * height / width, sizes[0] * width / height) - sizes, 0.0) / 2
    moves = [fn.random.uniform(range=(-config.jitter, config.jitter), shape=[2, 4]) * sizes for _ in range(2)]
    start, inset = (int32(math.floor(move - growth + 0.5)) for move in moves)  # half up
    length = math.max(sizes - inset - start, 1)
    first, last = math.max(start, 0), math.min(start + length, sizes)  # inside the image
    low, high = ((2 * input_size * (edge - start) + length) // (2 * length) for edge in (first, last))
    low = math.min(low, input_size - 1)
    return fn.cat(first, last - first), fn.cat(low, math.max(high - low, 1))


def tiles_of(config: Config, sizes, is_mosaic):
    """What is decoded of each image, and its new size; the map of its boxes; the corner where it goes."""
    input_size = constant(np.int32(config.image_size)[:, np.newaxis])  # (2, 1)
    cut = int32(math.floor(column(fn.random.uniform(range=(0.2, 0.8), shape=[2])) * input_size + 0.5))
    cut = cut * is_mosaic + input_size * (1 - is_mosaic)
    rest = input_size - cut
    crop, place = random_crop(config, sizes, input_size)
    start, length, place, new_length = crop[0:2], crop[2:4], place[0:2], place[2:4]
    coins = fn.random.coin_flip(probability=config.flip_prob, shape=[4]) if config.flip_prob else 0
    flips = constant(np.int32([[0] * 4, [1] * 4])) * coins
    place = place + flips * (input_size - new_length - 2 * place)
    # In pixels of the four canvases: where the tile starts, and what shows there of the image.
    is_first = constant(np.int32([[1, 1, 0, 0], [1, 0, 1, 0]]))
    after = input_size - place - new_length
    tile = is_first * (rest - math.min(rest, after)) + (1 - is_first) * math.min(cut, place)
    shown = math.max(tile, place)
    tile_size = math.max(is_first * cut + (1 - is_first) * rest, 1)
    size = math.min(tile + tile_size, place + new_length) - shown
    to_target = (1 - is_first) * cut - tile
    # Without a mosaic the other tiles are one pixel under the first one.
    there = math.max(constant(np.int32([1, 0, 0, 0])), is_mosaic)
    size = size * there + 1 - there
    target = shown + to_target
    target = target * there + target[:, 0:1] * (1 - there)
    # In pixels of the stored images, from the window's start: what shows, and around it the filter's reach.
    part = shown - place + flips * (new_length - size - 2 * (shown - place))
    scale = length / new_length
    roi_start, roi_end = part * scale, (part + size) * scale
    reach = math.max(scale, 1.0) + 1.0
    first = math.max(int32(math.floor(roi_start - reach)), 0)
    last = math.min(int32(math.ceil(roi_end + reach)), length)
    turn = flips * (roi_end - roi_start)  # fn.resize mirrors where the start is right of the end
    roi_start, roi_end = roi_start - first + turn, roi_end - first - turn
    flipped_start = start + flips * (sizes - length - 2 * start)
    views = fn.cat(start + first, last - first), fn.cat(roi_start, roi_end), size * 1.0
    maps = start / sizes, (start + length) / sizes, sizes / scale, place + to_target - flipped_start / scale
    maps = flips[1], *(xyxy(node) for node in (*maps, target, target + size * there))
    return views, maps, fn.transpose(target, perm=[1, 0])


def xyxy(yx):  # (2, 4) -> float32 (4, 4): a row for each image, to scale or to move its boxes
    return fn.coord_transform(fn.transpose(yx, perm=[1, 0]), M=[0, 1, 1, 0, 0, 1, 1, 0])


def boxes_to_tile(boxes, mirrored, crop_low, crop_high, scale, shift, low, high):
    """Boxes of the image in 0..1, clipped to the crop -> in pixels of the sample, clipped to the tile."""
    boxes = fn.bb_flip(math.clamp(boxes, crop_low, crop_high), horizontal=mirrored, ltrb=True)
    return math.clamp(boxes * scale + shift, low, high)


def decode_and_resize(jpegs, window, roi, size, on_gpu: bool):
    """uint8 (h, w, 3) RGB. EXIF must not turn the pixels: boxes would stay behind."""
    part = {"start": window[0:2], "shape": window[2:4], "axes": [0, 1]}
    if on_gpu:
        images = fn.slice(fn.decoders.image(jpegs, device="mixed", adjust_orientation=False), **part)
    else:
        images = fn.decoders.image_slice(jpegs, adjust_orientation=False, **part)
    return fn.resize(images, size=size, roi_start=roi[0:2], roi_end=roi[2:4], interp_type=types.INTERP_LINEAR)


def random_colors(config: Config, images: list) -> list:
    """uint8 0..255 -> float32 0..1, each with another hue, saturation and brightness."""
    hue = fn.random.uniform(range=(-config.hue, config.hue), shape=[4])
    factors = []
    for limit in (config.saturation, config.exposure):
        inverse = fn.random.coin_flip(probability=0.5, shape=[4])
        factors.append(fn.random.uniform(range=(1.0, limit), shape=[4]) ** (1 - 2 * inverse))
    result = []
    for i, image in enumerate(images):
        twist = {"hue": hue[i], "saturation": factors[0][i], "value": factors[1][i] / 255.0}
        result.append(math.min(math.max(fn.hsv(image, **twist, dtype=types.FLOAT), 0.0), 1.0))
    return result


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
    parser.add_argument("--annotations", help="their COCO json")
    parser.add_argument("--image_size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), default=(416, 416))
    parser.add_argument("--letterbox", action="store_true", help="keep the aspect ratio")
    parser.add_argument("--mosaic_prob", type=float, default=0.5, help="share of the images that are mosaics")
    parser.add_argument("--output", default="batch.png", help="the picture")
    fields = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    output = fields.pop("output")
    if "images" not in fields:
        fields |= draw_synthetic(SCRATCH.name)
    elif "annotations" not in fields:
        parser.exit(1, "--annotations is missing: name the COCO json of these images\n")
    pipeline = make_pipeline(Config(**fields, batch_size=8))
    images, boxes, classes, _ = (np.asarray(node.as_tensor()) for node in pipeline.run())
    draw_batch(images, boxes, classes).save(output)
    print(f"{output}: {len(images)} images, {(classes >= 0).sum()} boxes")
