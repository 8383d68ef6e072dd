"""Every stage is checked by issue a drawn rectangle again, or against NumPy."""

import dataclasses
import io
import itertools
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn
from PIL import Image

from common import box_encoder, boxes, letterbox
from common.datacheck.datasets import open_source
from common.loader import gpu_visible
from efficientdet import crops, pipeline
from efficientdet.config import get_config
from efficientdet.pipeline import EfficientDetPipeline

INPUT = (192, 256)  # height, width: not square, so that a swapped axis shows
NANO = dataclasses.replace(
    get_config("efficientdet-nano"), image_size=INPUT, augmentation="none", flip_prob=0.0
)
SIZES = [(300, 500), (420, 200), (97, 131), (640, 90), (192, 256), (50, 700)]  # height, width of drawn images
RED, GREY = (230, 20, 30), (90, 110, 100)


@pytest.fixture(scope="module")
def rectangles(tmp_path_factory) -> pathlib.Path:
    """48 PNGs of six shapes, each with one red rectangle; ids with gaps."""
    random = np.random.default_rng(0)
    directory = tmp_path_factory.mktemp("rectangles")
    images, annotations = [], []
    for i in range(48):
        height, width = SIZES[i % len(SIZES)]
        w, h = random.integers(width // 4, width // 2), random.integers(height // 4, height // 2)
        x, y = random.integers(0, width - w + 1), random.integers(0, height - h + 1)
        image = np.full((height, width, 3), GREY, np.uint8)
        image[y : y + h, x : x + w] = RED
        annotations.append((1000 + 7 * i, (x, y, w, h)))
        images.append((1000 + 7 * i, image))
    return write_coco(directory, images, annotations)


def write_coco(directory, images, annotations, suffix=".png", crowds=()) -> pathlib.Path:
    """images [(id, uint8 array or encoded bytes)], annotations [(image id, ltwh px)] -> COCO files."""
    entries = []
    for image_id, image in images:
        name = f"{image_id}{suffix}"
        if isinstance(image, bytes):
            (directory / name).write_bytes(image)
            width, height = Image.open(directory / name).size
        else:
            Image.fromarray(image).save(directory / name)
            height, width = image.shape[:2]
        entries.append({"id": image_id, "file_name": name, "height": int(height), "width": int(width)})
    document = {
        "images": entries,
        "categories": [{"id": 3, "name": "thing"}, {"id": 17, "name": "other"}],
        "annotations": [
            {
                "id": i + 1,
                "image_id": image_id,
                "category_id": 17,
                "bbox": [float(v) for v in ltwh],
                "area": float(ltwh[2] * ltwh[3]),
                "iscrowd": int(i in crowds),
            }
            for i, (image_id, ltwh) in enumerate(annotations)
        ],
    }
    (directory / "instances.json").write_text(json.dumps(document))
    return directory


def source_of(directory: pathlib.Path):
    return open_source(images=str(directory), annotations=str(directory / "instances.json"))


def make(directory, config=NANO, **options) -> EfficientDetPipeline:
    options = {"batch_size": 8, "training": True, "num_threads": 1} | options
    return EfficientDetPipeline(source=source_of(directory), config=config, **options)


def batches(loader: EfficientDetPipeline, count: int) -> list[dict[str, np.ndarray]]:
    """Batches from the DALI pipeline itself, by name."""
    result = []
    for _ in range(count):
        outputs = loader.pipeline.run()
        result.append(
            {n: np.asarray(o.as_tensor()) for n, o in zip(loader.element_spec, outputs, strict=True)}
        )
    return result


def run_stage(define, samples: list[tuple[np.ndarray, ...]], seed=1) -> list[list[np.ndarray]]:
    """Runs a stage on a batch; `define` gets one node for each array of a sample. -> [output][sample]."""
    pipe = dali.Pipeline(batch_size=len(samples), num_threads=1, device_id=None, seed=seed, exec_dynamic=True)
    with pipe:
        columns = [list(column) for column in zip(*samples, strict=True)]
        nodes = [fn.external_source(source=itertools.repeat(c), batch=True) for c in columns]
        pipe.set_outputs(*define(*nodes))
    return [[np.array(sample) for sample in output] for output in pipe.run()]


def to_pixels(image: np.ndarray) -> np.ndarray:
    return image * pipeline.STDDEV_RGB + pipeline.MEAN_RGB


def find_rectangle(pixels: np.ndarray) -> np.ndarray | None:
    """ltrb in pixels of what is nearer to red than to anything else drawn here."""
    colors = np.array([RED, GREY, pipeline.MEAN_RGB])
    nearest = np.abs(pixels[:, :, np.newaxis] - colors).sum(-1).argmin(-1)
    ys, xs = np.nonzero(nearest == 0)
    return None if len(ys) == 0 else np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])


