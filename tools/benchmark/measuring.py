"""What an app's bench.py does: measures loaders, the training step and both together, prints and writes it.

Candidates: each loader alone, the step on a synthetic batch, the step fed by each loader, and each command of
`--baseline`. Each runs in a process of its own, one after another (rounds.py). After them come the stages of
each DALI loader (stages.py) and inference (inference.py).
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
from common.loader import check_dali_device, gpu_visible
from common.progress import log
from common.sources import Source
from common.training import checkpoint_files
from tools import synthetic
from tools.benchmark import environment, report, rounds, summary, worker
from tools.benchmark.rounds import Command
from tools.benchmark.worker import App

ROOT = pathlib.Path(__file__).resolve().parents[2]
WHAT = ("data", "model", "both", "stages", "inference")
TYPES = ("dali_gpu", "dali_cpu", "tensorflow")  # that read data


def define_flags(app: App, fv: flags.FlagValues) -> None:
    """All flags of an app's bench.py."""
    shared_flags.define_model_flags(fv, app.model_names, default=app.model_name)
    shared_flags.define_source_flags(fv, ("train",))
    shared_flags.define_dali_device_flag(fv)
    shared_flags.define_batch_flags(fv)
    shared_flags.define_arithmetic_flags(fv)
    flags.DEFINE_list("what", list(WHAT[:4]), f"What to measure, of {','.join(WHAT)}.", flag_values=fv)
    flags.DEFINE_list(
        "pipeline_types",
        None,
        f"Loaders to measure, of {','.join(TYPES)}. Default: all that run on this machine.",
        flag_values=fv,
    )
    flags.DEFINE_multi_string(
        "baseline",
        [],
        "NAME=COMMAND: another program to measure; may be repeated. It prints `ready`, then `step N` after "
        "every N images until it is killed.",
        flag_values=fv,
    )
    define_rounds_flags(fv)


def define_rounds_flags(fv: flags.FlagValues) -> None:
    """The flags of any command that measures in rounds."""
    flags.DEFINE_integer("rounds", 5, "How often each is measured.", lower_bound=1, flag_values=fv)
    flags.DEFINE_float("seconds", 5.0, "Least seconds of a measurement.", lower_bound=0.01, flag_values=fv)
    flags.DEFINE_integer(
        "drawn_images", 256, "Size of the data set that is drawn where no data are given.", 1, flag_values=fv
    )
    flags.DEFINE_string("json", None, "File for all that was measured.", flag_values=fv)


def main(app: App) -> None:
    """Runs an app's bench.py as a command."""

    def define(fv: flags.FlagValues) -> None:
        define_flags(app, fv)

    shared_flags.install(define)
    # Not for users: --role makes this process one candidate.
    flags.DEFINE_string("role", None, "Which candidate this process is.")
    errors.run(lambda: start(app, shared_flags.values(flags.FLAGS, define), flags.FLAGS.role))


def start(app: App, given: dict[str, Any], role: str | None = None) -> None:
    """Measures everything, or is one candidate.

    Args:
        app: whose bench.py it is.
        given: the values of the flags.
        role: of --role; None for the process that measures.

    Raises:
        UserError: flags or data that cannot be used, or nothing could be measured.
    """
    if role:
        worker.work(app, given, role)
    else:
        measure(app, given)


def measure(app: App, given: dict[str, Any]) -> dict[str, Any]:
    """Measures everything that `given` asks for, prints it, and writes it to --json; see `start`.

    Returns:
        The record, as `--json` has it.
    """
    what = _known("thing to measure", given["what"], WHAT)
    types = given["pipeline_types"] or [name for name in TYPES if name != "dali_gpu" or gpu_visible()]
    types = _known("loader", types, TYPES)
    check_dali_device(given["dali_device_id"], "dali_gpu" if "dali_gpu" in types else "dali_cpu")
    baselines = parse_baselines(given["baseline"])
    if not what and not baselines:
        raise UserError("--what is empty and there is no --baseline: nothing to measure")
    config = app.make_config(given)
    given, source = _with_data(app, given, config, needed=bool({*what} - {"model"}))

    roles = [f"data:{each}" for each in types if "data" in what]
    roles += ["model"] if "model" in what else []
    roles += [f"both:{each}" for each in types if "both" in what]
    own = [_command(app, given, role) for role in roles]
    dali_types = [each for each in types if each != "tensorflow" and "stages" in what]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        logs = pathlib.Path(name)
        measured = rounds.measure(
            [*own, *baselines], rounds=given["rounds"], seconds=given["seconds"], logs=logs, log=log
        )
        stages = {
            each: _read_json(_command(app, given, f"stages:{each}"), logs, summary.stages)
            for each in dali_types
        }
        inference = {
            each: _read_json(_command(app, given, f"inference:{each}"), logs, list)
            for each in types
            if "inference" in what
        }
    record = _record(app.name, given, source) | {
        "title": _title(given, config),
        "settings": _settings(given, config),
        "candidates": {name: summary.candidate(each) for name, each in measured.items()},
        "stages": stages,
        "inference": inference,
    }
    record["other_cores"] = summary.other_cores(record["candidates"])
    record["ratios"] = summary.ratios(record["candidates"])
    record["verdict"] = report.verdict(record)
    print(report.tables(record), flush=True)
    if given["json"]:
        write(given["json"], record)
    results = [*record["candidates"].values(), *stages.values(), *inference.values()]
    if all(isinstance(each, dict) and "error" in each for each in results):
        raise UserError("nothing could be measured: the lines above name the reasons")
    return record


