"""Fixtures of real data skip their tests if the data are missing."""

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import nvidia.dali  # noqa: F401 (before TensorFlow, see storage.check_dali)
import PIL.Image
import PIL.ImageDraw
import pytest

from tests.object_store import Faults

# Before TensorFlow is imported; as in progress.import_tensorflow.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# Tests do not use the user's cache.
_CACHE = tempfile.TemporaryDirectory(prefix="detection-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # true in background jobs; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(OSError, ModuleNotFoundError):  # without a driver, or where only DALI is installed
    ctypes.CDLL("libcuda.so.1")
    import tensorflow as tf

    # TensorFlow allows this only before its first operation, and some test modules run one on import.
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)

LONGEST_FIRST = (  # files, without their folders
    *("test_train_on_ranks.py", "test_stop_and_resume.py", "test_pages.py", "test_train_efficientdet.py"),
    *("test_bucket.py", "test_keras_fit.py", "test_determinism.py", "test_examples.py", "test_copy_this.py"),
    *("test_demo.py", "test_customize.py", "test_train_yolov4.py", "test_ranks.py"),
)
# Long tests without common fixtures. Several test processes share the tests of such a file.
SPLIT = (
    *("test_stop_and_resume.py", "test_pages.py", "test_determinism.py", "test_examples.py"),
    *("test_copy_this.py", "test_demo.py", "test_customize.py"),
)
ROOT = pathlib.Path(__file__).resolve().parents[1]
DATA = pathlib.Path(os.environ.get("DETECTION_TEST_DATA", ROOT / ".." / "shared" / "data")).resolve()


@pytest.hookimpl(trylast=True)  # after the tests were put into a random order
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gc.freeze()  # the garbage collector no longer scans the imported modules, which saves time
    files = list(dict.fromkeys(item.path for item in items))
    # The longest tests start first, so that all test processes end at about the same time.
    files.sort(key=lambda path: (*LONGEST_FIRST, path.name).index(path.name))
    places = {path: place for place, path in enumerate(files)}
    # In a file, the tests of one app follow each other, because pytest keeps the fixtures of one app only.
    items.sort(key=lambda item: (places[item.path], _app_of(item)))
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    from nvidia.dali import backend

    if backend.GetCUDADeviceCount() == 0:
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="DALI sees no GPU"))


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Returns the scheduler of --dist=loadfile, which gives each test of SPLIT to the next free process."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return nodeid if file.endswith(SPLIT) else file

    return Scheduler(config, log) if config.getoption("dist") == "loadfile" else None


def _app_of(item: pytest.Item) -> str:
    return str(item.callspec.params.get("app", "")) if hasattr(item, "callspec") else ""


@pytest.hookimpl(tryfirst=True)  # before the test's fixtures
def pytest_runtest_setup() -> None:
    random.seed(0)  # Keras takes the seeds of new weights from this generator


@pytest.fixture(scope="session")
def coco128() -> pathlib.Path:
    """128 images of COCO train2017: images/ and instances.json."""
    return _real("coco128")


@pytest.fixture(scope="session")
def bccd() -> pathlib.Path:
    """Blood cells: images/ and instances_{train,val,test}.json."""
    return _real("bccd")


def _real(name: str) -> pathlib.Path:
    directory = DATA / name
    if not directory.is_dir():
        pytest.skip(f"{directory} is not there: set DETECTION_TEST_DATA")
    return directory


