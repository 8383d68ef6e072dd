"""Writes images in every format of --source.

Each `write_*` returns the value of --input, and the names of the pictures without suffix.
"""

import functools
import io
import json
import os
import struct
import tarfile

import lmdb
import numpy as np
import tensorflow as tf
from PIL.PngImagePlugin import PngInfo

from tests.common.image_variants import pillow
from tests.common.record_writing import feature, write

COUNT = 7
LABELS = [5, 0, 70_000, 3, 2**24, 5, 11]
RECORDIO_MAGIC = struct.pack("<I", 0xCED7230A)


def pixels(number):
    """Returns uint8 (8 + number, 12, 3)."""
    return np.random.default_rng(number).integers(0, 256, (8 + number, 12, 3), np.uint8)


def png(number, extra=b""):
    """Encodes `pixels(number)`. A chunk contains `extra`."""
    info = PngInfo()
    if extra:
        info.add(b"exTr", extra)
    return pillow("PNG", pixels(number), pnginfo=info)


IMAGES = [png(number) for number in range(COUNT)]


def row_names(images):
    return [f"{number:06d}" for number in range(len(images))]


# --- files ---


def write_images(directory, names, images):
    for name, image in zip(names, images, strict=True):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(image)


def write_files(directory, images, labels):
    """The labels are the numbers of the directories, not `labels`."""
    names = [f"{'b ü' if number >= 3 else 'a'}/{number} ü" for number in range(len(images))]
    write_images(directory, [f"{name}.png" for name in names], images)
    return os.fspath(directory), names


def write_list(directory, images, labels):
    paths, names = write_files(directory / "files", images, labels)
    lines = [f"{paths}/{name}.png {label}\n" for name, label in zip(names, labels, strict=True)]
    (directory / "list.txt").write_text("".join(lines))
    return os.fspath(directory / "list.txt"), [name.rpartition("/")[2] for name in names]


def write_coco(directory, images, labels):
    """`labels` is not used. Image ids do not have the order of the images."""
    names = [f"{(number * 3) % 7}" for number in range(len(images))]
    write_images(directory / "images", [f"{name}.png" for name in names], images)
    rows = [
        {"id": 90 - i, "file_name": f"{name}.png", "width": 12, "height": 8 + i}
        for i, name in enumerate(names)
    ]
    annotation = {"id": 1, "image_id": 90, "category_id": 3, "bbox": [1, 1, 5, 5]}
    document = {"images": rows, "annotations": [annotation], "categories": [{"id": 3, "name": "three"}]}
    (directory / "instances.json").write_text(json.dumps(document))
    return os.fspath(directory), names


def write_numpy(directory, images, labels):
    """Every second array is in Fortran's order."""
    names = [f"{number}" for number in range(len(images))]
    for number, name in enumerate(names):
        order = np.asfortranarray if number % 2 else np.ascontiguousarray
        np.save(directory / f"{name}.npy", order(pixels(number)))
    return os.fspath(directory), names


# --- containers ---


def example(image, label=None, **extra):
    """Returns a tf.train.Example with the features of ImageNet's records."""
    labels = {} if label is None else {"image/class/label": label}
    features = {key: feature(value) for key, value in {"image/encoded": image, **labels, **extra}.items()}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write_tfrecord(directory, images, labels):
    names = [f"n0{number}" for number in range(len(images))]
    rows = zip(images, labels, names, strict=True)
    records = [
        example(image, label, **{"image/filename": f"train/{name}.JPEG".encode()})
        for image, label, name in rows
    ]
    write(directory / "a.tfrecord", *records[:4])
    write(directory / "b.tfrecord", *records[4:])
    return os.fspath(directory / "*.tfrecord"), names


def varint(number):
    """Encodes an integer for protobuf: seven bits per byte, the lowest bits first.

    A negative integer is encoded as its 64 bits.
    """
    low, high = number % 2**64 & 127, number % 2**64 >> 7
    return bytes([low | 128]) + varint(high) if high else bytes([low])


def protobuf(*fields):
    """Encodes a message. Each field is (field number, an integer or bytes)."""
    encoded = b""
    for field, value in fields:
        is_bytes = isinstance(value, bytes)
        encoded += varint(8 * field + 2 * is_bytes)
        encoded += varint(len(value)) + value if is_bytes else varint(value)
    return encoded


