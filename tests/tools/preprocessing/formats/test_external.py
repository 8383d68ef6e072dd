import numpy as np
import pytest

from tests.refusal import refusal
from tests.tools.preprocessing import reading
from tests.tools.preprocessing.reading import by_dynamic, by_pipeline, flat, refused
from tests.tools.preprocessing.source_writing import IMAGES
from tools.preprocessing.formats import external
from tools.preprocessing.reading import Part

HEADER = f"import numpy as np\nimages = {IMAGES[:3]!r}\n"
ARRAYS = "def array(i):\n    return np.full((4 + i, 6, 2), i, np.{})[:, ::-1]\n"
OF_BATCHES = "def given():\n    yield np.zeros((0, 5, 5, 3), np.uint8)\n    yield np.stack([array(1)] * 2)"
OF_SAMPLES = """
class _Given:
    def __iter__(self):
        yield array(0)
        yield array(1), np.int8(4)
given = _Given()
"""
OF_BATCH_INFO = """
def given(info: "BatchInfo"):
    if info.iteration == 2:
        raise StopIteration
    return [array(0), array(info.iteration)], np.array([7, 8 + info.iteration])
"""


def path_of(directory, code):
    (directory / "code.py").write_text(HEADER + code)
    return f"{directory / 'code.py'}:given"


def opened(directory, code, **options):
    return reading.opened("external", path_of(directory, code), **options)


ARRAY_CODES = [
    ("float32", "given = [array(i) for i in range(3)]", [(4, 0, -1), (5, 1, -1), (6, 2, -1)]),
    ("uint8", OF_BATCHES, [(5, 1, -1), (5, 1, -1)]),
    ("uint8", OF_SAMPLES, [(4, 0, -1), (5, 1, 4)]),
    ("uint8", OF_BATCH_INFO, [(4, 0, 7), (4, 0, 8), (4, 0, 7), (5, 1, 9)]),
]


@pytest.mark.parametrize(("dtype", "code", "expected"), ARRAY_CODES)
def test_arrays_alone_in_batches_and_with_labels(tmp_path, dtype, code, expected):
    """`expected` has the height, value and label of each image."""
    source = opened(tmp_path, ARRAYS.format(dtype) + code)
    assert source.is_decoded and source.size == len(expected)
    for read in (flat(by_pipeline(Part(source), 1, source.size)), flat(by_dynamic(Part(source)))):
        for (image, label), (height, value, wanted) in zip(read, expected, strict=True):
            assert image.dtype == dtype and np.array_equal(image, np.full((height, 6, 2), value))
            assert label == wanted


def test_an_object_within_an_object_of_a_module():
    source = reading.opened("external", "tests.tools.preprocessing:source_writing.IMAGES")
    assert [source.load(i).tobytes() for i in range(source.size)] == IMAGES


WRONG = [
    ("def given(info):\n    raise ValueError('out of\\nluck')", "step 0 raised ValueError: out of luck$"),
    ("def given():\n    yield images[0]\n    yield 1 / 0", "step 1 raised ZeroDivisionError: division"),
    ("given = ['a.png']", "step 0 returned str: an image must be bytes"),
    ("given = [np.zeros((4, 4), np.uint8)]", r"step 0 returned uint8 of the shape \(4, 4\): an image must"),
    ("given = [np.zeros((0, 4, 3), np.uint8)]", r"step 0 returned uint8 of the shape \(0, 4, 3\)"),
    ("given = [(images[0], 2**31)]", "step 0 has the label 2147483648: a label must be a whole number"),
    ("given = [(images[0], -2**31 - 1)]", "step 0 has the label -2147483649: a label must be a whole number"),
    ("given = [(images[0], float('nan'))]", "step 0 has the label nan"),
    ("given = [(images[0], 'cat')]", "step 0 returned the label 'cat': use one whole number"),
    ("given = [(images[0], [1, 2])]", r"step 0 returned the label \[1, 2\]"),
    ("given = [(images, [1, 2])]", "step 0 returned 3 images, but a different number of labels"),
    ("given = [images[0], np.zeros((4, 4, 3), np.uint8)]", "'sample-0' is encoded and 'sample-1' is"),
    ("given = 7", "is 'int': use a sequence, an iterable"),
    ("given = iter(images)", "is 'list_iterator': use a sequence, an iterable that can be iterated"),
    ("class given:\n    pass", "is 'given': use a sequence"),
    ("def given(a, b):\n    pass", "or a function of SampleInfo, BatchInfo or no argument"),
    ("given_ = 1", "importing it raised AttributeError: .* has no attribute 'given'"),
]


@pytest.mark.parametrize(("code", "said"), WRONG)
def test_what_is_wrong_is_said_in_one_line(tmp_path, code, said):
    refused("external", path_of(tmp_path, code), said)


def test_names_that_are_none_of_python():
    for path in ("code.py", ":name", "module:"):
        refused("external", path, "must be FILE.py:name or package.module:name")


def test_what_has_no_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(external, "_MOST", 20)
    endless = path_of(tmp_path, "def given(info):\n    return images[0]")
    refused("external", endless, "has more than 20 steps: raise StopIteration at the end")
    assert opened(tmp_path, "given = images[:1] * 20").size == 20


CHANGING = """
calls = []
def given(info):
    calls.append(info.idx_in_epoch)
    if info.idx_in_epoch > 2:
        raise StopIteration
    return np.zeros((2, 2, 3), np.uint8) if len(calls) > 5 else images[info.idx_in_epoch]
"""


def test_samples_that_change_are_named_while_a_pipeline_runs(tmp_path):
    part = Part(opened(tmp_path, CHANGING))
    said = "code.py:given: sample-{} was encoded when it was checked, but differs now"
    assert said.format(1) in refusal(by_dynamic, part)
    assert said.format(0) in refusal(by_pipeline, part, 1)
