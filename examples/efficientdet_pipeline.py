r"""EfficientDet's training pipeline (arXiv 1911.09070) in DALI, in one file to copy.

    python efficientdet_pipeline.py  # draws a batch of synthetic images with their boxes
    python efficientdet_pipeline.py --images=train2017 --annotations=instances_train2017.json
    python efficientdet_pipeline.py --file_pattern='train-*.tfrecord' --annotations=train.label_map.json

train_efficientdet.py trains on them. Check data with tools/check_data.py: DALI accepts damaged data. Batches
on CPUs equal the app's, for TFRecords with --shuffle=buffer. Never run on a GPU. Outputs in order:

    images           float32 (B, H, W, 3): RGB, normalised, at the top left; padded with 0, the mean
    num_positives    float32 (B,): number of anchors that are matched to a box
    boxes            float32 (B, max_instances, 4): left, top, right, bottom in 0..1; padded with -1
    classes          int32 (B, max_instances): 0-based, in the order of category ids; padded with -1
    class_targets_l  int32 (B, h, w, K): of level l, the class of each anchor; -1 for background
    box_targets_l    float32 (B, h, w, K * 4): (dy, dx, dh, dw) from each of K = 9 anchors to its box, or 0
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

MEAN, STDDEV = (np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]) * 255).tolist()  # of ImageNet
CROPS = ("scale_jitter", "min_iou_crop", "resize_range", "none")
SCRATCH = tempfile.TemporaryDirectory()  # for files that only DALI reads; removed at exit
int32 = functools.partial(fn.cast, dtype=types.INT32)
int_sum = functools.partial(fn.reductions.sum, dtype=types.INT32)
constant = functools.partial(types.Constant, device="cpu")
column = functools.partial(fn.expand_dims, axes=[1])  # (N,) -> (N, 1)


@dataclasses.dataclass(frozen=True)
class Config:
    """The data and the augmentation. Sizes are (height, width) in pixels."""

    annotations: str  # COCO json; with TFRecords, any json that has the same `categories`
    images: str = ""  # directory of the files that the json names
    file_pattern: str = ""  # glob of TFRecords, to read in place of `images`
    batch_size: int = 8
    image_size: tuple[int, int] = (512, 512)
    crop: str = "scale_jitter"  # one of CROPS
    jitter: tuple[float, float] = (0.1, 2.0)  # scale_jitter: range of sizes; 1 is the largest that fits
    resize: tuple[int, int] = (320, 512)  # resize_range: range of the shorter side in pixels
    flip_prob: float = 0.5
    grid_mask_prob: float = 0.0
    color: tuple[float, float, float] = (0.0, 0.0, 0.0)  # brightness, contrast, saturation: factors 1 +- x
    hue: float = 0.0  # in degrees: -x .. x
    min_box_size: float = 1.0  # pixels of the network input; smaller boxes are dropped
    max_instances: int = 100  # maximum number of boxes in an image; the largest are kept
    levels: tuple[int, ...] = (3, 4, 5, 6, 7)  # of the feature pyramid
    anchor_scale: float = 4.0  # side of the smallest square anchor, in strides
    num_threads: int = 4  # CPU threads
    device_id: int | None = None  # number of the GPU; None: use the CPU
    seed: int = 0


def make_pipeline(config: Config, shard_id: int = 0, num_shards: int = 1) -> Pipeline:
    order = {"shard_id": shard_id, "num_shards": num_shards, "name": "reader"}
    order |= {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": config.seed}
    seed = int(np.random.SeedSequence([config.seed, shard_id]).generate_state(1)[0])
    on_gpu, options = config.device_id is not None, {"seed": seed, "enable_checkpointing": True}
    with Pipeline(config.batch_size, config.num_threads, config.device_id, **options) as pipeline:
        jpegs, boxes, labels = (read_tfrecords if config.file_pattern else read_coco)(config, order)
        size = fn.peek_image_shape(jpegs, adjust_orientation=False)[0:2] * 1.0  # (height, width) as stored
        window, new_size, boxes, labels = random_crop(config, size, boxes, labels)
        images = fn.resize(decode(jpegs, window, on_gpu), size=new_size * 1.0)
        # Convert boxes to 0..1 of the window, and clip them.
        boxes = math.clamp((boxes * xyxy(size) - xyxy(window[0:2])) / xyxy(window[2:4]), 0.0, 1.0)
        images, boxes = augment(config, images, boxes)
        place = {"crop": config.image_size, "crop_pos_x": 0, "crop_pos_y": 0, "out_of_bounds_policy": "pad"}
        images = fn.crop_mirror_normalize(images, mean=MEAN, std=STDDEV, output_layout="HWC", **place)
        # Convert boxes from 0..1 of the window to 0..1 of the network input.
        boxes = boxes * xyxy(new_size / constant(np.float32(config.image_size)))
        smallest = config.min_box_size / np.float32(config.image_size[::-1])
        boxes, labels = select_boxes(boxes, labels, smallest, config.max_instances)
        padded = fn.pad([boxes, labels - 1], axes=[0], shape=[config.max_instances], fill_value=-1)
        num_positives, *targets = encode(config, *(x.gpu() if on_gpu else x for x in (boxes, labels)))
        pipeline.set_outputs(*(x.gpu() if on_gpu else x for x in (images, num_positives, *padded, *targets)))
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


def random_crop(config: Config, size, boxes, labels):
    """Returns the crop window (top, left, height, width), its new size (height, width), boxes and labels."""
    assert config.crop in CROPS, config.crop
    limit = constant(np.int32(config.image_size))
    if config.crop == "scale_jitter":  # a random part of the image at a random scale (google/automl)
        scale = uniform(*config.jitter) * fn.reductions.min(limit / size)
        scaled = math.max(math.floor(size * scale + 0.5), 1.0)
        new_size = math.min(scaled, limit * 1.0)
        sides = math.clamp(math.floor(size * new_size / scaled + 0.5), 1.0, size)
        free = size - sides
        top_left = fn.stack(*(math.floor(uniform(0.0, 1.0) * (free[axis] + 1.0)) for axis in (0, 1)))
        return int32(fn.cat(math.min(top_left, free), sides)), int32(new_size), boxes, labels
    top_left, sides = constant(np.int32([0, 0])), int32(size)
    if config.crop == "min_iou_crop":  # as in SSD: the image, or a window with a minimum IoU with each box
        choices = {"thresholds": [0.1, 0.3, 0.5, 0.7, 0.9], "scaling": [0.3, 1.0], "aspect_ratio": [0.5, 2.0]}
        layout = {"bbox_layout": "xyXY", "input_shape": sides, "shape_layout": "HW"}
        start, shape, boxes, labels = fn.random_bbox_crop(boxes, labels, **choices, **layout, num_attempts=20)
        boxes = boxes * fn.cat(shape, shape) + fn.cat(start, start)  # start and shape are x, y
        start, end = (fn.stack(xy[1], xy[0]) * size for xy in (start, start + shape))
        top_left = math.clamp(math.ceil(start - 1e-3), 0.0, size - 1.0)
        sides = int32(math.clamp(math.floor(end + 1e-3), top_left + 1.0, size) - top_left)
    across, limit_x = fn.stack(sides[1], sides[0]), constant(np.int32(config.image_size[::-1]))
    new_size = math.clamp((2 * limit_x * sides + across) // (2 * across), 1, limit)  # as large as fits
    if config.crop == "resize_range":  # the shorter side gets a random length (RetinaNet)
        shorter = math.floor(uniform(float(config.resize[0]), config.resize[1] + 1.0))
        new_size = math.min(new_size, int32(math.floor(size * (shorter / fn.reductions.min(size)) + 0.5)))
    return fn.cat(int32(top_left), sides), new_size, boxes, labels


def augment(config: Config, images, boxes):
    """Flips an image, applies GridMask (arXiv 2001.04086), changes colours. Add your own steps here."""
    if config.flip_prob:
        coin = fn.random.coin_flip(probability=config.flip_prob)
        images, boxes = fn.flip(images, horizontal=coin), fn.bb_flip(boxes, horizontal=coin, ltrb=True)
    if config.grid_mask_prob:
        tile = uniform(0.2, 0.6) * float(min(config.image_size))
        ratio = 0.4 * fn.random.coin_flip(probability=config.grid_mask_prob)
        angle = uniform(-np.pi / 18, np.pi / 18)  # 10 degrees
        shifts = {"shift_x": uniform(0.0, 1.0) * tile, "shift_y": uniform(0.0, 1.0) * tile}
        images = fn.grid_mask(images, tile=int32(math.max(tile, 2.0)), ratio=ratio, angle=angle, **shifts)
    if any(config.color) or config.hue:
        b, c, s, hue = *(uniform(1 - x, 1 + x) for x in config.color), uniform(-config.hue, config.hue)
        images = fn.color_twist(images, brightness=b, contrast=c, saturation=s, hue=hue)
    return images, boxes


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


def make_anchors(config: Config):
    """Yields each level's anchors as in google/automl's anchors.py: float32 (h, w, K, 4), ltrb in 0..1."""
    scales, ratios = 2.0 ** (np.arange(3) / 3), np.sqrt([1.0, 2.0, 0.5])
    for level in config.levels:
        h, w = (-(-side // 2**level) for side in config.image_size)
        y, x, scale, ratio = np.meshgrid(np.arange(0.5, h), np.arange(0.5, w), scales, ratios, indexing="ij")
        dy, dx = config.anchor_scale * scale / ratio / 2, config.anchor_scale * scale * ratio / 2
        corners = np.stack([x - dx, y - dy, x + dx, y + dy], axis=-1).reshape(h, w, -1, 4)  # in cells
        corners *= np.array(config.image_size[::-1] * 2) / (w, h, w, h)
        yield np.float32(corners) / np.float32(config.image_size[::-1] * 2)


def encode(config: Config, boxes, labels) -> list:
    """Returns the number of positive anchors, then each level's class and box targets. Matches as in SSD."""
    levels, start = list(make_anchors(config)), 0
    anchors = np.concatenate([level.ravel() for level in levels]).tolist()
    deltas, classes = fn.box_encoder(boxes, labels, anchors=anchors, criteria=0.5, offset=True)
    outputs = [fn.reductions.sum((classes != 0) * 1.0)]
    deltas, classes = fn.coord_transform(deltas, M=np.eye(4)[[1, 0, 3, 2]].ravel().tolist()), classes - 1
    for h, w, k, _ in (level.shape for level in levels):
        parts = fn.slice([classes, deltas], start=[start], shape=[h * w * k], axes=[0])
        outputs += [fn.reshape(part, shape=[h, w, -1]) for part in parts]
        start += h * w * k
    return outputs


