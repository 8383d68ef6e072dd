import dataclasses
import json
import re

from common.args import Args
from common.distributed.ranks import Ranks
from common.training import run_directory
from common.training.run_directory import Identity
from tests.common.thread_ranks import run_on_ranks
from tests.refusal import refusal

IDENTITY = Identity({"app": "efficientdet", "config": {"image_size": [512, 512], "momentum": 0.9}, "seed": 0})


def check(path, identity, ranks=None, **flags):
    return run_directory.check(Args(output_dir=str(path), **flags), ranks or Ranks(), identity)


def claim(path, identity, **flags):
    check(path, identity, **flags)
    return run_directory.claim(Args(output_dir=str(path), **flags), Ranks(), identity)


def test_directory_of_the_same_run_is_resumed(tmp_path):
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


def test_directory_of_another_run_is_refused_with_the_differences(tmp_path):
    claim(tmp_path, IDENTITY)
    other = {"app": "efficientdet", "config": {"image_size": [640, 512], "momentum": 0.9}, "batch_size": 8}
    log = refusal(check, tmp_path, Identity(other))
    differences = [
        "batch_size was absent and is now 8",
        "config.image_size was [512, 512] and is now [640, 512]",
        "seed was 0 and is now absent",
    ]
    holds = f"--output_dir={tmp_path} holds another run: {'; '.join(differences)}. Choose another directory, "
    assert log == f"{holds}or give --overwrite to start anew"


def test_other_number_of_ranks_is_the_same_run_and_other_steps_alone_are_not(tmp_path):
    of_two = {"seed": 0, "num_replicas": 2, "num_ranks": 2, "steps_per_epoch": 4}
    claim(tmp_path, Identity(of_two))
    check(tmp_path, Identity({"seed": 0, "num_replicas": 1, "num_ranks": 1, "steps_per_epoch": 8}))
    check(tmp_path, Identity({"seed": 0, "num_replicas": 4, "num_ranks": 2, "steps_per_epoch": 2}))
    message = refusal(check, tmp_path, Identity(of_two | {"steps_per_epoch": 8}))
    assert "holds another run: steps_per_epoch was 4 and is now 8. Choose" in message
    message = refusal(check, tmp_path, Identity(of_two | {"num_replicas": 1, "num_ranks": 1, "seed": 1}))
    assert "holds another run: seed was 0 and is now 1. Choose" in message


def test_long_values_that_differ_are_named_without_their_values(tmp_path):
    claim(tmp_path, Identity({"data": "864dbb" * 11, "seed": 1}))
    log = refusal(check, tmp_path, Identity({"data": "241152" * 11, "seed": 1}))
    assert "holds another run: data is not the same. Choose" in log


def test_ranks_with_other_flags_or_data_are_refused(tmp_path):
    def work(ranks):
        own = {"data": f"of rank {ranks.rank}", "seed": 1}
        return refusal(check, tmp_path, Identity(own, of_all_ranks={"patience": ranks.rank}), ranks)

    _, log = run_on_ranks(2, work)
    assert log.startswith("ranks 0 and 1 differ in data, patience: give all the same flags")


@dataclasses.dataclass(frozen=True)
class Config:
    width: int
    epochs: int = 10


@dataclasses.dataclass(frozen=True)
class LaterConfig(Config):
    dropout: float = 0.0
    levels: tuple[int, ...] = (3, 4)


def identity_of(config):
    metadata = {"app": "a", "num_classes": 1, "label_map": "", "config": dataclasses.asdict(config)}
    metadata = json.loads(json.dumps(metadata))
    return Identity.of(Args(), Ranks(), config, metadata, may_change=("epochs",))


def test_new_config_field_with_its_default_is_the_same_run(tmp_path):
    claim(tmp_path, identity_of(Config(8)))
    older = json.loads((tmp_path / "run.json").read_text())
    assert older.pop("freeze_batch_norm") is False
    assert not identity_of(Config(8)).differences(older)  # earlier versions did not have this flag
    for config in (LaterConfig(8), LaterConfig(8, epochs=3), Config(8, epochs=3)):
        check(tmp_path, identity_of(config))
    assert identity_of(Config(8, epochs=3)).of_all_ranks["config"]["epochs"] == 3
    for config, message in (
        (LaterConfig(8, dropout=0.5), "config.dropout was 0.0 and is now 0.5"),
        (LaterConfig(8, levels=(3,)), r"config.levels was \[3, 4\] and is now \[3\]"),
        (LaterConfig(9), "config.width was 8 and is now 9"),
    ):
        assert re.search(message, refusal(check, tmp_path, identity_of(config)))


def test_directory_with_other_files_is_refused_and_overwrite_keeps_them(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert "holds files (thesis.tex), but no run" in refusal(check, tmp_path, IDENTITY)
    claim(tmp_path, IDENTITY, overwrite=True)
    (tmp_path / "checkpoints" / "00000001").mkdir(parents=True)
    (tmp_path / "best.weights.h5").write_text("")
    assert not check(tmp_path, Identity({"seed": 1}), overwrite=True)
    assert (tmp_path / "best.weights.h5").exists()  # `check` removes no files, only `claim` does
    claim(tmp_path, Identity({"seed": 1}), overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.json", "thesis.tex"]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert json.loads((tmp_path / "run.json").read_text()) == {"seed": 1}


def test_damaged_run_json_and_path_of_a_file_are_refused(tmp_path):
    claim(tmp_path / "run", IDENTITY)
    for content in ("{", "[]", '"x"'):
        (tmp_path / "run" / "run.json").write_text(content)
        assert "run.json is damaged" in refusal(check, tmp_path / "run", IDENTITY)
    (tmp_path / "file").touch()
    assert re.search(r"--output_dir=.*file", refusal(check, tmp_path / "file", IDENTITY))


def test_overwrite_keeps_files_that_no_run_wrote(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "other_model.pt").write_text("precious")
    (tmp_path / "resnet.weights.h5").write_text("precious")
    assert "holds files (checkpoints), but no run" in refusal(check, tmp_path, IDENTITY, overwrite=True)
    assert (tmp_path / "checkpoints" / "other_model.pt").exists()
    (tmp_path / "checkpoints").rename(tmp_path / "mine")
    for _ in range(2):
        claim(tmp_path, IDENTITY, overwrite=True)
    assert (tmp_path / "resnet.weights.h5").exists()
