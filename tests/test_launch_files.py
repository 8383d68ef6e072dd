"""The launch files of docker/ and the commands of docs/many_gpus.md, against who will read them.

docker/slurm.sh runs for real, with a stand-in for Slurm's two commands.
"""

import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
import yaml
from absl import flags

import efficientdet.train
import yolov4.train
from tests.distributed import launching

ROOT = pathlib.Path(__file__).resolve().parents[1]
SLURM = ROOT / "docker" / "slurm.sh"
MPIJOB = ROOT / "docker" / "mpijob.yaml"
PAGE = ROOT / "docs" / "many_gpus.md"
APPS = {"efficientdet": efficientdet, "yolov4": yolov4}
RANKS_PATTERN = "^[^ ]*python[^ ]* [^ ]*train\\.py"


def bash_commands(text: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def training_commands() -> dict[str, list[str]]:
    """Every command that trains, of all files, from its script on."""
    container = yaml.safe_load(MPIJOB.read_text())["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]
    comments = SLURM.read_text().replace("\\\n#", " ").splitlines()
    lines = {
        "mpijob.yaml": [container["spec"]["containers"][0]["args"]],
        "slurm.sh": [shlex.split(line) for line in comments if line.startswith("#   sbatch")],
        "many_gpus.md": [shlex.split(line) for line in bash_commands(PAGE.read_text())],
    }
    found = {}
    for file, commands in lines.items():
        for number, words in enumerate(commands):
            script = next((i for i, word in enumerate(words) if word.endswith("/train.py")), None)
            if script is not None:
                found[f"{file}-{number}"] = words[script:]
    return found


TRAINING_COMMANDS = training_commands()


@pytest.mark.parametrize("command", TRAINING_COMMANDS.values(), ids=TRAINING_COMMANDS)
def test_flags_are_train_pys_own(command):
    fv = flags.FlagValues()
    flags.DEFINE_multi_string("flagfile", [], "", flag_values=fv)
    APPS[command[0].partition("/")[0]].train.define_flags(fv)
    left = fv(command)
    assert left[1:] == []  # nothing that is no flag
    for file in fv.flagfile:
        assert (ROOT / file).is_file()
        fv(["train", *(line for line in (ROOT / file).read_text().splitlines() if line.startswith("--"))])


def test_every_file_has_commands():
    assert {name.partition("-")[0] for name in TRAINING_COMMANDS} == {
        "mpijob.yaml",
        "slurm.sh",
        "many_gpus.md",
    }
    assert sum(name.startswith("many_gpus.md") for name in TRAINING_COMMANDS) >= 4


def horovodrun_lines() -> list[list[str]]:
    """The words after `horovodrun` of the page, of the MPIJob and of slurm.sh."""
    lines = [shlex.split(line) for line in bash_commands(PAGE.read_text())]
    words = [line[line.index("horovodrun") + 1 :] for line in lines if "horovodrun" in line]
    spec = yaml.safe_load(MPIJOB.read_text())["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    return [*words, spec["containers"][0]["args"]]


@pytest.mark.parametrize("words", horovodrun_lines(), ids=" ".join)
def test_horovodrun_understands_its_options(words):
    from horovod.runner.launch import parse_args

    with mock.patch.object(sys, "argv", ["horovodrun", *words]):
        args = parse_args()
    assert args.num_proc >= 2
    assert pathlib.Path(args.command[0]).name == "python"
    assert args.command[1].endswith("/train.py")
    assert "--strategy=horovod" in args.command
    if args.hosts:
        slots = [int(host.rpartition(":")[2]) for host in args.hosts.split(",")]
        assert sum(slots) == args.num_proc


def test_the_page_names_files_and_options_that_exist(capsys):
    from horovod.runner.launch import parse_args

    text = PAGE.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("https://") or (PAGE.parent / link).exists(), link
    with mock.patch.object(sys, "argv", ["horovodrun", "--help"]), pytest.raises(SystemExit):
        parse_args()
    known = set(re.findall(r"--([\w-]+)", capsys.readouterr().out))
    for app in APPS.values():
        fv = flags.FlagValues()
        app.train.define_flags(fv)
        known |= set(fv)
    of_others = {"nodes", "shm-size", "flagfile"}
    assert set(re.findall(r"(?<![\w-])--([a-z][\w-]+)", text)) <= known | of_others


def test_mpijob_is_what_the_operator_reads():
    """kubeflow/mpi-operator, pkg/apis/kubeflow/v2beta1/types.go (fields) and pkg/apis/.../validation.go."""
    job = yaml.safe_load(MPIJOB.read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    known = {"slotsPerWorker", "runLauncherAsWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath"}
    assert set(spec) <= known | {"launcherCreationPolicy", "mpiImplementation"}
    assert set(spec["runPolicy"]) <= {
        *("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"),
        *("schedulingPolicy", "suspend", "managedBy"),
    }
    assert spec["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    assert spec["launcherCreationPolicy"] in ("AtStartup", "WaitForWorkersReady")
    assert spec["mpiImplementation"] == "OpenMPI"  # its hostfile, "host slots=N", is the one horovodrun reads
    replicas = spec["mpiReplicaSpecs"]
    assert set(replicas) == {"Launcher", "Worker"} and replicas["Launcher"]["replicas"] == 1
    for replica in replicas.values():
        assert set(replica) == {"replicas", "restartPolicy", "template"}
        assert replica["restartPolicy"] in ("Never", "OnFailure")
        pod = replica["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            assert {"name", "image", "command", "args", "resources"} <= set(container)
            assert all(isinstance(word, str) for word in [*container["command"], *container["args"]])
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
            for variable in container.get("env", []):
                assert isinstance(variable["value"], str)


def test_mpijob_uses_every_gpu_once_and_has_time_to_save():
    spec = yaml.safe_load(MPIJOB.read_text())["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    (starts,), (works,) = (role["template"]["spec"]["containers"] for role in (launcher, worker))
    assert works["resources"]["limits"]["nvidia.com/gpu"] == spec["slotsPerWorker"]
    ranks = int(starts["args"][starts["args"].index("-np") + 1])
    assert ranks == worker["replicas"] * spec["slotsPerWorker"]
    assert "nvidia.com/gpu" not in starts["resources"]["limits"]
    assert {mount["mountPath"] for mount in works["volumeMounts"]} == {"/data", "/dev/shm"}
    grace = [role["template"]["spec"]["terminationGracePeriodSeconds"] for role in (launcher, worker)]
    assert grace[0] > grace[1] >= 120  # horovodrun outlives the ranks


def test_no_machine_of_ours_in_them():
    for path in (SLURM, MPIJOB, PAGE, ROOT / "docker" / "build_horovod.sh"):
        text = path.read_text()
        paths = set(re.findall(r"(?<![\w.$}*\]])(/[a-z]+)(?:/[\w.-]+)+", text))
        assert paths <= {"/data", "/dev", "/etc", "/home", "/run", "/usr", "/workspace"}, path  # an image's
        assert not re.search(r"\b(?!127\.)\d{1,3}(\.\d{1,3}){3}\b", text), path


def test_slurm_script_parses():
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    options = re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SLURM.read_text(), re.MULTILINE)
    assert {"nodes", "gpus-per-node", "signal", "requeue"} <= {name for name, _ in options}
    assert dict(options)["ntasks-per-node"] == "1"  # horovodrun starts the ranks
    assert re.fullmatch(r"B:TERM@\d+", dict(options)["signal"])  # the script alone: it tells the ranks


# --- docker/slurm.sh at work ----------------------------------------------------------------------

SRUN = """#!/bin/sh
echo "srun $*" >> {log}
while [ "${{1#--}}" != "$1" ]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/sh
echo "scontrol $*" >> {log}
[ "$1 $2" = "show hostnames" ] && echo localhost
exit 0
"""
TRAIN = """
import os, signal, sys
def stop(*_):
    print("saved", flush=True)
    os._exit(75)
signal.signal(signal.SIGTERM, stop)
if "--fail" in sys.argv:
    sys.exit(1)
print("training with", sys.argv[1:], flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def cluster(tmp_path):
    """A project whose train.py waits for a signal, on a cluster of one node with two GPUs."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "train.py").write_text(TRAIN)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text.format(log=tmp_path / "log"))
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def sbatch(cluster: pathlib.Path, *arguments: str) -> launching.Job:
    env = {
        **os.environ,
        "PATH": f"{cluster}/bin:{os.environ['PATH']}",
        "HOME": str(cluster),
        "SLURM_SUBMIT_DIR": str(cluster),
        "SLURM_JOB_NODELIST": "node[1-1]",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_ID": "42",
    }
    return launching.Job(["bash", str(SLURM), *arguments], env, cluster)


def test_slurm_stops_the_ranks_before_the_time_limit_and_queues_the_job_again(cluster):
    # Everything that a regular expression could misread; the run's directory makes the line unique.
    own = [f"--output_dir={cluster}/run", "--freeze=^(a|b)[0-9]+.*$", "--hparams=x={1,2}"]
    with sbatch(cluster, "app/train.py", *own) as job:
        job.wait_for("training with", times=2)
        first = json.dumps([*own, "--strategy=horovod"]).replace('"', "'")
        assert f"[0]<stdout>:training with {first}" in job.output()[0]
        os.kill(job.pid, signal.SIGTERM)
        start = time.monotonic()
        result = job.finish(timeout=60)
    assert time.monotonic() - start < 20
    assert result.returncode == 75, result.stderr
    assert "saved" in result.stdout_of(0) and "saved" in result.stdout_of(1)
    log = (cluster / "log").read_text().splitlines()
    assert log[0] == "scontrol show hostnames node[1-1]"
    assert log[1].startswith("srun --overlap --nodes=1 --ntasks-per-node=1 pkill -TERM -f -- ^")
    assert log[2:] == ["scontrol requeue 42"]


def test_slurm_does_not_queue_a_job_again_that_failed(cluster):
    with sbatch(cluster, "app/train.py", "--fail") as job:
        result = job.finish(timeout=60)
    assert result.returncode == 1
    assert "requeue" not in (cluster / "log").read_text()


def test_slurm_says_what_is_missing(cluster):
    with sbatch(cluster) as job:
        assert job.finish(timeout=20).stderr.startswith("error: name a script and its flags")
    (cluster / ".venv").unlink()
    with sbatch(cluster, "app/train.py") as job:
        result = job.finish(timeout=20)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "run make horovod there first" in result.stderr


def test_the_pattern_for_signals_finds_the_ranks_alone(tmp_path):
    """Of all processes of a job: not horovodrun, its helpers and shells, whose lines hold train.py, too."""
    assert RANKS_PATTERN in MPIJOB.read_text() and RANKS_PATTERN in PAGE.read_text()
    script = tmp_path / "train.py"
    script.write_text("import signal; signal.pause()")
    with launching.start(2, [script]) as job:
        ranks = launching.rank_pids(job, 2)
        lines = {process.pid: " ".join(process.cmdline()) for process in launching._processes(job)}
    assert sum("train.py" in line for line in lines.values()) > 2
    assert {pid for pid, line in lines.items() if re.search(RANKS_PATTERN, line)} == set(ranks.values())
