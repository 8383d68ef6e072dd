#!/usr/bin/env bash
# Builds Horovod for the TensorFlow of a virtual environment and installs it there. `make horovod` calls it.
#
#   docker/build_horovod.sh .venv
#
# Horovod has no wheel for this TensorFlow. One of its files no longer compiles and is left out: with --xla the all-reduce
# stays outside XLA. The first build takes two minutes on two cores. The wheel is cached.
#
# Gloo is always included. HOROVOD_WITH_MPI=1 adds MPI; the wheel then needs libmpi at run time. NCCL is included if a CUDA
# toolkit (nvcc) and NCCL are found. HOROVOD_GPU_OPERATIONS= (empty) leaves it out. Other variables of Horovod's build are
# HOROVOD_NCCL_HOME, HOROVOD_CUDA_HOME and HOROVOD_BUILD_CUDA_CC_LIST.
set -euo pipefail

venv=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")/.." && pwd)
python=$venv/bin/python
say() { printf '\033[1m[horovod]\033[0m %s\n' "$*" >&2; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Prints the pins of one extra of pyproject.toml, one per line.
extra() {
  "$python" - "$here/pyproject.toml" "$1" <<'PYTHON'
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["optional-dependencies"][sys.argv[2]], sep="\n")
PYTHON
}
pip_install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }
works() { TF_CPP_MIN_LOG_LEVEL=3 "$python" -c 'import horovod.tensorflow as hvd; assert hvd.gloo_built()' 2>>"$log"; }

own=$(env | grep '^HOROVOD_' | sort || true) # part of the key of the cached wheel
for tool in g++ make; do
  command -v $tool >/dev/null || fail "no $tool: Horovod is compiled (Debian and Ubuntu: apt install build-essential)"
done
nvcc=${HOROVOD_CUDA_HOME:+$HOROVOD_CUDA_HOME/bin/}nvcc
has_nvcc() { "$nvcc" --version 2>/dev/null | grep -q 'release 12\.'; } # TensorFlow's CUDA libraries are of CUDA 12
if [ "${HOROVOD_GPU_OPERATIONS:-}" = NCCL ] && command -v "$nvcc" >/dev/null && ! has_nvcc; then
  fail "$(command -v "$nvcc") is not of CUDA 12: put nvcc of CUDA 12 on PATH, or set HOROVOD_CUDA_HOME to its toolkit"
fi
log=$venv/horovod.log
: >"$log"
pin=$(extra horovod | grep '^horovod==')
mapfile -t needed < <(extra horovod | grep -v '^horovod==')
pip_install "${needed[@]}" || fail "pip could not install ${needed[*]}"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Uses the NCCL of TensorFlow's GPU packages. A link adds the library name that linkers expect.
packaged_nccl() {
  local home
  home=$("$python" -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null) || return 1
  [ -f "$home/include/nccl.h" ] && [ -f "$home/lib/libnccl.so.2" ] || return 1
  ln -s "$home/lib/libnccl.so.2" "$work/libnccl.so"
  export HOROVOD_NCCL_INCLUDE=$home/include HOROVOD_NCCL_LIB=$work HOROVOD_NCCL_LINK=SHARED
}
system_nccl() { echo '#include <nccl.h>' | g++ -E -x c++ - >/dev/null 2>&1; }
if [ "${HOROVOD_GPU_OPERATIONS-NCCL}" = NCCL ]; then
  if has_nvcc && { [ -n "${HOROVOD_NCCL_HOME:-}${HOROVOD_NCCL_INCLUDE:-}" ] || packaged_nccl || system_nccl; }; then
    export HOROVOD_GPU_OPERATIONS=NCCL
  elif [ -z "${HOROVOD_GPU_OPERATIONS:-}" ] && nvidia-smi -L >/dev/null 2>&1; then
    say "no nvcc of CUDA 12 or no NCCL here: gradients will go through the CPU. Put this nvcc on PATH, then: rm $venv/.horovod && make horovod"
  fi
fi
[ -n "${HOROVOD_GPU_OPERATIONS:-}" ] || unset HOROVOD_GPU_OPERATIONS
kind=gloo
if [ "${HOROVOD_WITH_MPI:-}" = 1 ]; then
  kind+=-mpi
else
  export HOROVOD_WITHOUT_MPI=1
fi
kind+=${HOROVOD_GPU_OPERATIONS:+-${HOROVOD_GPU_OPERATIONS,,}}
export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
export MAKEFLAGS=${MAKEFLAGS:--j$(nproc)} # Horovod's default is 8 jobs, which need 8 GB

key=$("$python" - "$0" "$here/docker/patch_horovod.sh" "$pin" "$kind" "$own" <<'PYTHON'
import hashlib, importlib.metadata, pathlib, platform, sys
parts = [*sys.argv[3:], importlib.metadata.version("tensorflow"), platform.python_version(), platform.machine(),
         platform.libc_ver()[1], *(pathlib.Path(script).read_text() for script in sys.argv[1:3])]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16])
PYTHON
)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/dali-detection/wheels/$key

if ! compgen -G "$cache/*.whl" >/dev/null; then
  say "compiling $pin ($kind); two minutes on two cores, once"
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --no-build-isolation \
    --dest "$work" "$pin" >>"$log" 2>&1 || fail "$pin could not be downloaded: see $log"
  tar xzf "$work"/horovod-*.tar.gz -C "$work"
  source=$(find "$work" -maxdepth 1 -mindepth 1 -type d -name 'horovod-*')
  "$here/docker/patch_horovod.sh" "$source"
  # Where the library finds NCCL: in the same site-packages, then in HOROVOD_NCCL_HOME.
  rpath="\\\$ORIGIN/../../nvidia/nccl/lib${HOROVOD_NCCL_HOME:+;$HOROVOD_NCCL_HOME/lib}"
  printf 'set_target_properties(tensorflow PROPERTIES BUILD_WITH_INSTALL_RPATH TRUE INSTALL_RPATH "%s")\n' "$rpath" \
    >>"$source/horovod/tensorflow/CMakeLists.txt"
  # CMake 4 rejects the bundled Gloo.
  if ! cmake --version 2>/dev/null | grep -q 'version 3\.'; then
    pip_install --target "$work/cmake" "$(extra horovod-build)" || fail "pip could not install $(extra horovod-build)"
    HOROVOD_CMAKE=$(find "$work/cmake" -path '*/data/bin/cmake' -type f | head -1)
    chmod +x "$HOROVOD_CMAKE"
    export HOROVOD_CMAKE
  fi
  "$python" -m pip wheel --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir "$work/wheel" "$source" \
    >>"$log" 2>&1 || fail "Horovod did not compile${HOROVOD_GPU_OPERATIONS:+ (without NCCL: HOROVOD_GPU_OPERATIONS= make horovod)}: see $log"
  # Copy, then rename: the cache never holds an incomplete wheel.
  mkdir -p "$(dirname "$cache")" && cp -r "$work/wheel" "$cache.$$" || fail "cannot write $cache"
  mv -T "$cache.$$" "$cache" 2>/dev/null || rm -rf "$cache.$$"
fi
pip_install --no-deps --force-reinstall "$cache"/*.whl || fail "the wheel in $cache cannot be installed"
works || fail "Horovod does not load: see $log (and remove $cache to compile it again)"
say "ready ($kind)"
