"""What an app's bench.py does: measures loaders, the training step and both together, prints and writes it.

Candidates: each loader into a sink, the step on a synthetic batch, the step fed by each loader, and whatever
`--peer` starts. Each lives in a process of its own that is stopped while the others run (rounds.py). The
stages of a DALI loader are measured after them (stages.py).
"""

import dataclasses
import datetime
import json
import pathlib
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from common import args as shared_flags
from common import errors
from common.datacheck.open_data import check_sizes, log_source
from common.errors import UserError
from common.files import cache_directory, write_bytes
from common.loading import check_dali_device, gpu_visible
from common.progress import log
from common.sources import Source
from common.training import checkpoint_files
from tools import synthetic
from tools.benchmark import environment, report, rounds, summary, worker
from tools.benchmark.rounds import Command
from tools.benchmark.summary import FORMAT
from tools.benchmark.worker import App

ROOT = pathlib.Path(__file__).resolve().parents[2]
WHAT = ("data", "model", "both", "stages", "inference")
TYPES = ("dali_gpu", "dali_cpu", "tensorflow")  # that read data


def define_flags(fv: flags.FlagValues) -> None:
    """All flags of a bench.py but those of the model."""
    shared_flags.define_source_flags(fv, ("train",))
    shared_flags.define_dali_device_flag(fv)
    shared_flags.define_batch_flags(fv)
    shared_flags.define_arithmetic_flags(fv)
    flags.DEFINE_list("what", list(WHAT[:4]), f"What to measure, of {','.join(WHAT)}.", flag_values=fv)
    flags.DEFINE_list(
        "pipeline_types",
        None,
        "Loaders: dali_gpu, dali_cpu, tensorflow. Default: all that this machine can.",
        flag_values=fv,
    )
    flags.DEFINE_multi_string(
        "peer",
        [],
        "name=COMMAND: something else to measure beside them, may be repeated. It prints `ready` and then "
        "`step N` after every N images, for ever; it is stopped and continued by signals.",
        flag_values=fv,
    )
    define_rounds_flags(fv)


def define_rounds_flags(fv: flags.FlagValues) -> None:
    """Of anything that measures in rounds."""
    flags.DEFINE_integer("rounds", 5, "How often each is measured.", lower_bound=1, flag_values=fv)
    flags.DEFINE_float("seconds", 5.0, "How long each time, at least.", lower_bound=0.01, flag_values=fv)
    flags.DEFINE_integer(
        "drawn_images", 256, "Size of the data set that is drawn where no data are given.", 1, flag_values=fv
    )
    flags.DEFINE_string("json", None, "Where everything that was measured goes.", flag_values=fv)


def define_role_flag(fv: flags.FlagValues) -> None:
    """Not for users: what a candidate's own process is."""
    flags.DEFINE_string("role", None, "Which candidate this process is.", flag_values=fv)


def start(app: App, given: dict[str, Any], role: str | None = None) -> dict[str, Any] | None:
    """What a bench.py does: all of it, or one candidate's part.

    Args:
        app: whose bench.py it is.
        given: the values of the flags.
        role: of --role; None for the process that measures.

    Returns:
        The record, as `--json` has it.

    Raises:
        UserError: what was given cannot be used, or nothing could be measured.
    """
    return worker.work(app, given, role) if role else measure(app, given)


def measure(app: App, given: dict[str, Any]) -> dict[str, Any]:
    """Measures everything that was asked for, prints it, and writes it to --json; see `start`."""
    what = _known("thing to measure", given["what"], WHAT)
    types = given["pipeline_types"] or [name for name in TYPES if name != "dali_gpu" or gpu_visible()]
    types = _known("loader", types, TYPES)
    check_dali_device(given["dali_device_id"], "dali_gpu" if "dali_gpu" in types else "dali_cpu")
    peers = _peers(given["peer"])
    config = app.make_config(given)
    if not what and not peers:
        raise UserError("--what is empty and there is no --peer: nothing to measure")
    given, source = _with_data(app, given, config, needed=not {"model"}.issuperset(what))

    roles = [f"data:{each}" for each in types if "data" in what]
    roles += ["model"] if "model" in what else []
    roles += [f"both:{each}" for each in types if "both" in what]
    own = [
        Command(
            _name(role),
            _again(app, given, role),
            settle=given["prefetch"] + 1,
            like="model" if role.startswith("both:") else "",
        )
        for role in roles
    ]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        logs = pathlib.Path(name)
        measured = rounds.measure(
            [*own, *peers], rounds=given["rounds"], seconds=given["seconds"], logs=logs, log=log
        )
        by_stage = {
            each: _measure_alone(app, given, f"stages:{each}", logs, summary.stages)
            for each in types
            if "stages" in what and each != "tensorflow"
        }
        inferred = {
            each: _measure_alone(app, given, f"inference:{each}", logs, list)
            for each in types
            if "inference" in what
        }
    record = {
        "format": FORMAT,
        "app": app.name,
        "title": _title(given, config),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": environment.commit(),
        "versions": checkpoint_files.versions(),
        "machine": environment.machine(),
        "data": environment.data(source),
        "settings": _settings(given, config),
        "rounds": given["rounds"],
        "seconds": given["seconds"],
        "candidates": {name: summary.candidate(each) for name, each in measured.items()},
        "stages": by_stage,
        "inference": inferred,
    }
    record["other_cores"] = summary.other_cores(record["candidates"])
    record["ratios"] = summary.ratios(record["candidates"])
    record["verdict"] = report.verdict(record)
    print(report.tables(record), flush=True)
    if given["json"]:
        write(given["json"], record)
    results = [*record["candidates"].values(), *by_stage.values(), *inferred.values()]
    if all(isinstance(each, dict) and "error" in each for each in results):
        raise UserError("nothing could be measured: the lines above say why")
    return record


