"""Images in memory and in files: damage that decoding shows, files that are opened, and the cache."""

import os
import pathlib
import socket
import struct
import threading
import zlib
from unittest import mock

import cv2
import msgspec
import numpy as np
import PIL.Image
import pytest
import simplejpeg

from common.data.annotations import CocoImage
from common.data.check import image_cache, images
from common.data.check.images import (
    ImageFacts,
    ImagePolicy,
    check_files,
    check_images,
    files_to_check,
    inspect,
    path_fault,
    state_of_files,
)
from common.data.check.issues import Issues
from common.files import cache_directory
from tests.common.image_variants import GREY, HEIGHT, RGB, VARIANTS, WIDTH, chunk, opencv, pillow, png, tiff


def inspect_files(*arguments, **options):
    """Returns the facts about files without their checksums, which have their own test."""
    facts = images.inspect_files(*arguments, **options)
    return [msgspec.structs.replace(fact, checksum=0) for fact in facts]


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


PIECES = {
    "early end": b"\xff\xd9" + bytes(58),
    "zeros": bytes(10_000),
    "missing bytes": b"",
    "noise": FOREIGN,
}


@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("name", NOISY_JPEGS)
def test_damage_in_the_scan_of_a_jpeg_is_reported_when_decoded(name, piece):
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
def test_padding_of_equal_bytes_before_the_end_of_a_jpeg_is_no_damage(name):
    body, end = VARIANTS[name][:-2], VARIANTS[name][-2:]
    for padding in (bytes(500), b"\x55" * 3):
        assert not inspect(body + padding + end, EVERY_PIXEL).fault
        assert not inspect(body + padding + end + b"behind it", EVERY_PIXEL).fault
    assert inspect(body + b"other bytes" + end, EVERY_PIXEL).fault == "image-damaged"


def test_jpeg_with_unknown_jfif_version_or_application_segment_is_not_damaged():
    jfif = VARIANTS["jpeg"].index(b"JFIF\0") + 5
    assert not inspect(VARIANTS["jpeg"][:jfif] + b"\x09" + VARIANTS["jpeg"][jfif + 1 :], EVERY_PIXEL).fault
    assert not inspect(VARIANTS["jpeg-rgb"].replace(b"JFIF", b"ABCD"), EVERY_PIXEL).fault


# --- checks that decode every pixel: other formats ---


def test_flipped_bit_anywhere_in_a_png_is_reported():
    for name, step in (("png", 1), ("png-interlaced", 37), ("png-palette", 37)):
        for position in range(8, len(VARIANTS[name]), step):
            damaged = bytearray(VARIANTS[name])
            damaged[position] ^= 4
            assert inspect(bytes(damaged), EVERY_PIXEL).fault, (name, position)


BLACK = bytes(HEIGHT * (1 + 3 * WIDTH))  # uncompressed rows of a black PNG, each with a filter byte


def png_of(data: bytes) -> bytes:
    """Returns a PNG whose compressed pixels are `data`."""
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def with_noise(encoded: bytes) -> bytes:
    third = len(encoded) // 3
    return encoded[:third] + np.random.default_rng(2).bytes(third) + encoded[2 * third :]


