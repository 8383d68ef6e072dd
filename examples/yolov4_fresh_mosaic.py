r"""YOLOv4's training pipeline in DALI with mosaics of freshly read images, in one file to copy.

    python yolov4_fresh_mosaic.py  # draws a batch of synthetic images with their boxes
    python yolov4_fresh_mosaic.py --images=train2017 --annotations=instances_train2017.json

For training only: images are shuffled and have no ids. Evaluation is in the app. Run tools/check_data.py
first, because DALI may accept damaged data without an error. A mosaic shows four newly read images, as in
Darknet (github.com/AlexeyAB/darknet src/data.c): four readers read the data in different orders. In
yolov4_pipeline.py the four images are in the batch. Only what a tile shows is decoded. CPU batches equal
those of yolov4/pipeline.py with mosaic_tiles=fresh bit for bit. The GPU branch was not run. Outputs in order:

    images     float32 (B, H, W, 3): RGB in 0..1
    boxes      float32 (B, max_instances, 4): left, top, right, bottom in 0..1; padded with -1
    classes    int32 (B, max_instances): 0-based, in the order of category ids; padded with -1
    num_boxes  int32 (B,)
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

PIXEL = np.frombuffer(b"P6\n1 1\n255\n\0\0\0", np.uint8)  # an encoded image of one pixel
RANGES = {"jitter": (0, 0.499), "flip_prob": (0, 1), "mosaic_prob": (0, 1), "image_size": (1, 2**14)}
RANGES |= {"hue": (0, 180), "saturation": (1, 100), "exposure": (1, 100)}
SCRATCH = tempfile.TemporaryDirectory()  # for files that only DALI reads; removed at exit
int32 = functools.partial(fn.cast, dtype=types.INT32)
int_sum = functools.partial(fn.reductions.sum, dtype=types.INT32)
constant = functools.partial(types.Constant, device="cpu")
column = functools.partial(fn.expand_dims, axes=[1])  # (N,) -> (N, 1)


@dataclasses.dataclass(frozen=True)
class Config:
    """The data and the augmentation (Darknet's cfg/yolov4.cfg). Sizes are (height, width) in pixels."""

    annotations: str  # COCO json
    images: str = ""  # directory of the files that the json names
    batch_size: int = 16
    image_size: tuple[int, int] = (608, 608)
    letterbox: bool = False  # keep the aspect ratio and pad; False: stretch
    jitter: float = 0.3  # each edge of the crop moves by up to this share of the image
    flip_prob: float = 0.5
    hue: float = 36.0  # in degrees: -x .. x
    saturation: float = 1.5  # a factor in 1 .. x, or its inverse
    exposure: float = 1.5  # the same for brightness
    mosaic_prob: float = 0.5
    min_box_size: float = 1.0  # pixels of the network input; smaller boxes are dropped
    max_instances: int = 200  # maximum number of boxes in an image; the largest are kept
    num_threads: int = 4  # CPU threads
    device_id: int | None = None  # number of the GPU; None: use the CPU
    seed: int = 0


def make_pipeline(config: Config, shard_id: int = 0, num_shards: int = 1) -> Pipeline:
    """Makes a pipeline for shard `shard_id` of `num_shards`. A node is one image, or all four of a mosaic."""
    for name, (low, high) in RANGES.items():
        if not low <= np.min(value := getattr(config, name)) <= np.max(value) <= high:
            raise ValueError(f"{name}={value}: use {low} to {high}")
    numbers = [config.seed, shard_id, 1], *([config.seed, reader] for reader in (1, 2, 3))
    seed, *others = (int(np.random.SeedSequence(entropy).generate_state(1)[0]) for entropy in numbers)
    on_gpu, clean_json = config.device_id is not None, write_clean_json(config.annotations)
    options = {"seed": seed, "enable_checkpointing": True}
    with Pipeline(config.batch_size, config.num_threads, config.device_id, **options) as pipeline:
        order = {"shard_id": shard_id, "num_shards": num_shards, "shuffle_after_epoch": True}
        orders = [
            order | {"shuffle_after_epoch_seed": reader_seed}
            for reader_seed in (config.seed, *(other % 2**31 for other in others))
        ]
        readers = [read_coco(config, clean_json, order) for order in orders]
        jpegs, boxes, labels = map(list, zip(*readers, strict=True))
        is_mosaic = fn.random.coin_flip(probability=config.mosaic_prob)
        if config.mosaic_prob < 1:  # without a mosaic, one pixel replaces the other images, to save time
            pixel = constant(PIXEL)[: len(PIXEL) * (1 - is_mosaic)]
            jpegs[1:] = [fn.cat(file[: file.shape()[0] * is_mosaic], pixel) for file in jpegs[1:]]
        shapes = [fn.peek_image_shape(file, adjust_orientation=False) for file in jpegs]
        sizes = int32(fn.stack(*shapes, axis=1)[0:2])  # (2, 4)
        views, maps, targets = tiles_of(config, sizes, is_mosaic)
        images, boxes_px = [], []
        for tile in range(4):
            window, roi, size = (columns[:, tile] for columns in views)
            roi = {"roi_start": roi[0:2], "roi_end": roi[2:4]}
            images.append(fn.resize(decode(jpegs[tile], window, on_gpu), size=size, **roi))
            # Boxes in 0..1 of the image, clipped to the crop -> in pixels of the sample, clipped to the tile.
            mirrored, crop_low, crop_high, scale, shift, low, high = (rows[tile] for rows in maps)
            shown = fn.bb_flip(math.clamp(boxes[tile], crop_low, crop_high), horizontal=mirrored, ltrb=True)
            boxes_px.append(math.clamp(shown * scale + shift, low, high))
        first, *rest = augment(config, images)
        grey = fn.reshape(fn.full(127 / 255, shape=[*config.image_size, 3]), layout="HWC")
        grey = grey.gpu() if on_gpu else grey
        # The first image is pasted last, because without a mosaic it must cover the others.
        corners = fn.cat(0 * targets[:1], targets[1:], targets[:1])
        images = fn.multi_paste(grey, *rest, first, out_anchors=corners, output_size=config.image_size)
        boxes_px, labels = fn.cat(*boxes_px), fn.cat(*labels)
        boxes_px, labels = select_boxes(boxes_px, labels, config.min_box_size, config.max_instances)
        boxes = boxes_px / xyxy(constant(np.int32(config.image_size)))
        padded = fn.pad([boxes, labels - 1], axes=[0], shape=[config.max_instances], fill_value=-1)
        outputs = images, *padded, labels.shape(dtype=types.INT32)[0]
        pipeline.set_outputs(*(node.gpu() if on_gpu else node for node in outputs))
    return pipeline


def uniform(low: float, high: float, shape: tuple[int, ...] = ()):  # DALI rejects an empty range
    return fn.random.uniform(range=(low, high), shape=shape) if low < high else float(low)


def xyxy(yx):  # (2,) or (n, 2) -> float32 (1, 4) or (n, 4), to scale or to move boxes
    return fn.coord_transform(fn.reshape(yx, shape=[-1, 2]), M=[0, 1, 1, 0, 0, 1, 1, 0])


def read_coco(config: Config, clean_json: str, order: dict):
    """Returns an encoded image; boxes float32 (N, 4), ltrb in 0..1, not empty; labels int32 (N,), 1-based."""
    files = {"file_root": config.images, "annotations_file": clean_json}
    # avoid_class_remapping keeps our labels. size_threshold only drops boxes without an area.
    options = {"avoid_class_remapping": True, "size_threshold": 1e-30, "ltrb": True, "ratio": True}
    jpegs, boxes, labels = fn.readers.coco(**files, **options, **order)
    return jpegs, math.clamp(boxes, 0.0, 1.0), labels


def write_clean_json(path: str) -> str:
    """Copies a json without its crowds. Renumbers images: DALI sorts by id and rejects ids >= 2**31."""
    document = json.loads(pathlib.Path(path).read_bytes())
    label_of = {i: label for label, i in enumerate(sorted(c["id"] for c in document["categories"]), 1)}
    row_of = {image["id"]: row for row, image in enumerate(document["images"])}
    objects = [entry for entry in document["annotations"] if not entry.get("iscrowd")]
    rows = [row_of[entry["image_id"]] for entry in objects]
    scale = np.array([(image["width"], image["height"]) * 2 for image in document["images"]], float)[rows]
    boxes_px = np.array([entry["bbox"] for entry in objects], float).reshape(-1, 4)
    boxes_px[:, 2:] += boxes_px[:, :2]  # ltwh -> ltrb
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


def decode(jpegs, window, on_gpu: bool):
    """Decodes the window, uint8 (h, w, 3) RGB. Ignores EXIF rotation, because the boxes are not rotated."""
    part = {"start": window[0:2], "shape": window[2:4], "axes": [0, 1]}
    if not on_gpu:
        return fn.decoders.image_slice(jpegs, adjust_orientation=False, **part)
    options = {"device": "mixed", "jpeg_fancy_upsampling": True}  # interpolates chroma, as on a CPU
    return fn.slice(fn.decoders.image(jpegs, adjust_orientation=False, **options), **part)


# Each column belongs to one of the four images: (2, 4) is a row of four y and a row of four x.
def random_crop(config: Config, sizes, input_size):
    """Returns windows of the images and their positions in the input, (4, 4): top, left, height, width."""
    growth = 0.0
    if config.letterbox:  # first the window grows at both ends to the aspect ratio of the input
        height, width = config.image_size
        growth = math.max(fn.stack(sizes[1] * height / width, sizes[0] * width / height) - sizes, 0.0) / 2
    moves = [uniform(-config.jitter, config.jitter, (2, 4)) * sizes for _ in range(2)]
    start, inset = (int32(math.floor(move - growth + 0.5)) for move in moves)  # rounds half up
    length = math.max(sizes - inset - start, 1)
    first, last = math.max(start, 0), math.min(start + length, sizes)  # inside the image
    low, high = ((2 * input_size * (edge - start) + length) // (2 * length) for edge in (first, last))
    low = math.min(low, input_size - 1)
    return fn.cat(first, last - first), fn.cat(low, math.max(high - low, 1))


def tiles_of(config: Config, sizes, is_mosaic):
    """Returns for each image the part to decode and its new size, the map of its boxes, its tile's corner."""
    input_size = constant(np.int32(config.image_size)[:, np.newaxis])  # (2, 1)
    cut = int32(math.floor(column(uniform(0.2, 0.8, (2,))) * input_size + 0.5))
    cut = cut * is_mosaic + input_size * (1 - is_mosaic)
    rest = input_size - cut
    crop, place = random_crop(config, sizes, input_size)
    start, length, place, new_length = crop[0:2], crop[2:4], place[0:2], place[2:4]
    coins = fn.random.coin_flip(probability=config.flip_prob, shape=[4]) if config.flip_prob else 0
    flips = constant(np.int32([[0] * 4, [1] * 4])) * coins
    place = place + flips * (input_size - new_length - 2 * place)
    # In pixels of the four canvases: the start of the tile, and the part of the image that it shows.
    is_first = constant(np.int32([[1, 1, 0, 0], [1, 0, 1, 0]]))
    after = input_size - place - new_length
    tile = is_first * (rest - math.min(rest, after)) + (1 - is_first) * math.min(cut, place)
    shown = math.max(tile, place)
    tile_size = math.max(is_first * cut + (1 - is_first) * rest, 1)
    size = math.min(tile + tile_size, place + new_length) - shown
    to_target = (1 - is_first) * cut - tile
    # Without a mosaic, each of the other three tiles is one pixel, hidden under the first tile.
    there = math.max(constant(np.int32([1, 0, 0, 0])), is_mosaic)
    size = size * there + 1 - there
    target = shown + to_target
    target = target * there + target[:, 0:1] * (1 - there)
    # In pixels of the stored images, from the window's start: the shown part, with a margin for the filter.
    part = shown - place + flips * (new_length - size - 2 * (shown - place))
    scale = length / new_length
    roi_start, roi_end = part * scale, (part + size) * scale
    reach = math.max(scale, 1.0) + 1.0
    first = math.max(int32(math.floor(roi_start - reach)), 0)
    last = math.min(int32(math.ceil(roi_end + reach)), length)
    turn = flips * (roi_end - roi_start)  # fn.resize mirrors if the start is right of the end
    roi_start, roi_end = roi_start - first + turn, roi_end - first - turn
    flipped_start = start + flips * (sizes - length - 2 * start)
    views = fn.cat(start + first, last - first), fn.cat(roi_start, roi_end), size * 1.0
    maps = start / sizes, (start + length) / sizes, sizes / scale, place + to_target - flipped_start / scale
    maps = *maps, target, target + size * there
    maps = flips[1], *(xyxy(fn.transpose(node, perm=[1, 0])) for node in maps)
    return views, maps, fn.transpose(target, perm=[1, 0])


def augment(config: Config, images: list) -> list:
    """Changes hue, saturation, brightness: uint8 0..255 -> float32 0..1. Add your own steps here."""
    hue, result = uniform(-config.hue, config.hue, (4,)), []
    saturation, brightness = (
        uniform(1.0, limit, (4,)) ** (1 - 2 * fn.random.coin_flip(probability=0.5, shape=[4]))
        for limit in (config.saturation, config.exposure)
    )
    for i, image in enumerate(images):
        twist = {"hue": hue[i] if config.hue else 0.0, "saturation": saturation[i]}
        image = fn.hsv(image, **twist, value=brightness[i] / 255.0, dtype=types.FLOAT)
        result.append(math.min(math.max(image, 0.0), 1.0))
    return result


def select_boxes(boxes, labels, min_size=0.0, limit: int = 2**14):
    """Drops boxes without area or with a side below `min_size`. Keeps the `limit` largest, in their order."""
    number = constant(np.arange(2**14, dtype=np.int32))[: boxes.shape()[0]]  # (N,), at most 2**14
    sides, smallest = boxes[:, 2:4] - boxes[:, 0:2], constant(np.maximum(np.float32(min_size), 2.0**-126))
    is_large = fn.reductions.min(int32(sides >= smallest), axes=[1])
    area, is_before = sides[:, 0] * sides[:, 1] * is_large, column(number) < number  # (N,), (N, N)
    is_larger = (column(area) > area) | ((column(area) == area) & is_before)
    kept = is_large * (int_sum(int32(is_larger), axes=[0]) < limit)
    # DALI has no boxes[kept]: a matrix of 0 and 1 moves the bits of boxes. Slice it last: DALI 2.4 compares
    # slices of different shapes wrongly.
    row = int_sum(is_before * column(kept), axes=[0])
    move = (kept * (column(number) == row))[: int_sum(kept)]  # (M, N)
    bits = int_sum(fn.expand_dims(move, axes=[2]) * fn.reinterpret(boxes, dtype=types.INT32), axes=[1])
    return fn.reinterpret(bits, dtype=types.FLOAT), int_sum(move * labels, axes=[1])


def make_dataset(config: Config, shard_id: int = 0, num_shards: int = 1):
    """Returns endless tf.data of (images, dict of other outputs); on a GPU, which lacks `map`, of tuples."""
    import nvidia.dali.plugin.tf as dali_tf
    import tensorflow as tf

    b, rows, on_gpu = config.batch_size, config.max_instances, config.device_id is not None
    spec = {"images": ((b, *config.image_size, 3), tf.float32), "boxes": ((b, rows, 4), tf.float32)}
    spec |= {"classes": ((b, rows), tf.int32), "num_boxes": ((b,), tf.int32)}
    options = {"batch_size": b, "device_id": config.device_id}
    options["output_shapes"], options["output_dtypes"] = zip(*spec.values(), strict=True)
    with tf.device(f"/gpu:{config.device_id}" if on_gpu else "/cpu:0"):
        data = dali_tf.DALIDataset(make_pipeline(config, shard_id, num_shards), **options)
    return data if on_gpu else data.map(lambda x, *y: (x, dict(zip(list(spec)[1:], y, strict=True))))


def draw_synthetic(directory: str) -> dict:
    """Writes images of ellipses and their json. Returns the fields of Config that name them."""
    random, images, objects = np.random.default_rng(0), [], []
    for number in range(16):
        image = Image.new("RGB", (480, 360), "silver")
        for category, color in enumerate(("teal", "maroon"), 1):
            left, top, width, height = box = random.uniform(20, 170, 4).tolist()
            ImageDraw.Draw(image).ellipse([left, top, left + width, top + height], fill=color)
            objects.append({"image_id": number, "category_id": category, "bbox": box})
        image.save(f"{directory}/{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": 480, "height": 360})
    document = {"images": images, "annotations": objects, "categories": [{"id": 1}, {"id": 2}]}
    pathlib.Path(directory, "instances.json").write_text(json.dumps(document))
    return {"images": directory, "annotations": f"{directory}/instances.json"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws a batch with its boxes.", exit_on_error=False)
    parser.add_argument("--images", default="", help="directory of images (default: synthetic images)")
    parser.add_argument("--annotations", default="", help="COCO json of these images")
    parser.add_argument("--image_size", type=int, nargs=2, default=(416, 416), help="height, width in pixels")
    parser.add_argument("--letterbox", action="store_true", help="keep the aspect ratio")
    parser.add_argument("--mosaic_prob", type=float, default=0.5, help="share of the images that are mosaics")
    parser.add_argument("--output", default="batch.png", help="file of the picture")
    try:
        fields = vars(parser.parse_args())
        output = fields.pop("output")
        if bool(fields["images"]) != bool(fields["annotations"]):
            raise ValueError("use --images and --annotations together")
        fields |= {} if fields["images"] else draw_synthetic(SCRATCH.name)
        pipeline = make_pipeline(Config(**fields, batch_size=8))
        images, boxes, classes, _ = (np.asarray(node.as_tensor()) for node in pipeline.run())
        pictures = [Image.fromarray(x) for x in np.uint8(np.clip(images * 255 + 0.5, 0, 255))]
        for i, j in np.argwhere(classes >= 0):
            box, color = boxes[i, j] * (pictures[i].size * 2), f"hsl({67 * classes[i, j] % 360}, 100%, 50%)"
            ImageDraw.Draw(pictures[i]).rectangle(box.tolist(), outline=color, width=2)
        Image.fromarray(np.vstack([np.hstack(pictures[:4]), np.hstack(pictures[4:])])).save(output)
    except (LookupError, TypeError, json.JSONDecodeError) as error:
        raise SystemExit(f"error: {fields['annotations']} is not a COCO json: {error!r}") from None
    except (OSError, RuntimeError, ValueError, argparse.ArgumentError) as error:  # DALI's messages are long
        raise SystemExit("error: " + str(error).split("encountered:")[-1].strip().splitlines()[0]) from None
