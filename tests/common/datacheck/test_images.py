"""Image files: what is looked at, what is remembered, and what is said to annotations."""

import io
import os
import pathlib
import socket
import threading

import numpy as np
import PIL.Image
import pytest

from common.annotations import CocoImage
from common.datacheck import images
from common.datacheck.coco import load_coco
from common.datacheck.images import ImageFacts, check_images, inspect, inspect_files, path_fault
from common.datacheck.issues import Issues
from common.files import cache_directory
from tests.common.image_variants import HEIGHT, JPEGS, VARIANTS, WIDTH, opencv, pillow

JPEG = ImageFacts("JPEG", HEIGHT, WIDTH)
PNG = ImageFacts("PNG", HEIGHT, WIDTH)
DAMAGED = JPEGS["jpeg"][:-60] + b"\xff\xd9" + bytes(56) + b"\xff\xd9"  # shows in decoding only


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("xdg")))


def opened_path(stream) -> str:
    return os.readlink(f"/proc/self/fd/{stream.fileno()}")


@pytest.fixture
def looks(monkeypatch):
    """The names of the files that were opened, in no particular order."""
    opened = []
    real = images._inspect

    def inspect(stream, *arguments):
        opened.append(os.path.basename(opened_path(stream)))
        return real(stream, *arguments)

    monkeypatch.setattr(images, "_inspect", inspect)
    return opened


def write(directory: pathlib.Path, **images: bytes) -> list[str]:
    for name, content in images.items():
        (directory / name).write_bytes(content)
    return list(images)


def touch(path: pathlib.Path) -> None:
    later = path.stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(later, later))


# --- names ---


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "..", "../a.jpg", "a/../b.jpg", "a/..", "a\0b.jpg", "a\nb.jpg"]
)
def test_names_that_leave_the_directory(name):
    assert path_fault(name)


@pytest.mark.parametrize(
    "name", ["a.jpg", "a/b.jpg", "..a.jpg", "a..b/c...jpg", "./a.jpg", "a//b.jpg", "", "caf\udce9"]
)
def test_names_that_do_not(name):
    assert not path_fault(name)


# --- files ---


def test_one_answer_per_name_in_order(tmp_path):
    (tmp_path / "deep/er").mkdir(parents=True)
    write(tmp_path, a=JPEGS["jpeg"], b=VARIANTS["png"])
    write(tmp_path / "deep", a=VARIANTS["png"])
    write(tmp_path / "deep/er", c=JPEGS["jpeg-grey"])
    names = [
        "deep/er/c",
        "b",
        "deep/a",
        "a",
        "b",
        "./a",
        "deep//a",
        "nothing",
        "deep/er/nothing",
        "deep/nowhere/c",
    ]
    missing = ImageFacts(fault="image-missing")
    expected = [JPEG, PNG, PNG, JPEG, PNG, JPEG, PNG, missing, missing, missing]
    for decode in (False, True, False):
        assert inspect_files(tmp_path, names, decode=decode) == expected
    assert inspect_files(tmp_path / "no/such", ["a"]) == [missing]
    assert inspect_files(tmp_path, []) == []


@pytest.mark.parametrize("name", VARIANTS)
def test_a_file_says_what_the_bytes_say(name, tmp_path):
    encoded = VARIANTS[name]
    names = write(tmp_path, whole=encoded, cut=encoded[:-40], more=encoded + bytes(9000))
    assert inspect_files(tmp_path, names) == [inspect((tmp_path / name).read_bytes()) for name in names]


def test_headers_beyond_what_is_read_at_once(tmp_path):
    long = JPEGS["jpeg"][:2] + (b"\xff\xe2\xff\xff" + bytes(65533)) * 3 + JPEGS["jpeg"][2:]
    names = write(tmp_path, whole=long, cut=long[:-300], far=long[:100_000])
    facts = inspect_files(tmp_path, names)
    assert facts[0] == JPEG and [fact.fault for fact in facts[1:]] == ["image-truncated"] * 2
    assert inspect_files(tmp_path, names, decode=True) == facts


