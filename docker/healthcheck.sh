#!/usr/bin/env bash
# Runs on CPUs. --gpu was never run on a GPU.
#
# Checks that this environment can train: two steps of a small network on generated images, from files to a checkpoint.
#
#   docker run --rm dali-detection:cpu docker/healthcheck.sh                        one process
#   docker run --rm --gpus all dali-detection docker/healthcheck.sh --gpu           requires a GPU
#   docker run --rm dali-detection:cpu docker/healthcheck.sh --ranks=2              two processes with horovodrun
#
# Takes half a minute. Exits with 0 and one line, or with 1 and the output of the failed step. Run it before a job, not
# during one, because it uses GPU memory.
set -euo pipefail

cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
ranks=1
gpu=
for argument in "$@"; do
  case $argument in
    --ranks=[1-9] | --ranks=[1-9][0-9]) ranks=${argument#--ranks=} ;;
    --gpu) gpu=1 ;;
    *)
      echo "error: $argument: docker/healthcheck.sh accepts --ranks=N (below 100) and --gpu" >&2
      exit 1
      ;;
  esac
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-3}
unhealthy() {
  cat "$work/log" >&2
  echo "unhealthy: $*" >&2
  exit 1
}

if [ "$gpu" ]; then
  "$python" - >"$work/log" 2>&1 <<'PYTHON' || unhealthy "no GPU that TensorFlow and DALI can both use"
import ctypes
import sys
import tensorflow as tf
from nvidia.dali import backend
print("TensorFlow:", tf.config.list_physical_devices("GPU"), "DALI:", backend.GetCUDADeviceCount())
try:
    ctypes.CDLL("libnvcuvid.so.1")  # nvJPEG loads it for the JPEG engines, and prints nothing if it is missing
except OSError:
    print("warning: no libnvcuvid.so.1, so no JPEG engines: set NVIDIA_DRIVER_CAPABILITIES=compute,utility,video")
sys.exit(not (tf.config.list_physical_devices("GPU") and backend.GetCUDADeviceCount()))
PYTHON
  grep '^warning: ' "$work/log" >&2 || true
fi

"$python" tools/synthetic.py --output_dir="$work/data" --num_images=$((8 * ranks)) --seed=1 >"$work/log" 2>&1 ||
  unhealthy "no data could be drawn"
train=("$python" efficientdet/train.py --model_name=efficientdet-nano --image_size=64
  "--hparams=fpn_cells=1,head_repeats=1,max_level=5" --batch_size=4 --epochs=1
  --steps_per_epoch=2 --train_images="$work/data/images" --train_annotations="$work/data/instances.json"
  --output_dir="$work/run")
if [ "$ranks" -gt 1 ]; then
  train=("$(dirname "$python")/horovodrun" --gloo -np "$ranks" "${train[@]}" --strategy=horovod)
fi
"${train[@]}" >"$work/log" 2>&1 || unhealthy "training failed"
[ -s "$work/run/results.csv" ] || unhealthy "training left no results"
echo "healthy: two steps on $ranks process(es)"
