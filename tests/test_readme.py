"""What the README says is run: every command on drawn data, every link and every file of its map."""

import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from yolov4.darknet_weights import save_darknet
from yolov4.model import build_model

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
# What a test adds to a training command so that it takes seconds: a small network, few steps.
SMALL = ["--image_size=64", "--epochs=1", "--batch_size=4"]
BENCH = ["--image_size=64", "--batch_size=2", "--rounds=2", "--seconds=0.2"]
DARKNET_FILE = "yolov4-tiny.weights"  # of random numbers here, and of a model that cannot be made smaller
SMALL_MODEL = {
    "efficientdet": ["--model_name=efficientdet-nano", "--hparams=fpn_cells=1,head_repeats=1,max_level=5"],
    "yolov4": ["--model_name=yolov4-nano", "--hparams=width=0.25"],
}


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture(scope="module")
def project(tmp_path_factory, drawn) -> pathlib.Path:
    """What somebody who copies the app has: <app>/ and common/ in an empty folder, and data in my/."""
    directory = tmp_path_factory.mktemp("copy")
    for name in (*SMALL_MODEL, "common"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(drawn, directory / "my")
    (directory / "my" / "records").mkdir()
    _write_voc_and_yolo(drawn, directory / "my")
    save_darknet(build_model("yolov4-tiny", 80), directory / DARKNET_FILE)
    return directory


def _write_voc_and_yolo(drawn: pathlib.Path, directory: pathlib.Path) -> None:
    """The drawn boxes as Pascal VOC and as YOLO's text, each with a split `train`."""
    document = json.loads((drawn / "instances.json").read_text())
    for folder in ("voc/Annotations", "voc/ImageSets/Main", "yolo/labels/train", "yolo/images"):
        (directory / folder).mkdir(parents=True)
    shutil.copytree(drawn / "images", directory / "voc" / "JPEGImages")
    shutil.copytree(drawn / "images", directory / "yolo" / "images" / "train")
    names = {category["id"]: category["name"] for category in document["categories"]}
    classes = sorted(names)
    (directory / "yolo" / "classes.txt").write_text("".join(f"{names[i]}\n" for i in classes))
    stems = []
    for image in document["images"]:
        stems.append(image["file_name"].rpartition(".")[0])
        width, height = image["width"], image["height"]
        objects, lines = [], []
        for annotation in document["annotations"]:
            left, top, box_width, box_height = annotation["bbox"]
            inside = min(left, top) >= 0 and left + box_width <= width and top + box_height <= height
            if annotation["image_id"] != image["id"] or not inside or not box_width:
                continue
            corners = (left + 1, top + 1, left + box_width, top + box_height)
            sides = zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True)
            box = "".join(f"<{side}>{value}</{side}>" for side, value in sides)
            name = names[annotation["category_id"]]
            objects.append(f"<object><name>{name}</name><bndbox>{box}</bndbox></object>")
            center = ((left + box_width / 2) / width, (top + box_height / 2) / height)
            numbers = (*center, box_width / width, box_height / height)
            lines.append(" ".join(map(str, (classes.index(annotation["category_id"]), *numbers))))
        size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        xml = f"<annotation><filename>{image['file_name']}</filename>{size}{''.join(objects)}</annotation>"
        (directory / "voc" / "Annotations" / f"{stems[-1]}.xml").write_text(xml)
        (directory / "yolo" / "labels" / "train" / f"{stems[-1]}.txt").write_text("\n".join(lines))
    (directory / "voc" / "ImageSets" / "Main" / "train.txt").write_text("\n".join(stems))


def test_python_commands_run_in_order(project):
    ran = 0
    for command in commands():
        words = shlex.split(command)
        if words[0] != "python":
            continue
        app, _, program = words[1].partition("/")
        more = {"train.py": SMALL, "bench.py": BENCH}.get(program, [])
        if more and not any(word.endswith(DARKNET_FILE) for word in words):
            more = [*more, *SMALL_MODEL[app]]
        done = subprocess.run(
            [sys.executable, *words[1:], *more], cwd=project, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stderr[-3000:]}"
        ran += 1
    assert ran >= 6
    assert (project / "runs/mine/metrics.json").exists()
    assert list((project / "runs/mine/pictures").glob("*.png"))


def test_the_command_for_two_processes_runs(project):
    (command,) = [command for command in commands() if command.startswith("horovodrun")]
    words = [sys.executable if word == ".venv/bin/python" else word for word in shlex.split(command)]
    words[0] = str(pathlib.Path(sys.executable).with_name("horovodrun"))
    done = subprocess.run(
        [*words, *SMALL, *SMALL_MODEL["efficientdet"]], cwd=project, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (project / "runs/two/metrics.json").exists()
    assert "on 2 replicas (horovod)" in done.stdout + done.stderr


def test_make_commands_are_targets():
    makefile = (ROOT / "Makefile").read_text()
    targets = [command.split()[1] for command in commands() if command.startswith("make ")]
    assert {"demo", "demo-yolov4", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(("target", "variable"), [("demo", "DEMO"), ("demo-yolov4", "DEMO_YOLOV4")])
def test_make_demo_end_to_end(tmp_path, target, variable):
    """The real target on a few images for one epoch. What the whole demo reaches is measured, not tested."""
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".ready").touch()  # the environment of this test serves
    data, run = tmp_path / "data", tmp_path / "run"
    splits = [
        f"--{split}_{what}"
        for split in ("train", "eval")
        for what in (f"images={data}/{split}/images", f"annotations={data}/{split}/instances.json")
    ]
    variables = {
        "VENV": tmp_path / "venv",
        "RUN": sys.executable,
        variable: run,
        "DEMO_DATA": data,
        "DEMO_IMAGES": 12,
        "DEMO_EVAL_IMAGES": 6,
        "DEMO_FLAGS": " ".join([*splits, "--epochs=1", "--image_size=64"]),
    }
    done = subprocess.run(
        ["make", target, *(f"{name}={value}" for name, value in variables.items())],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "AP50" in done.stdout
    assert "AP50" in json.loads((run / "metrics.json").read_text())
    for picture in ("first_batch.png", "loss_curves.png", "pr_curves.png", "pictures/contact_sheet.png"):
        assert (run / picture).exists(), picture
    assert len(list((run / "pictures").glob("0*.png"))) == 6


def test_links_and_the_map_exist():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link
    tree = re.search(r"## Map\n+```\n(.*?)```", README, re.DOTALL)[1]
    named, folder = set(), ""
    for line in tree.splitlines():
        folder = line.split()[0] if line and not line.startswith(" ") else folder
        named |= {folder + name for name in re.findall(r"\b\w+\.py\b", line)}
    existing = {
        str(path.relative_to(ROOT))
        for folder in (*SMALL_MODEL, "common")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert named == existing


def test_flags_in_the_text_exist():
    from absl import flags

    from common import check_data, convert, tfrecord
    from efficientdet import automl_weights, bench, export, infer, train
    from yolov4 import train as yolov4_train

    known: set[str] = {"flagfile"}
    for command in (check_data, convert, tfrecord, automl_weights, bench, export, infer, train, yolov4_train):
        fv = flags.FlagValues()
        command.define_flags(fv)
        known |= set(fv)
    assert set(re.findall(r"--(\w+)=", README)) <= known
