"""Images in every kind of source, written by other programs than ours or from the formats' specifications.

Each `write_*` takes an empty directory, encoded images and their labels, and returns (--input, names).
"""

import functools
import io
import json
import os
import struct
import tarfile

import lmdb
import numpy as np
import PIL.Image
import tensorflow as tf
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

COUNT = 7
LABELS = [5, 0, 70_000, 3, 2**24, 5, 11]  # in no order, with gaps; float32 holds them all
RECORDIO_MAGIC = struct.pack("<I", 0xCED7230A)


def pixels(number, width=12):
    """uint8 (8 + number, width, 3), no two alike."""
    return np.random.default_rng(number).integers(0, 256, (8 + number, width, 3), np.uint8)


def png(number, extra=b""):
    """`pixels` as PNG; `extra` stands in a chunk of its own, after which nothing else changes."""
    stream, info = io.BytesIO(), None
    if extra:
        from PIL.PngImagePlugin import PngInfo

        info = PngInfo()
        info.add(b"exTr", extra)
    PIL.Image.fromarray(pixels(number)).save(stream, "PNG", pnginfo=info)
    return stream.getvalue()


IMAGES = [png(number) for number in range(COUNT)]


# --- files ---


def write_files(directory, images, labels):
    """Labels are directories' numbers, so those of LABELS do not fit: `tree_labels` says which are theirs."""
    names = []
    for number, image in enumerate(images):
        name = f"{'b ü' if number >= 3 else 'a'}/{number} ü.png"
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(image)
        names.append(name)
    return os.fspath(directory), names


def write_list(directory, images, labels):
    names = []
    for number, image in enumerate(images):
        names.append(f"x {(number * 5) % 7}.png")
        (directory / names[-1]).write_bytes(image)
    lines = [f"{name} {label}" for name, label in zip(names, labels, strict=True)]
    (directory / "list.txt").write_text("# images\n\n" + "\r\n".join(lines), encoding="utf-8")
    return os.fspath(directory / "list.txt"), names


def write_coco(directory, images, labels):
    """Of which labels are not handed on."""
    (directory / "images").mkdir()
    names = []
    for number, image in enumerate(images):
        names.append(f"{(number * 3) % 7}.png")
        (directory / "images" / names[-1]).write_bytes(image)
    document = {
        "images": [
            {"id": 90 - i, "file_name": name, "width": 12, "height": 8 + i} for i, name in enumerate(names)
        ],
        "annotations": [{"id": 1, "image_id": 90, "category_id": 3, "bbox": [1, 1, 5, 5]}],
        "categories": [{"id": 3, "name": "three"}],
    }
    (directory / "instances.json").write_text(json.dumps(document))
    return os.fspath(directory / "images"), names


def write_numpy(directory, images, labels):
    """The pixels, every other file in Fortran's order."""
    names = [f"{number}.npy" for number in range(len(images))]
    for number, name in enumerate(names):
        order = np.asfortranarray if number % 2 else np.ascontiguousarray
        np.save(directory / name, order(pixels(number)))
    return os.fspath(directory), names


# --- containers ---


def example(image, label=None, **more):
    """A record like ImageNet's."""
    features = {"image/encoded": image, **({} if label is None else {"image/class/label": label}), **more}
    kinds = {bytes: ("bytes_list", tf.train.BytesList), int: ("int64_list", tf.train.Int64List)}

    def feature(value):
        kind, make = kinds[type(value)]
        return tf.train.Feature(**{kind: make(value=[value])})

    features = {key: feature(value) for key, value in features.items()}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write_tfrecord(directory, images, labels):
    """Two files."""
    names = [f"n0{number}.JPEG" for number in range(len(images))]
    for file, part in (("a.tfrecord", slice(0, 4)), ("b.tfrecord", slice(4, None))):
        if not images[part]:
            continue
        with tf.io.TFRecordWriter(os.fspath(directory / file)) as writer:
            for image, label, name in zip(images[part], labels[part], names[part], strict=True):
                writer.write(example(image, label, **{"image/filename": name.encode()}))
    return os.fspath(directory / "*.tfrecord"), names


