#!/usr/bin/env bash
# Creates the virtual environment for every command of this repository. `make setup` and the images call it.
#
#   docker/setup_env.sh .venv [extra ...]        extras of pyproject.toml, for example: dev
#
# pyproject.toml pins every version. The extra `gpu` is added if nvidia-smi finds a GPU. `make setup` calls this script again
# if one is found later, and adds the extra with WITH_GPU=1. Two calls for one directory run one after the other.
set -euo pipefail

venv=$1
shift
extras=("$@")
here=$(cd "$(dirname "$0")/.." && pwd)
say() { printf '\033[1m[setup]\033[0m %s\n' "$*" >&2; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

find_python() {
  candidates=(python3 python3.13 python3.12 python3.11)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON") # PYTHON, if set, is the only candidate
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.11, 3.12 or 3.13 found (tried: ${candidates[*]}). Install one, or give its path: make setup PYTHON=/path/to/python3.11"
}

# Prints the requirements of the named extras ("" is the default set), one per line.
requirements() {
  "$venv/bin/python" - "$here/pyproject.toml" "$@" <<'PYTHON'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
for name in sys.argv[2:]:
    print(*(project["optional-dependencies"][name] if name else project["dependencies"]), sep="\n")
PYTHON
}

pip_install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

command -v g++ >/dev/null || fail "no C++ compiler: DALI's TensorFlow plugin needs g++ (Debian and Ubuntu: apt install g++)"
python=$(find_python)
if [ -L "$venv" ]; then # scripts in the environment must not depend on the link
  target=$(readlink -f "$venv") || fail "$venv links to $(readlink "$venv"), whose folder does not exist: create it, or remove the link"
  venv=$target
fi
mkdir -p "$venv"
# Some network disks have no locks: then this script does not wait.
exec {lock_file}>"$venv/.lock"
code=0
flock --nonblock --conflict-exit-code 75 "$lock_file" 2>/dev/null || code=$?
if [ "$code" = 75 ]; then
  say "another set-up of $venv is running: waiting for its end"
  flock "$lock_file"
fi
if [ -e "$venv/pyvenv.cfg" ]; then # venv would mix two versions of Python in one directory
  existing=$("$venv/bin/python" --version 2>/dev/null) ||
    fail "the Python of $venv is gone or was moved: remove this directory, and run the command again"
  if [ -z "${PYTHON:-}" ]; then
    python=$(PYTHON=$venv/bin/python find_python)
  elif [ "$existing" != "$("$python" --version)" ]; then
    fail "$venv has $existing, but PYTHON=$PYTHON is $("$python" --version): remove this directory, or leave PYTHON out"
  fi
fi
say "virtual environment in $venv ($("$python" --version))"
"$python" -m venv "$venv" || fail "$python has no working venv module: on Debian and Ubuntu, apt install python3-venv"

if nvidia-smi -L >/dev/null 2>&1; then
  if [ -e "$venv/.ready" ] && [ ! -e "$venv/.gpu" ]; then
    say "NVIDIA GPU found, but not by the last set-up: adding TensorFlow's CUDA libraries"
  else
    say "NVIDIA GPU found: installing TensorFlow with its CUDA libraries"
  fi
  extras+=(gpu)
elif [ -e "$venv/.gpu" ]; then
  extras+=(gpu) # an environment keeps them
fi
size="about 1.3 GB to download"
[[ " ${extras[*]} " != *" gpu "* ]] || size="8.5 GB on the disk"
say "packages ($size the first time; a few minutes)"
# For the extras of `make setup` and of the images, a lock file has the hash of every file.
lock="$here/docker/locks/$(printf '%s\n' "${extras[@]}" | sort -u | paste -sd+).txt"
if [ -f "$lock" ]; then
  cp "$lock" "$venv/requirements.txt"
  hashes=(--require-hashes)
else
  say "no lock for the extras ${extras[*]}: versions are those of pyproject.toml, hashes are not checked"
  requirements "" "${extras[@]}" >"$venv/requirements.txt"
  hashes=()
fi
pip_install "${hashes[@]}" -r "$venv/requirements.txt" || fail "pip could not install the packages above: see its message"

# DALI's TensorFlow plugin imports TensorFlow and DALI while it builds, so it is installed last.
plugin=$(requirements dali-tf)
plugin_works() { TF_CPP_MIN_LOG_LEVEL=3 "$venv/bin/python" -c 'import nvidia.dali.plugin.tf' 2>"$venv/plugin.log"; }
install_plugin() {
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
    --no-cache-dir --force-reinstall "$plugin" >"$venv/plugin.log" 2>&1
}
requirements_build=$("$venv/bin/python" -c "import sys, tomllib
print(*tomllib.load(open(sys.argv[1], 'rb'))['build-system']['requires'], sep='\n')" "$here/pyproject.toml")
# shellcheck disable=SC2086 # each word is a requirement
pip_install $requirements_build

if ! plugin_works; then
  say "DALI's TensorFlow plugin (its shipped binary)"
  # The installer searches TensorFlow's library for "GCC:" with `strings`, and would compile because clang built it. A
  # replacement for `strings` makes the installer choose and test its own binary.
  shim=$(mktemp -d)
  trap 'rm -rf "$shim"' EXIT
  printf '#!/bin/sh\necho "GCC: (GNU) 13.1.0"\n' >"$shim/strings"
  chmod +x "$shim/strings"
  PATH="$shim:$PATH" install_plugin || true
fi
if ! plugin_works; then
  say "DALI's TensorFlow plugin: compiling it (a minute or two)"
  requirements dali-tf-build >"$venv/requirements-build.txt"
  pip_install -r "$venv/requirements-build.txt"
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  export CUDA_HOME="$site/nvidia/cuda_runtime"
  export CPATH="$site/nvidia/cuda_runtime/include:$site/nvidia/cuda_nvcc/include${CPATH:+:$CPATH}"
  install_plugin || fail "DALI's TensorFlow plugin did not build: see $venv/plugin.log"
  plugin_works || fail "DALI's TensorFlow plugin does not load: see $venv/plugin.log"
fi
if [[ " ${extras[*]} " == *" gpu "* ]]; then
  touch "$venv/.gpu" # the Makefile reads it
fi
say "ready after $SECONDS s: $venv/bin/python"
