import dataclasses
import json

import pytest

from common.args import Args
from common.data.sources import FIRST_IMAGES
from common.distributed.ranks import Ranks
from common.training import checkpoints
from common.training.checkpoints import Identity
from tests.common.reading import numbered_images
from tests.common.thread_ranks import run_on_ranks
from tests.refusal import refusal

IDENTITY = Identity({"app": "efficientdet", "config": {"image_size": [512, 512], "momentum": 0.9}, "seed": 0})


def check(path, identity, ranks=None, **flags):
    return checkpoints.check_directory(Args(output_dir=str(path), **flags), ranks or Ranks(), identity)


def claim(path, identity, **flags):
    check(path, identity, **flags)
    return checkpoints.claim_directory(Args(output_dir=str(path), **flags), Ranks(), identity)


def test_output_dir_of_the_same_run_is_resumed(tmp_path):
    path = tmp_path / "runs" / "mine"
    assert not check(path, IDENTITY)
    assert not (path / "run.json").exists()
    claim(path, IDENTITY)
    (path / "results.csv").write_text("epoch\n")
    assert not check(path, IDENTITY)
    (path / "checkpoints" / "00000001").mkdir(parents=True)
    assert check(path, IDENTITY)
    assert claim(path, IDENTITY) == path
    assert (path / "results.csv").exists()


# --- the defaults of the version that started a run ---


@dataclasses.dataclass(frozen=True)
class Recipe:
    jitter: float
    epochs: int = 30
    scales: tuple[float, ...] = (1.0, 2.0)
    later_field: bool = False


PRESENT, EARLIER = Recipe(0.1, later_field=True), Recipe(0.2, epochs=40)


@pytest.mark.parametrize(
    ("content", "overwrite", "expected"),
    [
        ({"config": {"jitter": 0.2, "scales": [1.0, 2.0]}}, False, EARLIER),
        ({"config": {"jitter": 0.2, "scales": [1.0, 2.0]}}, True, PRESENT),
        ({"config": {"jitter": 0.1, "scales": [1.0, 2.0], "later_field": True}}, False, PRESENT),
        ({"config": {"jitter": 0.3, "scales": [1.0, 2.0]}}, False, PRESENT),
        ({"config": {"jitter": 0.2, "scales": [1.0]}}, False, PRESENT),
        ({"config": None}, False, PRESENT),
        ([], False, PRESENT),
    ],
    ids=["earlier", "overwritten", "present", "neither", "another tuple", "no config", "damaged"],
)
def test_resumed_run_gets_the_defaults_with_which_its_config_is_that_of_run_json(
    tmp_path, content, overwrite, expected
):
    (tmp_path / "run.json").write_text(json.dumps(content))
    a = Args(output_dir=str(tmp_path), overwrite=overwrite)
    assert checkpoints.choose_config(a, Ranks(), [PRESENT, EARLIER], ["epochs"]) == expected


def test_other_ranks_get_the_config_of_rank_0_which_names_the_earlier_values(tmp_path, capsys):
    (tmp_path / "run.json").write_text(json.dumps({"config": {"jitter": 0.2, "scales": [1.0, 2.0]}}))

    def choose(ranks):
        directory = tmp_path if ranks.rank == 0 else tmp_path / "missing"
        return checkpoints.choose_config(
            Args(output_dir=str(directory)), ranks, [PRESENT, EARLIER], ["epochs"]
        )

    assert run_on_ranks(2, choose) == [EARLIER, EARLIER]
    assert "that started it: jitter=0.2, epochs=40, later_field=False\n" in capsys.readouterr().err


# --- what may differ between two sessions of a run ---


def test_output_dir_of_another_run_is_refused_with_the_differences(tmp_path):
    claim(tmp_path, IDENTITY)
    other = {"app": "efficientdet", "config": {"image_size": [640, 512], "momentum": 0.9}, "batch_size": 8}
    message = refusal(check, tmp_path, Identity(other))
    differences = [
        "batch_size was absent and is now 8",
        "config.image_size was [512, 512] and is now [640, 512]",
        "seed was 0 and is now absent",
    ]
    holds = f"--output_dir={tmp_path} holds another run: {'; '.join(differences)}. Choose another directory, "
    holds = holds.removesuffix(", ") + f" (--init_from={tmp_path} starts from the weights of this run), "
    assert message == f"{holds}or give --overwrite to start anew"