def _messages(package, syntax, **messages):
    """Classes of protobuf: {name: [(field, number, type, label)]}."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax=syntax)
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, number, kind, label in fields:
            message.field.add(name=field, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages
    ]


_F = descriptor_pb2.FieldDescriptorProto
_ONE, _MANY = _F.LABEL_OPTIONAL, _F.LABEL_REPEATED
(Datum,) = _messages(
    "caffe",
    "proto2",
    Datum=[
        *((name, i, _F.TYPE_INT32, _ONE) for i, name in enumerate(("channels", "height", "width"), 1)),
        ("data", 4, _F.TYPE_BYTES, _ONE),
        ("label", 5, _F.TYPE_INT32, _ONE),
        ("float_data", 6, _F.TYPE_FLOAT, _MANY),
        ("encoded", 7, _F.TYPE_BOOL, _ONE),
    ],
)
TensorProto, TensorProtos = _messages(
    "caffe2",
    "proto3",  # numbers are packed, as Caffe2's are
    TensorProto=[
        ("dims", 1, _F.TYPE_INT64, _MANY),
        ("data_type", 2, _F.TYPE_INT32, _ONE),
        ("float_data", 3, _F.TYPE_FLOAT, _MANY),
        ("int32_data", 4, _F.TYPE_INT32, _MANY),
        ("byte_data", 5, _F.TYPE_BYTES, _ONE),
        ("string_data", 6, _F.TYPE_BYTES, _MANY),
        ("int64_data", 10, _F.TYPE_INT64, _MANY),
    ],
    TensorProtos=[("protos", 1, _F.TYPE_BYTES, _MANY)],  # each a TensorProto
)


def datum(image, label):
    return Datum(channels=3, height=8, width=12, data=image, label=label, encoded=True).SerializeToString()


def tensors(image, label, **other):
    """Caffe2's record: `other` in place of an int32 label."""
    fields = other or {"data_type": 2, "int32_data": [label]}
    parts = [TensorProto(dims=[1], data_type=4, string_data=[image])]
    if label is not None:
        parts.append(TensorProto(dims=[1], **fields))
    return tensor_protos(*parts)


def tensor_protos(*parts):
    return TensorProtos(protos=[part.SerializeToString() for part in parts]).SerializeToString()


def write_values(directory, values):
    """An LMDB of {key: value}, put in no order."""
    path = os.fsencode(directory)
    with lmdb.open(path, map_size=2**22) as environment, environment.begin(write=True) as put:
        for key in sorted(values, key=lambda key: key[::-1]):
            put.put(key, values[key])
    return os.fspath(directory)


def write_caffe(directory, images, labels, make=datum):
    """Keys as convert_imageset makes them, file names that are not ASCII among them."""
    keys = [f"{number:08d}_ü {number}.png" for number in range(len(images))]
    values = {k.encode(): make(*sample) for k, *sample in zip(keys, images, labels, strict=True)}
    return write_values(directory, values), keys


def record(data):
    """dmlc-core's recordio.h: cut wherever the magic number stands at a multiple of four bytes."""
    parts, begin = [], 0
    for at in range(0, len(data) - 3, 4):
        if data[at : at + 4] == RECORDIO_MAGIC:
            parts.append(data[begin:at])
            begin = at + 4
    parts.append(data[begin:])
    kinds = [0] if len(parts) == 1 else [1, *[2] * (len(parts) - 2), 3]
    frames = []
    for kind, part in zip(kinds, parts, strict=True):
        frames += [RECORDIO_MAGIC, struct.pack("<I", kind << 29 | len(part)), part, bytes(-len(part) % 4)]
    return b"".join(frames)


