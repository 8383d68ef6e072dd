"""Checks docs/horovod.md against the scripts that build Horovod, and runs its loop on two processes."""

import pathlib
import re

import pytest

from tests.conftest import ROOT
from tests.distributed import launching

PAGE = (ROOT / "docs/horovod.md").read_text()


def test_horovod_page_has_a_reason_for_each_file_that_the_script_patches():
    files = set(re.findall(r'"\$source/([\w./]+)"', (ROOT / "docker/patch_horovod.sh").read_text()))
    assert len(files) == 9
    rows = PAGE.partition("## The patches")[2].partition("\n## ")[0]
    assert files == set(re.findall(r"`([\w./]+\.(?:cc|h|txt|py))`(?=<br>| \|)", rows))


def test_horovod_page_names_each_variable_of_the_build_script():
    script = (ROOT / "docker/build_horovod.sh").read_text()
    names = set(re.findall(r"\b(HOROVOD_[A-Z_]+|XDG_[A-Z_]+|MAKEFLAGS)\b", script))
    names -= {"HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB", "HOROVOD_NCCL_LINK"}  # set by the script itself
    assert len(names) >= 10
    assert names <= set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)*\b", PAGE))


@pytest.mark.slow
def test_loop_of_the_horovod_page_trains_two_ranks_to_equal_weights(tmp_path: pathlib.Path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "loop.py").write_text(code)
    result = launching.launch(2, [tmp_path / "loop.py"], timeout=250)
    assert result.returncode == 0, result.stderr
    pattern = r"rank (\d) of 2: loss (\S+) to (\S+), weights (\S+)"
    ranks = [re.search(pattern, result.stdout_of(rank)).groups() for rank in (0, 1)]
    assert [rank[0] for rank in ranks] == ["0", "1"] and ranks[0][1:] == ranks[1][1:]
    assert float(ranks[0][2]) < 0.5 * float(ranks[0][1])
