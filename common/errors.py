"""Problems with what the user gave: one clear line, exit code 1, no traceback.

Anything else that goes wrong is our bug and keeps its traceback (INTERFACE: exit codes).
"""

import difflib
import functools
import re
import sys
from collections.abc import Callable, Iterable

from absl import app, logging


class UserError(Exception):
    """What the user gave cannot be used. The message names it, its value, and what to do."""


class OtherRankError(UserError):
    """Another rank has a problem and reports it: this rank ends, too, without a message."""


class StoppedError(Exception):
    """A signal ended the run, after everything was saved. The message tells how to resume."""


# What a collective operation raises when another rank is gone: Horovod's SHUT_DOWN_ERROR (common/common.h),
# errors of Gloo's transport (gloo/transport/tcp/pair.cc), the names of Horovod's operations, and TensorFlow's
# CollectiveExecutor. Horovod's own wrapper (tensorflow/elastic.py) does not know the grouped operations.
_LOSS = re.compile(
    r"Horovod has been shut down|gloo/transport|({{node |/|_)Horovod|Collective ops is aborted"
)


def is_lost_rank(error: BaseException) -> bool:
    """Whether an error of a collective operation means that another rank is gone."""
    return bool(_LOSS.search(str(error)))


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not in a table, with the nearest right one.

    >>> str(unknown("model", "yolo4", ["efficientdet-d0", "yolov4"]))
    "unknown model 'yolo4': did you mean 'yolov4'? Known: efficientdet-d0, yolov4"
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" did you mean {near[0]!r}?" if near else ""
    return UserError(f"unknown {kind} {name!r}:{hint} Known: {', '.join(known)}")


def run(main: Callable[..., int | None], *, positional: bool = False) -> None:
    """Runs `main` under absl (flags are parsed here) and turns a UserError into one line and exit code 1.

    Args:
        main: called with the arguments that are not flags.
        positional: whether there may be any.
    """

    def guarded(argv: list[str]) -> int | None:
        if len(argv) > 1 and not positional:
            return _complain(f"unexpected argument {argv[1]!r}: every option is a --flag=value")
        try:
            return main(*argv[1:])
        except OtherRankError:
            return 1
        except UserError as error:
            return _complain(str(error))
        except StoppedError as stopped:
            tell(str(stopped))
            return 75  # EX_TEMPFAIL of sysexits.h: run the same command to go on
        except KeyboardInterrupt:
            tell("interrupted; what was saved before stands")
            return 130  # as a shell reports SIGINT

    app.run(guarded, flags_parser=lambda _: parse_flags())


@functools.cache
def parse_flags() -> list[str]:
    """Parses the command line, once. Returns the program and the arguments that are not flags.

    --help and a wrong flag end the program here: before imports that take seconds, if called before them.
    """
    logging.set_verbosity(logging.WARNING)  # TensorFlow's notes on its own saving are not the user's news
    app.define_help_flags()
    return app.parse_flags_with_usage(sys.argv)


def tell(text: str) -> None:
    """Prints one line on stderr, in place of a progress bar that is not complete."""
    start = "\r\033[K" if sys.stderr.isatty() else ""
    print(start + text, file=sys.stderr, flush=True)


def _complain(message: str) -> int:
    tell(f"error: {message}")
    return 1