@pytest.fixture(scope="session")
def once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """A function once(name, make) that returns a directory with the files that `make` writes.

    Only one of several test processes runs `make`. Tests must not write into the directory.
    """
    shared = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        shared = shared.parent

    def get(name: str, make: Callable[[pathlib.Path], object]) -> pathlib.Path:
        with (shared / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.fstat(lock.fileno()).st_size:  # the lock file is empty until `make` has ended
                shutil.rmtree(shared / name, ignore_errors=True)
                make(shared / name)
                lock.write("made")
        return shared / name

    return get


@pytest.fixture(scope="session")
def drawn(once: Callable) -> pathlib.Path:
    """Twelve synthetic images as a COCO directory.

    The category ids 3, 17, 90 and the image ids have gaps. One image id is above 2**31. The third image has
    no objects. The fifth image has a crowd. The seventh image has boxes outside and a box without area. The
    last image is a PNG.
    """
    return once("drawn", _draw)


def _draw(directory: pathlib.Path) -> None:
    (directory / "images").mkdir(parents=True)
    random = np.random.default_rng(7)
    colors = {17: (220, 60, 40), 3: (40, 160, 70), 90: (50, 80, 220)}
    images, annotations = [], []
    for i in range(12):
        height, width = 60 + 7 * i, 151 - 8 * i
        background = random.integers(90, 160, (height, width, 3), np.uint8)
        picture = PIL.Image.fromarray(background)
        image_id = 5_000_000_007 if i == 8 else 10 + 3 * i
        for _ in range(0 if i == 2 else 1 + i % 4):
            w, h = random.integers(8, 40, 2).tolist()
            x, y = int(random.integers(0, width - w)), int(random.integers(0, height - h))
            category_id = int(random.choice([3, 17, 90]))
            PIL.ImageDraw.Draw(picture).rectangle([x, y, x + w - 1, y + h - 1], fill=colors[category_id])
            annotations.append(_annotation(image_id, category_id, [x, y, w, h]))
        if i == 4:
            annotations.append(_annotation(image_id, 3, [0.5, 10.25, 60.5, 30.75]) | {"iscrowd": 1})
        if i == 6:
            annotations.append(_annotation(image_id, 90, [width - 10.5, -4, 20, 30.25]))
            annotations.append(_annotation(image_id, 17, [20, 30, 0, 12]))
            annotations.append(_annotation(image_id, 3, [width + 5, 3, 10, 10]))
        name = f"{i:02d}.{'png' if i == 11 else 'jpg'}"
        picture.save(directory / "images" / name, quality=92)
        images.append({"id": image_id, "file_name": name, "height": height, "width": width})
    for number, annotation in enumerate(annotations, 1):
        annotation["id"] = number
    random.shuffle(annotations)
    categories = [{"id": i, "name": name} for i, name in ((17, "cat"), (3, "car"), (90, "toothbrush"))]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (directory / "instances.json").write_text(json.dumps(document))


def _annotation(image_id: int, category_id: int, box_ltwh_px: list[float]) -> dict:
    area = box_ltwh_px[2] * box_ltwh_px[3]
    return {"image_id": image_id, "category_id": category_id, "bbox": box_ltwh_px, "area": area, "iscrowd": 0}


@pytest.fixture(scope="session")
def drawn_records(drawn: pathlib.Path, once: Callable) -> pathlib.Path:
    """Writes `drawn` as three TFRecord files, and returns the prefix of their paths."""

    def write(directory: pathlib.Path) -> None:
        from common.data.coco import load_coco
        from tests.common.record_writing import write_tfrecords

        directory.mkdir()
        annotations = load_coco(drawn / "instances.json", drawn / "images")
        write_tfrecords(annotations, drawn / "images", directory / "drawn", num_shards=3)

    return once("records", write) / "drawn"


@pytest.fixture(scope="session")
def fuzzed(tmp_path_factory: pytest.TempPathFactory):
    from tests.oracle.fuzzed import write_fuzzed_set

    return write_fuzzed_set(tmp_path_factory.mktemp("fuzzed"))


@pytest.fixture(scope="session")
def store() -> Iterator[str]:
    """The address of an object store on this machine, without content."""
    pytest.importorskip("moto")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.object_store", str(port)]
    null = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=null, stderr=null, cwd=ROOT) as server:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        server.kill()


@pytest.fixture
def bucket(store: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The path s3://NAME of an empty bucket in `store`, which the environment names."""
    import boto3

    from common.data import storage

    name = f"tests-{uuid.uuid4().hex[:12]}"
    values = {
        "ENDPOINT_URL": store,
        "ACCESS_KEY_ID": "tests",
        "SECRET_ACCESS_KEY": "tests",
        "REGION": "us-east-1",
    }
    for variable, value in values.items():
        monkeypatch.setenv(f"AWS_{variable}", value)
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=name)
    storage.forget_client()
    yield f"s3://{name}"
    storage.forget_client()


@pytest.fixture
def faults(store: str) -> Iterator[Faults]:
    """Makes `store` answer with faults, until the test ends."""
    faults = Faults(store)
    yield faults
    faults.clear()