def test_what_is_no_regular_file_is_never_opened(tmp_path, looks):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "directory.jpg").mkdir()
    (tmp_path / "device.jpg").symlink_to("/dev/zero")
    (tmp_path / "dangling.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "circle.jpg").symlink_to("circle.jpg")
    (tmp_path / "link.jpg").symlink_to("a.jpg")
    (tmp_path / "linked").symlink_to("directory.jpg")
    write(tmp_path, **{"a.jpg": JPEGS["jpeg"]})
    write(tmp_path / "directory.jpg", **{"b.jpg": JPEGS["jpeg"]})
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket.jpg"))
    names = [
        "pipe.jpg",
        "directory.jpg",
        "device.jpg",
        "socket.jpg",
        "dangling.jpg",
        "circle.jpg",
        "a.jpg/b.jpg",
    ]
    said = [(fact.fault, fact.detail) for fact in inspect_files(tmp_path, names, decode=True)]
    listener.close()
    assert said[:4] == [
        ("image-not-a-file", what) for what in ("a pipe", "a directory", "a device", "a socket")
    ]
    assert said[4] == ("image-missing", "a symbolic link to nothing")
    assert said[5][0] == "image-unreadable" and "symbolic links" in said[5][1]
    assert said[6] == ("image-missing", "")
    assert looks == []
    assert inspect_files(tmp_path, ["link.jpg", "linked/b.jpg"]) == [JPEG, JPEG]


def test_a_pipe_that_takes_the_place_of_a_file_does_not_hang(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "a.jpg")
    monkeypatch.setattr(images.stat, "S_ISREG", lambda mode: True)
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (inspect_files(tmp_path, ["a.jpg"]), ended.set()), daemon=True)
    thread.start()
    assert ended.wait(20)


def test_empty_and_foreign_files(tmp_path):
    contents = {
        "empty.jpg": b"",
        "pointer.jpg": b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n",
        "page.jpg": b"<html>404</html>",
        "movie.jpg": pillow("GIF", mode="P"),
    }
    kinds = ["image-empty", "image-lfs-pointer", "not-an-image", "unsupported-format"]
    assert [fact.fault for fact in inspect_files(tmp_path, write(tmp_path, **contents))] == kinds


def test_names_that_are_no_text(tmp_path, looks):
    name = os.fsdecode(b"caf\xe9.jpg")
    (tmp_path / name).write_bytes(JPEGS["jpeg"])
    for _ in range(2):
        assert inspect_files(tmp_path, [name]) == [JPEG]
    assert len(looks) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_without_permission(tmp_path):
    write(tmp_path, a=JPEGS["jpeg"])
    (tmp_path / "a").chmod(0)
    (fact,) = inspect_files(tmp_path, ["a"])
    assert fact.fault == "image-unreadable" and "denied" in fact.detail
    (tmp_path / "a").chmod(0o600)
    assert inspect_files(tmp_path, ["a"]) == [JPEG]