def test_refusal_of_another_run_does_not_quote_values_that_are_too_long(tmp_path):
    claim(tmp_path, Identity({"data": "864dbb" * 11, "seed": 1}))
    message = refusal(check, tmp_path, Identity({"data": "241152" * 11, "seed": 1}))
    assert "holds another run: data is not the same. Choose" in message


FIRST = {"images": 296, "boxes": 512, "first images": ["image 1 ('a.jpg')", "image 2 ('b.jpg')"]}
CHANGED_DATA = {
    "half": (
        {"images": 148, "boxes": 251, "first images": ["image 2 ('b.jpg')", "image 4 ('d.jpg')"]},
        "296 -> 148 images; 512 -> 251 boxes; first images image 1 ('a.jpg'), image 2 ('b.jpg') -> "
        "image 2 ('b.jpg'), image 4 ('d.jpg')",
    ),
    "one box more": (FIRST | {"boxes": 513}, "512 -> 513 boxes"),
    "moved box": (FIRST, "the same numbers of images and boxes, but other images, boxes or classes"),
}


@pytest.mark.parametrize(("summary", "difference"), CHANGED_DATA.values(), ids=CHANGED_DATA)
def test_changed_data_are_refused_with_their_numbers_and_first_images(tmp_path, summary, difference):
    claim(tmp_path, Identity({"data": "864dbb" * 11}, data_summary=FIRST))
    check(tmp_path, Identity({"data": "864dbb" * 11}, data_summary=FIRST))
    message = refusal(check, tmp_path, Identity({"data": "241152" * 11}, data_summary=summary))
    assert f"holds another run: data is not the same ({difference}). Choose another directory" in message


def test_resuming_with_other_data_names_no_counts_if_run_json_has_no_data_summary(tmp_path):
    claim(tmp_path, Identity({"data": "864dbb" * 11}))
    check(tmp_path, Identity({"data": "864dbb" * 11}, data_summary=FIRST))
    message = refusal(check, tmp_path, Identity({"data": "241152" * 11}, data_summary=FIRST))
    assert "holds another run: data is not the same. Choose" in message


def test_summary_of_a_source_counts_images_and_boxes_and_names_three_images(tmp_path):
    source = numbered_images(tmp_path, (7, 5, 9, 6), category_ids=(1, 2))
    assert source.summary() == {
        "images": 4,
        "boxes": 8,
        "first images": ["image 7 ('00.png')", "image 5 ('01.png')", "image 9 ('02.png')"],
    }
    metadata = {"app": "a", "num_classes": 1, "label_map": "", "config": dataclasses.asdict(Config(8))}
    options = {"may_change": ("epochs",), "source": source}
    identity = Identity.of(Args(), Ranks(), Config(8), metadata, **options)
    claim(tmp_path / "run", identity)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data_summary"] == source.summary()


TWO_RANKS = {"seed": 0, "num_replicas": 2, "num_ranks": 2, "steps_per_epoch": 4}
ONE_RANK = {"seed": 0, "num_replicas": 1, "num_ranks": 1, "steps_per_epoch": 8}
FOUR_REPLICAS = {"seed": 0, "num_replicas": 4, "num_ranks": 2, "steps_per_epoch": 2}


@pytest.mark.parametrize("values", [ONE_RANK, FOUR_REPLICAS], ids=["one rank", "four replicas"])
def test_output_dir_of_a_run_with_another_number_of_replicas_is_accepted(tmp_path, values):
    claim(tmp_path, Identity(TWO_RANKS))
    check(tmp_path, Identity(values))


OTHER_RUNS = {
    "steps_per_epoch": (TWO_RANKS | {"steps_per_epoch": 8}, "steps_per_epoch was 4 and is now 8"),
    "seed": (ONE_RANK | {"seed": 1}, "seed was 0 and is now 1"),
}


