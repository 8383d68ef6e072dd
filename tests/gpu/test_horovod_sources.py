"""Checks with the compiler that Horovod's sources for CUDA and NCCL fit this TensorFlow.

This needs no GPU and no CUDA toolkit: TensorFlow's wheel contains the headers of CUDA 12 and NCCL. Linking
and the kernels in cuda_kernels.cu are not tested.
"""

import pathlib
import subprocess
import sys
import tarfile
import tomllib

import pytest
import tensorflow as tf

from tests.conftest import ROOT

SOURCES = (
    "tensorflow/mpi_ops.cc",
    "common/operations.cc",
    "common/ops/cuda_operations.cc",
    "common/ops/gpu_operations.cc",
    "common/ops/nccl_operations.cc",
)
# As CMakeLists.txt of Horovod sets them for HOROVOD_GPU_OPERATIONS=NCCL without MPI: letters as numbers.
DEFINITIONS = {"EIGEN_MPL2_ONLY": 1, "HAVE_CUDA": 1, "HAVE_GPU": 1, "HAVE_NCCL": 1, "HAVE_GLOO": 1}
DEFINITIONS |= {"HOROVOD_CPU_OPERATIONS_DEFAULT": ord("G"), "TENSORFLOW_VERSION": 2021000000}
for name in ("ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER"):
    DEFINITIONS[f"HOROVOD_GPU_{name}"] = ord("N")


@pytest.fixture(scope="module")
def horovod_sources(tmp_path_factory) -> pathlib.Path:
    """The patched sources of the pinned Horovod."""
    directory = tmp_path_factory.mktemp("horovod")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pin = project["optional-dependencies"]["horovod"][0]
    options = ["--quiet", "--no-deps", "--no-binary=:all:", "--no-build-isolation", f"--dest={directory}"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, pin], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"pip cannot download {pin}: {done.stderr[-300:]}")
    (archive,) = directory.glob("horovod-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(directory, filter="data")
    sources = archive.with_name(archive.name.removesuffix(".tar.gz"))
    subprocess.run([ROOT / "docker" / "patch_horovod.sh", sources], check=True)
    return sources


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_patched_sources_of_horovod_for_cuda_and_nccl_compile_with_tensorflows_headers(
    horovod_sources, source
):
    tensorflow = pathlib.Path(tf.sysconfig.get_include())
    cuda = [tensorflow / "third_party" / "gpus" / "cuda" / "include"]
    cuda += [tensorflow / "external" / name for name in ("cuda_nccl/include", "cuda_cccl/libcudacxx/include")]
    if not all(path.is_dir() for path in cuda):
        pytest.skip(f"this TensorFlow has no headers of CUDA in {tensorflow}")
    third_party = horovod_sources / "third_party"
    parts = ("gloo", "flatbuffers/include", "HTTPRequest/include", "eigen", "lbfgs/include")
    includes = [horovod_sources, tensorflow, *cuda, *(third_party / part for part in parts)]
    includes += sorted(third_party.glob("boost/*/include"))
    command = ["g++", "-fsyntax-only", "-w", *tf.sysconfig.get_compile_flags()]
    command += [f"-D{name}={value}" for name, value in DEFINITIONS.items()]
    command += [f"-I{path}" for path in includes]
    done = subprocess.run(
        [*command, horovod_sources / "horovod" / source], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[:3000]
