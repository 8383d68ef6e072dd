"""What the README and the pages of docs/ say is run: commands on drawn data, links, every file of the map.

A block that cannot be run here says what it needs: ```bash needs: two hosts
"""

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
# In the order in which somebody reads them: later pages use what earlier ones made.
PAGES = (
    "data",
    "training",
    "weights",
    "yolov4",
    "preprocessing",
    "troubleshooting",
    "results",
    "performance",
    "architecture",
)
OF_OTHER_TESTS = ("many_gpus", "docker", "copy_this", "licences")  # test_launch_files, test_docker, below
# What a test adds to a training command so that it takes seconds: a small network, few steps.
SMALL = ["--image_size=64", "--epochs=1", "--batch_size=4"]
BENCH = ["--image_size=64", "--batch_size=2", "--rounds=2", "--seconds=0.2"]
DARKNET_FILE = "yolov4-tiny.weights"  # of random numbers here, and of a model that cannot be made smaller
SMALL_MODEL = {
    "efficientdet": ["--model_name=efficientdet-nano", "--hparams=fpn_cells=1,head_repeats=1,max_level=5"],
    "yolov4": ["--model_name=yolov4-nano", "--hparams=width=0.25"],
}


def commands(text: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


@pytest.fixture(scope="module")
def project(tmp_path_factory, drawn) -> pathlib.Path:
    """The product in an empty folder, and data in my/."""
    directory = tmp_path_factory.mktemp("copy")
    for name in (*SMALL_MODEL, "common", "examples", "tools"):
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


def run_python(command: str, project: pathlib.Path) -> None:
    words = shlex.split(command)
    app, _, program = words[1].partition("/")
    more = {"train.py": SMALL, "bench.py": BENCH}.get(program, [])
    if more and not any(word.endswith(DARKNET_FILE) for word in words):
        more = [*more, *SMALL_MODEL[app]]
    done = subprocess.run([sys.executable, *words[1:], *more], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stderr[-3000:]}"


def test_every_page_is_looked_at():
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} == {*PAGES, *OF_OTHER_TESTS}


def python_commands() -> list[str]:
    """Of the README, and then of the pages; what was said before is not run again."""
    said = [command for text in (README, *map(page, PAGES)) for command in commands(text)]
    return [command for command in dict.fromkeys(said) if command.startswith("python ")]


@pytest.mark.parametrize("command", python_commands())
def test_python_commands_run_in_order(project, command):
    run_python(command, project)


def test_the_first_commands_leave_what_the_readme_says(project):
    assert len(python_commands()) >= 30
    assert (project / "runs/mine/metrics.json").exists()
    assert list((project / "runs/mine/pictures").glob("*.png"))
    assert (project / "my/report.html").exists()


def test_other_commands_are_known():
    """No command hides in a block that nobody runs."""
    for text in (README, *map(page, PAGES)):
        for command in commands(text):
            assert command.split()[0] in ("python", "make", "horovodrun"), command


def test_python_in_the_text_runs(project):
    for name in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page(name), re.DOTALL):
            done = subprocess.run([sys.executable, "-c", block], cwd=project, capture_output=True, text=True)
            assert done.returncode == 0, f"{name}: {block}\n{done.stderr[-3000:]}"


def test_the_command_for_two_processes_runs(project):
    (command,) = [command for command in commands(README) if command.startswith("horovodrun")]
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
    every = [command for text in (README, *map(page, PAGES)) for command in commands(text)]
    targets = [word for command in every if command.startswith("make ") for word in command.split()[1:]]
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


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))], ids=lambda path: path.stem
)
def test_links_exist(path):
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert link.startswith("https://") or (path.parent / link).exists(), link


def test_flags_in_the_text_exist():
    from absl import flags

    from efficientdet import automl_weights, bench, eval, export, infer, train
    from examples import efficientdet_walkthrough
    from tools import check_data, convert, copy_app, preprocess, preprocess_bench
    from tools.benchmark import measuring
    from yolov4 import darknet_weights, fit_anchors
    from yolov4 import train as yolov4_train

    known: set[str] = {"flagfile"}
    for command in (
        *(check_data, convert, copy_app, preprocess, preprocess_bench),
        *(automl_weights, eval, export, infer, train, efficientdet_walkthrough),
        *(darknet_weights, fit_anchors, yolov4_train),
    ):
        fv = flags.FlagValues()
        command.define_flags(fv)
        known |= set(fv)
    fv = flags.FlagValues()
    measuring.flags_of(bench.APP)(fv)
    known |= set(fv)
    for name in ("README.md", *(f"docs/{page}.md" for page in PAGES)):
        assert set(re.findall(r"(?<![-\w])--(\w+)=", (ROOT / name).read_text())) <= known, name