def _measure_alone(
    app: App, given: dict[str, Any], role: str, logs: pathlib.Path, summarize: Callable[[list[Any]], list]
) -> list[summary.Record] | summary.Record:
    """What a process that measures by itself tells, when all others have gone; {"error"} where it fails."""
    name = _name(role)
    log(f"starting {name}")
    running: dict[str, rounds.Candidate] = {}
    told: list[Any] = []
    with rounds.closed_at_the_end(running):
        try:
            running[name] = rounds.Candidate(Command(name, _again(app, given, role)), logs / f"{role}.txt")
            while not told or told[-1] is not None:
                told += map(json.loads, running[name].lines(rounds.START_TIMEOUT))
        except rounds.CandidateError as error:
            log(f"  {name} failed: {error}")
            return {"error": str(error)}
    return summarize(told[:-1])


# --- what is given ----------------------------------------------------------------------------------


def _known(kind: str, chosen: Sequence[str], known: Sequence[str]) -> list[str]:
    """The chosen ones, each once; UserError for an unknown one."""
    for name in chosen:
        if name not in known:
            raise errors.unknown(kind, name, known)
    return list(dict.fromkeys(chosen))


def _peers(texts: Sequence[str]) -> list[Command]:
    """--peer, parsed."""
    peers: dict[str, Command] = {}
    for text in texts:
        name, _, line = text.partition("=")
        name = f"peer {name.strip()}"
        try:
            arguments = shlex.split(line)
        except ValueError as error:
            raise UserError(f"--peer={text!r}: {error}") from error
        if name == "peer " or not arguments:
            raise UserError(f"--peer={text!r} is not name=COMMAND")
        if name in peers:
            raise UserError(f"--peer={text!r}: there is another {name}")
        peers[name] = Command(name, arguments, settle=3)
    return list(peers.values())


def _name(role: str) -> str:
    return role.replace(":", " ")


def _again(app: App, given: dict[str, Any], role: str) -> list[str]:
    """The command line of this bench.py, with the same values of its flags, as one candidate."""
    mine = ("what", "pipeline_types", "peer", "json", "drawn_images")
    values = {name: value for name, value in given.items() if name not in mine and value is not None}
    script = ROOT / app.name / "bench.py"
    return [sys.executable, str(script), *(f"--{k}={v}" for k, v in values.items()), f"--role={role}"]


def _with_data(
    app: App, given: dict[str, Any], config: Any, *, needed: bool
) -> tuple[dict[str, Any], Source | None]:
    """The flags' values completed by data and number of classes; the data, checked once for all candidates.

    Args:
        needed: draws data where none are given.
    """
    if not any(given[f"train_{what}"] for what in ("images", "annotations", "file_pattern")):
        if not needed:
            return given | {"num_classes": given["num_classes"] or app.num_classes}, None
        directory = draw(given["drawn_images"])
        drawn = {"images": directory / "images", "annotations": directory / "instances.json"}
        given = given | {f"train_{what}": str(path) for what, path in drawn.items()}
    source = worker.open_given(given)
    log_source("training", source)
    check_sizes(source, batch_size=given["batch_size"], num_replicas=1, max_instances=config.max_instances)
    classes = source.label_map.num_classes
    if (given["num_classes"] or classes) < classes:
        raise UserError(
            f"--num_classes={given['num_classes']}: the data have {classes} classes; leave the flag out"
        )
    return given | {"num_classes": given["num_classes"] or classes}, source


def draw(count: int) -> pathlib.Path:
    """Images as large as COCO's, in the user's cache directory, drawn once."""
    directory = cache_directory() / f"bench-images-{count}"
    if not (directory / "instances.json").exists():
        log(f"no data are given: drawing {count} images into {directory}")
        synthetic.draw_dataset(directory, count, seed=0, style="photo")
    return directory


def _title(given: dict[str, Any], config: Any) -> str:
    height, width = config.image_size
    return (
        f"{given['model_name']} at {height}x{width}, batch {given['batch_size']}, {given['precision']}"
        f"{', XLA' if given['xla'] else ''}; loaders with {given['num_threads']} threads, prefetch "
        f"{given['prefetch']}"
    )


def _settings(given: dict[str, Any], config: Any) -> dict[str, Any]:
    """What decides the numbers, besides machine and data."""
    names = ["num_classes", "batch_size", "num_threads", "prefetch", "precision", "xla"]
    return {name: given[name] for name in names} | dataclasses.asdict(config)


def write(path: str, record: dict[str, Any]) -> None:
    """The record as json; UserError where it cannot be written."""
    try:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(pathlib.Path(path), json.dumps(record, indent=1).encode())
    except OSError as error:
        raise UserError(f"--json={path}: {error.strerror}") from error
    log(f"wrote {path}")
