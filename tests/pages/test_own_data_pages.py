import pytest

from tests.pages.running import assert_pages_run
from tests.test_readme import OWN_DATA_PAGES


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_commands_and_code_of_readme_and_the_pages_that_use_its_run_pass_in_order(project):
    assert_pages_run(OWN_DATA_PAGES, project)
    assert (project / "runs/mine/metrics.json").exists()
    assert list((project / "runs/mine/pictures").glob("*.png"))
    assert (project / "my/report.html").exists()
