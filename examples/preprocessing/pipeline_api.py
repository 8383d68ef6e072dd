"""Preprocesses images with DALI's Pipeline API: `fn` builds a graph, which DALI's threads run in advance.

    pipeline = make_pipeline(files_pipeline, {"paths": paths, "labels": labels}, {"crop": (224, 224)},
                             batch_size=32, num_threads=4, device_id=None)
    images, labels = pipeline.run()

`preprocess` has no random numbers: dynamic_api.py makes the same pixels from the same images, bit for bit.
`augment` draws random numbers for each image.
"""

from collections.abc import Callable

from nvidia.dali import fn, math, pipeline_def, types
from nvidia.dali.data_node import DataNode

IMAGENET_MEAN = [0.485 * 255, 0.456 * 255, 0.406 * 255]  # RGB
IMAGENET_STD = [0.229 * 255, 0.224 * 255, 0.225 * 255]


@pipeline_def
def make_pipeline(read: Callable[..., tuple], source: dict, options: dict) -> tuple[DataNode, ...]:
    """Builds the graph.

    Args:
        read: a function of sources.py, such as `files_pipeline`.
        source: its arguments.
        options: the options of `preprocess`.
    """
    encoded, *others = read(**source)
    return preprocess(encoded, **options), *others


def preprocess(
    encoded: DataNode,
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
) -> DataNode:
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
            images = fn.resize(images, resize_shorter=resize_shorter)
        if crop:
            images = fn.crop(images, crop=crop)
    if brightness != 1 or saturation != 1:
        images = fn.color_twist(images, brightness=brightness, saturation=saturation)
    if rotate:
        images = fn.rotate(images, angle=rotate, keep_size=True, fill_value=0)
    if shear:
        size = images.shape(dtype=types.FLOAT)  # height, width, channels
        center = fn.stack(size[1], size[0]) / 2  # x, y
        matrix = fn.transforms.shear(angles=[shear, 0], center=center)
        images = fn.warp_affine(images, matrix=matrix, inverse_map=False, fill_value=0)
    if normalize == "imagenet":
        images = fn.crop_mirror_normalize(images, mean=IMAGENET_MEAN, std=IMAGENET_STD, output_layout="HWC")
    return images


def decode_whole(encoded: DataNode, device: str = "cpu") -> DataNode:
    """Returns uint8 (height, width, 3) RGB, rotated as EXIF says. For boxes, set adjust_orientation=False."""
    # On a GPU, fancy upsampling interpolates the chroma of JPEGs as on a CPU.
    device = {"cpu": "cpu", "gpu": "mixed"}[device]
    return fn.decoders.image(encoded, device=device, output_type=types.RGB, jpeg_fancy_upsampling=True)


def decode_cropped(encoded: DataNode, resize_shorter: int, crop: tuple[int, int]) -> DataNode:
    """Decodes and resizes only the pixels that a crop from the centre of the resized image shows.

    `resize_shorter` is at least as large as both sides of `crop`. The sizes are rounded as in DALI's resize
    and crop, so the pixels are those of "whole", but for rounding.
    """
    size = fn.cast(fn.peek_image_shape(encoded)[0:2], dtype=types.FLOAT)  # height, width
    scale = resize_shorter / fn.reductions.min(size)
    resized = math.floor(size * scale + 0.5)
    corner = math.floor((resized - crop) / 2 + 0.5)  # of the crop in the resized image
    # The crop in pixels of the stored image. DALI keeps the scale and the centre when it rounds the size.
    start = (size - resized / scale) / 2 + corner / scale
    end = start + types.Constant(crop, dtype=types.FLOAT, device="cpu") / scale
    margin = 1 / scale + 4  # pixels around the crop that the resize and the chroma need
    low = fn.cast(math.max(start - margin, 0.0), dtype=types.INT32)
    high = fn.cast(math.min(end + margin, size), dtype=types.INT32)
    images = fn.decoders.image_slice(encoded, start=low, end=high, axes=[0, 1])
    return fn.resize(images, roi_start=start - low, roi_end=end - low, size=crop)


def augment(images: DataNode, size: tuple[int, int] = (224, 224)) -> DataNode:
    """Crops, flips and colours each image at random, uint8 (height, width, 3). The pipeline has the seed."""
    images = fn.random_resized_crop(images, size=size, random_area=[0.3, 1.0])
    images = fn.flip(images, horizontal=fn.random.coin_flip(probability=0.5))
    brightness, hue = fn.random.uniform(range=(0.7, 1.3)), fn.random.uniform(range=(-30.0, 30.0))
    return fn.color_twist(images, brightness=brightness, hue=hue)