def boxes_px(box: np.ndarray) -> np.ndarray:
    return box * [INPUT[1], INPUT[0], INPUT[1], INPUT[0]]


# --- the drawn rectangle is found again ---


AUGMENTATIONS = {
    "none": {},
    "scale_jitter": {"augmentation": "scale_jitter", "jitter_min": 0.3, "jitter_max": 2.0},
    "min_iou_crop": {"augmentation": "min_iou_crop"},
    "resize_range": {"augmentation": "resize_range", "resize_min": 40, "resize_max": 200},
    "flip": {"flip_prob": 1.0},
    "all": {
        "augmentation": "scale_jitter",
        "flip_prob": 0.5,
        "brightness": 0.1,
        "jitter_min": 0.7,
        "jitter_max": 0.7,
    },
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_boxes_and_pixels_move_together(rectangles, name):
    config = dataclasses.replace(NANO, **AUGMENTATIONS[name], min_box_size=3.0)
    found = 0
    for batch in batches(make(rectangles, config, batch_size=16), 12):
        for image, padded, classes in zip(batch["images"], batch["boxes"], batch["classes"], strict=True):
            rectangle = find_rectangle(to_pixels(image))
            kept = padded[classes >= 0]
            if len(kept) == 0:  # cropped away, or too small to keep
                visible = np.zeros(4) if rectangle is None else rectangle
                assert min(visible[2:] - visible[:2]) <= 5 or name == "min_iou_crop"
                continue
            assert len(kept) == 1
            assert list(classes[classes >= 0]) == [1]
            box = boxes_px(kept[0])
            if rectangle is None:
                assert min(box[2:] - box[:2]) <= 4  # blurred into the background
                continue
            np.testing.assert_allclose(rectangle, box, atol=1.5)
            found += 1
    assert found > 100


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_targets_decode_to_the_padded_boxes(rectangles, name):
    config = dataclasses.replace(NANO, **AUGMENTATIONS[name])
    loader = make(rectangles, config)
    (batch,) = batches(loader, 1)
    deltas = [batch[f"box_targets_{level}"] for level in config.anchors.levels]
    classes = np.concatenate(
        [batch[f"class_targets_{level}"].reshape(8, -1) for level in config.anchors.levels], axis=1
    )
    decoded = np.asarray(box_encoder.decode_boxes(deltas, config.anchors))
    for i in range(8):
        positive = classes[i] >= 0
        assert positive.sum() == batch["num_positives"][i]
        kept = batch["boxes"][i][batch["classes"][i] >= 0]
        assert positive.any() == (len(kept) > 0)
        if len(kept):  # the only object owns every positive anchor
            np.testing.assert_allclose(decoded[i][positive], np.repeat(kept, positive.sum(), 0), atol=1e-5)


# --- the views, against NumPy ---


def drawn_views(define, sizes, count=40):
    """[(size, window, out_size)] of `count` draws for each size."""
    samples = [(np.array(size, np.float32),) for size in sizes for _ in range(count)]
    windows, out_sizes = run_stage(define, samples)
    return [(s[0].astype(int), w, o) for s, w, o in zip(samples, windows, out_sizes, strict=True)]


def test_whole_view_is_the_letterbox():
    random = np.random.default_rng(0)
    sizes = [(1, 1), (1, 5000), (4001, 3072), *SIZES, *random.integers(1, 4097, (300, 2)).tolist()]
    for size, window, out in drawn_views(lambda s: crops.whole_image(s, INPUT), sizes, 1):
        assert list(window) == [0, 0, *size]
        assert (0, 0, *out) == letterbox.geometry(*size.tolist(), INPUT)


def test_jittered_view_follows_automl():
    low, high = 0.1, 2.0
    drawn = drawn_views(lambda s: crops.jittered_crop(s, INPUT, low, high), SIZES, 200)
    scales, starts = [], []
    for size, window, out in drawn:
        start, length = window[:2], window[2:]
        assert (start >= 0).all() and (start + length <= size).all() and (length >= 1).all()
        assert (out >= 1).all() and (out <= INPUT).all()
        fit = min(INPUT[0] / size[0], INPUT[1] / size[1])
        # The scale at which the whole image would be this large; both axes agree to the rounding of the
        # pixels.
        scale = out / length / fit
        slack = 0.5 / out + 0.5 / length
        assert abs(scale[0] - scale[1]) <= (scale * slack).sum() + 1e-6
        assert (scale >= low * (1 - slack) - 1e-6).all() and (scale <= high * (1 + slack) + 1e-6).all()
        # Nothing is cropped but what does not fit.
        cropped = length < size
        assert (out[cropped] == np.array(INPUT)[cropped]).all()
        scales.append(scale[np.argmax(out)])
        free = size - length
        starts += list(start[free > 20] / free[free > 20])
    counts, _ = np.histogram(scales, bins=5, range=(low, high))
    assert counts.min() > 0.7 * len(scales) / 5  # uniform
    counts, _ = np.histogram(starts, bins=5, range=(0, 1))
    assert counts.min() > 0.6 * len(starts) / 5
    assert min(starts) == 0 and max(starts) == 1  # both borders are reached


def test_resized_view_draws_the_shorter_side_and_fits():
    shorter = []
    for size, window, out in drawn_views(lambda s: crops.resize_range_crop(s, INPUT, 60, 150), SIZES, 60):
        assert list(window) == [0, 0, *size]
        assert (out <= INPUT).all()
        slack = 0.5 / out
        assert abs(out[0] / size[0] - out[1] / size[1]) <= ((out / size) * slack).sum()
        if (out < INPUT).all():
            shorter.append(out.min())
    assert min(shorter) >= 60 and max(shorter) <= 150 and max(shorter) - min(shorter) > 70
    # An image that cannot have the smallest shorter side is as large as fits.
    for _, _, out in drawn_views(lambda s: crops.resize_range_crop(s, INPUT, 60, 150), [(50, 700)], 5):
        assert list(out) == [18, 256]


def test_min_iou_view_keeps_its_promise_on_non_square_images():
    """Crops overlap the box by at least the smallest threshold, keep to the aspect, and are not empty."""
    random = np.random.default_rng(3)
    samples = []
    for i in range(200):
        height, width = SIZES[i % 4]
        low = random.uniform(0, 0.3, 2)
        box = np.array([[*low, *(low + random.uniform(0.5, 0.7, 2))]], np.float32)
        samples.append((np.array((height, width), np.float32), box, np.array([5], np.int32)))

    def define(size, box, label):
        crop, box, label = crops.min_iou_crop(size, box, label, INPUT)
        return *crop, box, label

    windows, _, kept, labels = run_stage(define, samples)
    whole = 0
    for (size, box, _), window, left, label in zip(samples, windows, kept, labels, strict=True):
        top, start, height, width = window
        assert top >= 0 and start >= 0 and top + height <= size[0] and start + width <= size[1]
        whole += int((height, width) == tuple(size))
        crop = np.array([[start, top, start + width, top + height]]) / [size[1], size[0], size[1], size[0]]
        assert np.asarray(boxes.iou(crop.astype(np.float32), box))[0] > 0.1 - 0.05
        if (height, width) != tuple(size):
            assert 0.5 - 0.1 < width / height < 2.0 + 0.1
        assert list(label) == [5] * len(left)
        center = (box[0, :2] + box[0, 2:]) / 2
        assert len(left) == int((crop[0, :2] <= center + 0.02).all() and (center - 0.02 <= crop[0, 2:]).all())
        # What the crop leaves of the box is what clipping the original box leaves.
        if len(left):
            np.testing.assert_allclose(
                np.clip(left[0], np.tile(crop[0, :2], 2), np.tile(crop[0, 2:], 2)),
                np.clip(box[0], np.tile(crop[0, :2], 2), np.tile(crop[0, 2:], 2)),
                atol=1e-5,
            )
    assert 50 < whole < 150  # the 640 x 90 images cannot be cropped to the aspect ratio


def test_boxes_to_window_is_the_affine_map_of_the_pixels():
    random = np.random.default_rng(1)
    samples, expected = [], []
    for _ in range(50):
        size = random.integers(2, 900, 2)
        start = [random.integers(0, side) for side in size]
        window = np.array(
            [*start, *(random.integers(1, s - a + 1) for s, a in zip(size, start, strict=True))]
        )
        corners = np.sort(random.uniform(0, 1, (random.integers(0, 6), 2, 2)), axis=1)
        box = corners.reshape(-1, 4)
        px = box * size[[1, 0, 1, 0]]
        px = (px - window[[1, 0, 1, 0]]) / window[[3, 2, 3, 2]]
        samples.append((box.astype(np.float32), size.astype(np.float32), window.astype(np.int32)))
        expected.append(np.clip(px, 0, 1))
    (got,) = run_stage(lambda b, s, w: [pipeline.boxes_to_window(b, s, w)], samples)
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=2e-4)


