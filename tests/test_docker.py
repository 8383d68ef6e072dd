"""Tests that the files of docker/ agree with each other, with pyproject.toml and with the Makefile."""

import os
import pathlib
import re
import tomllib

import pytest
import yaml

from common.data import storage
from tests.test_launch_files import LAUNCHER, SPEC, WORKER
from tests.test_readme import PAGES

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOLDERS = ("common", "efficientdet", "tools", "yolov4")
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.cpu"]
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
every_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def stages(path: pathlib.Path) -> list[list[tuple[str, str]]]:
    """Returns lists of (instruction, arguments): before the first FROM, then for each stage."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    parts: list[list[tuple[str, str]]] = [[]]
    for name, value in (line.split(maxsplit=1) for line in text.splitlines() if line.strip()):
        if name == "FROM":
            parts.append([])
        parts[-1].append((name, " ".join(value.split())))
    return parts


def values_of(stage: list[tuple[str, str]], name: str) -> list[str]:
    return [value for instruction, value in stage if instruction == name]


def argument(stage: list[tuple[str, str]], name: str) -> str:
    return dict(value.split("=", 1) for value in values_of(stage, "ARG") if "=" in value)[name]


@every_dockerfile
def test_docker_image_runs_as_a_numbered_user_without_root_rights(path):
    last = stages(path)[-1]
    assert values_of(last, "USER") == ["${UID}"]  # a number, because Kubernetes' runAsNonRoot needs it
    assert int(argument(last, "UID")) >= 1000
    names = [name for name, _ in last]
    assert "RUN" not in names[names.index("USER") :]


@every_dockerfile
def test_docker_image_installs_only_the_locked_packages_of_pyproject(path):
    assert not re.search(r"==|\bpip3? |requirements", str(stages(path)))
    build = stages(path)[1]
    extras = argument(build, "EXTRAS").strip('"')
    assert set(extras.split()) <= set(EXTRAS) and "dev" not in extras
    assert ("gpu" in extras.split()) == (path.name == "Dockerfile")
    # docker/setup_env.sh searches for a lock file of this name.
    lock = (DOCKER / "locks" / f"{'+'.join(sorted(extras.split()))}.txt").read_text()
    for pin in [*PROJECT["dependencies"], *(pin for extra in extras.split() for pin in EXTRAS[extra])]:
        package, version = pin.split("==")
        assert f"\n{package.partition('[')[0]}=={version} " in lock, pin
    runs = " ".join(values_of(build, "RUN"))
    assert "docker/setup_env.sh .venv ${EXTRAS}" in runs and "docker/build_horovod.sh .venv" in runs


@every_dockerfile
def test_docker_image_can_read_a_bucket_through_https(path):
    assert "s3" in argument(stages(path)[1], "EXTRAS")
    assert (
        f"ln -s {storage._DEBIAN_CERTIFICATES} {storage._CERTIFICATES}"
        in values_of(stages(path)[-1], "RUN")[0]
    )


@every_dockerfile
def test_files_that_a_dockerfile_copies_exist_and_are_in_the_build_context(path):
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    for stage in stages(path):
        for value in values_of(stage, "COPY"):
            *sources, _ = value.split()
            if sources[0].startswith("--from="):
                assert sources == ["--from=build", "/workspace/.venv"]
                continue
            for source in sources:
                assert (ROOT / source).exists()
                assert source == "." or source.split("/")[0] in allowed


def test_docker_build_context_has_only_the_files_that_the_apps_need():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    files = {"Makefile", "README.md", "pyproject.toml", "LICENSE"}
    assert allowed == files | {"docker"} | set(FOLDERS)
    assert lines[-1] == "**/__pycache__"


def test_gpu_docker_image_differs_from_cpu_docker_image_only_by_driver_and_infiniband():
    gpu, cpu = (stages(path)[-1] for path in DOCKERFILES)
    for name in ("COPY", "USER", "ENTRYPOINT", "CMD", "WORKDIR"):
        assert values_of(gpu, name) == values_of(cpu, name), name
    packages, infiniband, users, *rest = values_of(gpu, "RUN")
    assert packages == values_of(cpu, "RUN")[0] and "libibverbs1" in infiniband
    assert values_of(cpu, "RUN")[1] in users and rest == values_of(cpu, "RUN")[2:]
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility,video" in values_of(gpu, "ENV")[0]
    (entry,) = values_of(cpu, "ENTRYPOINT")
    assert yaml.safe_load(entry)[-1] == "/workspace/docker/entrypoint.sh"
    assert os.access(DOCKER / "entrypoint.sh", os.X_OK)


@every_dockerfile
def test_make_in_the_docker_image_does_not_install_again(path):
    last = stages(path)[-1]
    order = [value for name, value in last if name in ("COPY", "RUN")]
    assert order.index("touch .venv/.ready .venv/.horovod") > order.index(". .")
    makefile = (ROOT / "Makefile").read_text()
    assert {".ready", ".horovod"} == set(re.findall(r"^\$\(VENV\)/(\S+):", makefile, re.MULTILINE))


# --- compose.yaml and mpijob.yaml -----------------------------------------------------------------


def test_compose_service_trains_only_after_its_health_check():
    for device in ("cpu", "gpu"):
        service, check = COMPOSE["services"][device], COMPOSE["services"][f"check-{device}"]
        for each in (service, check):
            assert (DOCKER / each["build"]["context"] / each["build"]["dockerfile"]).is_file()
            assert int(each["shm_size"].removesuffix("g")) >= 1 and each["cap_drop"] == ["ALL"]
            places = {volume.rpartition("}:")[2] for volume in each["volumes"]}
            assert places == {"/data:ro", "/workspace/runs"}
            assert ("deploy" in each) == (device == "gpu")
        assert service["depends_on"] == {f"check-{device}": {"condition": "service_completed_successfully"}}
        assert check["command"][0] == "docker/healthcheck.sh"


def test_mpijob_has_the_ssh_port_keys_and_user_of_the_docker_images():
    lines = (DOCKER / "sshd_config").read_text().splitlines()
    settings = dict(line.split(maxsplit=1) for line in lines if not line.startswith("#"))
    keys = SPEC["sshAuthMountPath"]
    assert settings["HostKey"] == f"{keys}/id_rsa"
    assert settings["AuthorizedKeysFile"] == f"{keys}/authorized_keys"
    assert settings["StrictModes"] == "no"
    launcher, worker = LAUNCHER["containers"][0], WORKER["containers"][0]
    port = settings["Port"]
    assert int(port) > 1024
    assert launcher["args"][launcher["args"].index("--ssh-port") + 1] == port
    assert str(worker["readinessProbe"]["tcpSocket"]["port"]) == port
    assert worker["args"] == ["-De", "-f", "/workspace/docker/sshd_config"]
    for path in DOCKERFILES:
        last = stages(path)[-1]
        assert values_of(last, "WORKDIR") == ["/workspace"]
        user = re.search(r"useradd [^&]* (\w+) &&", " ".join(values_of(last, "RUN")))[1]
        assert keys == f"/home/{user}/.ssh" and settings["AllowUsers"] == user
        for pod in (LAUNCHER, WORKER):
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert str(pod["securityContext"]["runAsUser"]) == argument(last, "UID")
            assert pod["containers"][0]["image"].partition(":")[0] == "dali-detection"


# --- pages ----------------------------------------------------------------------------------------


def test_docker_files_and_pages_name_no_private_address_host_or_path():
    texts = {path: path.read_text() for path in DOCKER.rglob("*") if path.suffix != ".pyc" and path.is_file()}
    for path, text in [*texts.items(), *((name, PAGES[name]) for name in ("containers", "distributed"))]:
        if "locks" not in pathlib.Path(path).parts:  # versions in locks look like addresses
            assert not re.search(r"\b(?!127\.)\d{1,3}(\.\d{1,3}){3}\b", text), path
        known = r"horovod|www\.apache|raw\.githubusercontent\.com/kubeflow/"
        assert not re.search(rf"https?://(?!{known})[\w.-]+\.\w+/", text), path
    for text in (*(texts[DOCKER / name] for name in ("slurm.sh", "mpijob.yaml")), PAGES["distributed"]):
        paths = set(re.findall(r"(?<![\w.$}*\]])(/[a-z]+)(?:/[\w.-]+)+", text))
        assert paths <= {"/data", "/dev", "/etc", "/home", "/run", "/usr", "/workspace"}