def shorter_webp(encoded: bytes) -> bytes:
    """Cuts the image data to half, and sets the new length in the header."""
    data = encoded[20 : 20 + len(encoded) // 2 // 2 * 2]
    header = struct.pack("<4sI8sI", b"RIFF", 12 + len(data), encoded[8:16], len(data))
    return header + data


def overwritten(encoded: bytes, mark: bytes, offset: int, piece: bytes) -> bytes:
    at = encoded.index(mark) + offset
    return encoded[:at] + piece + encoded[at + len(piece) :]


DAMAGED_INSIDE = {
    "jpeg-4-2": overwritten(VARIANTS["jpeg-sampled-4-2"], b"\xff\xda", 5, b"\x0f"),
    "jpeg-arithmetic": overwritten(VARIANTS["jpeg-arithmetic"], b"\xff\xda", 5, b"\x0f"),
    "png": overwritten(VARIANTS["png"], b"IDAT", 12, b"\0"),
    "png-no-deflate": png_of(b"no deflate"),
    "png-short": png_of(zlib.compress(BLACK[:-1])),
    "png-checksum": png_of(zlib.compress(BLACK)[:-4] + bytes(4)),
    "tiff-lzw": with_noise(pillow("TIFF", NOISE, compression="tiff_lzw")),
    "tiff-deflate": with_noise(pillow("TIFF", NOISE, compression="tiff_adobe_deflate")),
    "webp": shorter_webp(pillow("WEBP", NOISE)),
    "webp-lossless": shorter_webp(pillow("WEBP", NOISE, lossless=True)),
    "jpeg2000": overwritten(VARIANTS["jpeg2000"], b"\xff\x52", 4, b"\xff" * 8),
}


def test_png_with_valid_compressed_pixels_is_not_reported():
    assert not inspect(png_of(zlib.compress(BLACK)), EVERY_PIXEL).fault


@pytest.mark.parametrize("name", DAMAGED_INSIDE)
def test_damage_behind_a_valid_image_header_is_reported_only_if_every_pixel_is_decoded(name):
    assert not inspect(DAMAGED_INSIDE[name]).fault
    facts = inspect(DAMAGED_INSIDE[name], EVERY_PIXEL)
    assert facts.fault == "image-damaged" and facts.detail
    assert {"png": "IDAT", "png-short": "truncated"}.get(name, "") in facts.detail


def test_images_above_the_pixel_limit_of_pillow_are_decoded_without_a_warning(monkeypatch, recwarn):
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 10)
    for name in ("webp", "tiff-lzw", "jpeg2000", "png-grey-16", "jpeg-sampled-4-2"):
        assert not inspect(VARIANTS[name], EVERY_PIXEL).fault
    assert not [warning for warning in recwarn if "bomb" in str(warning.message)]
    assert PIL.Image.MAX_IMAGE_PIXELS == 10


def test_image_with_another_size_in_its_data_than_in_its_header_is_damaged(monkeypatch):
    real = PIL.Image.Image.__dict__["height"]
    monkeypatch.setattr(PIL.Image.Image, "height", property(lambda image: 10_000 * real.fget(image)))
    facts = inspect(VARIANTS["jpeg2000"], EVERY_PIXEL)
    assert facts.fault == "image-damaged" and f"has {WIDTH} x {HEIGHT}" in facts.detail


def test_image_above_max_megapixels_is_reported_and_not_decoded(monkeypatch):
    monkeypatch.setattr(images, "_check_pixels", None)
    for name in ("png", "png-grey-16"):
        facts = inspect(VARIANTS[name], ImagePolicy(decode=True, max_megapixels=0.001))
        assert facts.fault == "image-too-large"
        assert facts.detail == f"{WIDTH} x {HEIGHT} pixels are 0.001872 megapixels, the limit is 0.001"


# --- 16-bit images that use only 12 bits ---


def deep_images(largest: int) -> dict[str, bytes]:
    """Returns 16-bit images whose largest value is `largest`."""
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


@pytest.mark.parametrize("decode", [False, True], ids=["header", "every pixel"])
@pytest.mark.parametrize("name", deep_images(4095))
def test_16_bit_image_with_values_below_4096_is_reported_as_12_bit(name, decode):
    for largest in (255, 4095):
        facts = inspect(deep_images(largest)[name], ImagePolicy(decode=decode))
        assert facts.fault == "image-12-bit"
        in_color = "rgb" in name or name == "png-grey-alpha"
        assert f"is {'about ' if in_color else ''}{largest} of 65535" in facts.detail
        assert (facts.height, facts.width) == RGB.shape[:2]
    assert not inspect(deep_images(4096)[name], ImagePolicy(decode=decode)).fault


def test_all_black_16_bit_image_is_not_reported_as_12_bit_if_its_values_are_known_exactly():
    assert not inspect(pillow("PNG", np.zeros((9, 9), np.uint16))).fault
    assert not inspect(tiff(np.zeros((HEIGHT, WIDTH, 1), np.int64), 1, bits=16)).fault
    assert inspect(opencv(".png", np.zeros((9, 9, 3), np.uint16))).fault == "image-12-bit"


