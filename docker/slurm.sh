#!/usr/bin/env bash
# Not yet run on a cluster or a GPU. A test runs it with stand-ins for Slurm's commands.
#
# Trains on the nodes of a Slurm job, one rank per GPU, and is requeued at the time limit. horovodrun starts the ranks by
# ssh. docker/slurm_srun.sh does the same without ssh, and in containers. Two nodes with eight GPUs each:
#
#   sbatch --nodes=2 docker/slurm.sh efficientdet/train.py --flagfile=efficientdet/flags/d0_coco_16gpu.txt \
#       --train_images=coco/train2017 --train_annotations=coco/annotations/instances_train2017.json \
#       --eval_images=coco/val2017 --eval_annotations=coco/annotations/instances_val2017.json --output_dir=runs/d0
#
# Each recipe is for one number of GPUs (docs/distributed.md). Without internet on the nodes, replace --init_from=imagenet by
# a file (docs/training.md).
#
# Submit from this project's root, on a disk that all nodes share, after `make horovod` on a node with GPUs. The site must
# allow ssh between the nodes of a job.
#
# Five minutes before the time limit Slurm signals this script. The ranks save the same step and end. Then the script
# requeues the job, which resumes. A job that ends with an error is not requeued.
#SBATCH --job-name=detection
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail

cd "$SLURM_SUBMIT_DIR"
horovodrun=.venv/bin/horovodrun
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}
[ -x "$horovodrun" ] || fail "there is no $horovodrun in $PWD: run make horovod there first"
[ $# -gt 0 ] || fail "give a script and its flags: sbatch docker/slurm.sh efficientdet/train.py --..."

gpus=${SLURM_GPUS_ON_NODE:?ask for GPUs: --gpus-per-node=N}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:$gpus/" | paste -sd, -)
training=(.venv/bin/python "$@" --strategy=horovod)

# Matches the command lines of the ranks only. SIGTERM to horovodrun would kill the ranks after five seconds.
ranks="^$(printf '%s' "${training[*]}" | sed 's/[][\.*^$+?(){}|]/\\&/g')"
stopped=
# shellcheck disable=SC2329 # the trap calls it
stop() {
  stopped=1
  echo "$(date +%T) signalling the ranks: they save, then end" >&2
  srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 pkill -TERM -f -- "$ranks" || true
}
trap stop TERM

"$horovodrun" --gloo -np $((gpus * SLURM_JOB_NUM_NODES)) -H "$hosts" --start-timeout 300 "${training[@]}" &
launcher=$!
while kill -0 "$launcher" 2>/dev/null; do
  wait "$launcher" || true # a signal ends the wait, not the launcher
done
code=0
wait "$launcher" || code=$? # horovodrun returns 1 for every exit code other than 0

if [ "$stopped" ] && [ "$code" != 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
  exit 75
fi
exit "$code"
