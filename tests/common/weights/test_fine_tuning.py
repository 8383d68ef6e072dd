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
    """Returns {path: array} of the weights of a model."""
    return {weight.path: np.array(weight) for weight in model.weights}


def label_map(*names):
    return LabelMap(tuple(range(1, len(names) + 1)), names)


@pytest.mark.parametrize("first", [0, 5])
def test_fine_tuning_copies_the_head_weights_of_each_class_by_class_name(first):
    """`first` is the number of values per anchor that precede the class values."""
    model, source = make_model(2 * (first + 3)), values_of(make_model(2 * (first + 4)))
    before, rows = values_of(model), ClassRows(PATHS, 2, 2, first)
    report = transfer(model, source, rows, label_map("c", "new", "a"), ("a", "b", "c", "d"), "run")
    after = values_of(model)
    np.testing.assert_array_equal(after["body/kernel"], source["body/kernel"])
    for path in PATHS:
        result, initial, copied = (
            values[path].reshape(-1, 2, first + count)
            for values, count in ((after, 3), (before, 3), (source, 4))
        )
        np.testing.assert_array_equal(result[..., :first], copied[..., :first])
        np.testing.assert_array_equal(result[..., first], copied[..., first + 2])
        np.testing.assert_array_equal(result[..., first + 1], initial[..., first + 1])
        np.testing.assert_array_equal(result[..., first + 2], copied[..., first])
    assert str(report) == "run: 4 of 4 weights taken, new classes: new"


def test_fine_tuning_copies_no_head_weights_if_the_number_of_anchors_differs():
    model, source = make_model(6), values_of(make_model(6))
    for weight in model.weights:
        weight.assign(weight + 1)
    before = values_of(model)
    report = transfer(model, source, ClassRows(PATHS, 2, 3), label_map("a", "b", "c"), ("a", "b"), "run")
    for path in PATHS:
        np.testing.assert_array_equal(values_of(model)[path], before[path])
    assert report.initial == PATHS
    assert "2 of 4 weights taken, made anew: head" in str(report)


def test_fine_tuning_leaves_weights_of_another_shape_or_missing_in_the_source_at_initial_values():
    model, source = make_model(3, inputs=4), values_of(make_model(3, inputs=5))
    before = values_of(model)
    del source["head/bias"]
    source["tail/kernel"] = np.zeros(3)
    report = transfer(model, source, ClassRows((), 1, 1), label_map("a"), ("a",), "run")
    after = values_of(model)
    for path in after:
        values = before if path in ("body/kernel", "head/bias") else source
        np.testing.assert_array_equal(after[path], values[path])
    assert report.copied == ("body/bias", "head/kernel")
    assert report.initial == ("body/kernel", "head/bias")
    assert str(report) == "run: 2 of 4 weights taken, made anew: body, head"


@pytest.mark.parametrize("names", [[], ["body/bias"]], ids=["no-weight", "one-weight"])
def test_weights_file_with_too_few_weights_of_the_model_is_refused_for_fine_tuning(names):
    model, source = make_model(3), {"other": np.zeros(3)} | {name: np.zeros(6) for name in names}
    before = values_of(model)
    message = rf"^mine\.h5: only {len(names)} of the 4 weights of small are in this"
    with pytest.raises(UserError, match=message):
        transfer(model, source, ClassRows((), 1, 1), label_map("a"), ("a",), "mine.h5")
    for path, value in before.items():
        np.testing.assert_array_equal(values_of(model)[path], value)


def test_classes_of_voc_and_coco_match_in_either_spelling():
    voc = sorted(VOC_SPELLINGS.get(name, name) for name in coco_label_map().names if name in VOC)
    assert len(voc) == 20
    model, source = make_model(20), values_of(make_model(80))
    rows = ClassRows(PATHS, 1, 1)
    report = transfer(model, source, rows, label_map(*voc), coco_label_map().names, "coco")
    assert not report.new_classes
    coco_classes = {"aeroplane": 4, "sofa": 57, "tvmonitor": 62, "person": 0, "diningtable": 60}
    for name, index in coco_classes.items():
        assert values_of(model)["head/bias"][voc.index(name)] == source["head/bias"][index]
    coco_model, source = make_model(3), values_of(model)
    source_names = [*voc, "couch"][1:]
    report = transfer(coco_model, source, rows, label_map("couch", "tv", "airplane"), source_names, "voc")
    assert report.new_classes == ("airplane",)
    np.testing.assert_array_equal(values_of(coco_model)["head/bias"][:2], source["head/bias"][[19, 18]])


@pytest.mark.parametrize(
    ("names", "text"), [("abcde", "a, b, c, d, e"), ("abcdef", "a, b, c, d, e and 1 more")]
)
def test_fine_tuning_report_names_at_most_five_new_classes(names, text):
    model, source = make_model(len(names)), values_of(make_model(2))
    report = transfer(model, source, ClassRows(PATHS, 1, 1), label_map(*names), ("x", "y"), "run")
    assert report.initial == PATHS
    assert str(report).endswith(f"new classes: {text}")


# --- the flags --freeze and --init_from ---


def test_freeze_stops_training_of_matching_layers():
    model = make_model(3)
    assert freeze(model, "^bo") == "frozen: 1 layer, body to body"
    assert [weight.path for weight in model.trainable_variables] == list(PATHS)


WRONG_PATTERNS = [
    ("(", r"^--freeze='\(' is not a regular expression: "),
    ("xyz", "^--freeze='xyz' matches no layer: layer names start with body, head$"),
    (".", "^--freeze='.' leaves nothing to train$"),
]


@pytest.mark.parametrize(("pattern", "message"), WRONG_PATTERNS)
def test_freeze_pattern_that_is_invalid_matches_no_layer_or_freezes_all_layers_is_refused(pattern, message):
    with pytest.raises(UserError, match=message):
        freeze(make_model(3), pattern)


def test_initial_weights_are_loaded_into_new_runs_but_not_resumed_ones(capfd):
    loaded = []

    def load(path):
        loaded.append(path)
        return Report("run", ("a",), (), ())

    for resumed in (True, False):
        a, model = Args(init_from="x.h5", freeze="head"), make_model(3)
        fine_tuning.set_initial_weights(a, Ranks(), resumed, model, load)
        assert len(model.trainable_variables) == 2
    assert loaded == ["x.h5"]
    log = capfd.readouterr().err
    assert "--init_from=x.h5 is not read again: this run continues from its checkpoint" in log
    assert "run: 1 of 1 weights taken" in log and log.count("frozen: 1 layer, head to head") == 2
