#!/usr/bin/env bash
# Not yet run on a cluster or a GPU. A test runs it with a stand-in for srun.
#
# Trains on the nodes of a Slurm job, one rank per GPU. srun starts the ranks, so the nodes need no ssh between them. The
# ranks run in a container (Pyxis and Enroot) if IMAGE is set. Two nodes with eight GPUs each:
#
#   export IMAGE="$PWD/dali-detection.sqsh" MOUNTS="$HOME/coco:/data:ro,$PWD/runs:/workspace/runs"
#   sbatch --nodes=2 docker/slurm_srun.sh efficientdet/train.py --flagfile=efficientdet/flags/d0_coco_16gpu.txt \
#       --train_images=/data/train2017 --train_annotations=/data/annotations/instances_train2017.json \
#       --eval_images=/data/val2017 --eval_annotations=/data/annotations/instances_val2017.json --output_dir=runs/d0
#
# IMAGE: a squashfs file or an image name that `srun --container-image` accepts. If it is empty, the ranks use .venv in the
# directory in which you call sbatch, which must be on a disk that all nodes share.
# MOUNTS: what `srun --container-mounts` mounts. docs/distributed.md explains both.
#
# Five minutes before the time limit Slurm signals the ranks. They save the same step and exit with 75. This script then
# requeues the job, which resumes. A job that ends with an error is not requeued.
#SBATCH --job-name=detection
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail

cd "$SLURM_SUBMIT_DIR"
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}
[ $# -gt 0 ] || fail "give a script and its flags: sbatch docker/slurm_srun.sh efficientdet/train.py --..."
python=.venv/bin/python
container=()
if [ -n "${IMAGE:-}" ]; then
  python=/workspace/.venv/bin/python
  container=("--container-image=$IMAGE" ${MOUNTS:+"--container-mounts=$MOUNTS"} --container-workdir=/workspace)
elif [ ! -x "$python" ]; then
  fail "there is no $python in $PWD: run make horovod there, or set IMAGE"
fi

DETECTION_HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)
DETECTION_PORT=$((20000 + SLURM_JOB_ID % 10000)) # of Horovod's rendezvous server on the first node
# By default Gloo waits 30 s for the other ranks, but a node may unpack the image for longer.
HOROVOD_GLOO_TIMEOUT_SECONDS=${HOROVOD_GLOO_TIMEOUT_SECONDS:-300}
export DETECTION_HOSTS DETECTION_PORT HOROVOD_GLOO_TIMEOUT_SECONDS

# The first rank that exits must not end rank 0, which may still be saving. After 600 s, remaining ranks are ended.
code=0
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-8}" --kill-on-bad-exit=0 --wait=600 --label "${container[@]}" \
  "$python" docker/slurm_rank.py "$@" --strategy=horovod || code=$?

if [ "$code" = 75 ]; then # srun returns the highest exit code of all ranks
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