def datum(image, label=None):
    """Caffe's record. Its field `encoded` is true."""
    return protobuf((1, 3), (4, image), *([] if label is None else [(5, label)]), (7, 1))


def tensor(kind, *numbers):
    """Caffe2's TensorProto with numbers in a packed field."""
    data_type, field = {"float": (1, 3), "int32": (2, 4), "int64": (10, 10)}[kind]
    packed = [struct.pack("<f", number) if kind == "float" else varint(number) for number in numbers]
    return protobuf((2, data_type), (field, b"".join(packed)))


def tensors(image, *numbers):
    """Caffe2's record: an image, followed by TensorProtos."""
    return protobuf(*((1, each) for each in (protobuf((2, 4), (6, image)), *numbers)))


def labelled_tensors(image, label):
    return tensors(image, tensor("int32", label))


def write_values(directory, values):
    """Keys are not added in alphabetical order."""
    path = os.fsencode(directory)
    with lmdb.open(path, map_size=2**22) as environment, environment.begin(write=True) as transaction:
        for key in sorted(values, key=lambda key: key[::-1]):
            transaction.put(key, values[key])
    return os.fspath(directory)


def write_lmdb(directory, images, labels, make=datum):
    """Keys are like those of Caffe's convert_imageset, but not ASCII."""
    keys = [f"{number:08d}_ü {number}.png" for number in range(len(images))]
    values = {k.encode(): make(*sample) for k, *sample in zip(keys, images, labels, strict=True)}
    return write_values(directory, values), row_names(images)


def record(data):
    """Makes a RecordIO record. Data that contain RecordIO's magic number are split into parts."""
    cuts = [at for at in range(0, len(data) - 3, 4) if data[at : at + 4] == RECORDIO_MAGIC]
    kinds = [1, *[2] * (len(cuts) - 1), 3] if cuts else [0]
    frames = b""
    for kind, begin, end in zip(kinds, [0, *(at + 4 for at in cuts)], [*cuts, len(data)], strict=True):
        size = struct.pack("<I", kind << 29 | end - begin)
        frames += RECORDIO_MAGIC + size + data[begin:end] + bytes((begin - end) % 4)
    return frames


def image_record(image, label, number=0, labels=()):
    """Like mxnet.recordio.pack. `labels` are several labels."""
    many = struct.pack(f"<{len(labels)}f", *labels)
    return record(struct.pack("<IfQQ", len(labels), label, number, 0) + many + image)


def write_recordio(directory, images, labels):
    (directory / "x.rec").write_bytes(b"".join(map(image_record, images, labels, range(len(images)))))
    return os.fspath(directory / "x.rec"), row_names(images)


def write_tar(path, files):
    """If a content is None, the name is a directory."""
    with tarfile.open(path, "w") as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            member.size = len(content or b"")
            archive.addfile(member, io.BytesIO(content or b""))
    return os.fspath(path)


def write_webdataset(directory, images, labels):
    files = [("train", None)]
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        stem = f"train/{number} ü"
        files += [(f"{stem}.cls", b"%d\n" % label), (f"{stem}.json", b"{}"), (f"{stem}.png", image)]
    write_tar(directory / "0.tar", files[:13])
    write_tar(directory / "1.tar", files[13:])
    return os.fspath(directory / "*.tar"), row_names(images)


# --- Python ---


def write_python(directory, images, labels):
    (directory / "pictures.py").write_text(f"images = {images}\n")
    return f"{directory / 'pictures.py'}:images", row_names(images)


# case -> (--source, function that writes it)
WRITERS = {
    "files": ("files", write_files),
    "list": ("list", write_list),
    "coco": ("coco", write_coco),
    "tfrecord": ("tfrecord", write_tfrecord),
    "lmdb-caffe": ("lmdb", write_lmdb),
    "lmdb-caffe2": ("lmdb", functools.partial(write_lmdb, make=labelled_tensors)),
    "recordio": ("recordio", write_recordio),
    "webdataset": ("webdataset", write_webdataset),
    "numpy": ("numpy", write_numpy),
    "external": ("external", write_python),
}


def write_case(case, directory, images=IMAGES):
    """Returns the values of --source and --input, and the names of the pictures without suffix."""
    directory.mkdir(exist_ok=True)
    kind, write_source = WRITERS[case]
    return kind, *write_source(directory, images, LABELS)
