"""A gallery of DALI's image operators: one call to copy for each, and a picture of all results.

    python operators.py --input=photo.jpg --output=gallery.png

`ops` is `nvidia.dali.fn` in a graph, or `nvidia.dali.experimental.dynamic`: names and arguments are the same,
and so are the pixels. Arguments of most operators can differ between images: pass a node or a batch, such as
`angle=fn.random.uniform(range=(-10.0, 10.0))` (`augment` in pipeline_api.py and dynamic_api.py).

Sizes are (height, width), positions (top, left), but points, offsets and matrices are x, y. The file needs
DALI, NumPy and Pillow.
"""

import argparse

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
from nvidia.dali import types
from PIL import Image, ImageDraw

IMAGENET_MEAN = [0.485 * 255, 0.456 * 255, 0.406 * 255]  # RGB
IMAGENET_STD = [0.229 * 255, 0.224 * 255, 0.225 * 255]
RANDOM = ("decode a random part", "random_resized_crop")  # other pixels at each call


def decoders(ops, encoded) -> dict:
    """Decodes image files, uint8 (bytes,), to uint8 (height, width, channels)."""
    return {
        "decode": ops.decoders.image(encoded),  # rotated as EXIF says
        # Boxes refer to the stored pixels, so do not rotate.
        "decode as stored": ops.decoders.image(encoded, adjust_orientation=False),
        "decode to BGR": ops.decoders.image(encoded, output_type=types.BGR),
        "decode to gray": ops.decoders.image(encoded, output_type=types.GRAY),
        # These decode only a part of the image.
        "decode a crop": ops.decoders.image_crop(encoded, crop=[150, 200]),  # from the centre
        "decode a part": ops.decoders.image_slice(encoded, start=[20, 50], shape=[150, 200], axes=[0, 1]),
        "decode a part in 0..1": ops.decoders.image_slice(
            encoded, rel_start=[0.1, 0.2], rel_shape=[0.5, 0.3], axes=[0, 1]
        ),
        "decode a random part": ops.decoders.image_random_crop(
            encoded, random_area=[0.1, 0.5], random_aspect_ratio=[0.75, 1.33]
        ),
    }


def sizes(ops, images) -> dict:
    """Resizes, crops and pads images, uint8 (height, width, 3)."""
    size = [150, 200]
    fitted = ops.resize(images, size=[200, 200], mode="not_larger")
    return {
        "resize": ops.resize(images, size=size),
        "resize the shorter side": ops.resize(images, resize_shorter=150),
        "resize the longer side": ops.resize(images, resize_longer=200),
        "fit": ops.resize(images, size=size, mode="not_larger"),
        "cover": ops.resize(images, size=size, mode="not_smaller"),
        "resize, no antialiasing": ops.resize(images, size=size, antialias=False),
        "resize, nearest": ops.resize(images, size=size, interp_type=types.INTERP_NN),  # for masks
        "resize, triangular": ops.resize(images, size=size, interp_type=types.INTERP_TRIANGULAR),
        "resize, cubic": ops.resize(images, size=size, interp_type=types.INTERP_CUBIC),
        "resize, Lanczos": ops.resize(images, size=size, interp_type=types.INTERP_LANCZOS3),
        "resize, Gaussian": ops.resize(images, size=size, interp_type=types.INTERP_GAUSSIAN),
        # The default of crop_pos_x and crop_pos_y, 0.5, is the centre; 0 is the left or top.
        "letterbox": ops.crop(fitted, crop=[200, 200], out_of_bounds_policy="pad", fill_values=114),
        "crop": ops.crop(images, crop=size),
        "crop at the lower left": ops.crop(images, crop=size, crop_pos_x=0.0, crop_pos_y=1.0),
        "crop and pad": ops.crop(
            images, crop=[500, 700], out_of_bounds_policy="pad", fill_values=[250, 200, 0]
        ),
        "random_resized_crop": ops.random_resized_crop(
            images, size=size, random_area=[0.1, 0.5], random_aspect_ratio=[0.75, 1.33]
        ),
        "pad": ops.pad(images, axes=[0, 1], shape=[500, 700], fill_value=114),  # at the bottom and right
    }


def geometry(ops, images) -> dict:
    """Flips, rotates and warps images, uint8 (height, width, 3)."""
    # Matrices (2, 3) for warp_affine. By default, they map points of the result to points of the image.
    matrix = np.array([[1, 0.2, -3], [0.1, 1, 2]], np.float32)
    move = ops.transforms.translation(offset=[25, 15])
    rotation = ops.transforms.rotation(angle=25.0, center=[150, 100])  # clockwise
    shear = ops.transforms.shear(angles=[10.0, 0.0], center=[150, 100])
    scale = ops.transforms.scale(scale=[0.8, 0.8], center=[150, 100])
    both = ops.transforms.combine(shear, scale)  # first shear, then scale
    return {
        "flip": ops.flip(images, horizontal=1),
        "flip top and bottom": ops.flip(images, horizontal=0, vertical=1),
        "rotate": ops.rotate(images, angle=25, fill_value=114),  # counter-clockwise; the canvas grows
        "rotate, same size": ops.rotate(images, angle=25, keep_size=True, fill_value=114),
        "rotate by 90": ops.rotate(images, angle=90),
        "warp by a matrix": ops.warp_affine(images, matrix=matrix, fill_value=0),
        "warp: move": ops.warp_affine(images, matrix=move, inverse_map=False, fill_value=0),
        "warp: rotate": ops.warp_affine(images, matrix=rotation, inverse_map=False, fill_value=0),
        "warp: shear and scale": ops.warp_affine(images, matrix=both, inverse_map=False, fill_value=0),
    }


