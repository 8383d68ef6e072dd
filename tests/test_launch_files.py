"""Tests the files that start many processes: Slurm scripts and the MPIJob.

Stand-ins for srun and scontrol run the scripts on this machine.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import sys

import pytest
import yaml

from tests.distributed import launching
from tests.test_readme import PAGES, check_flags, check_horovodrun, program_of

ROOT = pathlib.Path(__file__).resolve().parents[1]
SLURM = ROOT / "docker" / "slurm.sh"
SLURM_SRUN = ROOT / "docker" / "slurm_srun.sh"
MPIJOB = ROOT / "docker" / "mpijob.yaml"
RANKS_PATTERN = "^[^ ]*python[^ ]* [^ ]*train\\.py"
SPEC = yaml.safe_load(MPIJOB.read_text())["spec"]
LAUNCHER, WORKER = (SPEC["mpiReplicaSpecs"][role]["template"]["spec"] for role in ("Launcher", "Worker"))


def test_training_commands_of_mpijob_and_slurm_scripts_have_only_existing_flags():
    arguments = LAUNCHER["containers"][0]["args"]
    check_flags(arguments)
    check_horovodrun(["horovodrun", *arguments])
    for script in (SLURM, SLURM_SRUN):
        comments = script.read_text().replace("\\\n#", " ").splitlines()
        (words,) = [shlex.split(line) for line in comments if line.startswith("#   sbatch")]
        assert program_of(words)[0] == "efficientdet/train.py"
        check_flags(words)


def test_mpijob_has_only_fields_of_the_operators_api():
    """See types.go and validation.go of kubeflow/mpi-operator, API v2beta1."""
    job = yaml.safe_load(MPIJOB.read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    known = {"slotsPerWorker", "runLauncherAsWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath"}
    assert set(SPEC) <= known | {"launcherCreationPolicy", "mpiImplementation"}
    assert set(SPEC["runPolicy"]) <= {
        *("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"),
        *("schedulingPolicy", "suspend", "managedBy"),
    }
    assert SPEC["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    assert SPEC["launcherCreationPolicy"] in ("AtStartup", "WaitForWorkersReady")
    assert SPEC["mpiImplementation"] == "OpenMPI"
    replicas = SPEC["mpiReplicaSpecs"]
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


def test_mpijob_has_one_rank_per_gpu_and_two_minutes_to_save():
    (launcher,), (worker,) = LAUNCHER["containers"], WORKER["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == SPEC["slotsPerWorker"]
    ranks = int(launcher["args"][launcher["args"].index("-np") + 1])
    assert ranks == SPEC["mpiReplicaSpecs"]["Worker"]["replicas"] * SPEC["slotsPerWorker"]
    assert "nvidia.com/gpu" not in launcher["resources"]["limits"]
    assert {mount["mountPath"] for mount in worker["volumeMounts"]} == {"/data", "/dev/shm"}
    grace = [pod["terminationGracePeriodSeconds"] for pod in (LAUNCHER, WORKER)]
    assert grace[0] > grace[1] >= 120  # horovodrun must end after the ranks


def test_slurm_script_asks_for_a_signal_before_the_time_limit_and_for_a_requeue():
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SLURM.read_text(), re.MULTILINE))
    assert {"signal", "requeue"} <= set(options)
    assert (options["nodes"], options["gpus-per-node"]) == ("2", "8")
    assert options["ntasks-per-node"] == "1"  # horovodrun starts the ranks
    assert re.fullmatch(r"B:TERM@\d+", options["signal"])  # B: Slurm signals only the script


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
    """A directory with a train.py that waits for a signal, and stand-ins for Slurm."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "train.py").write_text(TRAIN)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text.format(log=tmp_path / "log"))
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def sbatch(
    cluster: pathlib.Path, *arguments: str, script: pathlib.Path = SLURM, **variables: str
) -> launching.Job:
    env = {"PATH": f"{cluster}/bin:{os.environ['PATH']}", "HOME": str(cluster)}
    env |= {"SLURM_SUBMIT_DIR": str(cluster), "SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node[1-1]"}
    env |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2"}
    return launching.Job(["bash", str(script), *arguments], env | variables, cluster)


