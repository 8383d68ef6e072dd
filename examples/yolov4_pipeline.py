r"""YOLOv4's training pipeline (arXiv 2004.10934) in DALI, in one file to copy.

    python yolov4_pipeline.py  # draws a batch of synthetic images with their boxes
    python yolov4_pipeline.py --images=train2017 --annotations=instances_train2017.json
    python yolov4_pipeline.py --file_pattern='train-*.tfrecord' --annotations=train.label_map.json

train_yolov4.py trains on these batches: images are shuffled and have no ids. Run tools/check_data.py first,
because DALI may accept damaged data without an error. Crop, flip, colour and mosaic follow Darknet
(github.com/AlexeyAB/darknet src/data.c), except for the differences in docs/yolov4.md. On a CPU, batches
equal those of yolov4/pipeline.py bit for bit, for TFRecords with --shuffle=buffer. The GPU branch was never
run. The app also has MixUp, CutMix and multi-scale training. Outputs in order:

    images     float32 (B, H, W, 3): RGB in 0..1
    boxes      float32 (B, max_instances, 4): left, top, right, bottom in 0..1; padded with -1
    classes    int32 (B, max_instances): 0-based, in the order of category ids; padded with -1
    num_boxes  int32 (B,)
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

GREY = [127 / 255] * 3  # padding, as in letterbox_image of Darknet's src/image.c
RANGES = {"jitter": (0, 0.499), "flip_prob": (0, 1), "mosaic_prob": (0, 1), "image_size": (1, 2**14)}
RANGES |= {"hue": (0, 180), "saturation": (1, 100), "exposure": (1, 100)}
SCRATCH = tempfile.TemporaryDirectory()  # for files that only DALI reads; removed at exit
int32 = functools.partial(fn.cast, dtype=types.INT32)
int_sum = functools.partial(fn.reductions.sum, dtype=types.INT32)
constant = functools.partial(types.Constant, device="cpu")
column = functools.partial(fn.expand_dims, axes=[1])  # (N,) -> (N, 1)


@dataclasses.dataclass(frozen=True)
class Config:
    """The data, and the augmentation of Darknet's cfg/yolov4.cfg. Sizes are (height, width) in pixels."""

    annotations: str  # COCO json; with TFRecords, any json that has the same `categories`
    images: str = ""  # directory of the files that the json names
    file_pattern: str = ""  # glob of TFRecords, to read in place of `images`
    batch_size: int = 16
    image_size: tuple[int, int] = (608, 608)
    letterbox: bool = False  # keep the aspect ratio and pad; False: stretch
    jitter: float = 0.3  # each edge of the crop moves by up to this share of the image
    flip_prob: float = 0.5
    hue: float = 36.0  # in degrees: -x .. x
    saturation: float = 1.5  # a factor in 1 .. x, or its inverse
    exposure: float = 1.5  # brightness: a factor in 1 .. x, or its inverse
    mosaic_prob: float = 0.5
    min_box_size: float = 1.0  # pixels of the network input; smaller boxes are dropped
    max_instances: int = 200  # maximum number of boxes in an image; the largest are kept
    num_threads: int = 4  # CPU threads
    device_id: int | None = None  # number of the GPU; None: use the CPU
    seed: int = 0


