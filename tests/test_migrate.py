"""Checks the tables of docs/migrate.md: what they name exists in this project.

A column `Here: PROGRAM` or `Here: APP/config.py` says where its flags or hyper-parameters belong. A cell can
name another program before its flags. Weights of other repositories are tested in test_automl_weights.py and
test_darknet_weights.py.
"""

import dataclasses
import functools
import re
import shlex

import pytest

import efficientdet.config
import yolov4.config
from common import hparams
from tests.conftest import ROOT
from tests.test_readme import known_flags

CONFIGS = {"efficientdet": efficientdet.config, "yolov4": yolov4.config}
MODELS = {"efficientdet": "efficientdet-d0", "yolov4": "yolov4"}
SPLIT = re.compile(r"(?<!\\)\|")


def tables() -> list[tuple[list[str], list[list[str]]]]:
    """Returns (titles, rows) of each table with a column of this project."""
    blocks = re.findall(r"(?:^\|.*\n)+", (ROOT / "docs/migrate.md").read_text(), re.MULTILINE)
    result = []
    for block in blocks:
        titles, _, *rows = ([c.strip() for c in SPLIT.split(line)[1:-1]] for line in block.splitlines())
        if any(title.startswith(("Here", "Files here")) for title in titles):
            result.append((titles, rows))
    return result


TABLES = tables()
FLAGS = functools.cache(known_flags)


def check_flags(program: str, words: list[str]) -> None:
    """Asserts that a program has these flags, and accepts their values."""
    fv = FLAGS(program)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        assert word.startswith("--") and name in fv, (program, word)
        if equals:
            fv[name].parser.parse(value)
            if name == "hparams":
                app = program.partition("/")[0]
                model = "retinanet-rn50fpn" if "iterations" in value else MODELS[app]
                hparams.override(CONFIGS[app].get_config(model), value)


def check_cell(title: str, cell: str, default: str | None) -> None:
    """Asserts that the names in a cell exist, and have this default."""
    names = re.findall(r"`([^`]+)`", cell)
    assert names or not cell, cell
    if title == "Files here":
        assert all((ROOT / name).is_file() for name in names), names
        return
    (place,) = re.findall(r"`([^`]+)`", title)
    app = place.partition("/")[0]
    for name in names:
        words = shlex.split(name)
        if words[0].endswith(".py"):
            check_flags(words[0], [word for word in words[1:] if word not in CONFIGS])
        elif name.startswith("--"):
            program = place.replace("config.py", "train.py")
            check_flags(program, words)
            if default and default.isdigit():
                assert str(FLAGS(program)[name[2:]].value) == default, name
        else:
            config = CONFIGS[app].get_config(MODELS[app])
            assert name in {field.name for field in dataclasses.fields(config)}, name
            if default:
                assert str(getattr(config, name)) == default, name


@pytest.mark.parametrize(("titles", "rows"), TABLES, ids=range(len(TABLES)))
def test_flags_hyper_parameters_defaults_and_files_of_migration_table_exist(titles, rows):
    index = next(i for i, title in enumerate(titles) if title.startswith(("Here", "Files here")))
    for row in rows:
        assert len(row) == len(titles), row
        default = row[-1].strip("`") if titles[-1] == "Default here" else None
        check_cell(titles[index], row[index], default)


def test_migration_page_has_tables_for_each_origin():
    text = (ROOT / "docs/migrate.md").read_text()
    assert len(re.findall(r"^## ", text, re.MULTILINE)) == 7
    assert len(TABLES) >= 25 and sum(len(rows) for _, rows in TABLES) >= 200