# --- pixels ---


def encode(image: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def decode(encoded: bytes, window) -> np.ndarray:
    samples = [(np.frombuffer(encoded, np.uint8), np.array(window, np.int32))]
    ((image,),) = run_stage(lambda j, w: [pipeline.decode_crop(j, w, "cpu")], samples)
    return image


def test_decode_window_cuts_what_the_whole_image_shows():
    noise = np.random.default_rng(0).integers(0, 256, (123, 211, 3), np.uint8)
    jpeg = encode(Image.fromarray(noise).resize((422, 246)), "JPEG", quality=90)
    whole = decode(jpeg, (0, 0, 246, 422))
    np.testing.assert_array_equal(decode(jpeg, (31, 57, 100, 201)), whole[31:131, 57:258])


def test_decode_formats_and_exif():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8))
    window = (0, 0, 40, 60)
    np.testing.assert_array_equal(decode(encode(image, "PNG"), window), np.asarray(image))
    grey = decode(encode(image.convert("L"), "PNG"), window)
    np.testing.assert_array_equal(grey, np.repeat(np.asarray(image.convert("L"))[..., None], 3, 2))
    assert decode(encode(image.convert("CMYK"), "JPEG"), window).shape == (40, 60, 3)
    # A photograph marked as lying on its side stays as it is stored, with its boxes.
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated = encode(image, "JPEG", exif=exif, quality=95)
    np.testing.assert_array_equal(decode(rotated, window), decode(encode(image, "JPEG", quality=95), window))
    ((size,),) = run_stage(lambda j: [crops.source_size(j)], [(np.frombuffer(rotated, np.uint8),)])
    assert list(size) == [40, 60]


