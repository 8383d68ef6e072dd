"""Runs the commands and the code of the pages, with small flags.

Each part of the pages has its own copy of the project, so that any test process can run it. In a part, the
commands run in order, because they use files of earlier ones.
"""

from typing import NamedTuple

import pytest

from tests.pages.running import Code, assert_steps_pass, sections, steps, training_of_readme
from tests.test_readme import PAGES, PAGES_TO_RUN

REST: tuple[str, ...] = ()  # the sections that no other part has


class Part(NamedTuple):
    """Some sections of the pages.

    Attributes:
        sections: {page: headings}.
        results: patterns of files that the commands must write.
        trained: whether the commands need runs/mine, which the README's commands train.
        more: commands that follow.
    """

    sections: dict[str, tuple[str, ...]]
    results: tuple[str, ...]
    trained: bool = False
    more: tuple[str, ...] = ()


ONE_FILE = ("EfficientDet's training in one file", "YOLOv4's training in one file")
RECORDS = ("TFRecords, Pascal VOC, YOLO", "WebDataset")
PARTS = {
    "readme": Part(
        {"README": REST}, ("runs/mine/metrics.json", "runs/mine/pictures/*.png", "my/report.html")
    ),
    "data": Part({"data": REST}, ("runs/both/metrics.json",)),
    "records": Part(
        {"data": RECORDS, "troubleshooting": REST},
        ("runs/mine-records/metrics.json", "runs/mine-shards/metrics.json", "runs/bench.json"),
        trained=True,
    ),
    "export": Part(
        {"training": REST, "export": REST, "benchmarks": REST, "architecture": REST},
        ("runs/heads/metrics.json", "runs/mine-int8.onnx", "runs/latency.json"),
        trained=True,
    ),
    "yolov4": Part(
        {"yolov4": REST, "preprocessing": REST},
        ("runs/yolov4/metrics.json", "runs/tiny/pictures/*.png"),
        more=(training_of_readme().replace("efficientdet", "yolov4").replace("runs/mine", "runs/yolov4"),),
    ),
    "examples": Part(
        {"examples": REST}, ("runs/keras-fit/last.weights.h5", "runs/tiles/found/detections.json")
    ),
    "one file": Part(
        {"examples": ONE_FILE},
        ("runs/one-file-d0-mine/metrics.json", "runs/one-file-yolov4-mine/metrics.json"),
    ),
}


def steps_of(part: Part) -> list[str | Code]:
    """Returns the commands and the blocks of code of a part."""
    named = {
        (page, heading)
        for each in PARTS.values()
        for page, names in each.sections.items()
        for heading in names
    }
    texts = []
    for page, headings in part.sections.items():
        for heading, text in sections(page).items():
            if heading in headings or (headings == REST and (page, heading) not in named):
                texts.append(text)
    return [*steps("\n".join(texts)), *part.more]


def test_each_command_and_block_of_code_of_the_pages_is_in_a_part():
    everything = steps("\n".join(PAGES[page] for page in PAGES_TO_RUN))
    assert set(everything) <= {step for part in PARTS.values() for step in steps_of(part)}
    for part in PARTS.values():
        for page, headings in part.sections.items():
            assert set(headings) <= set(sections(page))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PARTS)
def test_commands_and_code_of_a_part_of_the_pages_pass_in_order(name, project, add_trained_run):
    part = PARTS[name]
    if part.trained:
        add_trained_run(project)
    # Most users begin with the README's commands. They train the demo's network, others a smaller one.
    assert_steps_pass(steps_of(part), project, keep_model=name == "readme")
    for pattern in part.results:
        assert list(project.glob(pattern)), pattern
