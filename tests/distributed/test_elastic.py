"""Two names of this machine serve as hosts."""

import json
import pathlib
import re

import pytest

from tests.common.training.small_model import rows_of
from tests.distributed import elastic_on_ranks, launching
from tests.distributed.elastic_on_ranks import APPS, HOSTS, write_hosts
from tests.distributed.small_apps import IMAGES, training_flags

TIMEOUT = 240  # seconds; on two idle cores a run takes 30 s
BATCH_SIZE, EPOCHS = 2, 3
STEPS = {1: IMAGES // BATCH_SIZE, 2: IMAGES // BATCH_SIZE // 2}


def launch(directory, hosts, what, *flags, cooldown=600) -> launching.Result:
    """horovodrun may use a lost host again after `cooldown` seconds."""
    hosts_file, script = directory / "hosts", directory / "hosts.sh"
    write_hosts(hosts_file, hosts)
    script.write_text(f"#!/bin/sh\ncat '{hosts_file}'\n")
    script.chmod(0o755)
    options = ["--min-np", "1", "--max-np", "2", "--host-discovery-script", script]
    # Without --network-interface, horovodrun would search for an interface that both hosts share.
    options += ["--network-interface", "lo", "--blacklist-cooldown-range", str(cooldown), str(cooldown + 1)]
    command = [elastic_on_ranks.__file__, "--", what, hosts_file, *flags]
    return launching.launch(len(hosts), command, options=options, timeout=TIMEOUT)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "before", "after"), [("lose", 2, 1), ("grow", 1, 2)])
def test_a_run_goes_on_from_its_last_epoch_with_the_ranks_that_there_are(
    drawn: pathlib.Path, tmp_path, what, before, after
):
    run = tmp_path / "run"
    flags = training_flags(APPS[what], drawn, run, "horovod", BATCH_SIZE)
    result = launch(tmp_path, HOSTS[:before], what, *flags, "--elastic", f"--epochs={EPOCHS}")
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    assert re.findall(r"resumed after epoch (\d+) ", said) == ["1"]
    assert "changed: num_ranks, num_replicas, steps_per_epoch" in said
    images = [int(n) for n in re.findall(r"learning rate \S+ = \S+ x (\d+) images", said)]
    assert images == [BATCH_SIZE * before, BATCH_SIZE * after]
    rows = [(int(row["epoch"]), int(row["step"])) for row in rows_of(run)]
    assert rows == [(e, e * STEPS[before if e == 1 else after]) for e in range(1, EPOCHS + 1)]
    manifests = [json.loads(path.read_text()) for path in run.glob("checkpoints/*/manifest.json")]
    manifest = max(manifests, key=lambda m: (m["state"]["epoch"], m["state"]["step_in_epoch"]))
    assert (manifest["world_size"], manifest["state"]["epoch"]) == (after, EPOCHS)
    assert manifest["state"]["step"] == EPOCHS * STEPS[after]


def test_training_begins_anew_when_the_hosts_change_and_an_error_of_one_rank_ends_all(tmp_path):
    result = launch(tmp_path, HOSTS, "light", cooldown=1)
    said = result.stdout + result.stderr
    assert result.returncode != 0, said
    assert re.findall(r"attempt with .*", said) == [
        "attempt with 2: overwrite True, 0 epochs, report",
        "attempt with 1: overwrite False, 0 epochs, report",
        "attempt with 2: overwrite False, 1 epochs, report",
    ], said
    assert said.count("error: the disk of rank 1 is full") == 1, said
    assert said.count("exit with status code 1.") == 2, said
