"""Preprocesses images with DALI's Dynamic API: `ndd` runs one operator after the other, as NumPy does.

    for encoded, labels in files_dynamic(paths, labels, batch_size=32):
        images = preprocess(encoded, crop=(224, 224))
        print(images.shape)

`preprocess` has no random numbers: pipeline_api.py makes the same pixels from the same images, bit for bit.
Operators and arguments have the same names in both APIs. Here, shapes are known at once, devices are "cpu" or
"gpu", `.slice` takes a part of each sample, and random operators need a generator.
"""

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
from nvidia.dali import types

IMAGENET_MEAN = [0.485 * 255, 0.456 * 255, 0.406 * 255]  # RGB
IMAGENET_STD = [0.229 * 255, 0.224 * 255, 0.225 * 255]


def preprocess(
    encoded: ndd.Batch,
    *,
    decode: str = "whole",
    resize_shorter: int | None = None,
    crop: tuple[int, int] | None = None,
    brightness: float = 1.0,
    saturation: float = 1.0,
    rotate: float = 0.0,
    shear: float = 0.0,
    normalize: str = "none",
    device: str = "cpu",
) -> ndd.Batch:
    """Decodes and transforms images. A step whose option has its default value is left out.

    Args:
        encoded: uint8 (bytes,), or arrays (height, width, channels).
        decode: "whole" decodes whole images, "cropped" only the pixels that the crop shows. "no": for arrays.
        resize_shorter: new length of the shorter side in pixels; the aspect ratio stays.
        crop: (height, width) in pixels of a crop from the centre.
        brightness, saturation: factors.
        rotate: degrees, counter-clockwise.
        shear: degrees; moves the lower part of the image to the right.
        normalize: "imagenet" subtracts ImageNet's mean and divides by its standard deviation.
        device: "cpu" or "gpu". Never run on a GPU.

    Returns:
        uint8 (height, width, channels) RGB, or float32 after normalisation.
    """
    if decode == "cropped":
        images = decode_cropped(encoded, resize_shorter, crop)
    else:
        images = encoded if decode == "no" else decode_whole(encoded, device)
        if resize_shorter:
            images = ndd.resize(images, resize_shorter=resize_shorter)
        if crop:
            images = ndd.crop(images, crop=crop)
    if brightness != 1 or saturation != 1:
        images = ndd.color_twist(images, brightness=brightness, saturation=saturation)
    if rotate:
        images = ndd.rotate(images, angle=rotate, keep_size=True, fill_value=0)
    if shear:
        sizes = np.array([shape[:2] for shape in images.shape], np.float32)  # height, width
        center = ndd.as_batch(sizes[:, ::-1] / 2)  # x, y
        matrix = ndd.transforms.shear(angles=[shear, 0], center=center)
        images = ndd.warp_affine(images, matrix=matrix, inverse_map=False, fill_value=0)
    if normalize == "imagenet":
        images = ndd.crop_mirror_normalize(images, mean=IMAGENET_MEAN, std=IMAGENET_STD, output_layout="HWC")
    return images


def decode_whole(encoded: ndd.Batch, device: str = "cpu") -> ndd.Batch:
    """Returns uint8 (height, width, 3) RGB, rotated as EXIF says. For boxes, set adjust_orientation=False."""
    # On a GPU, fancy upsampling interpolates the chroma of JPEGs as on a CPU.
    return ndd.decoders.image(encoded, device=device, output_type=types.RGB, jpeg_fancy_upsampling=True)


def decode_cropped(encoded: ndd.Batch, resize_shorter: int, crop: tuple[int, int]) -> ndd.Batch:
    """Decodes and resizes only the pixels that a crop from the centre of the resized image shows.

    `resize_shorter` is at least as large as both sides of `crop`. The sizes are rounded as in DALI's resize
    and crop, so the pixels are those of "whole", but for rounding.
    """
    size = ndd.cast(ndd.peek_image_shape(encoded).slice[0:2], dtype=types.FLOAT)  # height, width
    scale = resize_shorter / ndd.reductions.min(size)
    resized = ndd.math.floor(size * scale + 0.5)
    corner = ndd.math.floor((resized - crop) / 2 + 0.5)  # of the crop in the resized image
    # The crop in pixels of the stored image. DALI keeps the scale and the centre when it rounds the size.
    start = (size - resized / scale) / 2 + corner / scale
    end = start + ndd.as_tensor(np.float32(crop)) / scale
    margin = 1 / scale + 4  # pixels around the crop that the resize and the chroma need
    low = ndd.cast(ndd.math.max(start - margin, 0.0), dtype=types.INT32)
    high = ndd.cast(ndd.math.min(end + margin, size), dtype=types.INT32)
    images = ndd.decoders.image_slice(encoded, start=low, end=high, axes=[0, 1])
    return ndd.resize(images, roi_start=start - low, roi_end=end - low, size=crop)


def augment(images: ndd.Batch, rng: ndd.random.RNG, size: tuple[int, int] = (224, 224)) -> ndd.Batch:
    """Crops, flips and colours each image at random, uint8 (height, width, 3). `rng` has the seed."""
    draw = {"rng": rng, "batch_size": images.batch_size}
    images = ndd.random_resized_crop(images, size=size, random_area=[0.3, 1.0], rng=rng)
    images = ndd.flip(images, horizontal=ndd.random.coin_flip(probability=0.5, **draw))
    brightness = ndd.random.uniform(range=(0.7, 1.3), **draw)
    hue = ndd.random.uniform(range=(-30.0, 30.0), **draw)
    return ndd.color_twist(images, brightness=brightness, hue=hue)
