"""Writes WebDataset shards."""

import io
import json
import os
import pathlib
import tarfile

import numpy as np

from common.data.annotations import Annotations
from tests.common.record_writing import PNG

BOX = {"bbox": [10, 10, 40, 30], "category_id": 17}


def npy(array) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(array))
    return stream.getvalue()


def sample(key="0001", *, image=PNG, annotations=(BOX,), **changes) -> dict[str, bytes]:
    """Returns the files of one sample. `changes` sets keys of the json; None removes a key."""
    values = {"image_id": 42, "width": 100, "height": 50, "annotations": list(annotations)} | changes
    content = json.dumps({name: value for name, value in values.items() if value is not None})
    return {f"{key}.png": image, f"{key}.json": content.encode()}


def arrays(key="0001", *, image=PNG, **changes) -> dict[str, bytes]:
    """Like `sample`, in the form of NumPy arrays."""
    values = {"image_id": 42, "boxes": np.float32([[0.1, 0.2, 0.5, 0.8]]), "labels": [17]} | changes
    files = {f"{key}.{name}.npy": npy(value) for name, value in values.items() if value is not None}
    return {f"{key}.png": image, **files}


def write_tar(path, *samples) -> str:
    """Writes a tar file with the files of the samples, and returns its path."""
    with tarfile.open(path, "w") as archive:
        for files in samples:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return os.fspath(path)


def write_shards(
    annotations: Annotations, images_dir, prefix, *, num_shards, seed=0, with_arrays=False
) -> list[str]:
    """Writes shuffled shards and a label map, like tools/convert.py. Returns the files."""
    order = np.random.default_rng(seed).permutation(annotations.num_images).tolist()
    pathlib.Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    of_row = _arrays_of_row if with_arrays else _sample_of_row
    paths = [f"{prefix}-{shard:05d}-of-{num_shards:05d}.tar" for shard in range(num_shards)]
    for shard, path in enumerate(paths):
        write_tar(path, *(of_row(annotations, row, images_dir) for row in order[shard::num_shards]))
    annotations.label_map.save(pathlib.Path(f"{prefix}.label_map.json"))
    return paths


def _image(annotations: Annotations, row: int, images_dir) -> tuple[str, bytes]:
    path = pathlib.Path(images_dir, annotations.file_names[row])
    return f"{row:06d}{path.suffix}", path.read_bytes()


def _sample_of_row(annotations: Annotations, row: int, images_dir) -> dict[str, bytes]:
    rows = slice(*annotations.row_splits[row : row + 2])
    columns = (annotations.boxes_ltwh_px, annotations.category_ids, annotations.is_crowd, annotations.areas)
    names = ("bbox", "category_id", "iscrowd", "area")
    objects = zip(*(column[rows].tolist() for column in columns), strict=True)
    height, width = annotations.image_sizes[row].tolist()
    name, image = _image(annotations, row, images_dir)
    content = {
        "image_id": int(annotations.image_ids[row]),
        "file_name": annotations.file_names[row],
        "width": width,
        "height": height,
        "annotations": [dict(zip(names, values, strict=True)) for values in objects],
    }
    return {name: image, f"{row:06d}.json": json.dumps(content).encode()}


def _arrays_of_row(annotations: Annotations, row: int, images_dir) -> dict[str, bytes]:
    rows = slice(*annotations.row_splits[row : row + 2])
    name, image = _image(annotations, row, images_dir)
    values = {
        "boxes": annotations.clipped_boxes[0][rows],
        "labels": annotations.category_ids[rows],
        "image_id": annotations.image_ids[row],
        "iscrowd": annotations.is_crowd[rows],
        "areas": annotations.areas[rows],
    }
    return {name: image, **{f"{row:06d}.{key}.npy": npy(value) for key, value in values.items()}}
