"""Checked annotations as bytes for the cache: the next start does not read the data again."""

import io
import json

import numpy as np

from common.annotations import ARRAYS, Annotations
from common.issues import Findings
from common.labels import LabelMap


def pack(annotations: Annotations) -> bytes:
    """Everything but `origin`."""
    text = {
        "label_map": annotations.label_map.to_json(),
        "file_names": annotations.file_names,
        "findings": annotations.findings.to_json(),
    }
    stream = io.BytesIO()
    arrays = {name: getattr(annotations, name) for name in ARRAYS}
    np.savez(stream, text=np.frombuffer(json.dumps(text).encode(), np.uint8), **arrays)
    return stream.getvalue()


def unpack(content: bytes, origin: str) -> Annotations | None:
    """What `pack` gave, now read from `origin`; None where another version found other kinds of issues."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        text = json.loads(arrays["text"].tobytes())
        try:
            findings = Findings.from_json(origin, text["findings"])
        except KeyError:
            return None
        return Annotations(
            label_map=LabelMap.from_json(text["label_map"]),
            file_names=text["file_names"],
            origin=origin,
            findings=findings,
            **{name: arrays[name] for name in ARRAYS},
        )
