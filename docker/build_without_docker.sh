#!/usr/bin/env bash
# Builds docker/Dockerfile.cpu and tests the image, on Debian or Ubuntu without Docker and without a registry.
#
#   sudo docker/build_without_docker.sh                 half an hour on two cores, 25 GB of temporary disk
#   sudo docker/build_without_docker.sh --whole-demo    also runs `make demo` completely: ten minutes more
#   sudo docker/build_without_docker.sh --keep          keeps the image and prints where
#
# Needs root and the apt packages buildah and debootstrap. debootstrap creates Debian bookworm from its packages, and buildah
# runs the Dockerfile in a chroot. The tests run as the image's user: imports, docker/healthcheck.sh, a second host through
# ssh, and `make demo` with a few images. All files are in one directory under TMPDIR (/var/tmp), removed at the end.
#
# The image contains this machine's pip and apt settings (mirrors, certificates). Do not publish a kept image.
set -euo pipefail

cd "$(dirname "$0")/.."
whole_demo=
keep=
say() { printf '\033[1m[image]\033[0m %s\n' "$*" >&2; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}
for argument in "$@"; do
  case $argument in
    --whole-demo) whole_demo=1 ;;
    --keep) keep=1 ;;
    *) fail "$argument: docker/build_without_docker.sh accepts --whole-demo and --keep" ;;
  esac
done
[ "$(id -u)" = 0 ] || fail "a chroot needs root: sudo docker/build_without_docker.sh"
for tool in buildah debootstrap; do
  command -v $tool >/dev/null || fail "no $tool: apt install buildah debootstrap"
done

work=$(mktemp -d "${TMPDIR:-/var/tmp}/dali-detection-image.XXXXXX")
# A separate store leaves the user's images untouched.
run_buildah() { TMPDIR=$work buildah --root "$work/store" --runroot "$work/run" "$@"; }
finish() {
  if [ "$keep" ]; then
    say "kept: buildah --root $work/store --runroot $work/run images"
    return
  fi
  run_buildah rm --all >/dev/null 2>&1 || true
  run_buildah rmi --all --force >/dev/null 2>&1 || true
  umount "$work/store/overlay" 2>/dev/null || true
  rm -rf --one-file-system "$work"
}
trap finish EXIT

# Prints this machine's pip settings that also work in the image.
pip_settings() {
  local python=${PYTHON:-python3}
  "$python" -m pip config list 2>/dev/null | sed -nE "s/^[^.]+\.((extra-)?index-url|trusted-host)='(https?:.*)'\$/\1 = \3/p" |
    awk '!seen[$1]++'
  certificates=$("$python" -m pip config list 2>/dev/null | sed -nE "s/^[^.]+\.cert='(.*)'\$/\1/p" | head -n1)
  if [ -f "$certificates" ]; then
    install -D --mode=644 "$certificates" "$work/base/usr/local/share/site-certificates.pem"
    echo "cert = /usr/local/share/site-certificates.pem"
  fi
}

say "the base: Debian bookworm, from its packages"
mirror=$(grep -hsoE 'https?://[^ ]+/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d/* | head -n1 || true)
debootstrap --variant=minbase bookworm "$work/base" ${mirror:+"${mirror% }"} >"$work/base.log" 2>&1 ||
  fail "debootstrap: $(tail -n3 "$work/base.log")"
{
  echo "[global]"
  pip_settings
} >"$work/base/etc/pip.conf"
rm -rf "$work/base/var/cache/apt/archives/"*.deb
container=$(run_buildah from scratch)
run_buildah add --quiet "$container" "$work/base" / >/dev/null
run_buildah commit --quiet --rm "$container" localhost/base >/dev/null
rm -rf "$work/base"

say "docker/Dockerfile.cpu"
run_buildah build --isolation chroot --build-arg BASE=localhost/base --build-arg VERSION=local \
  --file docker/Dockerfile.cpu --tag localhost/dali-detection:cpu . || fail "the image did not build"
container=$(run_buildah from localhost/dali-detection:cpu)
inside() { run_buildah run --isolation chroot "$container" -- "$@"; }
run_buildah images --format '{{.Name}} {{.Size}}' >&2

say "versions of the packages"
inside python -c 'import os, nvidia.dali.plugin.tf, horovod.tensorflow as hvd, nvidia.dali, tensorflow
assert os.getuid() != 0 and hvd.gloo_built()
print("TensorFlow", tensorflow.__version__, "DALI", nvidia.dali.__version__, "Horovod with Gloo, uid", os.getuid())'
inside sh -c '! touch common/mine 2>/dev/null' || fail "the program's files can be written by its user"

say "two steps, on one process and on two"
inside docker/healthcheck.sh
inside docker/healthcheck.sh --ranks=2

say "two hosts, of which the second is reached by ssh"
# As in Kubernetes, root owns the key. horovodrun takes 127.0.0.2 for another host.
# shellcheck disable=SC2016 # the shell in the container expands the variable
run_buildah run --isolation chroot --user root "$container" -- sh -euc '
  keys=/home/detection/.ssh
  mkdir $keys
  ssh-keygen -q -t ed25519 -N "" -f $keys/id_rsa
  cp $keys/id_rsa.pub $keys/authorized_keys
  chmod 644 $keys/*'
inside sh -euc '
  /usr/sbin/sshd -De -f docker/sshd_config 2>/dev/null &
  trap "kill $!" EXIT
  sleep 2
  horovodrun --gloo -np 2 -H localhost:1,127.0.0.2:1 --ssh-port 2222 python -c "
import horovod.tensorflow as hvd, tensorflow as tf
hvd.init()
assert (hvd.size(), hvd.local_size(), float(hvd.allreduce(tf.constant(1.0 + hvd.rank())))) == (2, 1, 1.5)
print(\"host\", hvd.cross_rank(), \"of\", hvd.cross_size())"'

say "make demo, on a few images"
# The scaled-down demo of tests/pages/test_demo.py.
inside make demo DEMO_IMAGES=12 DEMO_EVAL_IMAGES=6 DEMO_FLAGS="--epochs=1 --image_size=64"
inside make demo-clean

if [ "$whole_demo" ]; then
  say "make demo, complete"
  inside make demo
  inside make demo-clean
fi
say "all tests passed"
