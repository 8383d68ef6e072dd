#!/usr/bin/env bash
# The images' entry point. It runs any command unchanged. With horovodrun, stopping the container first saves a checkpoint.
#
#   docker run ... dali-detection:cpu horovodrun -np 2 python efficientdet/train.py ...
#
# SIGTERM makes horovodrun kill its ranks after five seconds. So this script sends SIGTERM to the ranks, which save the same
# step and end. Allow time for this: docker stop -t 300.
set -euo pipefail

[ "$(basename -- "${1:-}")" = horovodrun ] || exec "$@"

# The pattern does not match horovodrun and its shells. DETECTION_LAUNCHER limits the signal to the ranks of this job.
ranks='^[^ ]*python[^ ]* [^ ]*train\.py'
export DETECTION_LAUNCHER=$$
stop() {
  local found=
  for pid in $(pgrep -f -- "$ranks"); do
    if grep -qzx "DETECTION_LAUNCHER=$$" "/proc/$pid/environ" 2>/dev/null && kill -TERM "$pid"; then
      found=1
    fi
  done
  [ "$found" ] || kill -TERM "$launcher"
}
trap stop TERM INT

"$@" &
launcher=$!
while kill -0 "$launcher" 2>/dev/null; do
  wait "$launcher" || true # a signal ends the wait, not the launcher
done
wait "$launcher"
