"""Runs programs in processes that are forked from one in which DALI and TensorFlow are imported.

Those imports take five CPU seconds, more than most small commands need for their work. Each line of standard
input is a json list: the words after `python`, the directory, the path of an empty file for the output, and
whether tf.functions run eagerly. The answer to each line is the exit code.
"""

import gc
import json
import os
import runpy
import sys

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy starts no threads: a fork with threads may deadlock

import nvidia.dali.plugin.tf  # noqa: F401
import tensorflow as tf

assert len(os.listdir("/proc/self/task")) == 1
gc.freeze()  # the garbage collector no longer scans the imported modules, which saves time


def next_command() -> tuple[list[str], str, str, bool]:
    """Returns in a new process for each command. The server itself ends with its standard input."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return json.loads(line)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()


def run(words: list[str], directory: str, output: str, eagerly: bool) -> None:
    """Does what `python words...` does, up to the end of the process."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(output, os.O_WRONLY), 1)
    os.dup2(1, 2)
    os.chdir(directory)
    tf.config.run_functions_eagerly(eagerly)
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    run(*next_command())
