"""Tests the flags of the commands, and common/args.py."""

import dataclasses
import os
import pty
import subprocess
import sys

import pytest
from absl import flags

from tests import reference
from tests.apps.conftest import APPS
from tests.conftest import ROOT


def test_the_flags_of_training_are_the_fields_of_args_and_those_of_the_interface(app):
    fv = flags.FlagValues()
    app.package.train.define_flags(fv)
    fields = {field.name: field.default for field in dataclasses.fields(app.package.train.Args)}
    assert {name: fv[name].default for name in fv} == fields
    promised = (
        "input_type train_images train_annotations eval_images eval_annotations train_file_pattern "
        "eval_file_pattern label_map pipeline_type model_name image_size num_classes hparams batch_size "
        "epochs steps_per_epoch learning_rate strategy precision xla ema_decay clip_norm accumulate_steps "
        "init_from freeze freeze_batch_norm output_dir overwrite eval_every eval_every_steps seed "
        "num_threads prefetch"
    )
    assert set(promised.split()) <= set(fv)


def test_importing_defines_no_flags():
    assert "model_name" not in flags.FLAGS
    assert "weights" not in flags.FLAGS


def test_every_help_text_begins_with_the_thing(app):
    for field in dataclasses.fields(app.package.train.Args):
        text = field.metadata["help"]
        assert text[0].isupper() and text.endswith(".") and not text.startswith("Of "), field.name


@pytest.mark.parametrize("command", ["train", "eval", "infer", "export"])
def test_help_shows_the_most_used_flags_first(app, command):
    done = subprocess.run(
        [sys.executable, ROOT / app.name / f"{command}.py", "--help"], capture_output=True, text=True
    )
    of_flags = done.stdout.partition("\nflags:\n")[2].splitlines()
    headings = [line for line in of_flags if line.endswith(":") and not line.startswith(" ")]
    assert headings[0] == "Most used:"
    assert done.stdout.partition(headings[0])[2].partition(headings[1])[0].count("\n  --") in range(1, 11)


def heavy_imports(*command: str) -> set[str]:
    program = [sys.executable, "-X", "importtime", *command]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    return {"tensorflow", "keras", "nvidia.dali"} & imported


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("command", ["train", "eval", "infer", "export"])
def test_help_of_an_apps_command_imports_neither_tensorflow_nor_dali(name, command):
    assert heavy_imports(f"{name}/{command}.py", "--help") == set()


def test_import_of_other_commands_imports_neither_tensorflow_nor_dali():
    programs = [name.format(app=app) for app in APPS for name in reference.OF_APPS] + [*reference.OTHERS]
    programs += ["tools/describe_weights.py"]
    modules = [name.removesuffix(".py").replace("/", ".") for name in programs]
    modules = [name for name in modules if not name.endswith((".train", ".eval", ".infer", ".export"))]
    assert len(modules) >= 7
    assert heavy_imports("-c", f"import {', '.join(modules)}") == set()


def test_checking_and_converting_need_neither_tensorflow_nor_dali(drawn, tmp_path):
    images, annotations = f"--images={drawn}/images", f"{drawn}/instances.json"
    check = heavy_imports("tools/check_data.py", images, f"--annotations={annotations}")
    options = [images, f"--input={annotations}", f"--output={tmp_path}/small.json", "--holdout=0.5"]
    convert = heavy_imports("tools/convert.py", "--from=coco", "--to=coco", *options)
    assert check == convert == set()
    assert (tmp_path / "small_val.json").exists()


QUIET = "from common.progress import import_tensorflow as f; f(); "


def test_importing_tensorflow_prints_nothing_and_later_errors_are_shown():
    code = QUIET + "import os, tensorflow as tf; tf.zeros(1); os.write(2, b'later')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "later"


def test_what_was_captured_is_shown_if_the_import_fails(tmp_path):
    (tmp_path / "tensorflow.py").write_text("import os; os.write(2, b'captured\\n'); raise ImportError()")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", QUIET], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.stderr.startswith("captured\n") and "ImportError" in done.stderr


BAR = "from common.progress import Bar; b = Bar('epoch 1/2', 3); [b.step({'loss': 0.5}) for _ in range(3)]"


def test_without_a_terminal_progress_is_one_line():
    done = subprocess.run([sys.executable, "-c", BAR], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "epoch 1/2: 3 steps in 0 s, loss 0.5\n"


def test_on_a_terminal_progress_is_a_bar():
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", BAR], cwd=ROOT, stderr=theirs, check=True)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    os.close(theirs)
    assert shown.count("\r") >= 2 and "3/3 [====================]" in shown
