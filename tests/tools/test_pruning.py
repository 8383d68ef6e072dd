"""Tests tools/pruning.py, unused.py and source_text.py."""

import pytest

from tests.refusal import refusal
from tools.pruning import Lost, UnsoundError, prune, pruned
from tools.unused import unused

CASES = {
    "an if goes, and what stands below it stays": (
        "def start(a):\n    if a.elastic:\n        return elastic.run(a)\n    return train(a)\n",
        "def start(a):\n    return train(a)\n",
    ),
    "of an if with elif and else the others stay": (
        "if a.elastic:\n    f()\nelif x:\n    g()\nelse:\n    h()\n",
        "if x:\n    g()\nelse:\n    h()\n",
    ),
    "an elif goes": (
        "if x:\n    f()\nelif a.elastic:\n    g()\nelse:\n    h()\n",
        "if x:\n    f()\nelse:\n    h()\n",
    ),
    "an else stays in its place": ("if a.elastic:\n    f()\nelse:\n    # why\n    g()\n", "# why\ng()\n"),
    "the body of not stays": ("if not a.elastic:\n    f()\ng()\n", "f()\ng()\n"),
    "operands of or and and": ("x = y or a.elastic\nz = y and not a.elastic\n", "x = y\nz = y\n"),
    "an and with it is false": ("if x and a.elastic:\n    f()\n", ""),
    "a comparison with a lost choice": ('if kind != "tensorflow" and x:\n    f()\n', "if x:\n    f()\n"),
    "a comparison of a flag with its default": (
        'if a.strategy == "none":\n    f()\nif a.strategy != "none":\n    g()\n',
        "f()\n",
    ),
    "what is_ tells is false": ("if not elastic.is_lost(x):\n    f()\n", "f()\n"),
    "nothing is in a lost table": ("if x in elastic.TABLE:\n    f()\n", ""),
    "one of several choices": ('if kind in ("a", "tensorflow"):\n    f()\n', 'if kind in ("a",):\n    f()\n'),
    "entries": (
        'x = ("auto", "tensorflow")\ny = {"tensorflow": 1, "b": (2)}\nz = [*elastic.A, (b)]\n',
        'x = ("auto",)\ny = {"b": (2)}\nz = [(b)]\n',
    ),
    "a row of a table goes as a whole": ('x = [("a", 1), ("tensorflow", 2)]\n', 'x = [("a", 1)]\n'),
    "a keyword": ("f(x, y=a.elastic, z=1)\n", "f(x, z=1)\n"),
    "a branch": ("x = elastic.A if y else B\n", "x = B\n"),
    "a value that only it sets, and what needs it": (
        "x = elastic.f() if y else None\nz = g(x)\nh(z=z, u=1)\n",
        "h(u=1)\n",
    ),
    "a name that is set elsewhere, too": ("x = elastic.A\nx = 1\nf(x)\n", "x = 1\nf(x)\n"),
    "a parameter": ("def f(x, y: elastic.T = None):\n    g(y)\n    h(x)\n", "def f(x):\n    h(x)\n"),
    "a function without a result": ("def f():\n    return elastic.g()\n\nx = 1\ny = f()\n", "\nx = 1\n"),
    "a method without a body": (
        "class A:\n    def f(self):\n        elastic.g()\n    def g(self):\n        self.f()\n        h()\n",
        "class A:\n    def g(self):\n        h()\n",
    ),
    "a flag": (
        "class Args:\n    x: int = flag(1)\n    elastic: bool = flag(False)\n",
        "class Args:\n    x: int = flag(1)\n",
    ),
    "its comment": ("# Runs on.\nelastic.f()\n# --- next ---\nelastic.g()\n", "# --- next ---\n"),
    "imports": ("from b import elastic, other\n", "from b import other\n"),
}


def lost(**options) -> Lost:
    of_elastic = {"elastic": False, "strategy": "none"}
    return Lost({"": {"elastic"}}, flags=of_elastic, words=["tensorflow"], **options)


@pytest.mark.parametrize("name", CASES)
def test_what_uses_a_lost_name_goes(name):
    before, after = CASES[name]
    assert pruned(before, lost()) == after


UNSOUND = [
    "f(a.elastic)\n",
    "with elastic.f() as x:\n    g()\n",
    "def f(x):\n    if x:\n        return 1\n    return elastic.g()\n",
    "if x:\n    elastic.f()\nelse:\n    g()\n",
    "try:\n    elastic.f()\nfinally:\n    g()\n",
    "if not elastic.allows(x):\n    raise E\n",
    "while not a.elastic:\n    f()\n",
    'x = [y for y in z if y != "tensorflow"]\n',
    "@elastic.cached\ndef f():\n    g()\n",
    "class A(elastic.B):\n    x = 1\n",
    "x = 1\nx += elastic.f()\n",
    "def f(x, y: elastic.T = None):\n    return g(x, y)\n",
]


@pytest.mark.parametrize("text", UNSOUND)
def test_what_cannot_go_is_an_error(text):
    assert "line " in refusal(pruned, text, lost(), error=UnsoundError)


def test_a_test_goes_as_a_whole_and_an_entry_of_its_parameters():
    before = (
        '@pytest.mark.parametrize("kind", ["a", "tensorflow"])\ndef test_a(kind):\n    pass\n\n'
        "@pytest.fixture\ndef made():\n    return elastic.f()\n\n"
        'def test_b(made):\n    pass\n\ndef test_c():\n    train("--elastic")\n'
    )
    after = pruned(before, lost(is_test=True))
    assert after.split() == ['@pytest.mark.parametrize("kind",', '["a"])', "def", "test_a(kind):", "pass"]


def test_a_name_is_lost_for_the_files_that_import_it():
    texts = {
        "common/boxes.py": "from common import nms\n\ndef f():\n    return nms.g()\n",
        "common/data/labels.py": "from common.boxes import f\n\nx = f()\ny = 1\n",
        "common/errors.py": "from common import boxes\n\nx = [boxes.f, 1]\n",
    }
    prune(texts, {path: Lost({}) for path in texts}, lambda path: path != "common/nms.py")
    after = [" ".join(text.split()) for text in texts.values()]
    assert after == ["", "y = 1", "from common import boxes x = [1]"]


def test_unused_is_what_the_project_refers_to_and_the_copy_does_not():
    library = "def f():\n    f()\n\ndef api():\n    pass\n\nclass A:\n    def g(self):\n        pass\n"
    hook = "class L(keras.Layer):\n    def call(self):\n        pass\n"
    copied = {"a.py": library, "b.py": hook + "A(), L()\n"}
    project = copied | {"c.py": "f(), A().g(), L().call()\n"}
    assert set(unused(copied, project)) == {("a.py", "", "f"), ("a.py", "A", "g")}
