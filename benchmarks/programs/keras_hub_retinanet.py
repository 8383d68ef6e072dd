"""Trains keras-hub's RetinaNet and detects objects with it, because keras-hub has no command line.

Arguments: DATA RUN IMAGE_SIZE STEPS BATCH_SIZE LEARNING_RATE WARMUP_SHARE SEED
"""

import json
import pathlib
import sys

import keras
import keras_hub
import numpy as np
import tensorflow as tf
from PIL import Image

data, run = map(pathlib.Path, sys.argv[1:3])
side, steps, batch = map(int, sys.argv[3:6])
learning_rate, warmup = map(float, sys.argv[6:8])
seed, max_boxes = int(sys.argv[8]), 100
keras.utils.set_random_seed(seed)
num_classes = len((data / "names.txt").read_text().splitlines())
mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
convert = keras_hub.layers.RetinaNetImageConverter(  # a letterbox, then ImageNet's normalisation
    (side, side),
    pad_to_aspect_ratio=True,
    crop_to_aspect_ratio=False,
    bounding_box_format="xyxy",
    scale=(1 / 255 / std).tolist(),
    offset=(-mean / std).tolist(),
)


def read(split):
    coco = json.loads((data / f"annotations/instances_{split}.json").read_bytes())
    images, targets = [], {"boxes": [], "labels": []}
    for image in coco["images"]:
        rows = [a for a in coco["annotations"] if a["image_id"] == image["id"] and not a.get("iscrowd", 0)]
        rows = [(*a["bbox"], a["category_id"] - 1) for a in rows if min(a["bbox"][2:]) > 0][:max_boxes]
        rows = np.array(rows, np.float32).reshape(-1, 5)
        boxes = np.full((max_boxes, 4), -1, np.float32)
        labels = np.full(max_boxes, -1, np.float32)
        boxes[: len(rows)] = np.concatenate([rows[:, :2], rows[:, :2] + rows[:, 2:4]], axis=1)
        labels[: len(rows)] = rows[:, 4]
        pixels = np.array(Image.open(data / "images" / split / image["file_name"]).convert("RGB"), np.float32)
        out = convert({"images": pixels, "bounding_boxes": {"boxes": boxes, "labels": labels}})
        images.append(np.array(out["images"]))
        for name, values in targets.items():
            values.append(np.array(out["bounding_boxes"][name], np.float32))
    return coco["images"], np.stack(images), {name: np.stack(values) for name, values in targets.items()}


encoder = keras_hub.models.ResNetBackbone(
    input_conv_filters=[64],
    input_conv_kernel_sizes=[7],
    stackwise_num_filters=[64, 128, 256, 512],
    stackwise_num_blocks=[2, 2, 2, 2],
    stackwise_num_strides=[1, 2, 2, 2],
    block_type="basic_block",
)
backbone = keras_hub.models.RetinaNetBackbone(encoder, 3, 7, use_p5=False, image_shape=(side, side, 3))
model = keras_hub.models.RetinaNetObjectDetector(backbone, num_classes, bounding_box_format="xyxy")
schedule = keras.optimizers.schedules.CosineDecay(
    0.0, steps - round(warmup * steps), warmup_target=learning_rate, warmup_steps=round(warmup * steps)
)
model.compile(keras.optimizers.Adam(schedule, global_clipnorm=10.0))
model.summary()

flip = keras.layers.RandomFlip("horizontal", seed=seed, bounding_box_format="xyxy")
_, images, targets = read("train2017")
dataset = tf.data.Dataset.from_tensor_slices((images, targets)).shuffle(len(images), seed=seed).repeat()
dataset = dataset.batch(batch, drop_remainder=True)


def flipped(x, y):
    out = flip({"images": x, "bounding_boxes": y}, training=True)
    return out["images"], out["bounding_boxes"]


model.fit(dataset.map(flipped).prefetch(2), steps_per_epoch=steps, epochs=1, verbose=2)

model.prediction_decoder = keras_hub.layers.NonMaxSuppression(
    "xyxy", from_logits=True, iou_threshold=0.5, confidence_threshold=0.001, max_detections=100
)
infos, images, _ = read("val2017")
# Its NMS wants a known batch.
one_by_one = tf.data.Dataset.from_tensor_slices(images).batch(1, drop_remainder=True)
found = model.predict(one_by_one, verbose=2)
results = []
for i, info in enumerate(infos):
    scale = min(side / info["width"], side / info["height"])
    shift = [(side - int(info[name] * scale)) // 2 for name in ("width", "height")]
    for box, label, score in zip(found["boxes"][i], found["labels"][i], found["confidence"][i], strict=True):
        if label >= 0:
            left, top, right, bottom = ((box - [*shift, *shift]) / scale).tolist()
            bbox = [left, top, right - left, bottom - top]
            results.append(
                {"image_id": info["id"], "category_id": int(label) + 1, "bbox": bbox, "score": float(score)}
            )
(run / "detections.json").write_text(json.dumps(results))
