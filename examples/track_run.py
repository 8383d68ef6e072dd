r"""Sends a run's results to MLflow or Weights & Biases, after the training or, with --follow, during it.

    python track_run.py --run=runs/mine --to=mlflow      (or --to=wandb --follow)

Flags become parameters, rows of results.csv metrics, and pictures are attached. --follow ends with Ctrl-C or,
if the run was started with --epochs, after the last epoch. MLFLOW_TRACKING_URI or WANDB_MODE set the place.
Uses mlflow-skinny or wandb and Pillow.
"""

import argparse
import csv
import pathlib
import sys
import time
from contextlib import suppress


def rows_of(run: pathlib.Path, last_epoch: float, seconds: float):
    """Yields step and metrics of each row, and pictures with the last row. Looks again after `seconds`."""
    sent = 0.0
    while True:
        table = run / "results.csv"
        rows = list(csv.DictReader(table.read_text().splitlines())) if table.exists() else []
        for row in (new := [row for row in rows if float(row["epoch"]) > sent]):
            sent = float(row["epoch"])
            metrics = {name: float(value) for name, value in row.items() if value and name != "step"}
            yield int(row["step"]), metrics, sorted(run.glob("*.png")) if row is new[-1] else []
        if not seconds or sent >= last_epoch:
            return
        time.sleep(seconds)


def send(to: str, name: str, flags: dict, rows) -> None:
    if to == "mlflow":
        import mlflow

        with mlflow.start_run(run_name=name), suppress(KeyboardInterrupt):
            mlflow.log_params(flags)
            for step, metrics, pictures in rows:
                mlflow.log_metrics(metrics, step=step)
                for picture in pictures:
                    mlflow.log_artifact(str(picture))
    else:
        import wandb

        with wandb.init(name=name, config=flags) as opened, suppress(KeyboardInterrupt):
            for step, metrics, pictures in rows:
                opened.log(metrics | {file.stem: wandb.Image(str(file)) for file in pictures}, step=step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--run", type=pathlib.Path, required=True)
    parser.add_argument("--to", choices=("mlflow", "wandb"), required=True)
    parser.add_argument("--follow", nargs="?", type=float, const=10.0, default=0.0, metavar="SECONDS")
    o = parser.parse_args()
    try:
        flags = dict(line[2:].split("=", 1) for line in (o.run / "flags.txt").read_text().splitlines())
        send(o.to, o.run.name, flags, rows_of(o.run, float(flags.get("epochs", "inf")), o.follow))
        print(f"sent {o.run} to {o.to}")
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}. Run `make trackers`, then this file with .venv/trackers/bin/python")
    except Exception as error:  # the packages raise many classes
        sys.exit(f"error: {error}")
