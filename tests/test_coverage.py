"""Compares the coverage in README.md with the last measurement.

`make test PYTEST_FLAGS=--cov` measures it. CI does so before the long tests.
"""

import io
import re

import coverage
import pytest

from tests.conftest import ROOT

MEASURED = ROOT / ".coverage"


@pytest.mark.slow  # so that it runs after the measurement
def test_coverage_in_readme_is_right_to_within_one_point():
    measurement = coverage.Coverage(MEASURED, config_file=ROOT / "pyproject.toml")
    code = [path for folder in measurement.get_option("run:source") for path in (ROOT / folder).rglob("*.py")]
    if not MEASURED.exists() or MEASURED.stat().st_mtime < max(path.stat().st_mtime for path in code):
        pytest.skip("the coverage of this code was not measured: make test PYTEST_FLAGS=--cov")
    measurement.load()
    percent = measurement.report(file=io.StringIO())
    (stated,) = re.findall(r"(\d+) % of the lines of code", (ROOT / "README.md").read_text())
    assert abs(int(stated) - percent) <= 1