def test_flip_moves_pixels_and_boxes_together_or_not_at_all():
    random = np.random.default_rng(0)
    image = random.integers(0, 256, (5, 8, 3), np.uint8)
    box = np.array([[0.1, 0.2, 0.35, 0.9], [0.0, 0.0, 1.0, 1.0]], np.float32)
    images, flipped = run_stage(lambda i, b: pipeline.random_flip(i, b, 0.5), [(image, box)] * 64)
    turned = 0
    for got, got_boxes in zip(images, flipped, strict=True):
        if (got == image).all():
            np.testing.assert_array_equal(got_boxes, box)
        else:
            turned += 1
            np.testing.assert_array_equal(got, image[:, ::-1])
            np.testing.assert_allclose(got_boxes, [[0.65, 0.2, 0.9, 0.9], [0, 0, 1, 1]], atol=1e-6)
    assert 15 < turned < 49


def test_grid_mask_masks_and_shifts(monkeypatch):
    white = np.full((400, 600, 3), 255, np.uint8)

    def masks(prob, count=24):
        (images,) = run_stage(lambda i: [pipeline.random_grid_mask(i, (400, 600), prob)], [(white,)] * count)
        return np.stack([image[..., 0] == 0 for image in images])

    always = masks(1.0)
    assert abs(always.mean() - pipeline.GRID_MASK_RATIO**2) < 0.04
    assert len({mask.tobytes() for mask in always}) == 24  # another grid for every image
    share = masks(0.5).any((1, 2)).mean()
    assert 0.2 < share < 0.8
    assert not masks(0.0).any()

    # With only the shift left to chance, masked columns and rows begin anywhere in the tile of 200 pixels.
    monkeypatch.setattr(pipeline, "GRID_MASK_ANGLE", 1e-6)
    monkeypatch.setattr(pipeline, "GRID_MASK_TILE", (0.5, 0.501))
    for axis in (1, 2):
        lines = masks(1.0, 64).any(3 - axis)[:, :200]  # the first period
        starts = [np.flatnonzero(~line[np.arange(-1, 199)] & line)[0] for line in lines]
        counts, _ = np.histogram(starts, 4, (0, 200))
        assert counts.min() > 4


