#!/usr/bin/env bash
# What every command of the image runs under: any command as it is, horovodrun so that stopping the container saves.
#
#   docker run ... dali-detection:cpu horovodrun -np 2 python efficientdet/train.py ...
#
# A TERM to horovodrun would kill its ranks after five seconds, saved or not (docs/many_gpus.md). Here it goes to the ranks
# of this host: all ranks save the same step and end, then horovodrun does. Give them time: docker stop -t 300.
set -euo pipefail

[ "$(basename -- "${1:-}")" = horovodrun ] || exec "$@"

# The ranks alone, by a pattern that horovodrun and its shells, whose lines hold the same words, do not fit; and of this
# job alone, by a mark in the environment that horovodrun hands on.
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