def image_record(image, label, number=0, labels=None):
    """An image's record with one label, or with several (mxnet.recordio.pack)."""
    if labels is None:
        return record(struct.pack("<IfQQ", 0, label, number, 0) + image)
    many = struct.pack(f"<{len(labels)}f", *labels)
    return record(struct.pack("<IfQQ", len(labels), 0, number, 0) + many + image)


def write_recordio(directory, images, labels):
    """One file with the index that im2rec writes; some of the records are in parts."""
    offset, index = 0, []
    with open(directory / "x.rec", "wb") as stream:
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            index.append(f"{number}\t{offset}\n")
            offset += stream.write(image_record(image, label, number))
    (directory / "x.idx").write_text("".join(index))
    return os.fspath(directory / "x.rec"), [f"x.rec-{number}" for number in range(len(images))]


def write_tar(path, files):
    """{name: content}; None is a directory."""
    with tarfile.open(path, "w") as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            member.size = len(content or b"")
            archive.addfile(member, io.BytesIO(content or b""))
    return os.fspath(path)


def write_webdataset(directory, images, labels):
    """Two archives, without indexes."""
    names = [f"train/{number} ü.png" for number in range(len(images))]
    files = [[("train", None)], [("train", None)]]
    for number, (image, label, name) in enumerate(zip(images, labels, names, strict=True)):
        stem = name.removesuffix(".png")
        files[number >= 4] += [(f"{stem}.cls", b"%d\n" % label), (f"{stem}.json", b"{}"), (name, image)]
    for number, part in enumerate(files):
        if len(part) > 1:
            write_tar(directory / f"{number}.tar", part)
    return os.fspath(directory / "*.tar"), names


# --- Python ---


def write_python(directory, images, labels, name):
    """A module that gives the samples in every way."""
    (directory / "images.bin").write_bytes(repr((images, labels)).encode())
    (directory / "given.py").write_text(_MODULE)
    return f"{directory / 'given.py'}:{name}", [f"sample-{number}" for number in range(len(images))]


_MODULE = """
import ast, pathlib
import numpy as np

images, labels = ast.literal_eval((pathlib.Path(__file__).parent / "images.bin").read_text())
sequence = samples = list(zip(images, labels))


def function(info):
    if info.idx_in_epoch >= len(samples):
        raise StopIteration
    return samples[info.idx_in_epoch]


def of_batches(info: "BatchInfo"):
    if 3 * info.iteration >= len(samples):
        raise StopIteration
    part = slice(3 * info.iteration, 3 * info.iteration + 3)
    return [np.frombuffer(image, np.uint8) for image in images[part]], np.array(labels[part])


def generator():
    yield from samples


def batches():
    for begin in range(0, len(samples), 4):
        yield samples[begin : begin + 4]
"""


# kind of test -> (--source, writer)
WRITERS = {
    "files": ("files", write_files),
    "list": ("list", write_list),
    "coco": ("coco", write_coco),
    "tfrecord": ("tfrecord", write_tfrecord),
    "lmdb-caffe": ("lmdb", write_caffe),
    "lmdb-caffe2": ("lmdb", functools.partial(write_caffe, make=tensors)),
    "lmdb-caffe2-float": (
        "lmdb",
        functools.partial(write_caffe, make=lambda i, x: tensors(i, x, data_type=1, float_data=[x])),
    ),
    "recordio": ("recordio", write_recordio),
    "webdataset": ("webdataset", write_webdataset),
    "numpy": ("numpy", write_numpy),
    **{
        f"external-{case}": ("external", functools.partial(write_python, name=case.replace("-", "_")))
        for case in ("function", "sequence", "of-batches", "generator", "batches")
    },
}


def labels_of(kind, labels=LABELS):
    """The labels that a source gives, of those that were written."""
    if kind == "files":
        return [int(number >= 3) for number in range(len(labels))]
    return [-1] * len(labels) if kind in ("coco", "numpy") else labels
