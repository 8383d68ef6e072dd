"""Checks and claims --output_dir, before a run starts or resumes there: see checkpoints.py."""

import json
import pathlib

from common import files
from common.args import Args
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.training.checkpoints import RUN, Identity

# --overwrite removes only these files, and only if there is a run.json.
_DATA = ("checkpoints", "tensorboard", "best.weights.h5", "last.weights.h5", "results.csv")
_TEXTS = ("flags.txt", "init_from.txt", "metrics.json", "detections.json", "errors.json")
_EVALUATION = ("pr_curves.png", "detections.png", "errors.png", "confusion_matrix.png")
_PICTURES = ("first_batch.png", "loss_curves.png", *_EVALUATION)
RUN_FILES = (*_DATA, *_TEXTS, *_PICTURES, RUN)  # in the order of removal
_CHECKPOINTS = "checkpoints/[0-9]*"


def check(a: Args, ranks: Ranks, identity: Identity) -> bool:
    """Makes and checks --output_dir; returns whether it has a checkpoint of this run. Writes no files.

    All ranks call it together. Only rank 0 reads the directory, so hosts need not share a disk.

    Args:
        identity: the identity of the run. `Identity.changes` decides which values may differ from the last
            session.

    Raises:
        UserError: the directory holds another run or other files, or cannot be made; or the ranks differ in
            flags or data.
    """
    with ranks.raise_on_any_rank():
        local = Identity({**identity.values, **identity.of_all_ranks})
        if differing := local.differences(ranks.broadcast_object(local.values)):
            names = ", ".join(differing)
            raise UserError(f"ranks 0 and {ranks.rank} differ in {names}: give all the same flags and data")
        resumed = ranks.rank == 0 and _check_directory(a, identity)
    return ranks.broadcast_object(resumed)


def _check_directory(a: Args, identity: Identity) -> bool:
    directory = files.make_output_directory(a.output_dir)
    with files.user_errors(f"--output_dir={directory}"):
        if a.overwrite and a.init_from and directory.resolve() in pathlib.Path(a.init_from).resolve().parents:
            raise UserError(
                f"--init_from={a.init_from} is in --output_dir, which --overwrite empties: copy the file to "
                "another directory, or choose another --output_dir"
            )
        if not (directory / RUN).exists():
            _check_free(directory, a.overwrite)
        elif not a.overwrite:
            _check_same_run(directory / RUN, identity)
        return not a.overwrite and any(directory.glob(_CHECKPOINTS))


def claim(a: Args, ranks: Ranks, identity: Identity) -> pathlib.Path | None:
    """Takes over --output_dir for this run, after all other checks. All ranks call it together.

    With --overwrite, removes the files of the old run. Writes run.json, unless there are checkpoints: then
    `Checkpoints.restore` writes it.

    Returns:
        The directory on rank 0, None on the other ranks, which write no files.
    """
    with ranks.raise_on_any_rank():
        return _claim_directory(a, identity) if ranks.rank == 0 else None


def _claim_directory(a: Args, identity: Identity) -> pathlib.Path:
    directory = pathlib.Path(a.output_dir)
    with files.user_errors(f"--output_dir={directory}"):
        files.remove_unfinished(directory)
        if a.overwrite and (directory / RUN).exists():
            for path in (directory / name for name in RUN_FILES):
                if path.is_dir():
                    files.remove_directory(path)
                else:
                    path.unlink(missing_ok=True)
        if not any(directory.glob(_CHECKPOINTS)):
            identity.write(directory)
    return directory


def _check_same_run(file: pathlib.Path, identity: Identity) -> None:
    try:
        refused = identity.changes(json.loads(file.read_bytes())).refused
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{file} is damaged: give --overwrite to start anew") from error
    if refused:
        raise UserError(
            f"--output_dir={file.parent} holds another run: {'; '.join(refused)}. Choose another directory "
            f"(--init_from={file.parent} starts from the weights of this run), or give --overwrite to start "
            "anew"
        )


def _check_free(directory: pathlib.Path, overwrite: bool) -> None:
    """Raises UserError if `directory` holds files. With `overwrite`, only files in RUN_FILES count."""
    names = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
    if in_the_way := [name for name in names if name in RUN_FILES or not overwrite]:
        raise UserError(
            f"--output_dir={directory} holds files ({', '.join(in_the_way[:3])}), but no run.json, so it is "
            "not the directory of a run: choose another directory. With --overwrite, a run can start beside "
            "other files, if it does not write files with the same names"
        )
