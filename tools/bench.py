r"""Measures how fast an app loads and trains on this machine, and what each stage costs.

    python tools/bench.py efficientdet --model_name=efficientdet-d0 --batch_size=8 \
        --train_images=my/images --train_annotations=my/instances.json --json=a.json
    python tools/bench.py yolov4 --image_size=416 --batch_size=4 --what=data,model
    python tools/bench.py compare a.json b.json
    python tools/bench.py gpu --rounds=1 --json=gpu.json        # which flags to change on this GPU

Without data flags, the command uses synthetic images. `compare` also checks that both files were measured
under the same conditions. Even on one machine, differences under 10 % mean nothing.
"""

import dataclasses
import json
import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args, errors
from common.errors import UserError
from common.progress import import_tensorflow
from tools.benchmark import report
from tools.benchmark.options import APPS, BenchArgs, define_flags


def main(*words: str) -> None:
    match words:
        case ("compare", old, new):
            print(report.compare(old, new))
        case ("candidate", app_name, role, values):  # a process that bench.py itself has started
            import_tensorflow()
            from tools.benchmark import worker

            worker.work(APPS[app_name], role, BenchArgs(**json.loads(values)))
        case ("gpu",):
            import_tensorflow()
            from tools.benchmark import gpu

            gpu.measure(BenchArgs(**args.values(flags.FLAGS, define_flags)))
        case (app_name,) if app_name in APPS:
            import_tensorflow()
            from tools.benchmark import measuring

            app, a = APPS[app_name], BenchArgs(**args.values(flags.FLAGS, define_flags))
            measuring.measure(app, dataclasses.replace(a, model_name=a.model_name or app.model_name))
        case _:
            raise UserError(f"give an app ({', '.join(APPS)}), gpu, or: compare OLD.json NEW.json")


if __name__ == "__main__":
    args.install(define_flags)
    errors.run(main, positional=True)