def make_pipeline(config: Config, shard_id: int = 0, num_shards: int = 1) -> Pipeline:
    for name, (low, high) in RANGES.items():
        if not low <= np.min(value := getattr(config, name)) <= np.max(value) <= high:
            raise ValueError(f"{name}={value}: use {low} to {high}")
    order = {"shard_id": shard_id, "num_shards": num_shards, "name": "reader"}
    order |= {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": config.seed}
    seed = int(np.random.SeedSequence([config.seed, shard_id, 1]).generate_state(1)[0])
    on_gpu, options = config.device_id is not None, {"seed": seed, "enable_checkpointing": True}
    with Pipeline(config.batch_size, config.num_threads, config.device_id, **options) as pipeline:
        jpegs, boxes, labels = (read_tfrecords if config.file_pattern else read_coco)(config, order)
        size = int32(fn.peek_image_shape(jpegs, adjust_orientation=False)[0:2])  # (height, width) as stored
        window, place, mirrored = random_crop(config, size)
        new_size = fn.stack(place[2], place[3] * (1 - 2 * mirrored))  # a negative width mirrors
        images = fn.resize(decode(jpegs, window, on_gpu), size=new_size * 1.0)
        # Convert boxes from 0..1 of the image to 0..1 of the window, and clip them.
        boxes = math.clamp((boxes * xyxy(size) - xyxy(window[0:2])) / xyxy(window[2:4]), 0.0, 1.0)
        # Flip boxes, and convert them to pixels of the network input.
        boxes_px = fn.bb_flip(boxes, horizontal=mirrored, ltrb=True) * xyxy(place[2:4]) + xyxy(place[0:2])
        canvas = {"start": -place[0:2], "shape": config.image_size, "axes": [0, 1], "fill_values": GREY}
        images = fn.slice(augment(config, images), **canvas, out_of_bounds_policy="pad")
        if config.mosaic_prob:
            images, boxes_px, labels = mosaic(config, images, boxes_px, labels, place)
        boxes_px, labels = select_boxes(boxes_px, labels, config.min_box_size, config.max_instances)
        boxes = boxes_px / xyxy(constant(np.int32(config.image_size)))
        padded = fn.pad([boxes, labels - 1], axes=[0], shape=[config.max_instances], fill_value=-1)
        outputs = images, *padded, labels.shape(dtype=types.INT32)[0]
        pipeline.set_outputs(*(x.gpu() if on_gpu else x for x in outputs))
    return pipeline


def uniform(low: float, high: float, shape: tuple[int, ...] = ()):  # DALI rejects low == high
    return fn.random.uniform(range=(low, high), shape=shape) if low < high else float(low)


def xyxy(yx):  # (y, x), (2,) or (n, 2) -> (x, y, x, y), float32 (1, 4) or (n, 4), to scale or to move boxes
    return fn.coord_transform(fn.reshape(yx, shape=[-1, 2]), M=[0, 1, 1, 0, 0, 1, 1, 0])


# Each reader returns encoded images, boxes (float32 (N, 4), ltrb in 0..1) and labels (int32 (N,), from 1).
def read_coco(config: Config, order: dict):
    """Reads a COCO json without its crowds. Renumbers images, because DALI rejects ids of 2**31 or more."""
    document = json.loads(pathlib.Path(config.annotations).read_bytes())
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
        for row, entry, box in zip(rows, objects, np.float32(boxes_px).tolist(), strict=True)
    ]
    path = tempfile.mkdtemp(dir=SCRATCH.name) + "/clean.json"
    pathlib.Path(path).write_text(json.dumps(document))
    # avoid_class_remapping keeps our labels. With this size_threshold, DALI drops only boxes without an area.
    options = {"avoid_class_remapping": True, "size_threshold": 1e-30, "ltrb": True, "ratio": True}
    jpegs, boxes, labels = fn.readers.coco(file_root=config.images, annotations_file=path, **options, **order)
    return jpegs, math.clamp(boxes, 0.0, 1.0), labels


def read_tfrecords(config: Config, order: dict):
    """Reads TFRecords that have all keys below. DALI's tfrecord2idx makes the index FILE.idx of each file."""
    sides = [f"image/object/bbox/{side}" for side in ("xmin", "ymin", "xmax", "ymax")]
    category, crowd = "image/object/class/label", "image/object/is_crowd"
    features = {"image/encoded": tfrecord.FixedLenFeature([], tfrecord.string, "")}
    features |= dict.fromkeys(sides, tfrecord.VarLenFeature(tfrecord.float32, 0.0))
    features |= dict.fromkeys([category, crowd], tfrecord.VarLenFeature(tfrecord.int64, 0))
    files = sorted(name for name in glob.glob(config.file_pattern) if not name.endswith((".idx", ".json")))
    if not files:
        raise FileNotFoundError(f"file_pattern={config.file_pattern} matches no file: give a TFRecord glob")
    options = {"path": files, "index_path": [f"{name}.idx" for name in files], "features": features}
    options |= {"random_shuffle": True, "initial_fill": 1024, "seed": config.seed}
    record = fn.readers.tfrecord(**options, **order)  # `order` shuffles files, `options` shuffles records
    categories = json.loads(pathlib.Path(config.annotations).read_bytes())["categories"]
    ids = np.int32(sorted(category["id"] for category in categories))
    is_same = int32(column(record[category]) == constant(ids))  # (N, categories)
    labels = int_sum(is_same * constant(np.arange(1, len(ids) + 1, dtype=np.int32)), axes=[1])
    boxes = math.clamp(fn.stack(*(record[side] for side in sides), axis=1), 0.0, 1.0)
    boxes = boxes * column((record[crowd] == 0) & (labels > 0))  # drops crowds and other categories
    return record["image/encoded"], *select_boxes(boxes, labels)