def make_dataset(config: Config, shard_id: int = 0, num_shards: int = 1):
    """Returns an endless dataset of (images, dict of the other outputs). On a GPU, it has tuples."""
    import nvidia.dali.plugin.tf as dali_tf
    import tensorflow as tf

    b, rows, on_gpu = config.batch_size, config.max_instances, config.device_id is not None
    spec = {"images": ((b, *config.image_size, 3), tf.float32), "num_positives": ((b,), tf.float32)}
    spec |= {"boxes": ((b, rows, 4), tf.float32), "classes": ((b, rows), tf.int32)}
    for level, (h, w, k, _) in zip(config.levels, map(np.shape, make_anchors(config)), strict=True):
        spec[f"class_targets_{level}"] = (b, h, w, k), tf.int32
        spec[f"box_targets_{level}"] = (b, h, w, k * 4), tf.float32
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
    parser.add_argument("--crop", choices=CROPS, default=CROPS[0], help="which part of an image is used")
    parser.add_argument("--output", default="batch.png", help="file of the picture")
    try:
        fields = vars(parser.parse_args())
        output = fields.pop("output")
        data = [name for name in ("images", "file_pattern", "annotations") if fields[name]]
        if data and (len(data) != 2 or not fields["annotations"]):
            raise ValueError("use --annotations with either --images or --file_pattern")
        fields |= {} if data else draw_synthetic(SCRATCH.name)
        pipeline = make_pipeline(Config(**fields, batch_size=8))
        images, _, boxes, classes, *_ = (np.asarray(node.as_tensor()) for node in pipeline.run())
        pictures = [*map(Image.fromarray, np.clip(images * STDDEV + MEAN + 0.5, 0, 255).astype(np.uint8))]
        for i, j in np.argwhere(classes >= 0):
            box, color = boxes[i, j] * (pictures[i].size * 2), f"hsl({67 * classes[i, j] % 360}, 100%, 50%)"
            ImageDraw.Draw(pictures[i]).rectangle(box.tolist(), outline=color, width=2)
        Image.fromarray(np.vstack([np.hstack(pictures[:4]), np.hstack(pictures[4:])])).save(output)
    except (LookupError, TypeError, json.JSONDecodeError) as error:
        raise SystemExit(f"error: {fields['annotations']} is not a COCO json: {error!r}") from None
    except (OSError, RuntimeError, ValueError, argparse.ArgumentError) as error:  # DALI's messages are long
        raise SystemExit("error: " + str(error).split("encountered:")[-1].strip().splitlines()[0]) from None
