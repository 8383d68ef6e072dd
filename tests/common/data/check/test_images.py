import os
import pathlib
import socket
import struct
import threading
import zlib
from unittest import mock

import cv2
import numpy as np
import PIL.Image
import pytest
import simplejpeg

from common.data.annotations import CocoImage
from common.data.check import images
from common.data.check.images import ImageFacts, ImagePolicy, check_images, inspect, inspect_files, path_fault
from common.data.check.issues import Issues
from common.files import cache_directory
from tests.common.image_variants import GREY, HEIGHT, RGB, VARIANTS, WIDTH, chunk, opencv, pillow, png, tiff

EVERY_PIXEL = ImagePolicy(decode=True)
JPEG = ImageFacts("JPEG", HEIGHT, WIDTH)
PNG = ImageFacts("PNG", HEIGHT, WIDTH)
DAMAGED = VARIANTS["jpeg"][:-60] + b"\xff\xd9" + bytes(56) + b"\xff\xd9"


# --- checks that decode every pixel: JPEG ---

NOISE = np.random.default_rng(5).integers(0, 256, (96, 128, 3), np.uint8)
NOISY_JPEGS = {
    "baseline": pillow("JPEG", NOISE, quality=90),
    "progressive": pillow("JPEG", NOISE, progressive=True),
    "grey": pillow("JPEG", NOISE, "L"),
    "cmyk": pillow("JPEG", NOISE, "CMYK"),
    "ycck": simplejpeg.encode_jpeg(np.dstack([NOISE, NOISE[..., :1]]), colorspace="CMYK"),
    "restart": opencv(".jpg", NOISE, cv2.IMWRITE_JPEG_RST_INTERVAL, 2),
}
FOREIGN = np.random.default_rng(1).bytes(10_000).replace(b"\xff", b"\xfe")


@pytest.mark.parametrize("piece", [b"\xff\xd9" + bytes(58), bytes(10_000), b"", FOREIGN])
@pytest.mark.parametrize("name", NOISY_JPEGS)
def test_damage_in_the_scan_of_a_jpeg(name, piece):
    sound = NOISY_JPEGS[name]
    assert not inspect(sound, EVERY_PIXEL).fault
    at, size = (sound.index(b"\xff\xda") + 14 + len(sound)) // 2, len(sound) // 4
    damaged = sound[:at] + piece[:size] + sound[at + (len(piece[:size]) or size) :]
    facts = inspect(damaged, EVERY_PIXEL)
    assert facts.fault == "image-damaged" and facts.detail
    assert (facts.height, facts.width) == NOISE.shape[:2]
    # Without decoding, the damage is found only in progressive JPEGs.
    assert not inspect(damaged).fault or name == "progressive"


@pytest.mark.parametrize("name", ["jpeg", "jpeg-cmyk", "jpeg-progressive"])
def test_equal_bytes_between_a_picture_and_its_end_are_no_damage(name):
    body, end = VARIANTS[name][:-2], VARIANTS[name][-2:]
    for padding in (bytes(500), b"\x55" * 3):
        assert not inspect(body + padding + end, EVERY_PIXEL).fault
        assert not inspect(body + padding + end + b"behind it", EVERY_PIXEL).fault
    assert inspect(body + b"other bytes" + end, EVERY_PIXEL).fault == "image-damaged"


def test_what_does_not_touch_the_pixels_is_no_damage():
    jfif = VARIANTS["jpeg"].index(b"JFIF\0") + 5
    assert not inspect(VARIANTS["jpeg"][:jfif] + b"\x09" + VARIANTS["jpeg"][jfif + 1 :], EVERY_PIXEL).fault
    assert not inspect(VARIANTS["jpeg-rgb"].replace(b"JFIF", b"ABCD"), EVERY_PIXEL).fault


# --- checks that decode every pixel: other formats ---


def test_a_flipped_bit_anywhere_in_a_png():
    for name, step in (("png", 1), ("png-interlaced", 37), ("png-palette", 37)):
        for position in range(8, len(VARIANTS[name]), step):
            damaged = bytearray(VARIANTS[name])
            damaged[position] ^= 4
            assert inspect(bytes(damaged), EVERY_PIXEL).fault, (name, position)