@pytest.mark.skipif(not shutil.which("pkill"), reason="no pkill: install procps")
def test_sigterm_to_the_slurm_script_stops_its_ranks_and_requeues_the_job(cluster):
    # These flags contain characters that are special in regular expressions.
    flags = [f"--output_dir={cluster}/run", "--freeze=^(a|b)[0-9]+.*$", "--hparams=x={1,2}"]
    with sbatch(cluster, "app/train.py", *flags) as job:
        job.wait_for("training with", times=2)
        arguments = json.dumps([*flags, "--strategy=horovod"]).replace('"', "'")
        assert f"[0]<stdout>:training with {arguments}" in job.output()[0]
        os.kill(job.pid, signal.SIGTERM)
        result = job.finish(timeout=60)
    assert result.returncode == 75, result.stderr
    assert "saved" in result.stdout_of(0) and "saved" in result.stdout_of(1)
    log = (cluster / "log").read_text().splitlines()
    assert log[0] == "scontrol show hostnames node[1-1]"
    assert log[1].startswith("srun --overlap --nodes=1 --ntasks-per-node=1 pkill -TERM -f -- ^")
    assert log[2:] == ["scontrol requeue 42"]


def test_slurm_job_that_fails_is_not_requeued(cluster):
    with sbatch(cluster, "app/train.py", "--fail") as job:
        result = job.finish(timeout=60)
    assert result.returncode == 1
    assert "requeue" not in (cluster / "log").read_text()


SRUN_TASKS = """#!/bin/sh
while [ "${{1#--}}" != "$1" ]; do echo "$1" >> {log}; shift; done
export SLURM_NTASKS=2 SLURM_NODEID=0
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" &
SLURM_PROCID=0 SLURM_LOCALID=0 "$@"
code=$?
wait $! || code=$?
exit $code
"""
# One call writes the whole line: the ranks share a pipe, and print could mix the words of their lines.
PRINT_RANK = """
import os, sys
import horovod.tensorflow as hvd
hvd.init()
os.write(1, f"rank {hvd.rank()} of {hvd.size()} local {hvd.local_rank()} {sys.argv[1:]}\\n".encode())
hvd.shutdown()
sys.exit(75)
"""


def test_ranks_of_srun_connect_and_a_stopped_job_is_requeued(cluster):
    (cluster / "bin" / "srun").write_text(SRUN_TASKS.format(log=cluster / "log"))
    (cluster / "docker").mkdir()
    (cluster / "docker" / "slurm_rank.py").symlink_to(ROOT / "docker" / "slurm_rank.py")
    (cluster / "app" / "train.py").write_text(PRINT_RANK)
    environment = {"SLURM_JOB_ID": str(os.getpid()), "HOROVOD_GLOO_TIMEOUT_SECONDS": "200"}
    with sbatch(cluster, "app/train.py", "--flag", script=SLURM_SRUN, **environment) as job:
        result = job.finish(timeout=300)
    assert result.returncode == 75, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("rank")]
    assert sorted(lines) == [
        f"rank {rank} of 2 local {rank} ['--flag', '--strategy=horovod']" for rank in (0, 1)
    ]
    log = (cluster / "log").read_text().splitlines()
    assert log[-1] == f"scontrol requeue {os.getpid()}" and "--kill-on-bad-exit=0" in log


def test_srun_starts_the_ranks_in_a_container(cluster):
    (cluster / "bin" / "srun").write_text(f'#!/bin/sh\necho "$@" > {cluster}/log\n')
    with sbatch(cluster, "app/train.py", script=SLURM_SRUN, IMAGE="a.sqsh", MOUNTS="/a:/data:ro") as job:
        assert job.finish(timeout=60).returncode == 0
    words = (cluster / "log").read_text().split()
    place = words.index("/workspace/.venv/bin/python")
    container = [
        "--container-image=a.sqsh",
        "--container-mounts=/a:/data:ro",
        "--container-workdir=/workspace",
    ]
    assert words[place - 3 : place] == container
    assert words[place + 1 :] == ["docker/slurm_rank.py", "app/train.py", "--strategy=horovod"]


def test_slurm_script_reports_a_missing_program_or_environment(cluster):
    with sbatch(cluster) as job:
        assert job.finish(timeout=60).stderr.startswith("error: give a script and its flags")
    (cluster / ".venv").unlink()
    with sbatch(cluster, "app/train.py") as job:
        result = job.finish(timeout=60)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "run make horovod there first" in result.stderr


def test_process_pattern_of_the_mpijob_for_the_stop_signal_matches_only_the_ranks(tmp_path):
    assert RANKS_PATTERN in MPIJOB.read_text() and RANKS_PATTERN in PAGES["distributed"]
    script = tmp_path / "train.py"
    script.write_text("import signal; print('ready', flush=True); signal.pause()")
    with launching.start(2, [script]) as job:
        job.wait_for("ready", times=2)
        ranks = launching.rank_pids(job)
        lines = {process.pid: " ".join(process.cmdline()) for process in job.processes()}
    assert len(ranks) == 2
    assert sum("train.py" in line for line in lines.values()) > 2
    assert {pid for pid, line in lines.items() if re.search(RANKS_PATTERN, line)} == set(ranks.values())
