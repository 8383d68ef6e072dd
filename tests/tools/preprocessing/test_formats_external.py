"""Images of a user's Python: everything that may be named, and everything that can go wrong there."""

import sys

import numpy as np
import pytest

from common.datacheck.images import ImagePolicy
from common.datacheck.issues import DataError
from common.errors import UserError
from tests.tools.preprocessing.reading import build, by_dynamic, by_pipeline, flat, names_of, run
from tests.tools.preprocessing.source_writing import IMAGES
from tools.preprocessing.formats import external
from tools.preprocessing.image_source import open_image_source
from tools.preprocessing.reading import Part

HEADER = f"import numpy as np\nimages = {IMAGES[:3]!r}\n"


def opened(directory, code, name="given", **options):
    (directory / "code.py").write_text(HEADER + code)
    return open_image_source(
        "external", f"{directory / 'code.py'}:{name}", on_report=lambda issues: None, **options
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize(
    "code",
    [
        "given = [array(i) for i in range(3)]",
        "def given():\n    yield np.zeros((0, 5, 5, 3), np.uint8)\n    yield np.stack([array(0)] * 2)",
        "class _Given:\n    def __iter__(self):\n        yield array(0)\n        yield array(1), np.int8(4)\n"
        "given = _Given()",
    ],
)
def test_arrays(tmp_path, code, dtype):
    source = opened(
        tmp_path,
        f"def array(i):\n    return np.full((4 + i, 6, 2), i, np.{np.dtype(dtype).name})[:, ::-1]\n{code}",
    )
    assert source.is_decoded
    for read in (flat(by_pipeline(Part(source), 1, source.size)), flat(by_dynamic(Part(source)))):
        assert len(read) == source.size
        for (image, label), i in zip(read, range(source.size), strict=True):
            assert image.dtype == dtype and np.array_equal(image, source.load(i))
            assert label == source.labels[i]


def test_an_object_within_an_object_of_a_module(tmp_path, monkeypatch):
    (tmp_path / "ours_for_a_test").mkdir()
    (tmp_path / "ours_for_a_test/module.py").write_text(
        HEADER + "class Data:\n    def __init__(self):\n        self.train = images\ndata = Data()"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = open_image_source("external", "ours_for_a_test.module:data.train", on_report=lambda f: None)
    assert [source.load(i).tobytes() for i in range(3)] == IMAGES[:3]
    sys.modules.pop("ours_for_a_test.module")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def given(info):\n    raise ValueError('out of\\nluck')", "step 0 raised ValueError: out of luck$"),
        (
            "def given():\n    yield images[0]\n    yield 1 / 0",
            "step 1 raised ZeroDivisionError: division",
        ),
        ("given = ['a.png']", "step 0 gave str: an image is bytes"),
        ("given = [np.zeros((4, 4), np.uint8)]", r"step 0 gave uint8 of the shape \(4, 4\): an image is"),
        ("given = [images[0], np.zeros((4, 4, 3))]", r"step 1 gave float64 of the shape \(4, 4, 3\)"),
        ("given = [np.zeros((0, 4, 3), np.uint8)]", r"step 0 gave uint8 of the shape \(0, 4, 3\)"),
        ("given = [(images[0], 2**31)]", "step 0 has the label 2147483648: labels are whole numbers"),
        ("given = [(images[0], 0.5)]", "step 0 has the label 0.5"),
        ("given = [(images[0], float('nan'))]", "step 0 has the label nan"),
        ("given = [(images[0], 'cat')]", "step 0 gave the label 'cat': a label is one whole number"),
        ("given = [(images[0], [1, 2])]", r"step 0 gave the label \[1, 2\]"),
        ("given = [(images, [1, 2])]", "step 0 gave 3 images, and not as many labels"),
        ("given = [[images[0], None]]", "step 0 gave NoneType"),
        (
            "given = [images[0], np.zeros((4, 4, 3), np.uint8)]",
            "'sample-0' is encoded and 'sample-1' is uint8",
        ),
        ("given = 7", "is 'int': name a sequence, an iterable"),
        ("given = iter(images)", "is 'list_iterator': name a sequence, an iterable that is not used up"),
        ("class given:\n    pass", "is 'given': name a sequence"),
        ("def given(a, b):\n    pass", "or a function of SampleInfo, BatchInfo or no argument"),
        ("given_ = 1", "importing it raised AttributeError: .* has no attribute 'given'"),
        ("import nothing_of_this_name", "importing it raised ModuleNotFoundError: No module named"),
        ("def given(:", "importing it raised SyntaxError"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, code, said):
    with pytest.raises(UserError, match=said) as caught:
        opened(tmp_path, code)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("code.py", "names nothing in Python: FILE.py:name"),
        (":name", "names nothing in Python"),
        ("nowhere.py:name", "importing it raised FileNotFoundError"),
        ("nothing_of_this_name:name", "raised ModuleNotFoundError"),
    ],
)
def test_names_that_lead_nowhere(path, said):
    with pytest.raises(UserError, match=said):
        open_image_source("external", path)


def test_what_has_no_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(external, "_MOST", 20)
    with pytest.raises(UserError, match="goes on after 20 steps: raise StopIteration at the end"):
        opened(tmp_path, "def given(info):\n    return images[0]")


def test_bad_images_of_python(tmp_path):
    code = "given = [images[0], images[1][:-20], (b'text', 7), images[2]]"
    with pytest.raises(DataError) as caught:
        opened(tmp_path, code)
    assert "sample-1" in str(caught.value) and "sample-2" in str(caught.value)
    source = opened(tmp_path, code, policy=ImagePolicy(on_bad_image="skip"))
    assert names_of(source) == ["sample-0", "sample-3"]
    assert [image.tobytes() for image, _ in flat(by_dynamic(Part(source)))] == [IMAGES[0], IMAGES[2]]


def test_samples_that_change_are_named_while_a_pipeline_runs(tmp_path):
    source = opened(
        tmp_path,
        "calls = []\ndef given(info):\n    calls.append(info.idx_in_epoch)\n    if info.idx_in_epoch > 2:\n"
        "        raise StopIteration\n    if len(calls) > 5:\n        return np.zeros((2, 2, 3), np.uint8)\n"
        "    return images[info.idx_in_epoch]",
    )
    with pytest.raises(UserError, match=r"code\.py:given: sample-1 was encoded before, and is not any more"):
        flat(by_dynamic(Part(source)))
    with pytest.raises(UserError, match=r"code\.py:given: sample-0 was encoded before, and is not any more"):
        run(build(Part(source)))
