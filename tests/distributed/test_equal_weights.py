"""Two ranks with batch 2 end with the weights of one with batch 4, after ten steps on the same images.

Through train.py, as a user starts it. The set is one global batch, so every step sees all of it whatever the
order; augmentation is off; batch norms are frozen, because each rank normalises by its own images.
"""

import csv
import json
import os
import pathlib
import socket
import subprocess
import sys

import h5py
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 10
APPS = {
    "efficientdet": (
        "--model_name=efficientdet-nano",
        "--image_size=64x96",
        "--hparams=fpn_cells=1,head_repeats=1,max_level=5,optimizer=sgd,augmentation=none,flip_prob=0,"
        "warmup_epochs=0",
        r"--freeze=\bbn",
    ),
    "yolov4": (
        "--model_name=yolov4-nano",
        "--image_size=64x96",
        "--hparams=width=0.25,optimizer=sgd,jitter=0,flip_prob=0,hue=0,saturation=1,exposure=1,mosaic_prob=0,"
        "burn_in_steps=0",
        r"--freeze=\bbn",
    ),
}
# Two CPU devices where others have two GPUs: nothing but this is different from the command line.
TWO_DEVICES = """
import sys, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import runpy
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def four_images(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("four")
    draw = [sys.executable, ROOT / "tools/synthetic.py", f"--output_dir={directory}", "--num_images=4"]
    subprocess.run([*draw, "--seed=3"], check=True, capture_output=True)
    return directory


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def train(app: str, data: pathlib.Path, run: pathlib.Path, way: str) -> pathlib.Path:
    """Ten steps; the run directory."""
    script = str(ROOT / app / "train.py")
    flags = [
        *APPS[app],
        f"--train_images={data}/images",
        f"--train_annotations={data}/instances.json",
        f"--output_dir={run}",
        f"--batch_size={4 if way == 'none' else 2}",
        f"--epochs={STEPS}",
        "--learning_rate=0.5" if app == "efficientdet" else "--learning_rate=0.3",
        "--ema_decay=0.9",
        "--pipeline_type=dali_cpu",
        "--num_threads=1",
        f"--strategy={way}",
    ]
    python = pathlib.Path(sys.executable)
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }
    commands = [([sys.executable, script, *flags], environment)]
    if way == "horovod":
        launcher = [str(python.parent / "horovodrun"), "--gloo", "-np", "2"]
        commands = [([*launcher, *commands[0][0]], environment)]
    elif way == "mirrored":
        commands = [([sys.executable, "-c", TWO_DEVICES, script, *flags], environment)]
    elif way == "multi_worker":
        workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
        configs = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}} for i in range(2)]
        commands = [(commands[0][0], environment | {"TF_CONFIG": json.dumps(config)}) for config in configs]
    processes = [
        subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for arguments, env in commands
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    return run


def weights(run: pathlib.Path) -> dict[str, np.ndarray]:
    found = {}
    with h5py.File(run / "last.weights.h5") as file:
        file.visititems(
            lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
        )
    return {name: value for name, value in found.items() if value.dtype.kind == "f"}


def losses(run: pathlib.Path) -> list[float]:
    with (run / "results.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("app", APPS)
def test_ranks_with_batch_2_are_one_rank_with_batch_4(app, four_images, tmp_path):
    alone = train(app, four_images, tmp_path / "alone", "none")
    assert losses(alone)[-1] < 0.97 * losses(alone)[0]  # it moves
    for way in ("horovod", "mirrored", "multi_worker"):
        together = train(app, four_images, tmp_path / way, way)
        np.testing.assert_allclose(losses(together), losses(alone), rtol=1e-4, err_msg=way)
        expected, found = weights(alone), weights(together)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5, err_msg=f"{way} {name}")
