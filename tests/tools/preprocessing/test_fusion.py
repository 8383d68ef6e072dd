import numpy as np
import PIL.Image
import pytest

from common.data.check.images import ImagePolicy
from tests.common.image_variants import VARIANTS
from tests.tools.preprocessing.pictures_on_disk import picture
from tests.tools.preprocessing.reading import opened
from tools.preprocessing import chain
from tools.preprocessing.fusion import fuse
from tools.preprocessing.preprocessor import Preprocessor

# (height, width)
SIZES = ((96, 171), (200, 131), (48, 51), (48, 50), (64, 64), (30, 200), (225, 40), (151, 97))
CHAINS = (
    "resize:short=24 | crop:20x20",
    "resize:short=64 | crop:61x33",
    "resize:short=24,interp=cubic | crop:11x24,x=0.1,y=0.9",
    "resize:short=32,interp=lanczos,antialias=0 | crop:16,x=1,y=0",
    "decode:gray,exif=ignore | resize:short=24 | crop:20x20 | crop_mirror_normalize:mean=100,std=60",
    "decode:bgr | resize:short=40 | crop:31x40 | crop_mirror_normalize:mean=imagenet",
    "resize:short=24 | crop:20x23 | crop_mirror_normalize:mean=9,std=60/61/62 | layout:CHW",
)
ALONE = (
    "",
    "resize:short=24",
    "crop:20x20",
    "resize:short=24 | crop:25x20",
    "resize:short=20..30 | crop:24x24",
    "resize:20x20 | crop:10x10",
    "resize:short=24,interp=nearest | crop:20x20",
    "resize:short=24,max_size=30 | crop:20x20",
    "resize:short=24 | crop:30x30,fill=7",
    "resize:short=24 | crop:20x20,rounding=truncate",
    "resize:short=24 | crop:10..20x20",
    "resize:short=24 | flip | crop:20x20",
    "decode_region:start=1/1,shape=20/20 | resize:short=24 | crop:20x20",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """JPEGs with all subsamplings and EXIF orientations, and all other formats."""
    directory = tmp_path_factory.mktemp("images")
    for seed, size in enumerate(SIZES * 3):
        exif = PIL.Image.Exif()
        exif[0x0112] = 1 + seed % 8
        options = {"quality": 90, "subsampling": seed % 3, "progressive": seed % 2, "exif": exif}
        PIL.Image.fromarray(picture(*size, seed)).save(directory / f"{seed}.jpg", **options)
    for name, content in VARIANTS.items():
        (directory / f"{name}.png").write_bytes(content)
    return opened("files", directory, policy=ImagePolicy("skip"))


def images(source, ops, *, fused, api="pipeline"):
    """Returns float32 images. Normalised values become grey levels."""
    work = Preprocessor(source=source, ops=ops, batch_size=32)
    whole = chain.parse(ops)
    work.chain = fuse(whole) if fused else whole
    assert (work.chain != whole) == fused
    std = 62 if "std" in ops or "imagenet" in ops else 1
    return [sample.image.astype(np.float32) * std for sample in work.samples(api)]


def differences(ones, others):
    assert [one.shape for one in ones] == [other.shape for other in others]
    return [np.abs(one - other) for one, other in zip(ones, others, strict=True)]


@pytest.mark.parametrize("ops", CHAINS)
def test_pixels_are_those_of_the_steps(source, ops):
    assert source.size > 75
    found = images(source, ops, fused=True)
    off = differences(images(source, ops, fused=False), found)
    assert max(each.max() for each in off) < 1.1
    assert np.mean([(each > 6e-3).mean() for each in off]) < 0.02
    if ops in (CHAINS[0], CHAINS[4]):
        dynamic = images(source, ops, fused=True, api="dynamic")
        assert max(each.max() for each in differences(found, dynamic)) < 0.01


@pytest.mark.parametrize("ops", ALONE)
def test_what_cannot_be_fused_stays(ops):
    parsed = chain.parse(ops)
    assert fuse(parsed) is parsed


def test_a_preprocessor_decodes_only_a_part(source):
    ops = "resize:short=24 | crop:20x20 | crop_mirror_normalize:mean=imagenet"
    operators = " ".join(operator.name for operator in Preprocessor(source=source, ops=ops).pipeline._ops)
    assert "__ImageSlice_" in operators and "__Resize_" in operators
    assert "__Image_" not in operators and "__Crop_" not in operators, operators


def test_a_random_window_is_anywhere_and_as_large_as_asked(tmp_path):
    """Two channels of the picture are the row and the column of each pixel."""
    y, x = np.mgrid[0:120, 0:240]
    ramp = np.stack([y * 2, x, 0 * x], axis=-1).astype(np.uint8)
    PIL.Image.fromarray(ramp).save(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text("a.png\n" * 64)
    source = opened("list", tmp_path / "list.txt")
    found = np.stack(images(source, "resize:short=30..60 | crop:30x30,x=0.2..0.6,y=0..1", fused=True))
    tops, lefts = found[:, 0, :, 0].mean(axis=-1) / 2, found[:, :, 0, 1].mean(axis=-1)
    spans = found[:, :, -1, 1].mean(axis=-1) - lefts
    assert 58 - 2 < spans.min() < 68 and 106 < spans.max() < 116 + 2
    share = lefts / (240 - spans * 30 / 29)
    assert 0.18 < share.min() < 0.25 and 0.55 < share.max() < 0.62
    narrow = spans < 75
    assert tops[narrow].min() < 15 and tops[narrow].max() > 35