def test_damaged_16_bit_png_is_reported_even_if_the_policy_does_not_decode_every_pixel():
    assert inspect(overwritten(VARIANTS["png-rgb-16"], b"IDAT", 10, bytes(200))).fault == "image-damaged"


# --- which files are opened ---


def name_of(stream) -> str:
    return os.path.basename(os.readlink(f"/proc/self/fd/{stream.fileno()}"))


@pytest.fixture
def inspected(monkeypatch):
    """The names of the files that are read, as they are read."""
    names = []
    real = images._inspect

    def inspect(stream, *arguments):
        names.append(name_of(stream))
        return real(stream, *arguments)

    monkeypatch.setattr(images, "_inspect", inspect)
    return names


def write(directory: pathlib.Path, **contents: bytes) -> list[str]:
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return list(contents)


def touch(path: pathlib.Path) -> None:
    later = path.stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(later, later))


def faults(*arguments, **options) -> list[str]:
    return [fact.fault for fact in inspect_files(*arguments, **options)]


def test_image_path_that_leaves_the_directory_or_has_nul_or_newline_is_reported():
    outside = ["/etc/passwd", "..", "../a.jpg", "a/../b.jpg", "a/..", "a\0b.jpg", "a\nb.jpg"]
    assert all(map(path_fault, outside))
    inside = ["a.jpg", "a/b.jpg", "..a.jpg", "a..b/c...jpg", "./a.jpg", "a//b.jpg", "", "caf\udce9"]
    assert not any(map(path_fault, inside))


def test_inspecting_image_files_in_nested_directories_gives_one_result_per_name_in_order(tmp_path):
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


CHANGES = {
    "zeros": bytes,
    "truncated": lambda encoded: encoded[:-40],
    "longer": lambda encoded: encoded + bytes(9000),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_inspecting_an_image_file_gives_the_same_result_as_inspecting_its_bytes_in_memory(change, tmp_path):
    contents = {name: change(encoded) for name, encoded in VARIANTS.items()}
    names = write(tmp_path, **contents)
    assert inspect_files(tmp_path, names) == list(map(inspect, contents.values()))


def test_jpeg_file_with_a_header_longer_than_the_first_read_is_inspected(tmp_path):
    encoded = VARIANTS["jpeg"][:2] + (b"\xff\xe2\xff\xff" + bytes(65533)) * 3 + VARIANTS["jpeg"][2:]
    names = write(tmp_path, sound=encoded, cut=encoded[:-300], far=encoded[:100_000])
    facts = inspect_files(tmp_path, names)
    assert facts[0] == JPEG and [fact.fault for fact in facts[1:]] == ["image-truncated"] * 2
    assert inspect_files(tmp_path, names, EVERY_PIXEL) == facts


def test_pipe_directory_device_socket_and_broken_link_as_image_files_are_reported_and_not_opened(
    tmp_path, inspected
):
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
    assert inspected == []
    assert inspect_files(tmp_path, ["link", "linked/a"]) == [JPEG, JPEG]


def test_pipe_that_replaces_an_image_file_after_its_type_was_checked_does_not_block(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "a.jpg")
    monkeypatch.setattr(images.stat, "S_ISREG", lambda mode: True)
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (inspect_files(tmp_path, ["a.jpg"]), ended.set()), daemon=True)
    thread.start()
    assert ended.wait(20)


def test_image_file_with_a_name_that_is_not_utf_8_is_inspected_and_cached(tmp_path, inspected):
    name = os.fsdecode(b"caf\xe9.jpg")
    (tmp_path / name).write_bytes(VARIANTS["jpeg"])
    for _ in range(2):
        assert inspect_files(tmp_path, [name]) == [JPEG]
    assert len(inspected) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_image_file_without_read_permission_is_reported_and_inspected_once_permitted(tmp_path):
    write(tmp_path, a=VARIANTS["jpeg"])
    (tmp_path / "a").chmod(0)
    (fact,) = inspect_files(tmp_path, ["a"])
    assert fact.fault == "image-unreadable" and "denied" in fact.detail
    (tmp_path / "a").chmod(0o600)
    assert inspect_files(tmp_path, ["a"]) == [JPEG]


