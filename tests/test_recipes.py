"""Checks the recipes in efficientdet/flags/ and yolov4/flags/: their comments, flags and learning rates."""

import pathlib
import shlex

import pytest

import efficientdet.config
import efficientdet.optimization
import yolov4.config
import yolov4.optimization
from common import hparams
from common.args import Args
from tests import small_apps
from tests.test_readme import check_flags, commands, gpus_of

ROOT = pathlib.Path(__file__).resolve().parents[1]
APPS = {"efficientdet": efficientdet, "yolov4": yolov4}
COCO_IMAGES = 118_287  # train2017, including 1,021 images without boxes


def darknet(peak: float, images_an_update: int, updates_an_epoch: int, epochs: int) -> tuple:
    burn_in = 1000 / updates_an_epoch
    rates = [(burn_in / 2, peak / 16), (burn_in, peak), (epochs * 2 / 3, peak)]
    rates += [(epochs * 0.85, peak / 10), (epochs * 0.95, peak / 100)]
    return images_an_update, updates_an_epoch, rates


# {recipe: (images per update, updates per epoch, [(epoch, learning rate), ...])}
EXPECTED = {
    "efficientdet/d0_coco": (64, 1848, [(0, 0.008), (0.5, 0.044), (1, 0.08), (150.5, 0.04), (300, 0)]),
    "efficientdet/d0_coco_8xv100": (512, 231, [(0, 0.064), (2.5, 0.382), (5, 0.7), (152.5, 0.35), (300, 0)]),
    "efficientdet/d0_coco_8gpu": (1600, 73, [(0, 0.2), (12.5, 1.2), (25, 2.2), (212.5, 1.1), (400, 0)]),
    "efficientdet/d0_coco_16gpu": (1600, 73, [(0, 0.2), (12.5, 1.2), (25, 2.2), (212.5, 1.1), (400, 0)]),
    "yolov4/yolov4_coco": darknet(0.0013, 64, 1848, 271),
    "yolov4/yolov4_coco_8xv100": darknet(0.0013, 64, 1848, 271),
    "yolov4/yolov4_coco_8gpu": darknet(0.0026, 128, 924, 271),
    "yolov4/yolov4_coco_16gpu": darknet(0.0026, 128, 924, 271),
    "yolov4/tiny_coco": darknet(0.00261, 64, 1848, 1082),
}
RECIPES = [path for app in APPS for path in sorted((ROOT / app / "flags").glob("*.txt"))]


def parsed(app: str, recipe: pathlib.Path) -> Args:
    lines = recipe.read_text().splitlines()
    return small_apps.parsed(app, *(line for line in lines if line.startswith("--")))[1]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_recipe_has_valid_flags_and_commands_and_states_its_hardware(recipe):
    header = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
    app = recipe.parts[-3]
    assert any(f"python {app}/train.py" in line for line in header)
    assert any("Hardware" in line for line in header)
    a = parsed(app, recipe)
    config = hparams.override(APPS[app].config.get_config(a.model_name), a.hparams)
    indented = "\n".join(line[1:] for line in header if line[1:4] == "   ")
    for command in commands(f"```bash\n{indented}\n```"):
        if "..." not in command:
            check_flags(shlex.split(command))
    if "_coco" in recipe.stem:
        assert any(line.startswith("# Not measured by us. Expected") for line in header)
        assert a.xla and a.precision == ("mixed_float16" if "v100" in recipe.stem else "mixed_bfloat16")
        assert a.init_from or a.freeze_batch_norm
        assert a.strategy == ("horovod" if gpus_of(recipe.name) > 1 else "none")
        assert a.model_name != "yolov4" or config.mosaic_tiles == "fresh"


@pytest.mark.parametrize("recipe", EXPECTED)
def test_learning_rate_of_recipe_at_five_points_is_the_published_schedule(recipe):
    images_an_update, updates_an_epoch, points = EXPECTED[recipe]
    app, _, name = recipe.partition("/")
    a = parsed(app, ROOT / app / "flags" / f"{name}.txt")
    replicas = gpus_of(f"{name}.txt")
    accumulate = max(a.accumulate_steps, 1)
    assert replicas * a.batch_size * accumulate == images_an_update
    steps_per_epoch = COCO_IMAGES // (replicas * a.batch_size)
    assert steps_per_epoch // accumulate == updates_an_epoch

    config = hparams.override(APPS[app].config.get_config(a.model_name), a.hparams)
    config = hparams.replace(config, {"epochs": a.epochs, "learning_rate": a.learning_rate})
    options = {"accumulate_steps": accumulate} if app == "yolov4" else {}
    make_schedule = APPS[app].optimization.make_schedule
    schedule = make_schedule(config, images_an_update, steps_per_epoch, **options)
    for epoch, rate in points:
        step = epoch * steps_per_epoch
        assert float(schedule(step)) == pytest.approx(rate, rel=0.012, abs=1e-6), epoch


def test_learning_rates_of_all_coco_recipes_are_tested():
    names = [f"{path.parts[-3]}/{path.stem}" for path in RECIPES if "_coco" in path.stem]
    # tests/efficientdet/test_optimization.py tests the schedule of RetinaNet.
    assert {name for name in names if "/retinanet" not in name} == set(EXPECTED)


def test_both_apps_have_recipes_for_demo_laptop_and_finetune():
    for app in APPS:
        names = {path.stem for path in RECIPES if path.parts[-3] == app}
        assert {"demo", "laptop", "finetune"} <= names
