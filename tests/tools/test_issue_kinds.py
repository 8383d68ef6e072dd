from common.data.check.issues import KINDS
from tests.conftest import ROOT


def test_every_kind_of_data_issue_is_used_in_the_source_code_of_common_or_tools():
    files = [*(ROOT / "common").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    sources = "\n".join(path.read_text() for path in files if path.name != "issues.py")
    assert [kind for kind in KINDS if f'"{kind}"' not in sources] == []
