"""Errors in the user's flags, files or set-up. They end a program with one line and exit code 1.

Any other exception is a bug of this project and shows its traceback.
"""

import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Collection
from types import TracebackType

from absl import app, flags, logging

_INTERRUPTED = "interrupted; everything that was saved before is kept"
_SIGINT_CODE = 130  # as in shells


class UserError(Exception):
    """A flag or file of the user cannot be used. The message names it, and says what to do."""


class OtherRankError(UserError):
    """Another rank failed and reports the reason; this rank prints nothing."""


class StoppedError(Exception):
    """A signal ended the run after everything was saved. The message tells how to resume."""


# Matches the errors of collective operations when a rank is gone. These errors come from Horovod
# (SHUT_DOWN_ERROR in common/common.h, and its operations), Gloo (gloo/transport/tcp/pair.cc) and TensorFlow
# (CollectiveExecutor).
_LOSS = re.compile(r"Horovod has been shut down|gloo/transport|({{node |/|_)Horovod|ops is aborted")


# absl's message about a required flag, from absl/flags/_validators.py.
_MISSING = re.compile(r"flag --(\w+)=None: Flag --\w+ must have a value other than None\.")


def is_lost_rank(error: BaseException) -> bool:
    """Returns whether an error of a collective operation means that another rank is gone."""
    return bool(_LOSS.search(str(error)))


def unknown(kind: str, name: str, known: Collection[str]) -> UserError:
    """Returns the error for an unknown name. It suggests the most similar known name.

    >>> str(unknown("model", "yolo4", ["efficientdet-d0", "yolov4"]))
    "unknown model 'yolo4': did you mean 'yolov4'? Known: efficientdet-d0, yolov4"
    """
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" did you mean {near[0]!r}?" if near else ""
    return UserError(f"unknown {kind} {name!r}:{hint} Known: {', '.join(known)}")


def run(main: Callable[..., int | None], *, positional: bool = False) -> None:
    """Runs `main` under absl. Turns a UserError into one line and exit code 1.

    Args:
        main: called with the arguments of the command line that are not flags.
        positional: whether the command line may have arguments that are not flags.
    """

    def guarded(argv: list[str]) -> int | None:
        try:
            if len(argv) > 1 and not positional:
                raise UserError(f"unexpected argument {argv[1]!r}: every option is a --flag=value")
            return main(*argv[1:])
        except UserError as error:
            if not isinstance(error, OtherRankError):
                tell(f"error: {error}")
            return 1
        except StoppedError as stopped:
            tell(str(stopped))
            return 75  # EX_TEMPFAIL of sysexits.h
        except KeyboardInterrupt:
            tell(_INTERRUPTED)
            return _SIGINT_CODE

    app.run(guarded, flags_parser=lambda _: parse_flags())


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Handles Ctrl-C during the slow imports, before `run`."""
    if issubclass(kind, KeyboardInterrupt):
        tell(_INTERRUPTED)
        os._exit(_SIGINT_CODE)  # Python would end the process by the signal
    sys.__excepthook__(kind, error, trace)


@functools.cache
def parse_flags() -> list[str]:
    """Parses the command line, once. Returns the program's name and the arguments that are not flags.

    With --help or a wrong flag the program ends here. So call this before slow imports.
    """
    logging.set_verbosity(logging.WARNING)  # hides TensorFlow's notes
    sys.excepthook = _excepthook
    app.define_help_flags()
    try:
        return flags.FLAGS(sys.argv)
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, list(flags.FLAGS), n=1)
        hint = f" Did you mean --{near[0]}?" if near else ""
        tell(f"error: unknown flag --{error.flagname}.{hint} --help lists all flags")
    except flags.Error as error:
        messages = str(error).removeprefix("ERROR:: ").splitlines()
        reasons = "; ".join(_MISSING.sub(r"--\1 is missing", message) for message in messages)
        tell(f"error: {reasons.rstrip('.')}. --help lists all flags")
    sys.exit(1)


def tell(text: str) -> None:
    """Prints one line on stderr. It replaces an incomplete progress bar."""
    start = "\r\033[K" if sys.stderr.isatty() else ""
    print(start + text, file=sys.stderr, flush=True)
