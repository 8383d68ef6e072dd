"""Runs the scripts of docker/: healthcheck.sh, entrypoint.sh, and Horovod as build_horovod.sh built it."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.distributed import launching
from tests.test_launch_files import TRAIN

DOCKER = pathlib.Path(__file__).resolve().parents[1] / "docker"
HOROVODRUN = pathlib.Path(sys.executable).with_name("horovodrun")


def healthcheck(*arguments: str, python: str | os.PathLike = sys.executable) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHON": str(python)}
    words = [DOCKER / "healthcheck.sh", *arguments]
    return subprocess.run(words, env=env, cwd="/", capture_output=True, text=True)


@pytest.mark.slow
def test_healthcheck_trains_two_steps_in_this_environment():
    done = healthcheck()
    assert (done.returncode, done.stdout) == (0, "healthy: two steps on 1 process(es)\n"), done.stderr


@pytest.mark.parametrize(
    ("failing_program", "arguments", "message"),
    [
        pytest.param("tools/synthetic.py", [], "no data could be drawn", id="data"),
        pytest.param("efficientdet/train.py", [], "training failed", id="training"),
        pytest.param("-", ["--gpu"], "no GPU that TensorFlow and DALI can both use", id="GPU"),
    ],
)
def test_healthcheck_reports_the_program_that_fails(tmp_path, failing_program, arguments, message):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nif [ "$1" = {failing_program} ]; then echo "the reason"; exit 3; fi\n')
    python.chmod(0o755)
    done = healthcheck(*arguments, python=python)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"the reason\nunhealthy: {message}\n"


@pytest.mark.parametrize("engines", [1, 0], ids=["JPEG engines", "no JPEG engines"])
def test_healthcheck_fails_without_training_results_and_only_warns_without_jpeg_engines(tmp_path, engines):
    stand_ins = (
        "import ctypes, sys; from unittest import mock; "
        f"ctypes.CDLL = mock.Mock(side_effect={None if engines else 'OSError'}); sys.modules |= "
        "dict.fromkeys(['tensorflow', 'nvidia', 'nvidia.dali'], mock.MagicMock()); exec(sys.stdin.read())"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" != - ] || exec {sys.executable} -c "{stand_ins}"\n')
    python.chmod(0o755)
    *warnings, last = healthcheck("--gpu", python=python).stderr.splitlines()
    assert last == "unhealthy: training left no results" and len(warnings) == 1 - engines
    assert engines or warnings[0].startswith("warning: no libnvcuvid.so.1, so no JPEG engines: set NVIDIA_")


@pytest.mark.parametrize("argument", ["--ranks=0", "--ranks=two", "--ranks=", "--help"])
def test_healthcheck_names_an_unknown_argument(argument):
    done = healthcheck(argument)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert argument in done.stderr


# --- docker/entrypoint.sh -------------------------------------------------------------------------

ENTRYPOINT = DOCKER / "entrypoint.sh"


def test_entrypoint_replaces_itself_by_its_command_with_unchanged_arguments(tmp_path):
    script = 'echo "$0|$1|$(readlink /proc/$$/exe)"; kill -TERM $$'
    words = [ENTRYPOINT, "bash", "-c", script, "a  b", "*"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == -signal.SIGTERM
    name, argument, program = done.stdout.strip().split("|")
    assert (name, argument, pathlib.Path(program).name) == ("a  b", "*", "bash")


def test_sigterm_to_the_entrypoint_stops_only_the_ranks_of_its_horovodrun_and_they_save(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    other = subprocess.Popen([sys.executable, script], stdout=subprocess.DEVNULL)
    words = [ENTRYPOINT, HOROVODRUN, "--gloo", "-np", "2", sys.executable, script]
    with launching.Job(words, dict(os.environ), tmp_path) as job:
        job.wait_for("training", times=2)
        os.kill(job.pid, signal.SIGTERM)
        result = job.finish(timeout=60)
    assert result.returncode == 1
    assert [result.stdout_of(rank).split() for rank in (0, 1)] == [["training", "with", "[]", "saved"]] * 2
    assert other.poll() is None
    other.kill()
    other.wait()


# --- docker/setup_env.sh --------------------------------------------------------------------------

# A Python whose pip installs nothing. It waits until the file `go` exists.
SET_UP_PYTHON = f"""#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip "*) echo pip >>pip.log; until [ -e go ]; do sleep 0.02; done ;;
  *plugin.tf*) ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def set_up_in(tmp_path):
    """Returns a function that starts `make setup` for the directory `venv`, and the directory of both."""
    for name, text in {
        "python": SET_UP_PYTHON,
        "g++": "#!/bin/sh\n",
        "nvidia-smi": "#!/bin/sh\nexit 9\n",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "docker"):
        (tmp_path / name).symlink_to(DOCKER.parent / name)
    (tmp_path / "go").touch()
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["make", "setup", "VENV=venv", "PYTHON=./python"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return lambda *more: subprocess.Popen([*words, *more], env=env, cwd=tmp_path, **pipes), tmp_path


def test_set_up_adds_the_cuda_libraries_when_a_gpu_appears_later_and_only_then(set_up_in):
    start, directory = set_up_in
    added = "NVIDIA GPU found, but not by the last set-up: adding TensorFlow's CUDA libraries"
    packages = directory / "venv" / "requirements.txt"
    expected = [(False, 2), (False, 2), (True, 4), (False, 4)]  # message, calls of pip until then
    for attempt, (has_message, calls) in enumerate(expected):
        if attempt == 2:
            (directory / "nvidia-smi").write_text("#!/bin/sh\n")
        process = start()
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr
        assert (added in stderr) == has_message
        assert ("nvidia-cudnn-cu12==" in packages.read_text()) == (attempt >= 2)
        assert (directory / "pip.log").read_text().count("pip") == calls


def test_set_up_on_a_host_without_a_gpu_installs_the_cuda_libraries_if_asked_and_keeps_them(set_up_in):
    start, directory = set_up_in
    for words, has_cuda in (([], False), (["WITH_GPU=1"], True), (["--always-make"], True)):
        process = start(*words)
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr
        assert ("nvidia-cudnn-cu12==" in (directory / "venv" / "requirements.txt").read_text()) == has_cuda


def test_second_set_up_of_a_directory_says_that_it_waits_for_the_first(set_up_in):
    start, directory = set_up_in
    (directory / "go").unlink()
    first = start()
    while not (directory / "pip.log").exists():
        assert first.poll() is None
    second = start()
    assert second.stderr.readline().endswith(" another set-up of venv is running: waiting for its end\n")
    assert (directory / "pip.log").read_text() == "pip\n"
    (directory / "go").touch()
    assert [process.wait() for process in (first, second)] == [0, 0], second.stderr.read()
    for process in (first, second):
        process.communicate()


def test_set_up_fills_the_target_of_a_link_or_names_the_folder_that_is_missing(set_up_in):
    start, directory = set_up_in
    (directory / "venv").symlink_to("disk/environment")
    process = start()
    _, stderr = process.communicate()
    assert process.returncode == 2
    assert stderr.startswith("error: venv links to disk/environment, whose folder does not exist: create it")
    (directory / "disk").mkdir()
    process = start()
    _, stderr = process.communicate()
    assert process.returncode == 0 and f"virtual environment in {directory}/disk/environment" in stderr
    assert (directory / "disk" / "environment" / ".ready").exists()


def test_set_up_does_not_mix_two_versions_of_python_in_one_directory(set_up_in):
    start, directory = set_up_in
    (directory / "venv" / "bin").mkdir(parents=True)
    (directory / "venv" / "pyvenv.cfg").touch()
    _, stderr = start().communicate()
    assert stderr.startswith("error: the Python of venv is gone or was moved: remove this directory")
    (directory / "venv" / "bin" / "python").write_text("#!/bin/sh\necho Python 3.9.1\n")
    (directory / "venv" / "bin" / "python").chmod(0o755)
    _, stderr = start().communicate()
    assert stderr.startswith("error: venv has Python 3.9.1, but PYTHON=./python is Python 3.1")


# --- docker/build_horovod.sh ----------------------------------------------------------------------


def test_horovod_with_nccl_is_not_built_with_the_compiler_of_another_cuda_version(tmp_path):
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.48'\n")
    nvcc.chmod(0o755)
    env = {**os.environ, "HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CUDA_HOME": str(tmp_path / "cuda")}
    words = [DOCKER / "build_horovod.sh", tmp_path]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"error: {nvcc} is not of CUDA 12: put nvcc of CUDA 12 on PATH, or set")


@pytest.mark.slow
def test_ranks_connect_on_a_host_whose_name_has_no_address(tmp_path):
    """Horovod 0.28.1 without our patch looks up the host name, and crashes."""
    rename = 'echo nowhere.invalid >/proc/sys/kernel/hostname; exec "$@"'
    renamed = ["unshare", "--uts", "sh", "-c", rename, "sh"]
    if subprocess.run([*renamed, "true"], capture_output=True).stderr:
        pytest.skip("only root can change the host name")
    script = tmp_path / "meet.py"
    script.write_text(
        "import socket\nimport horovod.tensorflow as hvd\nhvd.init()\n"
        "print(socket.gethostname(), hvd.rank(), 'of', hvd.size(), flush=True)\n"
    )
    words = [*renamed, HOROVODRUN, "--gloo", "-np", "2", sys.executable, script]
    with launching.Job(words, dict(os.environ), tmp_path) as job:
        result = job.finish(timeout=120)
    assert result.returncode == 0, result.stderr
    assert [result.stdout_of(n).strip() for n in (0, 1)] == [f"nowhere.invalid {n} of 2" for n in (0, 1)]
