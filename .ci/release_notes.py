"""Prints the section of a version in CHANGELOG.md, for the notes of its release.

python .ci/release_notes.py 0.1.0
"""

import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]


def notes(version: str, changelog: str) -> str:
    """Returns the section without its heading, as the page of a release shows it well.

    GitHub shows each line break there, so each paragraph becomes one line. Links to files of the repository
    do not work there, so only their text stays.

    Raises:
        SystemExit: there is no dated section of this version.
    """
    heading = rf"^## {re.escape(version)}, \d{{4}}-\d\d-\d\d\n"
    match = re.search(rf"{heading}(.*?)(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE)
    if not match or not match[1].strip():
        sys.exit(f"error: CHANGELOG.md has no section '## {version}, YYYY-MM-DD' with text")
    text = re.sub(r"(?<!\n)\n *(?![\n* ])", " ", match[1].strip())
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)


if __name__ == "__main__":
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if sys.argv[1:] != [version]:
        sys.exit(f"error: the tag is {sys.argv[1:]}, but pyproject.toml has version {version}")
    print(notes(version, (ROOT / "CHANGELOG.md").read_text()))