def test_color_stays_in_its_ranges():
    grey = np.full((4, 4, 3), 100, np.uint8)
    (images,) = run_stage(lambda i: [pipeline.random_color(i, 0.4, 0.0, 0.0, 0.0)], [(grey,)] * 64)
    levels = np.array([image[0, 0, 0] for image in images])
    assert levels.min() >= 60 - 1 and levels.max() <= 140 + 1 and np.ptp(levels) > 50
    red = np.zeros((2, 2, 3), np.uint8) + np.uint8([200, 100, 100])
    (images,) = run_stage(lambda i: [pipeline.random_color(i, 0.0, 0.0, 0.0, 60.0)], [(red,)] * 64)
    hues = np.array([Image.fromarray(i).convert("HSV").getpixel((0, 0))[0] for i in images]) / 256 * 360
    hues = (hues + 180) % 360 - 180
    assert np.ptp(hues) > 60 and abs(hues).max() < 85  # degrees, not radians or turns
    (images,) = run_stage(lambda i: [pipeline.random_color(i, 0.0, 0.0, 0.0, 0.0)], [(red,)])
    assert np.abs(images[0].astype(int) - red).max() <= 1


def test_pad_and_normalize_against_numpy():
    image = np.random.default_rng(0).integers(0, 256, (100, 256, 3), np.uint8)
    ((got,),) = run_stage(lambda i: [pipeline.pad_and_normalize(i, INPUT)], [(image,)])
    expected = np.zeros((*INPUT, 3))
    expected[:100] = (image - np.array([123.675, 116.28, 103.53])) / [58.395, 57.12, 57.375]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=1e-5)


# --- the whole pipeline ---


def test_evaluation_shows_every_image_once_and_never_changes(rectangles):
    """48 images on 5 ranks: equal steps, repeated ids tell."""
    truth = {
        a["image_id"]: a["bbox"]
        for a in json.loads((rectangles / "instances.json").read_text())["annotations"]
    }
    random = {"augmentation": "scale_jitter", "flip_prob": 0.5, "grid_mask_prob": 1.0, "brightness": 0.5}
    config = dataclasses.replace(NANO, **random)
    seen = {}
    for rank in range(5):
        loader = make(
            rectangles, config, training=False, batch_size=4, shard_id=rank, num_shards=5, seed=rank
        )
        assert loader.steps_per_epoch == 3
        for batch in batches(loader, 3):
            for i, image_id in enumerate(batch["image_ids"].reshape(-1).tolist()):
                if image_id in seen:
                    np.testing.assert_array_equal(batch["images"][i], seen[image_id])
                seen[image_id] = batch["images"][i]
                # The letterbox brings the box back to the original image's pixels.
                top, left, height, width = batch["letterbox"][i]
                original = batch["image_sizes"][i]
                assert (top, left) == (0, 0)
                box = boxes_px(batch["boxes"][i][0]) / [width, height, width, height]
                x, y, w, h = truth[image_id]
                np.testing.assert_allclose(
                    box * original[[1, 0, 1, 0]], [x, y, x + w, y + h], atol=1e-3 * original.max()
                )
                rectangle = find_rectangle(to_pixels(batch["images"][i]))
                np.testing.assert_allclose(rectangle, boxes_px(batch["boxes"][i][0]), atol=1.0)
    assert set(seen) == set(truth)


