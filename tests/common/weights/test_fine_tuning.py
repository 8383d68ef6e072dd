import keras
import numpy as np
import pytest

from common.args import Args
from common.data.labels import LabelMap
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.weights import fine_tuning
from common.weights.fine_tuning import VOC_SPELLINGS, ClassRows, Report, coco_label_map, freeze, transfer

PATHS = ("head/kernel", "head/bias")
# The names that the 20 classes of Pascal VOC have in COCO.
VOC = {"person", "bird", "cat", "cow", "dog", "horse", "sheep", "airplane", "bicycle", "boat", "bus", "car"}
VOC |= {"motorcycle", "train", "bottle", "chair", "dining table", "potted plant", "couch", "tv"}


def make_model(outputs, inputs=4, middle=6):
    x = images = keras.Input((inputs,))
    x = keras.layers.Dense(middle, name="body")(x)
    x = keras.layers.Dense(outputs, name="head")(x)
    model = keras.Model(images, x, name="small")
    random = np.random.default_rng(outputs + middle)
    for weight in model.weights:
        weight.assign(random.normal(size=weight.shape))
    return model


def values_of(model):
    return {weight.path: np.array(weight) for weight in model.weights}


def label_map(*names):
    return LabelMap(tuple(range(1, len(names) + 1)), names)


@pytest.mark.parametrize("first", [0, 5])
def test_rows_follow_the_names(first):
    model, source = make_model(2 * (first + 3)), values_of(make_model(2 * (first + 4)))
    before, rows = values_of(model), ClassRows(PATHS, 2, 2, first)
    report = transfer(model, source, rows, label_map("c", "new", "a"), ("a", "b", "c", "d"), "run")
    after = values_of(model)
    np.testing.assert_array_equal(after["body/kernel"], source["body/kernel"])
    for path in PATHS:
        now, was, theirs = (
            values[path].reshape(-1, 2, first + count)
            for values, count in ((after, 3), (before, 3), (source, 4))
        )
        np.testing.assert_array_equal(now[..., :first], theirs[..., :first])
        for row, expected in enumerate((theirs[..., first + 2], was[..., first + 1], theirs[..., first])):
            np.testing.assert_array_equal(now[..., first + row], expected)
    assert str(report) == "run: 4 of 4 weights taken, new classes: new"


def test_rows_of_another_number_of_anchors_are_not_mixed_up():
    model, source = make_model(6), values_of(make_model(6))
    for weight in model.weights:
        weight.assign(weight + 1)
    before = values_of(model)
    report = transfer(model, source, ClassRows(PATHS, 2, 3), label_map("a", "b", "c"), ("a", "b"), "run")
    for path in PATHS:
        np.testing.assert_array_equal(values_of(model)[path], before[path])
    assert report.initial == PATHS
    assert "2 of 4 weights taken, made anew: head" in str(report)


def test_other_shapes_and_missing_weights_are_made_anew():
    model, source = make_model(3, inputs=4), values_of(make_model(3, inputs=5))
    before = values_of(model)
    del source["head/bias"]
    source["tail/kernel"] = np.zeros(3)
    report = transfer(model, source, ClassRows((), 1, 1), label_map("a"), ("a",), "run")
    after = values_of(model)
    for path, value in before.items():
        anew = path in ("body/kernel", "head/bias")
        np.testing.assert_array_equal(after[path], value if anew else source[path])
    assert report.copied == ("body/bias", "head/kernel")
    assert report.initial == ("body/kernel", "head/bias")
    assert str(report) == "run: 2 of 4 weights taken, made anew: body, head"


@pytest.mark.parametrize("names", [[], ["body/bias"]])
def test_little_that_fits_is_an_error(names):
    model, source = make_model(3), {"other": np.zeros(3)} | {name: np.zeros(6) for name in names}
    before = values_of(model)
    with pytest.raises(UserError, match=rf"^there: only {len(names)} of the 4 weights of small are in this"):
        transfer(model, source, ClassRows((), 1, 1), label_map("a"), ("a",), "there")
    for path, value in before.items():
        np.testing.assert_array_equal(values_of(model)[path], value)


def test_classes_are_found_in_the_other_spelling():
    voc = sorted(VOC_SPELLINGS.get(name, name) for name in coco_label_map().names if name in VOC)
    assert len(voc) == 20
    model, source = make_model(20), values_of(make_model(80))
    rows = ClassRows(PATHS, 1, 1)
    report = transfer(model, source, rows, label_map(*voc), coco_label_map().names, "coco")
    assert not report.new_classes
    expected = {"aeroplane": 4, "sofa": 57, "tvmonitor": 62, "person": 0, "diningtable": 60}
    for name, line in expected.items():
        assert values_of(model)["head/bias"][voc.index(name)] == source["head/bias"][line]
    back, source = make_model(3), values_of(model)
    both = [*voc, "couch"][1:]
    report = transfer(back, source, rows, label_map("couch", "tv", "airplane"), both, "voc")
    assert report.new_classes == ("airplane",)
    assert values_of(back)["head/bias"][0] == source["head/bias"][19]
    assert values_of(back)["head/bias"][1] == source["head/bias"][18]


def test_long_lists_are_cut():
    model, source = make_model(9), values_of(make_model(2))
    report = transfer(model, source, ClassRows(PATHS, 1, 1), label_map(*"abcdefghi"), ("x", "y"), "run")
    assert report.initial == PATHS
    assert str(report).endswith("new classes: a, b, c, d, e and 4 more")


# --- the flags --freeze and --init_from ---


def test_freeze_stops_the_layers_that_match():
    model = make_model(3)
    assert freeze(model, "^bo") == "frozen: 1 layers, body to body"
    assert [weight.path for weight in model.trainable_variables] == list(PATHS)


BAD_PATTERNS = [
    ("(", r"^--freeze='\(' is not a regular expression: "),
    ("xyz", "^--freeze='xyz' matches no layer: layer names start with body, head$"),
    (".", "^--freeze='.' leaves nothing to train$"),
]


@pytest.mark.parametrize(("pattern", "message"), BAD_PATTERNS)
def test_patterns_that_cannot_be(pattern, message):
    with pytest.raises(UserError, match=message):
        freeze(make_model(3), pattern)


def test_weights_are_loaded_into_new_runs_only(capfd):
    loaded = []

    def load(path):
        loaded.append(path)
        return Report("run", ("a",), (), ())

    for resumed in (True, False):
        a, model = Args(init_from="x.h5", freeze="head"), make_model(3)
        fine_tuning.set_initial_weights(a, Ranks(), resumed, model, load)
        assert len(model.trainable_variables) == 2
    assert loaded == ["x.h5"]
    said = capfd.readouterr().err
    assert "--init_from=x.h5 is not read again: this run continues from its checkpoint" in said
    assert "run: 1 of 1 weights taken" in said and said.count("frozen: 1 layers, head to head") == 2