def test_a_disk_that_fails_is_asked_again(tmp_path, monkeypatch):
    write(tmp_path, a=JPEGS["jpeg"])

    def fail(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(images, "_inspect", fail)
        assert inspect_files(tmp_path, ["a"]) == [
            ImageFacts(fault="image-unreadable", detail="Input/output error")
        ]
    assert inspect_files(tmp_path, ["a"]) == [JPEG]


# --- what is remembered ---


def test_only_changed_and_new_files_are_looked_at_again(tmp_path, looks):
    names = write(tmp_path, a=JPEGS["jpeg"], b=JPEGS["jpeg"], c=JPEGS["jpeg"])
    assert inspect_files(tmp_path, names) == [JPEG] * 3
    assert sorted(looks) == names
    looks.clear()
    assert inspect_files(tmp_path, names[::-1]) == [JPEG] * 3
    assert looks == []
    touch(tmp_path / "b")
    write(tmp_path, d=VARIANTS["png"])
    assert inspect_files(tmp_path, ["d", "b"]) == [PNG, JPEG]
    assert sorted(looks) == ["b", "d"]
    looks.clear()
    before = (tmp_path / "c").stat()
    (tmp_path / "c").write_bytes(VARIANTS["png"])
    os.utime(tmp_path / "c", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert inspect_files(tmp_path, [*names, "d"]) == [JPEG, JPEG, PNG, PNG]
    assert looks == ["c"]


def test_a_file_of_the_same_size_and_time_is_another_file(tmp_path):
    names = write(tmp_path, a=JPEGS["jpeg"])
    assert inspect_files(tmp_path, names) == [JPEG]
    before = (tmp_path / "a").stat()
    write(tmp_path, a=bytes(before.st_size))
    os.utime(tmp_path / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert inspect_files(tmp_path, names)[0].fault == "not-an-image"


def test_what_decoding_found_answers_later_questions(tmp_path, looks):
    names = write(tmp_path, good=JPEGS["jpeg"], bad=DAMAGED)
    assert inspect_files(tmp_path, names) == [JPEG, JPEG]
    decoded = inspect_files(tmp_path, names, decode=True)
    assert decoded[0] == JPEG and decoded[1].fault == "image-damaged"
    assert sorted(looks) == ["bad", "bad", "good", "good"]
    for decode in (False, True):
        assert inspect_files(tmp_path, names, decode=decode) == decoded
    assert len(looks) == 4
    touch(tmp_path / "bad")
    assert inspect_files(tmp_path, names) == [JPEG, JPEG]


def test_a_fault_of_the_header_is_final(tmp_path, looks):
    names = write(tmp_path, cut=JPEGS["jpeg"][:-9])
    facts = inspect_files(tmp_path, names)
    assert inspect_files(tmp_path, names, decode=True) == facts
    assert looks == names


def test_another_fault_is_worse_than_the_size(tmp_path):
    names = write(tmp_path, cut=JPEGS["jpeg"][:-9])
    (fact,) = inspect_files(tmp_path, names, max_megapixels=0.001)
    assert fact.fault == "image-truncated" and (fact.height, fact.width) == (HEIGHT, WIDTH)


def test_a_higher_limit_checks_again(tmp_path, looks):
    names = write(tmp_path, a=JPEGS["jpeg"])
    (fact,) = inspect_files(tmp_path, names, max_megapixels=0.001)
    assert fact.fault == "image-too-large" and (fact.height, fact.width) == (HEIGHT, WIDTH)
    assert fact.detail == f"{WIDTH} x {HEIGHT} pixels are 0.001872 megapixels, the limit is 0.001"
    assert inspect_files(tmp_path, names, max_megapixels=0.001872) == [JPEG]
    assert inspect_files(tmp_path, names, max_megapixels=0.001)[0].fault == "image-too-large"
    assert len(looks) == 2


def test_what_was_too_large_to_decode_is_decoded_under_a_higher_limit(tmp_path, looks):
    dark = opencv(".png", np.full((HEIGHT, WIDTH, 3), 900, np.uint16))
    names = write(tmp_path, bad=DAMAGED, dark=dark)
    faults = [fact.fault for fact in inspect_files(tmp_path, names, decode=True, max_megapixels=0.001)]
    assert faults == ["image-too-large"] * 2
    assert [fact.fault for fact in inspect_files(tmp_path, names)] == ["", "image-12-bit"]
    assert inspect_files(tmp_path, names, decode=True)[0].fault == "image-damaged"
    assert sorted(looks) == ["bad", "bad", "bad", "dark", "dark"]


def test_a_damaged_memory_is_as_good_as_none(tmp_path, looks):
    names = write(tmp_path, a=JPEGS["jpeg"])
    inspect_files(tmp_path, names)
    (path,) = (path for path in cache_directory().iterdir() if path.suffix != ".sha256")
    content = path.read_bytes()
    for i, damaged in enumerate((b"", content[:3], content[:-1], content + b"x", bytes(40)), start=2):
        path.write_bytes(damaged)
        assert inspect_files(tmp_path, names) == [JPEG]
        assert len(looks) == i


def test_other_rules_look_again(tmp_path, looks, monkeypatch):
    names = write(tmp_path, a=JPEGS["jpeg"])
    inspect_files(tmp_path, names)
    monkeypatch.setattr(images, "_VERSION", images._VERSION + 1)
    inspect_files(tmp_path, names)
    assert len(looks) == 2


def test_an_interrupted_look_is_remembered_so_far(tmp_path, looks, monkeypatch):
    names = write(tmp_path, **{f"{i:03d}": JPEGS["jpeg"] for i in range(200)})
    real = images._inspect

    def interrupted(stream, *arguments):
        if opened_path(stream).endswith("150"):
            raise KeyboardInterrupt
        return real(stream, *arguments)

    with monkeypatch.context() as once, pytest.raises(KeyboardInterrupt):
        once.setattr(images, "_inspect", interrupted)
        inspect_files(tmp_path, names)
    looks.clear()
    assert inspect_files(tmp_path, names) == [JPEG] * 200
    assert 0 < len(looks) < 100


def test_two_looks_at_once_at_a_changing_directory(tmp_path):
    names = write(tmp_path, **{f"{i:03d}": JPEGS["jpeg"] for i in range(300)})
    found = []
    threads = [
        threading.Thread(target=lambda part=part: found.append(inspect_files(tmp_path, names[part:])))
        for part in (0, 0, 100, 200)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(len, found)) == [100, 200, 300, 300]
    assert all(fact == JPEG for facts in found for fact in facts)
    assert inspect_files(tmp_path, names) == [JPEG] * 300


def test_progress_is_shown_when_it_takes_long(tmp_path, monkeypatch, capsys):
    names = write(tmp_path, **{f"{i:03d}": JPEGS["jpeg"] for i in range(200)})
    inspect_files(tmp_path, names[:150])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(images, "_SLOW", (0, 0))
    inspect_files(tmp_path, names, decode=True)
    shown = capsys.readouterr()
    assert "Checking images: 4 steps" in shown.err and "4/4" in shown.err and shown.out == ""


# --- against annotations ---


def check(facts: list[ImageFacts], sizes: list[tuple[int, int]], names: list[str]):
    issues = Issues("test")
    annotated = [
        CocoImage(i, name, *size[::-1]) for i, (name, size) in enumerate(zip(names, sizes, strict=True))
    ]
    usable = check_images(facts, annotated, lambda i: f"image {i + 7}", issues)
    assert usable.dtype == np.bool_ and usable.shape == (len(facts),)
    return usable.tolist(), {issue.kind: issue.offenders for issue in issues}


def test_sound_images_are_nothing_to_speak_of():
    assert check([JPEG, PNG], [(HEIGHT, WIDTH)] * 2, ["a.jpg", "b.png"]) == ([True, True], {})
    assert check([], [], []) == ([], {})


def test_faults_are_handed_on():
    bad = [ImageFacts(fault="image-empty"), ImageFacts("PNG", 3, 4, 6, "image-truncated", "in the middle")]
    usable, found = check([bad[0], JPEG, bad[1]], [(1, 1), (HEIGHT, WIDTH), (9, 9)], ["a.jpg"] * 3)
    assert usable == [False, True, False]
    assert found == {"image-empty": ["image 7"], "image-truncated": ["image 9: in the middle"]}


def test_another_size_than_in_the_annotations():
    usable, found = check([JPEG] * 3, [(HEIGHT, WIDTH + 1), (WIDTH, HEIGHT), (0, 0)], [""] * 3)
    assert usable == [True] * 3  # they can be decoded
    assert list(found) == ["image-size-differs"]
    assert found["image-size-differs"][:2] == [
        f"image 7 is {WIDTH} x {HEIGHT} pixels, the annotations say {WIDTH + 1} x {HEIGHT}",
        f"image 8 is {WIDTH} x {HEIGHT} pixels, the annotations say {HEIGHT} x {WIDTH}",
    ]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_images(orientation):
    fact = ImageFacts("JPEG", 30, 50, orientation)
    _, stored = check([fact], [(30, 50)], ["a.jpg"])
    assert stored == (
        {} if orientation == 1 else {"exif-turn": [f"image 7 has EXIF orientation {orientation}"]}
    )
    _, swapped = check([fact], [(50, 30)], ["a.jpg"])
    assert list(swapped) == (["image-turned"] if orientation >= 5 else ["image-size-differs"])
    _, other = check([fact], [(50, 31)], ["a.jpg"])
    assert list(other) == ["image-size-differs"]


@pytest.mark.parametrize(
    ("image_format", "fitting"),
    [
        ("JPEG", ["a.jpg", "a.JPG", "b/c.jpeg", "a.jpe", "a.jfif", "a.mpo"]),
        ("PNG", ["a.png", "x.y.PNG"]),
        ("TIFF", ["a.tif", "a.tiff"]),
        ("JPEG2000", ["a.jp2", "a.j2k", "a.jpx"]),
        ("WEBP", ["a.webp"]),
        ("BMP", ["a.bmp"]),
        ("PPM", ["a.ppm", "a.pgm"]),
    ],
)
def test_suffixes(image_format, fitting):
    unknown = ["", "a", "a.data", "a.jpg.bak", "photo.2024", "dir.png/a", "a."]
    unfit = ["a.jpg" if image_format != "JPEG" else "a.png", "b.GIF" if image_format != "PNG" else "b.tif"]
    names = fitting + unknown + unfit
    usable, found = check([ImageFacts(image_format, 3, 4)] * len(names), [(3, 4)] * len(names), names)
    assert all(usable)
    offenders = [f"image {names.index(name) + 7} is {image_format}" for name in unfit]
    assert found == {"wrong-extension": offenders}


# --- real data ---


def test_no_false_alarm_on_photographs(coco128):
    annotations = load_coco(coco128 / "instances.json")
    facts = inspect_files(coco128 / "images", annotations.file_names, decode=True)
    assert all(fact.image_format == "JPEG" and not fact.fault for fact in facts)
    assert [(fact.height, fact.width) for fact in facts] == [
        tuple(size) for size in annotations.image_sizes.tolist()
    ]


def test_no_false_alarm_on_blood_cells(bccd):
    names = sorted(path.name for path in (bccd / "images").iterdir())
    facts = inspect_files(bccd / "images", names, decode=True)
    assert names and all(fact.image_format == "JPEG" and not fact.fault for fact in facts)


def test_pillow_sees_the_same(coco128):
    for path in sorted((coco128 / "images").iterdir())[:40]:
        fact = inspect(path.read_bytes())
        with PIL.Image.open(path) as image:
            assert (fact.width, fact.height) == image.size
            assert fact.orientation == image.getexif().get(0x0112, 1)


def test_every_cut_of_a_photograph(coco128):
    content = min((coco128 / "images").iterdir(), key=lambda path: path.stat().st_size).read_bytes()
    for cut in np.random.default_rng(3).integers(20, len(content), 500).tolist():
        assert inspect(content[:cut]).fault == "image-truncated"
    as_png, as_webp = io.BytesIO(), io.BytesIO()
    with PIL.Image.open(io.BytesIO(content)) as image:
        image.save(as_png, "PNG")
        image.save(as_webp, "WEBP")
    for whole in (as_png.getvalue(), as_webp.getvalue()):
        assert not inspect(whole, decode=True).fault
        for cut in np.random.default_rng(4).integers(20, len(whole), 500).tolist():
            assert inspect(whole[:cut]).fault == "image-truncated"
