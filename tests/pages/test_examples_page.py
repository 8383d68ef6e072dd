import pytest

from tests.pages.running import assert_pages_run
from tests.test_readme import EXAMPLES_PAGES


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_commands_and_code_of_the_examples_page_pass_in_order(project):
    assert_pages_run(EXAMPLES_PAGES, project)
    assert (project / "runs/keras-fit/last.weights.h5").exists()
    for run in ("one-file-d0-mine", "one-file-yolov4-mine"):
        assert (project / "runs" / run / "metrics.json").exists()
