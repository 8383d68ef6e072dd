"""Runs one rank of a training under Horovod Elastic that loses a host or gets a new one.

    horovodrun ... python tests/distributed/elastic_on_ranks.py -- WHAT HOSTS_FILE [--flag=value ...]

lose    Trains YOLOv4 on two hosts. Rank 0 dies after the first epoch.
grow    Trains EfficientDet on one host. After the first epoch, rank 0 adds a host to HOSTS_FILE.
light   Trains nothing. Rank 0 of two dies while rank 1 waits for it in an all-reduce. When the host is back,
        rank 1 fails while rank 0 waits.
"""

import dataclasses
import os
import pathlib
import signal
import time

import horovod.tensorflow as hvd
import tensorflow as tf

from common import errors, progress
from common.distributed import elastic
from common.distributed.ranks import Hooks
from tests.distributed.small_apps import parsed

HOSTS = ("localhost", "127.0.0.1")
APPS = {"lose": "yolov4", "grow": "efficientdet"}


@dataclasses.dataclass(frozen=True)
class Flags:
    strategy: str = "horovod"
    overwrite: bool = True


def main(what: str, hosts_file: str, *arguments: str) -> None:
    if what == "light":
        elastic.run(light, Flags())
        return
    module, a = parsed(APPS[what], *arguments)
    train = module.train

    def interrupted(a, hooks):
        def on_epoch(epochs: int) -> None:
            if epochs == 1 and hooks.expected_epochs == 0:
                if what == "grow":
                    write_hosts(pathlib.Path(hosts_file), HOSTS)
                    wait_for_hosts(hooks)
                elif hvd.rank() == 0:
                    die()
            hooks.on_epoch(epochs)

        return train(a, dataclasses.replace(hooks, on_epoch=on_epoch))

    module.train = interrupted
    module.start(a)


def light(a: Flags, hooks: Hooks) -> None:
    given = f"overwrite {a.overwrite}, {hooks.expected_epochs} epochs, {hooks.lost_ranks}"
    progress.log(f"attempt with {hvd.size()}: {given}")
    if hvd.size() == 1:
        wait_for_hosts(hooks)
    if a.overwrite and hvd.rank() == 0:
        die()
    if not a.overwrite and hvd.rank() == 1:
        raise errors.UserError("the disk of rank 1 is full")
    hvd.allreduce(tf.ones(1))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_hosts(hooks: Hooks) -> None:
    """Waits until on_epoch raises an exception, which makes Horovod connect the ranks again."""
    while True:
        hooks.on_epoch(1)
        time.sleep(0.05)


def write_hosts(hosts_file: pathlib.Path, hosts: tuple[str, ...]) -> None:
    new = hosts_file.with_suffix(".new")
    new.write_text("".join(f"{host}:1\n" for host in hosts))
    new.replace(hosts_file)


if __name__ == "__main__":
    errors.run(main, positional=True)
