r"""EfficientDet's training pipeline (arXiv 1911.09070) in DALI, in one file to copy.

    python efficientdet_pipeline.py  # draws a batch of synthetic images with their boxes
    python efficientdet_pipeline.py --images=train2017 --annotations=instances_train2017.json
    python efficientdet_pipeline.py --file_pattern='train-*.tfrecord' --annotations=train.label_map.json

It reads COCO json, or TFRecords of TensorFlow's Object Detection API. Run tools/check_data.py first, for DALI
takes damaged data without an error. A batch has, in this order, with K = 9 anchors in a cell of each level l:

    images           float32 (B, H, W, 3): RGB, normalised, at the top left; 0, the mean colour, elsewhere
    num_positives    float32 (B,): anchors that are matched to a box
    boxes            float32 (B, max_instances, 4): left, top, right, bottom in 0..1; padded with -1
    classes          int32 (B, max_instances): 0-based, in the order of category ids; padded with -1
    class_targets_l  int32 (B, h, w, K): the class of each anchor; -1 for background
    box_targets_l    float32 (B, h, w, K * 4): (dy, dx, dh, dw) from each anchor to its box; 0 for background
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

MEAN, STDDEV = (np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]) * 255).tolist()  # ImageNet's pixels
SWAP_XY = [0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0]  # a matrix: (dx, dy, dw, dh) -> (dy, dx, dh, dw)
MAX_BOXES = 2**14  # of one image
SCRATCH = tempfile.TemporaryDirectory()  # for files that only DALI reads; removed at exit
int32 = functools.partial(fn.cast, dtype=types.INT32)
float32 = functools.partial(fn.cast, dtype=types.FLOAT)
int_sum = functools.partial(fn.reductions.sum, dtype=types.INT32)
constant = functools.partial(types.Constant, device="cpu")


@dataclasses.dataclass(frozen=True)
class Config:
    """The data, and what happens to them. Sizes are (height, width) in pixels."""

    annotations: str  # COCO json; with TFRecords, any json that has the same `categories`
    images: str = ""  # directory of the files that the json names
    file_pattern: str = ""  # glob of TFRecords, to read in place of `images`
    batch_size: int = 8
    image_size: tuple[int, int] = (512, 512)
    crop: str = "scale_jitter"  # or min_iou_crop, resize_range, none
    jitter: tuple[float, float] = (0.1, 2.0)  # scale_jitter: 1 is the largest image that fits
    resize: tuple[int, int] = (320, 512)  # resize_range: pixels of the shorter side
    flip_prob: float = 0.5
    grid_mask_prob: float = 0.0
    color: tuple[float, float, float] = (0.0, 0.0, 0.0)  # brightness, contrast, saturation: 1 - x .. 1 + x
    hue: float = 0.0  # degrees: -x .. x
    min_box_size: float = 1.0  # pixels of the network input; smaller boxes are dropped
    max_instances: int = 100  # boxes of an image; the largest stay
    levels: tuple[int, ...] = (3, 4, 5, 6, 7)  # of the feature pyramid
    anchor_scale: float = 4.0  # side of the smallest square anchor, in strides
    device_id: int | None = None  # of the GPU; None for the CPU
    seed: int = 0


def make_pipeline(config: Config, shard_id: int = 0, num_shards: int = 1) -> Pipeline:
    """Rank `shard_id` of `num_shards` reads its part. Below, a node stands for one image or its boxes."""
    order = {"shard_id": shard_id, "num_shards": num_shards, "name": "reader"}
    order |= {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": config.seed}
    seed = int(np.random.SeedSequence([config.seed, shard_id]).generate_state(1)[0])
    on_gpu = config.device_id is not None
    with Pipeline(config.batch_size, 4, config.device_id, seed=seed, enable_checkpointing=True) as pipeline:
        jpegs, boxes, labels = (read_tfrecords if config.file_pattern else read_coco)(config, order)
        size = float32(fn.peek_image_shape(jpegs, adjust_orientation=False)[0:2])  # EXIF would not turn boxes
        window, new_size, boxes, labels = random_crop(config, size, boxes, labels)

        part = {"start": window[0:2], "shape": window[2:4], "axes": [0, 1]}
        if on_gpu:
            images = fn.slice(fn.decoders.image(jpegs, device="mixed", adjust_orientation=False), **part)
        else:  # decodes no more than the window
            images = fn.decoders.image_slice(jpegs, adjust_orientation=False, **part)
        images = fn.resize(images, size=float32(new_size))
        boxes = math.clamp((boxes * xyxy(size) - xyxy(window[0:2])) / xyxy(window[2:4]), 0.0, 1.0)
        images, boxes = augment(config, images, boxes)
        place = {"crop": config.image_size, "crop_pos_x": 0, "crop_pos_y": 0, "out_of_bounds_policy": "pad"}
        images = fn.crop_mirror_normalize(images, mean=MEAN, std=STDDEV, output_layout="HWC", **place)
        boxes = boxes * xyxy(new_size / constant(np.float32(config.image_size)))

        smallest = config.min_box_size / np.float32(config.image_size)
        boxes, labels = select_boxes(boxes, labels, smallest, config.max_instances)
        padded = fn.pad([boxes, labels - 1], axes=[0], shape=[config.max_instances], fill_value=-1)
        num_positives, *targets = encode(config, *(x.gpu() if on_gpu else x for x in (boxes, labels)))
        pipeline.set_outputs(*(x.gpu() if on_gpu else x for x in (images, num_positives, *padded, *targets)))
    return pipeline


def xyxy(yx):  # (y, x) -> (x, y, x, y)
    return fn.stack(yx[1], yx[0], yx[1], yx[0])


def uniform(low, high):
    return fn.random.uniform(range=(low, high)) if low < high else float(low)  # DALI refuses an empty range


# Readers return encoded images; boxes float32 (N, 4), ltrb in 0..1, with an area; labels int32 (N,), from 1.
def read_coco(config: Config, order: dict):
    files = {"file_root": config.images, "annotations_file": write_clean_json(config.annotations)}
    # Labels follow the order of `categories` by default. The threshold drops only boxes without an area.
    options = {"avoid_class_remapping": True, "size_threshold": 1e-30, "ltrb": True, "ratio": True}
    jpegs, boxes, labels = fn.readers.coco(**files, **options, **order)
    return jpegs, math.clamp(boxes, 0.0, 1.0), labels


def write_clean_json(path: str) -> str:
    """The path of a json for DALI: no crowds, boxes clipped, labels from 1, images numbered in order."""
    document = json.loads(pathlib.Path(path).read_bytes())
    images = {image["id"]: image | {"id": number} for number, image in enumerate(document["images"])}
    ids = sorted(category["id"] for category in document["categories"])
    objects = [entry for entry in document["annotations"] if not entry.get("iscrowd")]
    objects.sort(key=lambda entry: images[entry["image_id"]]["id"])
    owners = [images[entry["image_id"]] for entry in objects]
    scale = np.array([(image["width"], image["height"]) * 2 for image in owners], float).reshape(-1, 4)
    boxes = np.array([entry["bbox"] for entry in objects], float).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]  # ltwh -> ltrb
    boxes = np.float32(boxes / scale).clip(0, 1) * scale
    boxes[:, 2:] -= boxes[:, :2]
    annotations = [
        {"image_id": image["id"], "category_id": ids.index(entry["category_id"]) + 1, "bbox": box}
        for image, entry, box in zip(owners, objects, boxes.tolist(), strict=True)
    ]
    with tempfile.NamedTemporaryFile("w", dir=SCRATCH.name, delete=False) as file:
        json.dump({"images": list(images.values()), "annotations": annotations, "categories": []}, file)
    return file.name


def read_tfrecords(config: Config, order: dict):
    """Every record needs every key below; every file needs an index, `<file>.idx` (DALI's tfrecord2idx)."""
    sides = [f"image/object/bbox/{side}" for side in ("xmin", "ymin", "xmax", "ymax")]
    keys = ["image/encoded", *sides, "image/object/class/label", "image/object/is_crowd"]
    real, integer = tfrecord.VarLenFeature(tfrecord.float32, 0.0), tfrecord.VarLenFeature(tfrecord.int64, 0)
    kinds = [tfrecord.FixedLenFeature([], tfrecord.string, ""), *[real] * 4, integer, integer]
    files = sorted(name for name in glob.glob(config.file_pattern) if not name.endswith((".idx", ".json")))
    options = {"path": files, "index_path": [f"{name}.idx" for name in files]}
    options |= {"random_shuffle": True, "initial_fill": 1024, "seed": config.seed}  # within files
    record = fn.readers.tfrecord(features=dict(zip(keys, kinds, strict=True)), **options, **order)
    jpegs, *ltrb, category, crowd = (record[key] for key in keys)
    boxes = math.clamp(fn.stack(*ltrb, axis=1), 0.0, 1.0)
    boxes = boxes * fn.expand_dims(float32(crowd == 0), axes=[1])  # crowds lose their area
    categories = json.loads(pathlib.Path(config.annotations).read_bytes())["categories"]
    ids = constant(np.array([entry["id"] for entry in categories], np.int32))
    labels = int_sum(int32(ids <= fn.expand_dims(category, axes=[1])), axes=[1])  # the place of an id, from 1
    return jpegs, *select_boxes(boxes, labels)


def random_crop(config: Config, size, boxes, labels):
    """A window of the stored image, int32 (4,), top, left, height, width; its new size; boxes and labels."""
    assert config.crop in ("scale_jitter", "min_iou_crop", "resize_range", "none"), config.crop
    limit = constant(np.int32(config.image_size))
    if config.crop == "scale_jitter":  # a random part of the image at a random scale (google/automl)
        scale = uniform(*config.jitter) * fn.reductions.min(limit / size)
        scaled = math.max(math.floor(size * scale + 0.5), 1.0)
        new_size = math.min(scaled, float32(limit))
        sides = math.clamp(math.floor(size * new_size / scaled + 0.5), 1.0, size)
        free = size - sides
        top_left = fn.stack(*(math.floor(uniform(0.0, 1.0) * (free[axis] + 1.0)) for axis in (0, 1)))
        return int32(fn.cat(math.min(top_left, free), sides)), int32(new_size), boxes, labels
    top_left, sides = constant(np.int32([0, 0])), int32(size)
    if config.crop == "min_iou_crop":  # every box overlaps it by this IoU, or it is the whole image (SSD)
        choices = {"thresholds": [0.1, 0.3, 0.5, 0.7, 0.9], "scaling": [0.3, 1.0], "aspect_ratio": [0.5, 2.0]}
        layout = {"bbox_layout": "xyXY", "input_shape": sides, "shape_layout": "HW"}
        start, shape, boxes, labels = fn.random_bbox_crop(boxes, labels, **choices, **layout, num_attempts=20)
        boxes = boxes * fn.cat(shape, shape) + fn.cat(start, start)  # start and shape are x, y
        top_left = math.clamp(math.ceil(xyxy(start)[0:2] * size - 1e-3), 0.0, size - 1.0)
        end = math.clamp(math.floor(xyxy(start + shape)[0:2] * size + 1e-3), top_left + 1.0, size)
        top_left, sides = int32(top_left), int32(end - top_left)
    across = xyxy(sides)[0:2]  # width, height; the new size is as large as fits
    new_size = math.clamp((2 * xyxy(limit)[0:2] * sides + across) // (2 * across), 1, limit)
    if config.crop == "resize_range":  # the shorter side gets a random length (RetinaNet)
        shorter = math.floor(uniform(float(config.resize[0]), config.resize[1] + 1.0))
        new_size = math.min(new_size, int32(math.floor(size * (shorter / fn.reductions.min(size)) + 0.5)))
    return fn.cat(top_left, sides), new_size, boxes, labels


def augment(config: Config, images, boxes):
    """Flip, GridMask (arXiv 2001.04086) and colour of uint8 (h, w, 3). Add your own here."""
    if config.flip_prob:
        coin = fn.random.coin_flip(probability=config.flip_prob)
        images, boxes = fn.flip(images, horizontal=coin), fn.bb_flip(boxes, horizontal=coin, ltrb=True)
    if config.grid_mask_prob:
        tile = uniform(0.2, 0.6) * float(min(config.image_size))
        ratio = 0.4 * float32(fn.random.coin_flip(probability=config.grid_mask_prob))
        angle = uniform(-np.radians(10), np.radians(10))
        shifts = {"shift_x": uniform(0.0, 1.0) * tile, "shift_y": uniform(0.0, 1.0) * tile}
        images = fn.grid_mask(images, tile=int32(math.max(tile, 2.0)), ratio=ratio, angle=angle, **shifts)
    if any(config.color) or config.hue:
        names = ("brightness", "contrast", "saturation")
        factors = {name: uniform(1 - x, 1 + x) for name, x in zip(names, config.color, strict=True)}
        images = fn.color_twist(images, **factors, hue=uniform(-config.hue, config.hue))
    return images, boxes


def select_boxes(boxes, labels, min_size=(0.0, 0.0), limit: int = MAX_BOXES):
    """Drops boxes without area or below (height, width) `min_size`; keeps the `limit` largest of the rest."""
    sides = boxes[:, 2:4] - boxes[:, 0:2]
    smallest = np.maximum(np.float32(min_size[::-1]), np.finfo(np.float32).tiny)
    is_large = fn.reductions.min(int32(sides >= constant(smallest)), axes=[1])  # (N,)
    row = constant(np.arange(MAX_BOXES, dtype=np.int32)[np.newaxis])[:, : boxes.shape()[0]]  # (1, N)
    column = fn.transpose(row, perm=[1, 0])
    # Positive floats are ordered as their bits are: one integer compares the area, then the position.
    area = fn.cast(fn.reinterpret(sides[:, 0] * sides[:, 1], dtype=types.INT32), dtype=types.INT64)
    key = ((area + 1) * MAX_BOXES - row) * is_large  # (1, N)
    rank = int_sum(int32(fn.transpose(key, perm=[1, 0]) > key), axes=[0])
    kept = is_large * (rank < limit)
    # DALI has no boxes[kept]: a matrix of 0 and 1 moves them to their new rows, bit by bit.
    new_row = int_sum((column <= row) * fn.expand_dims(kept, axes=[1]), axes=[0]) * kept - 1
    move = int32(fn.expand_dims(new_row, axes=[0]) == column)[: int_sum(kept)]  # (M, N)
    bits = int_sum(fn.expand_dims(move, axes=[2]) * fn.reinterpret(boxes, dtype=types.INT32), axes=[1])
    return fn.reinterpret(bits, dtype=types.FLOAT), int_sum(move * labels, axes=[1])


def make_anchors(config: Config) -> list[np.ndarray]:
    """Of each level float32 (h, w, K, 4), ltrb in 0..1; K is scale by ratio (google/automl anchors.py)."""
    levels, octaves, ratios = [], 2.0 ** (np.arange(3) / 3), np.sqrt([1.0, 2.0, 0.5])
    for level in config.levels:
        h, w = (-(-side // 2**level) for side in config.image_size)
        stride_y, stride_x = np.array(config.image_size) / (h, w)
        centers = (np.arange(h) + 0.5) * stride_y, (np.arange(w) + 0.5) * stride_x
        y, x, octave, ratio = np.meshgrid(*centers, octaves, ratios, indexing="ij")
        dy = config.anchor_scale * stride_y * octave / ratio / 2
        dx = config.anchor_scale * stride_x * octave * ratio / 2
        corners = np.stack([x - dx, y - dy, x + dx, y + dy], axis=-1).reshape(h, w, -1, 4)
        levels.append(np.float32(corners) / np.float32(config.image_size[::-1] * 2))
    return levels


def encode(config: Config, boxes, labels) -> list:
    """The number of positives, then the class and box targets of each level; boxes are matched as in SSD."""
    levels, start = make_anchors(config), 0
    anchors = np.concatenate([level.ravel() for level in levels]).tolist()
    deltas, classes = fn.box_encoder(boxes, labels, anchors=anchors, criteria=0.5, offset=True)
    outputs = [fn.reductions.sum(float32(classes != 0))]
    deltas, classes = fn.coord_transform(deltas, M=SWAP_XY), classes - 1
    for h, w, k, _ in (level.shape for level in levels):
        parts = fn.slice([classes, deltas], start=[start], shape=[h * w * k], axes=[0])
        outputs += [fn.reshape(part, shape=[h, w, -1]) for part in parts]
        start += h * w * k
    return outputs


def make_dataset(config: Config, shard_id: int = 0, num_shards: int = 1):
    """tf.data without end, of (images, the rest by name); on a GPU, where it has no `map`, of tuples."""
    import nvidia.dali.plugin.tf as dali_tf
    import tensorflow as tf

    rows, on_gpu = config.max_instances, config.device_id is not None
    shapes = {"images": (*config.image_size, 3), "num_positives": (), "boxes": (rows, 4), "classes": (rows,)}
    for level, (h, w, k, _) in zip(config.levels, (a.shape for a in make_anchors(config)), strict=True):
        shapes |= {f"class_targets_{level}": (h, w, k), f"box_targets_{level}": (h, w, k * 4)}
    spec = {"output_shapes": tuple((config.batch_size, *shape) for shape in shapes.values())}
    spec |= {"output_dtypes": tuple(tf.int32 if name.startswith("class") else tf.float32 for name in shapes)}
    with tf.device(f"/gpu:{config.device_id}" if on_gpu else "/cpu:0"):
        pipeline = make_pipeline(config, shard_id, num_shards)
        data = dali_tf.DALIDataset(pipeline, batch_size=config.batch_size, device_id=config.device_id, **spec)
    return data if on_gpu else data.map(lambda x, *y: (x, dict(zip(list(shapes)[1:], y, strict=True))))


def draw_synthetic(directory: str) -> None:
    """Writes images of ellipses and their instances.json."""
    random = np.random.default_rng(0)
    document = {"images": [], "annotations": [], "categories": [{"id": 1}, {"id": 2}]}
    for number in range(16):
        image = Image.new("RGB", (480, 360), "silver")
        for category, color in enumerate(("teal", "maroon"), 1):
            left, top, width, height = box = random.uniform(20, 170, 4).tolist()
            ImageDraw.Draw(image).ellipse([left, top, left + width, top + height], fill=color)
            document["annotations"].append({"image_id": number, "category_id": category, "bbox": box})
        image.save(f"{directory}/{number}.png")
        document["images"].append({"id": number, "file_name": f"{number}.png", "width": 480, "height": 360})
    pathlib.Path(directory, "instances.json").write_text(json.dumps(document))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws a batch with its boxes; see Config for the flags.")
    for name in ("images", "file_pattern", "annotations", "crop", "output"):
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS)
    fields = vars(parser.parse_args())
    output = fields.pop("output", "batch.png")
    if not fields.keys() & {"images", "file_pattern", "annotations"}:
        draw_synthetic(SCRATCH.name)
        fields |= {"images": SCRATCH.name, "annotations": f"{SCRATCH.name}/instances.json"}
    if not pathlib.Path(fields.get("annotations", "")).is_file():
        raise SystemExit("error: --annotations must name a json file")
    images, _, boxes, classes, *_ = (np.asarray(x.as_tensor()) for x in make_pipeline(Config(**fields)).run())
    pictures = [Image.fromarray(x) for x in np.clip(images * STDDEV + MEAN + 0.5, 0, 255).astype(np.uint8)]
    for i, j in np.argwhere(classes >= 0):
        box, color = boxes[i, j] * (pictures[i].size * 2), f"hsl({67 * classes[i, j] % 360}, 100%, 50%)"
        ImageDraw.Draw(pictures[i]).rectangle(box.tolist(), outline=color, width=2)
    Image.fromarray(np.vstack([np.hstack(pictures[:4]), np.hstack(pictures[4:])])).save(output)


if __name__ == "__main__":
    main()
