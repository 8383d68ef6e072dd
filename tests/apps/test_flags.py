"""The flags of the commands.

Also tests common/args.py.
"""

import dataclasses
import subprocess
import sys

from absl import flags

from tests.conftest import ROOT


def test_the_flags_of_training_are_the_fields_of_args(app):
    fv = flags.FlagValues()
    app.package.train.define_flags(fv)
    fields = {field.name: field.default for field in dataclasses.fields(app.package.train.Args)}
    assert {name: fv[name].default for name in fv} == fields


def test_help_shows_the_flags(app):
    program = ROOT / app.name / "infer.py"
    done = subprocess.run([sys.executable, str(program), "--help"], capture_output=True, text=True)
    for name in ("--weights", "--images", "--score_threshold", "--pipeline_type"):
        assert f"  {name}: " in done.stdout, name


def test_importing_defines_no_flags():
    """Two apps that define flags on import could not live in one process."""
    assert "model_name" not in flags.FLAGS
    assert "weights" not in flags.FLAGS


def test_the_flags_of_the_interface_exist(app):
    fv = flags.FlagValues()
    app.package.train.define_flags(fv)
    promised = (
        "input_type train_images train_annotations eval_images eval_annotations train_file_pattern "
        "eval_file_pattern label_map pipeline_type model_name image_size num_classes hparams batch_size "
        "epochs steps_per_epoch learning_rate strategy precision xla ema_decay clip_norm accumulate_steps "
        "init_from freeze freeze_batch_norm output_dir overwrite eval_every eval_every_steps dry_run seed "
        "num_threads prefetch"
    )
    assert set(promised.split()) <= set(fv)


def test_every_help_text_begins_with_the_thing(app):
    for field in dataclasses.fields(app.package.train.Args):
        text = field.metadata["help"]
        assert text[0].isupper() and text.endswith(".") and not text.startswith("Of "), field.name