def colors(ops, images) -> dict:
    """Changes the colours of images, uint8 (height, width, 3) RGB. For BGR images, convert them first."""
    return {
        "color_twist": ops.color_twist(images, brightness=1.2, contrast=0.8, saturation=1.5, hue=20),
        "brightness": ops.brightness(images, brightness=1.3),  # 0: black, 1: unchanged
        "contrast": ops.contrast(images, contrast=0.5),  # 0: gray of 128, 1: unchanged
        "saturation": ops.saturation(images, saturation=0),  # 0: gray, 1: unchanged
        "hue": ops.hue(images, hue=120),  # degrees
        "hsv": ops.hsv(images, hue=20, saturation=1.5, value=0.9),
        "gray": ops.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY),
        "RGB to BGR": ops.color_space_conversion(images, image_type=types.RGB, output_type=types.BGR),
        "gaussian_blur": ops.gaussian_blur(images, sigma=1.5, window_size=9),
        "JPEG compression": ops.jpeg_compression_distortion(images, quality=10),
    }


def numbers(ops, images) -> dict:
    """Normalises images, uint8 (height, width, 3) RGB, to float32, and changes dtypes and layouts."""
    pad = {"out_of_bounds_policy": "pad", "fill_values": 0}
    return {
        "crop_mirror_normalize": ops.crop_mirror_normalize(
            images,
            crop=[150, 200],
            mirror=1,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            output_layout="HWC",  # the default is CHW
        ),
        "normalize and pad": ops.crop_mirror_normalize(
            images, crop=[500, 700], crop_pos_x=0, crop_pos_y=0, std=[255.0], output_layout="HWC", **pad
        ),
        "normalize to CHW": ops.crop_mirror_normalize(images, std=[255.0], output_layout="CHW"),
        "cast": ops.cast(images, dtype=types.FLOAT),  # to integers, cast rounds
        "transpose to CHW": ops.transpose(images, perm=[2, 0, 1]),
    }


def apply_all(ops, encoded) -> dict:
    """Returns {name: result} of all operators, for the bytes of image files of at least 220 x 260 pixels."""
    decoded = decoders(ops, encoded)
    images = decoded["decode"]
    changed = sizes(ops, images) | geometry(ops, images) | colors(ops, images) | numbers(ops, images)
    return decoded | changed


def draw(encoded: bytes, columns: int = 7, tile: int = 200) -> Image.Image:
    """Draws the results of all operators for one image, with their names."""
    with ndd.EvalMode.sync_cpu:  # an error appears at its operator
        results = apply_all(ndd, ndd.as_batch([np.frombuffer(encoded, np.uint8)]))
    rows = -(-len(results) // columns)
    sheet = Image.new("RGB", (columns * (tile + 8), rows * (tile + 28)), "white")
    for number, (name, result) in enumerate(results.items()):
        picture = Image.fromarray(_picture(np.array(result.tensors[0])))
        picture.thumbnail((tile, tile))
        left, top = number % columns * (tile + 8) + 4, number // columns * (tile + 28)
        ImageDraw.Draw(sheet).text((left, top + 4), name, fill="black", font_size=15)
        sheet.paste(picture, (left, top + 24))
    return sheet


def _picture(image: np.ndarray) -> np.ndarray:
    """Returns uint8 (height, width, 3) of any result; normalised values are stretched to 0..255."""
    if image.shape[0] == 3:  # CHW
        image = image.transpose(1, 2, 0)
    if image.dtype != np.uint8 and image.max() <= 10:
        image = (image - image.min()) * (255 / np.ptp(image))
    return np.broadcast_to(image, (*image.shape[:2], 3)).astype(np.uint8)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws the results of all operators for one image.")
    parser.add_argument("--input", required=True, help="image file, at least 220 x 260 pixels")
    parser.add_argument("--output", default="gallery.png", help="file of the picture")
    arguments = parser.parse_args()
    try:
        with open(arguments.input, "rb") as stream:
            draw(stream.read()).save(arguments.output)
    except (OSError, RuntimeError, ValueError) as error:  # DALI's messages are long
        reason = str(error).split("encountered:")[-1].strip().splitlines()[0]
        raise SystemExit(f"error: {arguments.input}: {reason}") from None
