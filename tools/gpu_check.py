r"""Tries everything that needs a GPU, to check a new host. This command itself has never run on a GPU.

    python tools/gpu_check.py --output_dir=runs/gpu-check
    python tools/gpu_check.py --dali_only                         # without TensorFlow
    python tools/gpu_check.py --stages=decoding,loading --images=my/images --annotations=my/instances.json

Each case runs in a separate process with a time limit. After an interrupt, start the command again: it
continues with the next case. The report tells what works, what is slow and which flag to change.
"""

import dataclasses
import pathlib
import subprocess
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args, errors
from common.args import flag
from common.errors import UserError
from common.files import user_errors, write_bytes
from tools.gpu_checks import cases, images, parts, running, verdict

_COUNT = "from nvidia.dali import backend; print(backend.GetCUDADeviceCount())"


@dataclasses.dataclass(frozen=True)
class Args:
    output_dir: str = flag("runs/gpu-check", "Directory of all output files.")
    stages: str = flag(",".join(cases.STAGES), "Stages to run, comma-separated.")
    dali_only: bool = flag(False, "Run only the stages that do not use TensorFlow.")
    retry: bool = flag(False, "Rerun the cases that did not pass.")
    images: str | None = flag(None, "Directory of photographs for timings. Default: synthetic images.")
    annotations: str | None = flag(None, "COCO json of --images.")


def check(a: Args) -> list[str]:
    """Runs the cases that have no result yet, and returns the lines of the report. Raises UserError."""
    stages = cases.DALI_ALONE if a.dali_only else tuple(filter(None, a.stages.split(",")))
    for name in stages:
        if name not in cases.STAGES:
            raise errors.unknown("stage", name, cases.STAGES)
    if bool(a.images) != bool(a.annotations):
        raise UserError("--images and --annotations belong together: give both or neither")
    gpus = count_gpus()
    output = pathlib.Path(a.output_dir).absolute()
    photos = a.images or f"{output}/photos/images", a.annotations or f"{output}/photos/instances.json"
    with user_errors(f"--output_dir={output}"):
        draw(output, photos=not a.images)
        every = cases.all_cases(output, *photos, gpus, parts.cores())
        chosen = [case for case in every if case.stage in stages]
        host = f"{gpus} of {subprocess.getoutput('nvidia-smi --query-gpu=name --format=csv,noheader')}"
        rows = running.run_all(chosen, output / "gpu_check.json", host=host, retry=a.retry)
        write_bytes(output / "rows.md", verdict.tables(rows).encode())
    return verdict.words(rows)


def count_gpus() -> int:
    """Returns the number of GPUs that DALI sees. Raises UserError if it sees none or does not start."""
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"DALI does not start ({done.stderr.strip().rpartition(chr(10))[2]}): run make setup")
    if not (gpus := int(done.stdout)):
        raise UserError("no GPU: DALI finds none, this command needs one: check the driver with nvidia-smi")
    return gpus


def draw(output: pathlib.Path, *, photos: bool) -> None:
    """Draws the synthetic images, unless they exist, and writes hosts.sh for elastic training."""
    images.draw_kinds(output / "kinds")
    images.draw(output / "train", 600, seed=1)
    images.draw(output / "eval", 100, seed=2)
    if photos:
        images.draw(output / "photos", 512, seed=0, style="photo")
    (output / "hosts.sh").write_text("#!/bin/sh\necho localhost:1\n")
    (output / "hosts.sh").chmod(0o755)


def define_flags(fv: flags.FlagValues) -> None:
    args.define(fv, Args)


def main() -> None:
    print("\n".join(check(Args(**args.values(flags.FLAGS, define_flags)))))


if __name__ == "__main__":
    args.install(define_flags)
    errors.run(main)
