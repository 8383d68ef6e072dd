"""Reports on gpu_check.json in sentences and in tables."""

from collections.abc import Iterator, Mapping
from typing import Any

from common.args import LoaderArgs
from tools.gpu_checks.running import Row

PAYS = 1.05  # smallest speed-up that is worth a flag
DEFAULT_LOAD = LoaderArgs.hw_decoder_load
_TOLD = ("training", "nccl", "evaluation", "exports")
Rows = Mapping[str, Row]


def words(rows: Rows) -> list[str]:
    bad = {name: row for name, row in rows.items() if row["status"] not in ("ok", "left out")}
    lines = [f"{len(rows) - len(bad)} of {len(rows)} cases passed or were left out."]
    lines += [f"{name}: {row['status']}: {row['message']}" for name, row in bad.items()]
    if any("No module named" in row["message"] for row in bad.values()):
        lines.append("A package is missing: install it, or use --dali_only.")
    lines += [*_host(rows), *_decoding(rows)]
    for app in dict.fromkeys(row["about"]["app"] for row in rows.values() if "app" in row["about"]):
        for describe in (_loading, _arithmetic, _bottleneck, _results):
            lines += [f"{app}: {line}" for line in describe(rows, app)]
    return lines


def tables(rows: Rows) -> str:
    lines = []
    for stage in dict.fromkeys(row["stage"] for row in rows.values()):
        of_stage = {name: row for name, row in rows.items() if row["stage"] == stage}
        keys = list(dict.fromkeys(key for row in of_stage.values() for key in row["result"]))
        table = [[stage, "status", *keys], ["---"] * (2 + len(keys))]
        for name, row in of_stage.items():
            table.append([name, row["status"], *(row["result"].get(key, "") for key in keys)])
        lines += [f"| {' | '.join(map(str, cells))} |" for cells in table] + [""]
    return "\n".join(lines)


def _passed(rows: Rows, stage: str, **about: Any) -> list[tuple[dict, dict]]:
    """Returns (about, result) of each passed case of a stage that has the values `about`."""
    return [
        (row["about"], row["result"])
        for row in rows.values()
        if (row["stage"], row["status"]) == (stage, "ok") and about.items() <= row["about"].items()
    ]


def _host(rows: Rows) -> Iterator[str]:
    for _, facts in _passed(rows, "facts"):
        if not facts["libnvcuvid"]:
            yield "No libnvcuvid, so no JPEG engine works: add video to NVIDIA_DRIVER_CAPABILITIES."
        elif not facts["jpeg_engines"]:
            yield "No JPEG engine on this GPU: --hw_decoder_load changes nothing."


def _decoding(rows: Rows) -> Iterator[str]:
    whole, windows = (
        {about["load"]: result["images_per_second"] for about, result in _passed(rows, "decoding", roi=roi)}
        for roi in (False, True)
    )
    if whole:
        best = max(whole, key=whole.__getitem__)
        if whole[best] <= PAYS * whole.get(DEFAULT_LOAD, 0):
            best = DEFAULT_LOAD
        yield f"Decoding alone makes {whole[best]:.0f} images/s: use --hw_decoder_load={best:g}."
    of_windows = [row for row in rows.values() if row["about"].get("roi") or row["about"].get("roi_decoding")]
    if bad := [row for row in of_windows if row["status"] != "ok"]:
        yield f"--roi_decoding does not work ({bad[0]['status']}): leave it off."
    elif whole and windows:
        yield _advice("--roi_decoding", max(windows.values()) / max(whole.values()))


def _advice(flag: str, ratio: float, beside: str = "without") -> str:
    return f"{flag} is {ratio:.2f} times as fast as {beside}: {'use it' if ratio > PAYS else 'leave it off'}."


def _loading(rows: Rows, app: str) -> Iterator[str]:
    rates = {
        f"--num_threads={about['num_threads']} --batch_size={about['batch_size']}": result[
            "images_per_second"
        ]
        for about, result in _passed(rows, "loading", app=app)
        if not {"roi_decoding", "hparams"} & about.keys()
    }
    if rates:
        best, worst = (choose(rates, key=rates.__getitem__) for choose in (max, min))
        yield f"the loader makes {rates[best]:.0f} images/s with {best}, {rates[worst]:.0f} with {worst}."


def _arithmetic(rows: Rows, app: str) -> Iterator[str]:
    rates = {
        (about["precision"], about["xla"], about["batch_size"]): result["model"]
        for about, result in _passed(rows, "training", app=app, what="model")
    }
    for (precision, xla, batch), rate in rates.items():
        others = {
            f"--precision={precision}": ("float32", xla, batch),
            "--xla": (precision, False, batch),
            f"--batch_size={batch}": (precision, xla, batch // 2),
        }
        for flag, other in others.items():
            if other in rates and other != (precision, xla, batch):
                beside = f"{other[0]}{', XLA' * other[1]}, batch {other[2]}"
                yield _advice(flag, rate / rates[other], beside)


def _bottleneck(rows: Rows, app: str) -> Iterator[str]:
    for about, result in _passed(rows, "training", app=app, what="data,model,both"):
        share = result["both"] / min(result["data"], result["model"])
        kind = f"{about['precision']}{', XLA' * about['xla']}"
        yield f"{kind}: {result['verdict']} Loader and step together reach {share:.0%} of the slower rate."


def _results(rows: Rows, app: str) -> Iterator[str]:
    for about, result in (found for stage in _TOLD for found in _passed(rows, stage, app=app)):
        if result and about.get("what") in ("train.py", "AP", "time"):
            name = " ".join(value for key, value in about.items() if key != "app")
            yield f"{name}: {', '.join(f'{key} {value:g}' for key, value in result.items())}."