BLACK = bytes(HEIGHT * (1 + 3 * WIDTH))  # uncompressed rows of a black PNG, each with a filter byte


def _png_of(data: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def _with_noise(encoded: bytes) -> bytes:
    third = len(encoded) // 3
    return encoded[:third] + np.random.default_rng(2).bytes(third) + encoded[2 * third :]


def _shorter_webp(encoded: bytes) -> bytes:
    """Cuts the image data to half, and sets the new length in the header."""
    data = encoded[20 : 20 + len(encoded) // 2 // 2 * 2]
    header = struct.pack("<4sI8sI", b"RIFF", 12 + len(data), encoded[8:16], len(data))
    return header + data


def _overwritten(encoded: bytes, mark: bytes, offset: int, piece: bytes) -> bytes:
    at = encoded.index(mark) + offset
    return encoded[:at] + piece + encoded[at + len(piece) :]


DAMAGED_INSIDE = {
    "jpeg-4-2": _overwritten(VARIANTS["jpeg-sampled-4-2"], b"\xff\xda", 5, b"\x0f"),
    "jpeg-arithmetic": _overwritten(VARIANTS["jpeg-arithmetic"], b"\xff\xda", 5, b"\x0f"),
    "png": _overwritten(VARIANTS["png"], b"IDAT", 12, b"\0"),
    "png-no-deflate": _png_of(b"no deflate"),
    "png-short": _png_of(zlib.compress(BLACK[:-1])),
    "png-checksum": _png_of(zlib.compress(BLACK)[:-4] + bytes(4)),
    "tiff-lzw": _with_noise(pillow("TIFF", NOISE, compression="tiff_lzw")),
    "tiff-deflate": _with_noise(pillow("TIFF", NOISE, compression="tiff_adobe_deflate")),
    "webp": _shorter_webp(pillow("WEBP", NOISE)),
    "webp-lossless": _shorter_webp(pillow("WEBP", NOISE, lossless=True)),
    "jpeg2000": _overwritten(VARIANTS["jpeg2000"], b"\xff\x52", 4, b"\xff" * 8),
}


@pytest.mark.parametrize("name", DAMAGED_INSIDE)
def test_damage_that_only_decoding_shows(name):
    assert not inspect(_png_of(zlib.compress(BLACK)), EVERY_PIXEL).fault
    assert not inspect(DAMAGED_INSIDE[name]).fault
    facts = inspect(DAMAGED_INSIDE[name], EVERY_PIXEL)
    assert facts.fault == "image-damaged" and facts.detail
    assert {"png": "IDAT", "png-short": "truncated"}.get(name, "") in facts.detail


def test_the_limit_of_pillow_does_not_count(monkeypatch, recwarn):
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 10)
    for name in ("webp", "tiff-lzw", "jpeg2000", "png-grey-16", "jpeg-sampled-4-2"):
        assert not inspect(VARIANTS[name], EVERY_PIXEL).fault
    assert not [warning for warning in recwarn if "bomb" in str(warning.message)]
    assert PIL.Image.MAX_IMAGE_PIXELS == 10


def test_another_size_in_the_data_than_in_the_header_is_not_decoded(monkeypatch):
    real = PIL.Image.Image.height
    monkeypatch.setattr(PIL.Image.Image, "height", property(lambda image: 10_000 * real.fget(image)))
    facts = inspect(VARIANTS["jpeg2000"], EVERY_PIXEL)
    assert facts.fault == "image-damaged" and f"has {WIDTH} x {HEIGHT}" in facts.detail


def test_nothing_above_the_limit_is_decoded(monkeypatch):
    monkeypatch.setattr(images, "_check_pixels", None)
    for name in ("png", "png-grey-16"):
        facts = inspect(VARIANTS[name], ImagePolicy(decode=True, max_megapixels=0.001))
        assert facts.fault == "image-too-large"
        assert facts.detail == f"{WIDTH} x {HEIGHT} pixels are 0.001872 megapixels, the limit is 0.001"


# --- 16-bit images that use only 12 bits ---


def _deep(largest: int) -> dict[str, bytes]:
    grey = (GREY.astype(int) * largest // GREY.max()).astype(np.uint16)
    assert grey.max() == largest
    rgb, alpha = np.dstack([grey // 3, grey // 2, grey]), np.full_like(grey, 65535)
    return {
        "png-grey": pillow("PNG", grey),
        "png-grey-alpha": png(16, 4, [row.astype(">u2").tobytes() for row in np.dstack([grey, alpha])]),
        "png-rgb": opencv(".png", rgb),
        "png-rgba": opencv(".png", np.dstack([rgb, alpha])),
        "tiff-grey": tiff(grey[..., None], 1, bits=16),
        "tiff-grey-big-endian": tiff(grey[..., None], 1, bits=16, order=">"),
        "tiff-rgb": tiff(rgb, 2, bits=16),
    }


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("name", _deep(4095))
def test_12_bit_data_in_16_bits(name, decode):
    for largest in (255, 4095):
        facts = inspect(_deep(largest)[name], ImagePolicy(decode=decode))
        assert facts.fault == "image-12-bit"
        in_color = "rgb" in name or name == "png-grey-alpha"
        assert f"is {'about ' if in_color else ''}{largest} of 65535" in facts.detail
        assert (facts.height, facts.width) == RGB.shape[:2]
    assert not inspect(_deep(4096)[name], ImagePolicy(decode=decode)).fault


def test_an_image_without_light():
    assert not inspect(pillow("PNG", np.zeros((9, 9), np.uint16))).fault
    assert not inspect(tiff(np.zeros((HEIGHT, WIDTH, 1), np.int64), 1, bits=16)).fault
    assert inspect(opencv(".png", np.zeros((9, 9, 3), np.uint16))).fault == "image-12-bit"


def test_16_bit_images_are_decoded_without_being_asked():
    assert inspect(_overwritten(VARIANTS["png-rgb-16"], b"IDAT", 10, bytes(200))).fault == "image-damaged"


# --- which files are opened ---


def opened_name(stream) -> str:
    return os.path.basename(os.readlink(f"/proc/self/fd/{stream.fileno()}"))


@pytest.fixture
def looks(monkeypatch):
    opened = []
    real = images._inspect

    def inspect(stream, *arguments):
        opened.append(opened_name(stream))
        return real(stream, *arguments)

    monkeypatch.setattr(images, "_inspect", inspect)
    return opened


def write(directory: pathlib.Path, **contents: bytes) -> list[str]:
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return list(contents)


def touch(path: pathlib.Path) -> None:
    later = path.stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(later, later))


def faults(*arguments, **options) -> list[str]:
    return [fact.fault for fact in inspect_files(*arguments, **options)]


def test_names_that_leave_the_directory():
    outside = ["/etc/passwd", "..", "../a.jpg", "a/../b.jpg", "a/..", "a\0b.jpg", "a\nb.jpg"]
    assert all(map(path_fault, outside))
    inside = ["a.jpg", "a/b.jpg", "..a.jpg", "a..b/c...jpg", "./a.jpg", "a//b.jpg", "", "caf\udce9"]
    assert not any(map(path_fault, inside))


def test_one_answer_per_name_in_order(tmp_path):
    (tmp_path / "deep/er").mkdir(parents=True)
    write(tmp_path, a=VARIANTS["jpeg"], b=VARIANTS["png"])
    write(tmp_path / "deep", a=VARIANTS["png"])
    write(tmp_path / "deep/er", c=VARIANTS["jpeg-grey"])
    names = ["deep/er/c", "b", "deep/a", "a", "b", "./a", "deep//a", "nothing", "deep/er/nothing", "no/c"]
    missing = ImageFacts(fault="image-missing")
    expected = [JPEG, PNG, PNG, JPEG, PNG, JPEG, PNG, missing, missing, missing]
    for decode in (False, True, False):
        assert inspect_files(tmp_path, names, ImagePolicy(decode=decode)) == expected
    assert inspect_files(tmp_path / "no/such", ["a"]) == [missing]
    assert inspect_files(tmp_path, []) == []


@pytest.mark.parametrize("change", [bytes, lambda sound: sound[:-40], lambda sound: sound + bytes(9000)])
def test_a_file_says_what_the_bytes_say(change, tmp_path):
    contents = {name: change(sound) for name, sound in VARIANTS.items()}
    names = write(tmp_path, **contents)
    assert inspect_files(tmp_path, names) == list(map(inspect, contents.values()))


def test_headers_beyond_what_is_read_at_once(tmp_path):
    long = VARIANTS["jpeg"][:2] + (b"\xff\xe2\xff\xff" + bytes(65533)) * 3 + VARIANTS["jpeg"][2:]
    names = write(tmp_path, whole=long, cut=long[:-300], far=long[:100_000])
    facts = inspect_files(tmp_path, names)
    assert facts[0] == JPEG and [fact.fault for fact in facts[1:]] == ["image-truncated"] * 2
    assert inspect_files(tmp_path, names, EVERY_PIXEL) == facts


def test_what_is_no_regular_file_is_never_opened(tmp_path, looks):
    write(tmp_path, a=VARIANTS["jpeg"])
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    links = {"device": "/dev/zero", "dangling": "nowhere", "circle": "circle", "link": "a", "linked": "."}
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        names = ["pipe", "directory", "device", "socket", "dangling", "a/b", "circle"]
        *facts, circle = inspect_files(tmp_path, names, EVERY_PIXEL)
    assert [(fact.fault, fact.detail) for fact in facts] == [
        *(("image-not-a-file", what) for what in ("a pipe", "a directory", "a device", "a socket")),
        *(("image-missing", what) for what in ("a dangling symbolic link", "")),
    ]
    assert circle.fault == "image-unreadable" and "symbolic links" in circle.detail
    assert looks == []
    assert inspect_files(tmp_path, ["link", "linked/a"]) == [JPEG, JPEG]


def test_a_pipe_that_takes_the_place_of_a_file_does_not_hang(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "a.jpg")
    monkeypatch.setattr(images.stat, "S_ISREG", lambda mode: True)
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (inspect_files(tmp_path, ["a.jpg"]), ended.set()), daemon=True)
    thread.start()
    assert ended.wait(20)


def test_names_that_are_no_text(tmp_path, looks):
    name = os.fsdecode(b"caf\xe9.jpg")
    (tmp_path / name).write_bytes(VARIANTS["jpeg"])
    for _ in range(2):
        assert inspect_files(tmp_path, [name]) == [JPEG]
    assert len(looks) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_without_permission(tmp_path):
    write(tmp_path, a=VARIANTS["jpeg"])
    (tmp_path / "a").chmod(0)
    (fact,) = inspect_files(tmp_path, ["a"])
    assert fact.fault == "image-unreadable" and "denied" in fact.detail
    (tmp_path / "a").chmod(0o600)
    assert inspect_files(tmp_path, ["a"]) == [JPEG]


def test_a_disk_that_fails_is_asked_again(tmp_path, monkeypatch):
    write(tmp_path, a=VARIANTS["jpeg"])
    failed = ImageFacts(fault="image-unreadable", detail="Input/output error")
    with monkeypatch.context() as broken:
        broken.setattr(images, "_inspect", mock.Mock(side_effect=OSError(5, "Input/output error")))
        assert inspect_files(tmp_path, ["a"]) == [failed]
    assert inspect_files(tmp_path, ["a"]) == [JPEG]


# --- the cache of results ---


def test_only_changed_and_new_files_are_looked_at_again(tmp_path, looks):
    names = write(tmp_path, a=VARIANTS["jpeg"], b=VARIANTS["jpeg"], c=VARIANTS["jpeg"])
    assert inspect_files(tmp_path, names) == [JPEG] * 3
    assert sorted(looks) == names
    assert inspect_files(tmp_path, names[::-1]) == [JPEG] * 3
    assert len(looks) == 3
    touch(tmp_path / "b")
    write(tmp_path, d=VARIANTS["png"])
    assert inspect_files(tmp_path, ["d", "b"]) == [PNG, JPEG]
    assert sorted(looks[3:]) == ["b", "d"]
    # The file c is replaced by another file of the same size and modification time.
    before = (tmp_path / "c").stat()
    write(tmp_path, c=bytes(before.st_size))
    os.utime(tmp_path / "c", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert faults(tmp_path, [*names, "d"]) == ["", "", "not-an-image", ""]
    assert looks[5:] == ["c"]


def test_what_decoding_found_answers_later_questions(tmp_path, looks):
    names = write(tmp_path, good=VARIANTS["jpeg"], bad=DAMAGED)
    assert faults(tmp_path, names) == ["", ""]
    assert faults(tmp_path, names, EVERY_PIXEL) == ["", "image-damaged"]
    assert sorted(looks) == ["bad", "bad", "good", "good"]
    for decode in (False, True):
        assert faults(tmp_path, names, ImagePolicy(decode=decode)) == ["", "image-damaged"]
    assert len(looks) == 4
    touch(tmp_path / "bad")
    assert faults(tmp_path, names) == ["", ""]


def test_a_fault_of_the_header_is_final_and_worse_than_the_size(tmp_path, looks):
    names = write(tmp_path, cut=VARIANTS["jpeg"][:-9])
    (fact,) = inspect_files(tmp_path, names, ImagePolicy(max_megapixels=0.001))
    assert fact.fault == "image-truncated" and (fact.height, fact.width) == (HEIGHT, WIDTH)
    assert inspect_files(tmp_path, names, EVERY_PIXEL) == [fact]
    assert looks == names


def test_a_higher_limit_checks_again(tmp_path, looks):
    names = write(tmp_path, a=VARIANTS["jpeg"])
    (fact,) = inspect_files(tmp_path, names, ImagePolicy(max_megapixels=0.001))
    assert fact.fault == "image-too-large" and (fact.height, fact.width) == (HEIGHT, WIDTH)
    assert inspect_files(tmp_path, names, ImagePolicy(max_megapixels=0.001872)) == [JPEG]
    assert faults(tmp_path, names, ImagePolicy(max_megapixels=0.001)) == ["image-too-large"]
    assert len(looks) == 2


def test_what_was_too_large_to_decode_is_decoded_under_a_higher_limit(tmp_path, looks):
    dark = opencv(".png", np.full((HEIGHT, WIDTH, 3), 900, np.uint16))
    names = write(tmp_path, bad=DAMAGED, dark=dark)
    assert faults(tmp_path, names, ImagePolicy(decode=True, max_megapixels=0.001)) == ["image-too-large"] * 2
    assert faults(tmp_path, names) == ["", "image-12-bit"]
    assert faults(tmp_path, names, EVERY_PIXEL) == ["image-damaged", "image-12-bit"]
    assert sorted(looks) == ["bad", "bad", "bad", "dark", "dark"]


def test_a_damaged_memory_or_that_of_other_rules_is_as_good_as_none(tmp_path, looks, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = write(tmp_path, a=VARIANTS["jpeg"])
    inspect_files(tmp_path, names)
    (path,) = cache_directory().iterdir()
    content = path.read_bytes()
    for i, damaged in enumerate((b"", content[:3], content[:-1], content + b"x", bytes(40)), start=2):
        path.write_bytes(damaged)
        assert inspect_files(tmp_path, names) == [JPEG]
        assert len(looks) == i
    monkeypatch.setattr(images, "_VERSION", images._VERSION + 1)
    inspect_files(tmp_path, names)
    assert len(looks) == 7


def test_an_interrupted_look_is_remembered_so_far(tmp_path, looks, monkeypatch):
    names = write(tmp_path, **{f"{i:03d}": VARIANTS["jpeg"] for i in range(200)})
    real = images._inspect

    def interrupted(stream, *arguments):
        if opened_name(stream) == "150":
            raise KeyboardInterrupt
        return real(stream, *arguments)

    with monkeypatch.context() as once, pytest.raises(KeyboardInterrupt):
        once.setattr(images, "_inspect", interrupted)
        inspect_files(tmp_path, names)
    looks.clear()
    assert inspect_files(tmp_path, names) == [JPEG] * 200
    assert 0 < len(looks) < 100


def test_progress_is_shown_when_it_takes_long(tmp_path, monkeypatch, capsys):
    names = write(tmp_path, **{f"{i:03d}": VARIANTS["jpeg"] for i in range(200)})
    monkeypatch.setattr(images, "_SLOW", (200, 199))
    inspect_files(tmp_path, names)
    assert capsys.readouterr().err == ""
    inspect_files(tmp_path, names, EVERY_PIXEL)
    shown = capsys.readouterr()
    assert "Checking images: 4 steps" in shown.err and shown.out == ""


# --- comparison with annotations ---


def check(facts: list[ImageFacts], sizes: list[tuple[int, int]], names: list[str] | None = None):
    """Returns the usable images and the issues."""
    issues = Issues("test")
    names = names or [""] * len(facts)
    annotated = [CocoImage(i, names[i], width, height) for i, (height, width) in enumerate(sizes)]
    usable = check_images(facts, annotated, lambda i: f"image {i + 7}", issues)
    assert usable.dtype == np.bool_ and usable.shape == (len(facts),)
    return usable.tolist(), {issue.kind: issue.offenders for issue in issues}


def test_sound_images_are_nothing_to_speak_of():
    assert check([JPEG, PNG], [(HEIGHT, WIDTH)] * 2, ["a.jpg", "b.png"]) == ([True, True], {})
    assert check([JPEG], [(0, 0)]) == ([True], {})
    assert check([], []) == ([], {})


def test_faults_are_handed_on():
    bad = [ImageFacts(fault="image-empty"), ImageFacts("PNG", 3, 4, 6, "image-truncated", "in the middle")]
    usable, found = check([bad[0], JPEG, bad[1], None], [(1, 1), (HEIGHT, WIDTH), (9, 9), (9, 9)])
    assert usable == [False, True, False, False]
    assert found == {"image-empty": ["image 7"], "image-truncated": ["image 9: in the middle"]}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_images(orientation):
    stored, swapped, other = (
        check([ImageFacts("JPEG", 30, 50, orientation)], [size])[1] for size in ((30, 50), (50, 30), (50, 31))
    )
    turned = {"exif-turn": [f"image 7 has EXIF orientation {orientation}"]}
    assert stored == (turned if orientation > 1 else {})
    assert list(swapped) == ["image-turned" if orientation >= 5 else "image-size-differs"]
    assert list(other) == ["image-size-differs"]


SUFFIXES = [
    ("JPEG", ["a.jpg", "a.JPG", "b/c.jpeg", "a.jpe", "a.jfif", "a.mpo"]),
    ("PNG", ["a.png", "x.y.PNG"]),
    ("TIFF", ["a.tif", "a.tiff"]),
    ("JPEG2000", ["a.jp2", "a.j2k", "a.jpx"]),
    ("WEBP", ["a.webp"]),
    ("BMP", ["a.bmp", "a.dib"]),
]


@pytest.mark.parametrize(("image_format", "fitting"), SUFFIXES)
def test_suffixes(image_format, fitting):
    unknown = ["", "a", "a.data", "a.jpg.bak", "photo.2024", "dir.png/a", "a."]
    unfit = ["a.jpg" if image_format != "JPEG" else "a.png", "b.GIF", "c.heic"]
    names = fitting + unknown + unfit
    usable, found = check([ImageFacts(image_format, 3, 4)] * len(names), [(3, 4)] * len(names), names)
    assert all(usable)
    offenders = [f"image {names.index(name) + 7} is {image_format}" for name in unfit]
    assert found == {"wrong-extension": offenders}


def test_photographs_are_what_pillow_sees(coco128):
    for path in sorted((coco128 / "images").iterdir()):
        fact = inspect(path.read_bytes())
        with PIL.Image.open(path) as image:
            assert (fact.width, fact.height) == image.size
            assert (fact.image_format, fact.orientation) == (image.format, image.getexif().get(0x0112, 1))