def test_input_output_error_of_an_image_file_is_reported_and_not_cached(tmp_path, monkeypatch):
    write(tmp_path, a=VARIANTS["jpeg"])
    failed = ImageFacts(fault="image-unreadable", detail="Input/output error")
    with monkeypatch.context() as broken:
        broken.setattr(images, "_inspect", mock.Mock(side_effect=OSError(5, "Input/output error")))
        assert inspect_files(tmp_path, ["a"]) == [failed]
    assert inspect_files(tmp_path, ["a"]) == [JPEG]


# --- the cache of results ---


def test_only_new_and_changed_image_files_are_read_again(tmp_path, inspected):
    names = write(tmp_path, a=VARIANTS["jpeg"], b=VARIANTS["jpeg"], c=VARIANTS["jpeg"])
    assert inspect_files(tmp_path, names) == [JPEG] * 3
    assert sorted(inspected) == names
    assert inspect_files(tmp_path, names[::-1]) == [JPEG] * 3
    assert len(inspected) == 3
    touch(tmp_path / "b")
    write(tmp_path, d=VARIANTS["png"])
    assert inspect_files(tmp_path, ["d", "b"]) == [PNG, JPEG]
    assert sorted(inspected[3:]) == ["b", "d"]
    # The file c is replaced by another file of the same size and modification time.
    before = (tmp_path / "c").stat()
    write(tmp_path, c=bytes(before.st_size))
    os.utime(tmp_path / "c", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert faults(tmp_path, [*names, "d"]) == ["", "", "not-an-image", ""]
    assert inspected[5:] == ["c"]


def test_cached_result_of_decoding_an_image_is_used_by_checks_with_and_without_decoding(tmp_path, inspected):
    names = write(tmp_path, good=VARIANTS["jpeg"], bad=DAMAGED)
    assert faults(tmp_path, names) == ["", ""]
    assert faults(tmp_path, names, EVERY_PIXEL) == ["", "image-damaged"]
    assert sorted(inspected) == ["bad", "bad", "good", "good"]
    for decode in (False, True):
        assert faults(tmp_path, names, ImagePolicy(decode=decode)) == ["", "image-damaged"]
    assert len(inspected) == 4
    touch(tmp_path / "bad")
    assert faults(tmp_path, names) == ["", ""]


def test_cached_header_fault_is_reported_without_reading_again_and_before_too_many_megapixels(
    tmp_path, inspected
):
    names = write(tmp_path, cut=VARIANTS["jpeg"][:-9])
    (fact,) = inspect_files(tmp_path, names, ImagePolicy(max_megapixels=0.001))
    assert fact.fault == "image-truncated" and (fact.height, fact.width) == (HEIGHT, WIDTH)
    assert inspect_files(tmp_path, names, EVERY_PIXEL) == [fact]
    assert inspected == names


def test_image_file_above_max_megapixels_is_read_again_under_a_higher_limit(tmp_path, inspected):
    names = write(tmp_path, a=VARIANTS["jpeg"])
    (fact,) = inspect_files(tmp_path, names, ImagePolicy(max_megapixels=0.001))
    assert fact.fault == "image-too-large" and (fact.height, fact.width) == (HEIGHT, WIDTH)
    assert inspect_files(tmp_path, names, ImagePolicy(max_megapixels=0.001872)) == [JPEG]
    assert faults(tmp_path, names, ImagePolicy(max_megapixels=0.001)) == ["image-too-large"]
    assert len(inspected) == 2


def test_image_file_that_was_too_large_to_decode_is_decoded_under_a_higher_limit(tmp_path, inspected):
    dark = opencv(".png", np.full((HEIGHT, WIDTH, 3), 900, np.uint16))
    names = write(tmp_path, bad=DAMAGED, dark=dark)
    assert faults(tmp_path, names, ImagePolicy(decode=True, max_megapixels=0.001)) == ["image-too-large"] * 2
    assert faults(tmp_path, names) == ["", "image-12-bit"]
    assert faults(tmp_path, names, EVERY_PIXEL) == ["image-damaged", "image-12-bit"]
    assert sorted(inspected) == ["bad", "bad", "bad", "dark", "dark"]


def test_damaged_image_check_cache_and_that_of_another_version_are_ignored(tmp_path, inspected, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = write(tmp_path, a=VARIANTS["jpeg"])
    inspect_files(tmp_path, names)
    (path,) = cache_directory().iterdir()
    content = path.read_bytes()
    for i, damaged in enumerate((b"", content[:3], content[:-1], content + b"x", bytes(40)), start=2):
        path.write_bytes(damaged)
        assert inspect_files(tmp_path, names) == [JPEG]
        assert len(inspected) == i
    monkeypatch.setattr(image_cache, "_VERSION", image_cache._VERSION + 1)
    inspect_files(tmp_path, names)
    assert len(inspected) == 7


def test_results_of_image_checks_before_an_interrupt_are_cached(tmp_path, inspected, monkeypatch):
    names = write(tmp_path, **{f"{i:03d}": VARIANTS["jpeg"] for i in range(200)})
    real = images._inspect

    def interrupted(stream, *arguments):
        if name_of(stream) == "150":
            raise KeyboardInterrupt
        return real(stream, *arguments)

    with monkeypatch.context() as once, pytest.raises(KeyboardInterrupt):
        once.setattr(images, "_inspect", interrupted)
        inspect_files(tmp_path, names)
    inspected.clear()
    assert inspect_files(tmp_path, names) == [JPEG] * 200
    assert 0 < len(inspected) < 100


def test_killed_image_check_resumes_after_its_last_saved_part(tmp_path, inspected, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(images, "_PART", 64)
    names = write(tmp_path, **{f"{i:03d}": VARIANTS["jpeg"] for i in range(300)}, first=VARIANTS["jpeg"][:-9])
    inspect_files(tmp_path, names[-1:])
    real = images._inspect

    def killed(stream, *arguments):
        if name_of(stream) == "200":
            raise KeyboardInterrupt
        return real(stream, *arguments)

    with monkeypatch.context() as once, pytest.raises(KeyboardInterrupt):
        once.setattr(images, "_inspect", killed)
        once.setattr(images.ImageCache, "save", lambda *_: None)  # a killed process does not come so far
        inspect_files(tmp_path, names)
    assert len(list(cache_directory().iterdir())) > 2
    inspected.clear()
    facts = inspect_files(tmp_path, names)
    assert facts[:-1] == [JPEG] * 300 and facts[-1].fault == "image-truncated"
    assert 0 < len(inspected) <= 172 and "200" in inspected and "first" not in inspected
    assert len(list(cache_directory().iterdir())) == 1
    inspected.clear()
    assert inspect_files(tmp_path, names) == facts and inspected == []


def test_image_check_shows_a_progress_bar_only_for_more_images_than_its_limit(tmp_path, monkeypatch, capsys):
    names = write(tmp_path, **{f"{i:03d}": VARIANTS["jpeg"] for i in range(200)})
    monkeypatch.setattr(images, "_SLOW", (200, 199))
    inspect_files(tmp_path, names)
    assert capsys.readouterr().err == ""
    inspect_files(tmp_path, names, EVERY_PIXEL)
    output = capsys.readouterr()
    assert "Checking images: 4 steps" in output.err and output.out == ""


# --- the choice of files to check ---


def test_sample_of_files_to_check_is_drawn_once_and_the_same_each_time(monkeypatch):
    names = [f"{i:06}" for i in range(20_000)]
    sample = files_to_check([*names, *names], ImagePolicy(check="sample"))
    assert len(set(sample)) == len(sample) == images.SAMPLE == 5_000
    assert sample == sorted(sample) and set(sample) < set(names)
    assert sample == files_to_check(names, ImagePolicy(check="sample"))
    rows = np.array(sample, np.int64)
    assert np.histogram(rows, 10, (0, 20_000))[0] == pytest.approx(500, abs=100)
    assert files_to_check(["a", "b", "a"], ImagePolicy(check="sample")) == ["a", "b"]
    assert files_to_check([*names, *names], ImagePolicy()) == names
    assert files_to_check(names, ImagePolicy(check="none")) == []


@pytest.mark.parametrize(("check", "num_checked"), [("all", 9), ("sample", 4), ("none", 0)])
def test_images_that_are_not_checked_are_used_and_reported(
    tmp_path, inspected, monkeypatch, check, num_checked
):
    monkeypatch.setattr(images, "SAMPLE", 4)
    names = write(tmp_path, **{str(i): VARIANTS["jpeg"] for i in range(9)})
    issues = Issues("", ImagePolicy(on_bad_image="skip", check=check))
    shown = [CocoImage(row, name, WIDTH, HEIGHT) for row, name in enumerate([*names, "0", "../x", ""])]
    usable, facts, _ = check_files(tmp_path, shown, lambda row: f"image {row}", issues)
    assert len(inspected) == num_checked
    assert usable.tolist() == [True] * 10 + [False] * 2
    checked = {shown[row].file_name for row, fact in enumerate(facts) if fact.image_format}
    assert checked == set(inspected)
    unchecked = [f"image {row}" for row in range(10) if shown[row].file_name not in inspected]
    assert issues["image-unchecked"].offenders == unchecked
    assert issues["path-leaves-directory"].count == 1


def test_state_of_files_depends_only_on_the_files_that_are_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "SAMPLE", 4)
    names = write(tmp_path, **{str(i): VARIANTS["jpeg"] for i in range(9)})
    sample = files_to_check(names, ImagePolicy(check="sample"))
    policies = [ImagePolicy(check=check) for check in ("all", "sample", "none")]
    before = [state_of_files(tmp_path, names, policy) for policy in policies]
    (tmp_path / next(name for name in names if name not in sample)).unlink()
    after = [state_of_files(tmp_path, names, policy) for policy in policies]
    assert [was == now for was, now in zip(before, after, strict=True)] == [False, True, True]


# --- comparison with annotations ---


def compare(facts: list[ImageFacts], sizes: list[tuple[int, int]], names: list[str] | None = None):
    """Returns the usable images and the issues."""
    issues = Issues("test")
    names = names or [""] * len(facts)
    annotated = [CocoImage(i, names[i], width, height) for i, (height, width) in enumerate(sizes)]
    usable = check_images(facts, annotated, lambda i: f"image {i + 7}", issues)
    assert usable.dtype == np.bool_ and usable.shape == (len(facts),)
    return usable.tolist(), {issue.kind: issue.offenders for issue in issues}


RENAME = ": rename one of the two"
MISSING = [
    ("a.jpg", "A.JPG", f"'A.JPG' exists, in other upper and lower case{RENAME}"),
    ("gr\u00fcn.jpg", "gru\u0308n.jpg", f"'gru\u0308n.jpg' exists, in another Unicode normal form{RENAME}"),
    ("GR\u00dcN.jpg", "gru\u0308n.JPG", f"'gru\u0308n.JPG' exists, in other upper and lower case{RENAME}"),
    ("a.jpg", "images/a.jpg", "'images/a.jpg' exists"),
    ("images/a.jpg", "a.jpg", "'a.jpg' exists"),
    ("Sub/a.jpg", "sub/a.jpg", f"'sub/a.jpg' exists, in other upper and lower case{RENAME}"),
    ("a.jpg", "a.png", "'a.png' exists, with another extension: correct the name"),
    ("sub/a.jpg", "sub/A.JPEG", "'sub/A.JPEG' exists, with another extension: correct the name"),
    ("C:\\photos\\a.jpg", "a.jpg", "'a.jpg' exists: name it with /, relative to the image directory"),
    ("sub\\a.jpg", "sub/a.jpg", "'sub/a.jpg' exists: name it with /, relative to the image directory"),
    ("a.jpg", "a.txt", None),
    ("a.jpg", "sub/a.png", None),
]


@pytest.mark.parametrize(
    ("name", "file", "detail"), MISSING, ids=[f"{name} {file}" for name, file, _ in MISSING]
)
def test_missing_image_names_the_file_of_another_case_folder_or_extension(tmp_path, name, file, detail):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(VARIANTS["jpeg"])
    issues = Issues("x")
    usable, *_ = check_files(tmp_path, [CocoImage(1, name, 9, 9)], lambda _: "image 1", issues)
    assert not usable.any()
    assert issues["image-missing"].offenders == [f"image 1: {detail}" if detail else "image 1"]


def test_file_of_a_similar_name_in_the_same_folder_precedes_those_in_other_folders(tmp_path):
    for file in ("0/a.jpg", "sub/A.jpg"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_bytes(VARIANTS["jpeg"])
    issues = Issues("x")
    check_files(tmp_path, [CocoImage(1, "sub/a.jpg", 9, 9)], lambda _: "image 1", issues)
    assert issues["image-missing"].offenders[0].startswith("image 1: 'sub/A.jpg' exists")


def test_checksums_of_files_are_equal_only_for_equal_sizes_and_ends(tmp_path):
    content = bytearray(VARIANTS["bmp"].ljust(20_000, b"x"))
    contents = {"a": bytes(content), "b": bytes(content), "longer": bytes(content) + b"x"}
    for name, place in (("head", 60), ("tail", -1)):
        contents[name] = bytes(content)
        contents[name] = contents[name][:place] + b"y" + contents[name][place:][1:]
    facts = images.inspect_files(tmp_path, write(tmp_path, **contents))
    checksums = dict(zip(contents, (fact.checksum for fact in facts), strict=True))
    assert checksums["a"] == checksums["b"] > 0
    assert len(set(checksums.values())) == 4
    cached = images.inspect_files(tmp_path, list(contents))
    assert [fact.checksum for fact in cached] == list(checksums.values())


def test_valid_images_that_agree_with_their_annotations_give_no_issue():
    assert compare([JPEG, PNG], [(HEIGHT, WIDTH)] * 2, ["a.jpg", "b.png"]) == ([True, True], {})
    assert compare([JPEG], [(0, 0)]) == ([True], {})
    assert compare([], []) == ([], {})


def test_images_with_a_fault_or_without_an_inspection_result_are_marked_unusable():
    facts = [
        ImageFacts(fault="image-empty"),
        JPEG,
        ImageFacts("PNG", 3, 4, 6, "image-truncated", "in it"),
        None,
    ]
    usable, offenders = compare(facts, [(1, 1), (HEIGHT, WIDTH), (9, 9), (9, 9)])
    assert usable == [False, True, False, False]
    assert offenders == {"image-empty": ["image 7"], "image-truncated": ["image 9: in it"]}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_swapped_image_sides_in_annotations_are_blamed_on_exif_only_for_orientations_5_to_8(orientation):
    facts = [ImageFacts("JPEG", 30, 50, orientation)]
    stored, swapped, different = (compare(facts, [size])[1] for size in ((30, 50), (50, 30), (50, 31)))
    turned = {"exif-turn": [f"image 7 has EXIF orientation {orientation}"]}
    assert stored == (turned if orientation > 1 else {})
    assert list(swapped) == ["image-turned" if orientation >= 5 else "image-size-differs"]
    assert list(different) == ["image-size-differs"]


SUFFIXES = [
    ("JPEG", ["a.jpg", "a.JPG", "b/c.jpeg", "a.jpe", "a.jfif", "a.mpo"]),
    ("PNG", ["a.png", "x.y.PNG"]),
    ("TIFF", ["a.tif", "a.tiff"]),
    ("JPEG2000", ["a.jp2", "a.j2k", "a.jpx"]),
    ("WEBP", ["a.webp"]),
    ("BMP", ["a.bmp", "a.dib"]),
]


@pytest.mark.parametrize(("image_format", "fitting"), SUFFIXES)
def test_file_suffix_of_another_image_format_is_reported_and_unknown_suffixes_are_not(image_format, fitting):
    unknown = ["", "a", "a.data", "a.jpg.bak", "photo.2024", "dir.png/a", "a."]
    unfit = ["a.jpg" if image_format != "JPEG" else "a.png", "b.GIF", "c.heic"]
    names = fitting + unknown + unfit
    usable, issues = compare([ImageFacts(image_format, 3, 4)] * len(names), [(3, 4)] * len(names), names)
    assert all(usable)
    offenders = [f"image {names.index(name) + 7} is {image_format}" for name in unfit]
    assert issues == {"wrong-extension": offenders}


def test_format_size_and_orientation_of_photographs_equal_those_of_pillow(coco128):
    for path in sorted((coco128 / "images").iterdir()):
        fact = inspect(path.read_bytes())
        with PIL.Image.open(path) as image:
            assert (fact.width, fact.height) == image.size
            assert (fact.image_format, fact.orientation) == (image.format, image.getexif().get(0x0112, 1))
