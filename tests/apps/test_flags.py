"""Tests the flags of the commands, common/args.py, and what commands print while they import and train."""

import dataclasses
import functools
import os
import pty
import subprocess
import sys

import pytest
from absl import flags

from tests import reference
from tests.apps.conftest import APPS
from tests.conftest import ROOT

COMMANDS = ["train", "eval", "infer", "export"]
HEAVY = {"tensorflow", "keras", "nvidia.dali"}


def test_train_py_has_one_flag_per_field_of_its_args_class_and_all_flags_of_a_fixed_list(app):
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


@pytest.mark.parametrize("name", ["learning_rate", "ema_decay", "max_megapixels"])
def test_flag_that_is_not_a_number_is_refused(app, name):
    fv = flags.FlagValues()
    app.package.train.define_flags(fv)
    with pytest.raises(flags.IllegalFlagValueError, match=f"{name}=nan: give a number"):
        fv(["train.py", f"--{name}=nan"])


def test_importing_the_apps_defines_no_global_flags():
    assert "model_name" not in flags.FLAGS
    assert "weights" not in flags.FLAGS


@functools.cache
def run_python(*arguments: str) -> tuple[str, set[str]]:
    """Returns stdout and the imported modules among HEAVY."""
    command = [sys.executable, "-X", "importtime", *arguments]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    modules = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    return process.stdout, HEAVY & modules


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_most_used_flags_first(name, command):
    stdout, _ = run_python(f"{name}/{command}.py", "--help")
    flag_lines = stdout.partition("\nflags:\n")[2].splitlines()
    headings = [line for line in flag_lines if line.endswith(":") and not line.startswith(" ")]
    assert headings[0] == "Most used:"
    assert stdout.partition(headings[0])[2].partition(headings[1])[0].count("\n  --") in range(1, 11)


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_an_apps_command_imports_neither_tensorflow_nor_dali(name, command):
    assert run_python(f"{name}/{command}.py", "--help")[1] == set()


def test_importing_commands_other_than_train_eval_infer_and_export_loads_no_tensorflow_or_dali():
    programs = [name.format(app=app) for app in APPS for name in reference.APP_PROGRAMS]
    programs += reference.OTHER_PROGRAMS
    programs += ["tools/describe_weights.py"]
    modules = [name.removesuffix(".py").replace("/", ".") for name in programs]
    modules = [name for name in modules if name.rpartition(".")[2] not in COMMANDS]
    assert len(modules) >= 7
    assert run_python("-c", f"import {', '.join(modules)}")[1] == set()


def test_check_data_and_convert_import_neither_tensorflow_nor_dali(drawn, tmp_path):
    images, annotations = f"--images={drawn}/images", f"{drawn}/instances.json"
    _, imported_by_check = run_python("tools/check_data.py", images, f"--annotations={annotations}")
    options = [images, f"--input={annotations}", f"--output={tmp_path}/small.json", "--holdout=0.5"]
    _, imported_by_convert = run_python("tools/convert.py", "--from=coco", "--to=coco", *options)
    assert imported_by_check == imported_by_convert == set()
    assert (tmp_path / "small_val.json").exists()


IMPORT_TENSORFLOW = "from common.progress import import_tensorflow as f; f(); "


def test_import_of_tensorflow_prints_nothing_and_later_errors_are_shown():
    code = IMPORT_TENSORFLOW + "import os, tensorflow as tf; tf.zeros(1); os.write(2, b'later')"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert process.stderr == "later"


def test_training_and_detection_start_without_matplotlib_which_can_be_imported_later():
    modules = ", ".join(f"{app}.{command}" for app in APPS for command in ("train", "infer"))
    code = f"import sys, {modules}; assert 'matplotlib' not in sys.modules; import matplotlib.pyplot"
    start = IMPORT_TENSORFLOW.replace("f()", "f(pyplot=False)")
    subprocess.run([sys.executable, "-c", start + code], cwd=ROOT, check=True)


def test_failed_import_of_tensorflow_shows_its_messages(tmp_path):
    (tmp_path / "tensorflow.py").write_text("import os; os.write(2, b'captured\\n'); raise ImportError()")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    process = subprocess.run(
        [sys.executable, "-c", IMPORT_TENSORFLOW], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert process.stderr.startswith("captured\n") and "ImportError" in process.stderr


@pytest.mark.parametrize(("variables", "value"), [({}, "1"), ({"TF_ENABLE_ONEDNN_OPTS": "0"}, "0")])
def test_import_of_tensorflow_turns_onednn_on_unless_the_environment_turns_it_off(variables, value, tmp_path):
    code = "import os; raise ImportError('oneDNN: ' + os.environ['TF_ENABLE_ONEDNN_OPTS'])"
    (tmp_path / "tensorflow.py").write_text(code)
    env = {name: setting for name, setting in os.environ.items() if name != "TF_ENABLE_ONEDNN_OPTS"}
    env |= {"PYTHONPATH": f"{tmp_path}:{ROOT}", **variables}
    command = [sys.executable, "-c", IMPORT_TENSORFLOW]
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert process.stderr.endswith(f"ImportError: oneDNN: {value}\n")


SHOW_BAR = (
    "from common.progress import Bar; b = Bar('epoch 1/2', 3); [b.step({'loss': 0.5}) for _ in range(3)]"
)


def test_progress_of_an_epoch_without_a_terminal_is_one_log_line():
    process = subprocess.run([sys.executable, "-c", SHOW_BAR], cwd=ROOT, capture_output=True, text=True)
    assert process.stderr == "epoch 1/2: 3 steps in 0 s, loss 0.5\n"


def test_progress_of_an_epoch_on_a_terminal_is_a_bar():
    reading_end, terminal = pty.openpty()
    subprocess.run([sys.executable, "-c", SHOW_BAR], cwd=ROOT, stderr=terminal, check=True)
    shown = os.read(reading_end, 10_000).decode()
    os.close(reading_end)
    os.close(terminal)
    assert shown.count("\r") >= 2 and "3/3 [====================]" in shown
