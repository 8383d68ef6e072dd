"""Writes docs/licences.md: what is installed, and under which licence, as the packages say themselves.

python docker/list_licences.py docs/licences.md
"""

import importlib.metadata
import pathlib
import re
import sys

HEAD = """# Licences of what is installed

This project is Apache-2.0 ([LICENSE](../LICENSE)). `make setup` and `make horovod` install these packages;
the licences are what their metadata say, written by `python docker/list_licences.py docs/licences.md`.
NVIDIA's CUDA packages, which come with a GPU, are under NVIDIA's own terms.

| package | version | licence |
|---|---|---|
"""
_OWN = {"dali-detection", "pip", "setuptools", "wheel"}
_LONGEST = 60  # a licence's whole text in the field that should hold its name


def licence(metadata: importlib.metadata.PackageMetadata) -> str:
    """SPDX expression, classifiers, or the free field, whichever says something first; "" where none does."""
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    classifiers = [
        text.rpartition(" :: ")[2]
        for text in metadata.get_all("Classifier") or []
        if text.startswith("License ::") and not text.endswith("OSI Approved")
    ]
    if classifiers:
        return ", ".join(classifiers)
    text = " ".join(metadata["License"].split()) if "License" in metadata else ""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def table() -> str:
    rows = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        if name not in _OWN:
            says = licence(distribution.metadata) or "not said"
            rows[name] = f"| {name} | {distribution.version} | {says} |"
    return HEAD + "\n".join(rows[name] for name in sorted(rows)) + "\n"


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(table())