def test_ranks_share_the_images_but_not_the_augmentation(rectangles, tmp_path):
    ranks = [
        batches(make(rectangles, batch_size=12, shard_id=rank, num_shards=2, seed=0), 2) for rank in (0, 1)
    ]
    seen = [{tuple(box) for batch in rank for box in batch["boxes"][:, 0].tolist()} for rank in ranks]
    assert len(seen[0]) == len(seen[1]) == 24 and not seen[0] & seen[1]  # one epoch

    image = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    directory = write_coco(
        tmp_path, [(i, image) for i in range(1, 9)], [(i, (9, 9, 30, 30)) for i in range(1, 9)]
    )
    config = dataclasses.replace(NANO, augmentation="scale_jitter")
    pictures = []
    for rank in (0, 1):
        for batch in batches(make(directory, config, batch_size=4, shard_id=rank, num_shards=2), 2):
            pictures += [picture.tobytes() for picture in batch["images"]]
    assert len(set(pictures)) == 16  # of one and the same image


@pytest.mark.parametrize(
    "change, changed", [({"grid_mask_prob": 1.0}, 0.16), ({"brightness": 0.5}, 1.0), ({"hue": 60.0}, 1.0)]
)
def test_training_images_are_really_augmented(rectangles, change, changed):
    (plain,) = batches(make(rectangles, batch_size=48), 1)
    (other,) = batches(make(rectangles, dataclasses.replace(NANO, **change), batch_size=48), 1)
    np.testing.assert_array_equal(plain["boxes"], other["boxes"])
    content = plain["images"].any(-1)
    differs = np.abs(plain["images"] - other["images"]).max(-1) > 0.03
    assert abs(differs[content].mean() - changed) < 0.1
    assert not differs[~content].any()  # the padding stays


def test_seed_decides_everything_and_zero_is_one(rectangles):
    config = dataclasses.replace(
        NANO, augmentation="scale_jitter", flip_prob=0.5, grid_mask_prob=0.5, hue=20.0
    )

    def run(seed, threads=1):
        return batches(make(rectangles, config, seed=seed, num_threads=threads), 3)

    first = run(0)
    for again in (run(0), run(0, threads=2)):
        for one, other in zip(first, again, strict=True):
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])
    assert not np.array_equal(first[0]["images"], run(1)[0]["images"])


def test_awkward_images(tmp_path):
    """No boxes; 500 boxes, some too small; a crowd; a box without area; grey and CMYK files."""
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, (200, 300, 3), np.uint8))
    files = [(1, encode(image, "JPEG")), (2, encode(image.convert("L"), "JPEG"))]
    files += [(3, encode(image.convert("CMYK"), "JPEG")), (4, encode(image, "JPEG"))]
    sides = random.uniform(3.0, 90.0, (450, 2))
    corners = random.uniform(0, 1, (450, 2)) * (np.array([300, 200]) - sides)
    large = [(2, ltwh) for ltwh in np.concatenate([corners, sides], 1).tolist()]
    small = [(2, (10.0 + i, 5.0, 0.4, 30.0)) for i in range(50)]
    others = [(3, (0, 0, 300, 200)), (4, (5, 5, 50, 50)), (4, (1, 1, 0, 9)), (4, (60, 5, 200, 100))]
    directory = write_coco(tmp_path, files, large + small + others, ".jpg", crowds={503})
    loader = make(directory, batch_size=4, training=False, count_lost=True)
    (batch,) = batches(loader, 1)
    counts = (batch["classes"] >= 0).sum(1)
    assert list(counts) == [0, 100, 1, 1]
    assert list(batch["num_positives"] > 0) == [False, True, True, True]
    np.testing.assert_array_equal(batch["boxes"][0], -1)
    assert (batch["class_targets_3"][0] == -1).all() and not batch["box_targets_3"][0].any()
    assert batch["lost"].tolist() == [[0, 0], [50, 350], [0, 0], [0, 0]]
    kept = batch["boxes"][1]
    areas = np.sort(np.prod(kept[:, 2:] - kept[:, :2], 1))
    expected = np.sort(np.prod(sides, 1))[-100:] / (300 * 200) * (171 / 192)  # 200 x 300 becomes 171 x 256
    np.testing.assert_allclose(areas, expected, rtol=1e-3)
    for name, tensor in batch.items():
        assert np.isfinite(tensor).all(), name
    np.testing.assert_allclose(boxes_px(batch["boxes"][3][0]), np.array([5, 5, 55, 55]) * 256 / 300, atol=0.2)


