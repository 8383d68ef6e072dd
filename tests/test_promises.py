import pathlib
import re

from tests import promises
from tests.conftest import ROOT

FILE = pathlib.Path(__file__).with_name("promises.txt")


def test_flags_and_python_names_of_earlier_versions_are_still_there():
    """New lines enter the file by `python -m tests.promises >tests/promises.txt` (docs/versions.md)."""
    lines, earlier = promises.promises(), FILE.read_text().splitlines()
    removed = [line for line in earlier if line not in lines]
    assert not removed, f"docs/versions.md promises that these stay, but they are gone or renamed: {removed}"
    added = [line for line in lines if line not in earlier]
    assert not added, f"new promises: run python -m tests.promises >tests/promises.txt for {added}"


def test_order_of_positional_parameters_of_python_names_stays():
    earlier = [line.split(" ") for line in FILE.read_text().splitlines() if "--" not in line]
    for name in promises.NAMES:
        parameters = [parameter for other, parameter in earlier if other == name]
        assert promises.parameters_of(name)[: len(parameters)] == parameters, name


def test_every_name_of_the_page_of_python_names_is_a_promise():
    shown = re.findall(r"^::: (\S+)", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    promised = {name.rpartition(".")[2] for name in promises.NAMES}
    assert len(shown) > 15
    promised |= {"readers", "UserError"}  # the module of coco_reader; an exception has no parameters
    assert not [name for name in shown if name.rpartition(".")[2] not in promised]