@pytest.mark.parametrize(("values", "difference"), OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_output_dir_of_a_run_with_another_seed_or_only_another_epoch_length_is_refused(
    tmp_path, values, difference
):
    claim(tmp_path, Identity(TWO_RANKS))
    assert f"holds another run: {difference}. Choose" in refusal(check, tmp_path, Identity(values))


def test_ranks_with_different_flags_or_data_are_refused(tmp_path):
    def work(ranks):
        data = {"data": f"of rank {ranks.rank}", "seed": 1}
        return refusal(check, tmp_path, Identity(data, of_all_ranks={"patience": ranks.rank}), ranks)

    _, message = run_on_ranks(2, work)
    assert message.startswith("ranks 0 and 1 differ in data, patience: give all the same flags")


@dataclasses.dataclass(frozen=True)
class Config:
    width: int
    epochs: int = 10


@dataclasses.dataclass(frozen=True)
class LaterConfig(Config):
    dropout: float = 0.0
    levels: tuple[int, ...] = (3, 4)


def identity_of(config, may_change=("epochs",)):
    metadata = {"app": "a", "num_classes": 1, "label_map": "", "config": dataclasses.asdict(config)}
    metadata = json.loads(json.dumps(metadata))
    return Identity.of(Args(), Ranks(), config, metadata, may_change=may_change)


@pytest.mark.parametrize("config", [LaterConfig(8), LaterConfig(8, epochs=3), Config(8, epochs=3)], ids=str)
def test_output_dir_of_an_older_run_is_accepted_if_new_config_fields_have_their_defaults(tmp_path, config):
    claim(tmp_path, identity_of(Config(8)))
    check(tmp_path, identity_of(config))


CHANGED_CONFIGS = {
    LaterConfig(8, dropout=0.5): "config.dropout was 0.0 and is now 0.5",
    LaterConfig(8, levels=(3,)): "config.levels was [3, 4] and is now [3]",
    LaterConfig(9): "config.width was 8 and is now 9",
}


@pytest.mark.parametrize(("config", "difference"), CHANGED_CONFIGS.items(), ids=CHANGED_CONFIGS.values())
def test_output_dir_of_a_run_with_a_changed_config_field_is_refused(tmp_path, config, difference):
    claim(tmp_path, identity_of(Config(8)))
    assert difference in refusal(check, tmp_path, identity_of(config))


def test_config_field_that_may_change_between_sessions_must_be_equal_on_all_ranks():
    assert identity_of(Config(8, epochs=3)).of_all_ranks["config"]["epochs"] == 3


# --- files in the way ---


@pytest.mark.parametrize("content", ["{", "[]", '"x"', '{"data": "y", "data_summary": {"images": 1}}'])
def test_damaged_run_json_is_refused(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    identity = Identity({"data": "x"}, data_summary={"images": 1, "boxes": 1, FIRST_IMAGES: ["a.jpg"]})
    assert "run.json is damaged" in refusal(check, tmp_path, identity)


def test_output_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    message = refusal(check, tmp_path / "file", IDENTITY)
    assert message == f"--output_dir={tmp_path / 'file'} is a file: give a directory"


def test_overwrite_with_initial_weights_in_the_same_directory_is_refused(tmp_path):
    weights = tmp_path / "runs" / "best.weights.h5"
    claim(tmp_path / "runs", IDENTITY)
    message = refusal(check, tmp_path / "runs", IDENTITY, overwrite=True, init_from=str(weights))
    assert "is in --output_dir, which --overwrite empties" in message


def test_output_dir_with_foreign_files_is_refused_without_overwrite(tmp_path):
    (tmp_path / "thesis.tex").touch()
    assert "holds files (thesis.tex), but no run" in refusal(check, tmp_path, IDENTITY)


def test_overwrite_removes_only_the_files_of_the_run(tmp_path):
    (tmp_path / "resnet.weights.h5").touch()
    (tmp_path / "thesis.tex").write_text("years of work")
    claim(tmp_path, IDENTITY, overwrite=True)
    (tmp_path / "checkpoints" / "00000001").mkdir(parents=True)
    (tmp_path / "best.weights.h5").touch()
    assert not check(tmp_path, Identity({"seed": 1}), overwrite=True)
    assert (tmp_path / "best.weights.h5").exists()  # `check` removes no files, only `claim` does
    claim(tmp_path, Identity({"seed": 1}), overwrite=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["resnet.weights.h5", "run.json", "thesis.tex"]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert json.loads((tmp_path / "run.json").read_text()) == {"seed": 1}


def test_overwrite_of_a_checkpoints_directory_without_run_json_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "other_model.pt").touch()
    message = refusal(check, tmp_path, IDENTITY, overwrite=True)
    assert "holds files (checkpoints), but no run" in message
    assert (tmp_path / "checkpoints" / "other_model.pt").exists()