def test_min_iou_crop_without_boxes(tmp_path):
    random = np.random.default_rng(0)
    images = [(i, random.integers(0, 256, (80, 120, 3), np.uint8)) for i in range(1, 5)]
    write_coco(tmp_path, images, [(1, (5, 5, 30, 30))])
    config = dataclasses.replace(NANO, augmentation="min_iou_crop")
    for batch in batches(make(tmp_path, config, batch_size=4), 4):
        assert (batch["num_positives"] > 0).sum() <= 1


# --- tf.data ---


def test_dataset_has_the_promised_elements(rectangles):
    config = dataclasses.replace(NANO, augmentation="scale_jitter")
    for training in (True, False):
        loader = make(rectangles, config, training=training, count_lost=True, seed=5)
        images_spec, targets_spec = loader.dataset().element_spec
        assert images_spec == tf.TensorSpec((8, *INPUT, 3), tf.float32)
        names = ["num_positives", "boxes", "classes"]
        for level in range(3, 8):
            names += [f"class_targets_{level}", f"box_targets_{level}"]
        names += [] if training else ["image_ids", "image_sizes", "letterbox"]
        assert list(loader.element_spec) == ["images", *names, "lost"]
        images, targets = next(iter(loader.dataset()))
        (batch,) = batches(loader, 1)  # the DALI pipeline of the same loader starts alike
        np.testing.assert_array_equal(images, batch["images"])
        assert set(targets) == set(targets_spec) == {*names, "lost"}
        for name, tensor in targets.items():
            assert tensor.shape == targets_spec[name].shape == loader.element_spec[name].shape
            assert tensor.dtype == targets_spec[name].dtype
            # box targets are encoded after the graph there and by fn.box_encoder here
            atol = 1e-6 if name.startswith("box_targets") else 0
            expected = batch[name].reshape(tensor.shape)
            np.testing.assert_allclose(tensor, expected, rtol=atol, atol=atol, err_msg=name)
        assert targets["num_positives"].numpy().min() > 0
    assert targets["class_targets_4"].shape == (8, 12, 16, 9)
    assert targets["box_targets_4"].shape == (8, 12, 16, 36)


def test_without_targets(rectangles):
    loader = make(rectangles, training=False, with_targets=False)
    assert list(loader.element_spec) == ["images", "image_ids", "image_sizes", "letterbox"]
    images, extra = next(iter(loader.dataset()))
    assert images.shape == (8, *INPUT, 3)
    assert extra["image_ids"].numpy().tolist() == [1000 + 7 * i for i in range(8)]
    assert extra["image_sizes"].numpy().tolist()[:3] == [list(size) for size in SIZES[:3]]


def test_iterator_resumes_bit_exactly_in_the_middle_of_an_epoch(rectangles, tmp_path):
    config = dataclasses.replace(
        NANO, augmentation="scale_jitter", flip_prob=0.5, grid_mask_prob=0.5, hue=20.0
    )

    def fresh():
        return iter(make(rectangles, config, seed=3).dataset())

    iterator = fresh()
    for _ in range(3):
        next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).save(tmp_path / "loader")
    expected = [next(iterator) for _ in range(6)]  # into the second epoch
    restored = fresh()
    tf.train.Checkpoint(iterator=restored).restore(path).assert_consumed()
    for images, targets in expected:
        got_images, got_targets = next(restored)
        np.testing.assert_array_equal(got_images, images)
        for name, tensor in targets.items():
            np.testing.assert_array_equal(got_targets[name], tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not gpu_visible(), reason="no GPU")
def test_gpu_graph_gives_what_the_cpu_graph_gives(rectangles):
    cpu = make(rectangles, training=False)
    gpu = make(rectangles, training=False, device_id=0)
    for _ in range(3):
        for name, one, other in zip(cpu.element_spec, cpu.pipeline.run(), gpu.pipeline.run(), strict=True):
            one, other = np.asarray(one.as_tensor()), np.asarray(other.as_cpu().as_tensor())
            if name == "images":  # PNGs are decoded alike, and resized alike to a level
                assert np.abs(one - other).max() < 2.5 / 57
            else:
                np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)