def decode(jpegs, window, on_gpu: bool):
    """Decodes the window, uint8 (h, w, 3) RGB, without EXIF rotation."""
    part = {"start": window[0:2], "shape": window[2:4], "axes": [0, 1]}
    if not on_gpu:
        return fn.decoders.image_slice(jpegs, adjust_orientation=False, **part)
    options = {"device": "mixed", "jpeg_fancy_upsampling": True}  # interpolates chroma, as on a CPU
    return fn.slice(fn.decoders.image(jpegs, adjust_orientation=False, **options), **part)


def random_crop(config: Config, size):
    """Chooses the part of an image to use.

    Returns:
        window: int32 (4,), top, left, height, width in pixels of the stored image.
        place: int32 (4,), top, left, height, width of this window in the network input.
        mirrored: 1 if the window is mirrored, else 0.
    """
    height, width = config.image_size
    input_size, growth = constant(np.int32(config.image_size)), 0.0
    if config.letterbox:  # first the window grows at both ends to the aspect ratio of the input
        growth = math.max(fn.stack(size[1] * height / width, size[0] * width / height) - size, 0.0) / 2
    moves = [uniform(-config.jitter, config.jitter, (2,)) * size for _ in range(2)]
    start, inset = (int32(math.floor(move - growth + 0.5)) for move in moves)  # rounds half up
    length = math.max(size - inset - start, 1)
    first, last = math.max(start, 0), math.min(start + length, size)  # inside the image
    low, high = ((2 * input_size * (edge - start) + length) // (2 * length) for edge in (first, last))
    low = math.min(low, input_size - 1)
    new_size = math.max(high - low, 1)
    mirrored = fn.random.coin_flip(probability=config.flip_prob) if config.flip_prob else 0
    left = low[1] + mirrored * (width - new_size[1] - 2 * low[1])
    return fn.cat(first, last - first), fn.stack(low[0], left, new_size[0], new_size[1]), mirrored


def augment(config: Config, images):
    """Changes the colours of a uint8 image. Returns float32 in 0..1. Add your own steps here."""
    hue = uniform(-config.hue, config.hue)
    saturation, brightness = (
        uniform(1.0, limit) ** (1 - 2 * fn.random.coin_flip(probability=0.5))
        for limit in (config.saturation, config.exposure)
    )
    images = fn.hsv(images, hue=hue, saturation=saturation, value=brightness / 255.0, dtype=types.FLOAT)
    return math.min(math.max(images, 0.0), 1.0)  # `clamp` takes three times as long


def mosaic(config: Config, images, boxes_px, labels, place):
    """Shuffles the batch. With probability `mosaic_prob`, makes a sample from four canvases (padded images).

    Each tile shows the opposite corner of its canvas, without the padding at this corner. For example,
    the top left tile shows the bottom right corner.
    """
    first = fn.batch_permutation()
    others = [fn.batch_permutation(no_fixed_points=True) for _ in range(3)]
    sources = [first, *(fn.permute_batch(first, indices=other) for other in others)]
    input_size = constant(np.int32(config.image_size))
    is_mosaic = fn.random.coin_flip(probability=config.mosaic_prob)
    cut = int32(math.floor(uniform(0.2, 0.8, (2,)) * input_size + 0.5))
    cut = input_size + (cut - input_size) * is_mosaic  # without a mosaic the first tile is the whole canvas
    rest = input_size - cut
    # Each array below is (4, 2): y and x for each tile.
    # before, after: padding of the canvas. start, size: the part of the canvas that the tile shows.
    # target: the place of the tile in the mosaic.
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


def select_boxes(boxes, labels, min_size=0.0, limit: int = 2**14):
    """Drops boxes with no area or a side below `min_size`. Then keeps at most `limit` boxes, the largest."""
    number = constant(np.arange(2**14, dtype=np.int32))[: boxes.shape()[0]]  # (N,), at most 2**14
    sides, smallest = boxes[:, 2:4] - boxes[:, 0:2], constant(np.maximum(np.float32(min_size), 2.0**-126))
    is_large = fn.reductions.min(int32(sides >= smallest), axes=[1])
    area, is_before = sides[:, 0] * sides[:, 1] * is_large, column(number) < number  # (N,), (N, N)
    is_larger = (column(area) > area) | ((column(area) == area) & is_before)
    is_selected = is_large * (int_sum(int32(is_larger), axes=[0]) < limit)
    # Each row selects one box. Slice after `==`, as DALI 2.4 may read wrong memory if an operand is empty.
    row = int_sum(is_before * column(is_selected), axes=[0])
    move = (is_selected * (column(number) == row))[: int_sum(is_selected)]  # (M, N)
    bits = int_sum(fn.expand_dims(move, axes=[2]) * fn.reinterpret(boxes, dtype=types.INT32), axes=[1])
    return fn.reinterpret(bits, dtype=types.FLOAT), int_sum(move * labels, axes=[1])


def make_dataset(config: Config, shard_id: int = 0, num_shards: int = 1):
    """Returns an endless dataset of (images, dict of the other outputs). On a GPU, it has tuples."""
    import nvidia.dali.plugin.tf as dali_tf
    import tensorflow as tf

    b, rows, on_gpu = config.batch_size, config.max_instances, config.device_id is not None
    spec = {"images": ((b, *config.image_size, 3), tf.float32), "boxes": ((b, rows, 4), tf.float32)}
    spec |= {"classes": ((b, rows), tf.int32), "num_boxes": ((b,), tf.int32)}
    options = {"batch_size": b, "device_id": config.device_id, "num_threads": config.num_threads}
    options["output_shapes"], options["output_dtypes"] = zip(*spec.values(), strict=True)
    with tf.device(f"/gpu:{config.device_id}" if on_gpu else "/cpu:0"):
        data = dali_tf.DALIDataset(make_pipeline(config, shard_id, num_shards), **options)
    return data if on_gpu else data.map(lambda x, *y: (x, dict(zip(list(spec)[1:], y, strict=True))))


def draw_synthetic(directory: str) -> dict:
    """Writes images of ellipses and their json. Returns the fields of Config for these files."""
    random, images, objects = np.random.default_rng(0), [], []
    for number in range(16):
        image = Image.new("RGB", (480, 360), "silver")
        for category, color in enumerate(("teal", "maroon"), 1):
            left, top, width, height = box = random.uniform(20, 170, 4).tolist()
            ImageDraw.Draw(image).ellipse([left, top, left + width, top + height], fill=color)
            objects.append({"image_id": number, "category_id": category, "bbox": box, "iscrowd": 0})
            objects[-1] |= {"id": len(objects), "area": width * height}
        image.save(f"{directory}/{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": 480, "height": 360})
    document = {"images": images, "annotations": objects, "categories": [{"id": 1}, {"id": 2}]}
    pathlib.Path(directory, "instances.json").write_text(json.dumps(document))
    return {"images": directory, "annotations": f"{directory}/instances.json"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws a batch with its boxes.", exit_on_error=False)
    parser.add_argument("--images", default="", help="directory of images (default: synthetic images)")
    parser.add_argument("--file_pattern", default="", help="TFRecords, instead of --images")
    parser.add_argument("--annotations", default="", help="COCO json; with TFRecords, json of the categories")
    parser.add_argument("--image_size", type=int, nargs=2, default=(416, 416), help="height, width in pixels")
    parser.add_argument("--letterbox", action="store_true", help="keep the aspect ratio")
    parser.add_argument("--mosaic_prob", type=float, default=0.5, help="share of the images that are mosaics")
    parser.add_argument("--output", default="batch.png", help="file of the picture")
    try:
        fields = vars(parser.parse_args())
        output = fields.pop("output")
        data = [name for name in ("images", "file_pattern", "annotations") if fields[name]]
        if data and (len(data) != 2 or not fields["annotations"]):
            raise ValueError("use --annotations with either --images or --file_pattern")
        fields |= {} if data else draw_synthetic(SCRATCH.name)
        pipeline = make_pipeline(Config(**fields, batch_size=8))
        images, boxes, classes, _ = (np.asarray(node.as_tensor()) for node in pipeline.run())
        pictures = [*map(Image.fromarray, np.clip(images * 255 + 0.5, 0, 255).astype(np.uint8))]
        for i, j in np.argwhere(classes >= 0):
            box, color = boxes[i, j] * (pictures[i].size * 2), f"hsl({67 * classes[i, j] % 360}, 100%, 50%)"
            ImageDraw.Draw(pictures[i]).rectangle(box.tolist(), outline=color, width=2)
        Image.fromarray(np.vstack([np.hstack(pictures[:4]), np.hstack(pictures[4:])])).save(output)
    except (LookupError, TypeError, json.JSONDecodeError) as error:
        raise SystemExit(f"error: {fields['annotations']} is not a COCO json: {error!r}") from None
    except (OSError, RuntimeError, ValueError, argparse.ArgumentError) as error:  # DALI's messages are long
        raise SystemExit("error: " + str(error).split("encountered:")[-1].strip().splitlines()[0]) from None
