import pytest

from tests.pages.running import assert_pages_run
from tests.test_readme import YOLOV4_PAGES, python_commands


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_commands_and_code_of_the_yolov4_and_preprocessing_pages_pass_in_order(project):
    training = next(command for command in python_commands("README") if "/train.py" in command)
    training = training.replace("efficientdet", "yolov4").replace("runs/mine", "runs/yolov4")
    assert_pages_run(YOLOV4_PAGES, project, training)
    assert (project / "runs/yolov4/metrics.json").exists()
    assert list((project / "runs/tiny/pictures").glob("*.png"))