def parse_baselines(texts: Sequence[str]) -> list[Command]:
    """The values of --baseline; UserError for one that is not NAME=COMMAND, or a name given twice."""
    baselines: dict[str, Command] = {}
    for text in texts:
        name, _, line = text.partition("=")
        try:
            arguments = shlex.split(line)
        except ValueError as error:
            raise UserError(f"--baseline={text!r}: {error}") from error
        if not name.strip() or not arguments:
            raise UserError(f"--baseline={text!r} is not NAME=COMMAND")
        name = f"baseline {name.strip()}"
        if name in baselines:
            raise UserError(f"--baseline={text!r}: there is another {name}")
        baselines[name] = Command(name, arguments, settle=3)
    return list(baselines.values())


def draw(count: int) -> pathlib.Path:
    """Images as large as COCO's, in the user's cache directory, drawn once."""
    directory = cache_directory() / f"bench-images-{count}"
    if not (directory / "instances.json").exists():
        log(f"no data are given: drawing {count} images into {directory}")
        synthetic.draw_dataset(directory, count, seed=0, style="photo")
    return directory


def write(path: str, record: dict[str, Any]) -> None:
    """The record as json; UserError where it cannot be written."""
    try:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(pathlib.Path(path), json.dumps(record, indent=1).encode())
    except OSError as error:
        raise UserError(f"--json={path}: {error.strerror}") from error
    log(f"wrote {path}")


def _known(kind: str, chosen: Sequence[str], known: Sequence[str]) -> list[str]:
    """The chosen ones, each once; UserError for an unknown one."""
    for name in chosen:
        if name not in known:
            raise errors.unknown(kind, name, known)
    return list(dict.fromkeys(chosen))


def _command(app: App, given: dict[str, Any], role: str) -> Command:
    """The command line of this bench.py, with the same values of its flags, as one candidate."""
    for_all = ("what", "pipeline_types", "baseline", "json", "drawn_images")
    values = {name: value for name, value in given.items() if name not in for_all and value is not None}
    arguments = [sys.executable, str(ROOT / app.name / "bench.py"), f"--role={role}"]
    arguments += [f"--{name}={value}" for name, value in values.items()]
    return Command(role.replace(":", " "), arguments, settle=given["prefetch"] + 1)


def _read_json(
    command: Command, logs: pathlib.Path, summarize: Callable[[list[Any]], list]
) -> list[summary.Record] | summary.Record:
    """The JSON lines, up to `null`, of a process that measures alone; {"error"} where it fails."""
    log(f"starting {command.name}")
    told: list[Any] = []
    try:
        with rounds.started(command, logs / "stderr.txt") as candidate:
            while not told or told[-1] is not None:
                told.append(json.loads(candidate.line(rounds.START_TIMEOUT)))
    except rounds.CandidateError as error:
        log(f"  {command.name} failed: {error}")
        return {"error": str(error)}
    return summarize(told[:-1])


def _with_data(
    app: App, given: dict[str, Any], config: Any, *, needed: bool
) -> tuple[dict[str, Any], Source | None]:
    """The flags' values with data and number of classes, and the data, checked once for all candidates.

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


def _record(app: str, given: dict[str, Any], source: Source | None) -> dict[str, Any]:
    """What was measured, when and where."""
    return {
        "format": summary.FORMAT,
        "app": app,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": environment.commit(),
        "versions": checkpoint_files.versions(),
        "machine": environment.machine(),
        "data": environment.data(source),
        "rounds": given["rounds"],
        "seconds": given["seconds"],
    }


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
