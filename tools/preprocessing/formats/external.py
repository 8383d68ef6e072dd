"""Images that a user's Python gives: encoded, or as arrays (H, W, C) of uint8 or float32.

A step gives a sample, `image` or `(image, label)`, or a batch: a list of samples, `(images, labels)`, or an
array (N, H, W, C). Samples are numbered through all steps.

Samples are asked for by number, so a pipeline over them resumes exactly, if the same number gives the same
sample: of functions that draw random numbers without regard to SampleInfo it does not. An iterable is run
through again up to there.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.datacheck import images as image_files
from common.datacheck.images import ImageFacts, ImagePolicy
from common.errors import UserError
from common.issues import Findings
from common.reader_calls import Call
from tools.preprocessing.formats import base, external_steps
from tools.preprocessing.formats.base import Given, ImageSource, Part, Seen
from tools.preprocessing.formats.external_steps import Steps

_MOST = 1_000_000  # samples: what gives more is taken to have no end
_ENCODED = "encoded"
_Sample = tuple[np.ndarray, int | None]


class Samples:
    """The samples of steps.

    Args:
        steps: of the user.
        origin: --input, for messages.
    """

    def __init__(self, steps: Steps, origin: str):
        self._steps, self._origin = steps, origin
        self._last: tuple[int, list[_Sample]] = (-1, [])
        self.in_any_order = steps.in_any_order

    def of_step(self, number: int) -> list[_Sample] | None:
        """The samples of a step; None behind the last one.

        Raises:
            UserError: the user's code raised something, or gave what is no sample.
        """
        if self._last[0] != number:
            whose = f"{self._origin}: step {number}"
            try:
                item = self._steps.step(number)
            except StopIteration:
                return None
            except UserError:
                raise
            except Exception as error:
                raise UserError(f"{whose} raised {external_steps.said(error)}") from error
            self._last = (number, _samples(item, whose))
        return self._last[1]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ExternalImages(ImageSource):
    """Images of Python.

    Attributes:
        origin: --input.
        samples: of it.
        places: int64 (size, 2), the step of each image and its place there.
        form: "encoded", or the dtype of arrays.
    """

    kind = "external"
    origin: str
    samples: Samples
    places: np.ndarray
    form: str
    names: Sequence[str]
    labels: np.ndarray
    label_names: Sequence[str]

    @property
    def is_decoded(self) -> bool:
        return self.form != _ENCODED

    def encoded(self, i: int) -> bytes:
        if self.is_decoded:
            raise TypeError(f"{self.names[i]} is an array, not an encoded image")
        return self.sample(i)[0].tobytes()

    def sample(self, i: int) -> tuple[np.ndarray, int]:
        step, place = self.places[i].tolist()
        found = self.samples.of_step(step)
        if found is None or place >= len(found):
            raise UserError(f"{self.origin}: step {step} gave {self.names[i]} before, and does not any more")
        image, label = found[place]
        if _form_of(image) != self.form:
            raise UserError(f"{self.origin}: {self.names[i]} was {self.form} before and is {_form_of(image)}")
        return image, base.NO_LABEL if label is None else label

    def _call(self, part: Part) -> Call:
        if part.training and not self.samples.in_any_order:
            raise UserError(
                f"--input={self.origin} is an iterable, whose order is its own: to shuffle it, give a"
                " sequence, or a function that takes SampleInfo"
            )
        return self._external_call(part)


def open_external(given: Given) -> ExternalImages:
    """--source=external: `FILE.py:name` or `package.module:name`."""
    samples = Samples(external_steps.load(given.path), given.path)
    seen: list[Seen] = []
    step = 0
    while (found := samples.of_step(step)) is not None:
        for place, (image, label) in enumerate(found):
            name = f"sample-{len(seen)}"
            seen.append(Seen(name, _look(image, given.policy), label, _form_of(image), (step, place)))
        step += 1
        if step > _MOST:
            raise UserError(f"{given.path} goes on after {_MOST} steps: raise StopIteration at the end")
    if not seen:
        raise UserError(f"{given.path} gives no sample")
    findings = Findings(given.path)
    kept = base.judge(seen, findings, given.policy, lambda row: seen[row].name)
    base.check_one_kind([seen[row] for row in kept], given.path)
    given.on_report(findings)
    labels = base.column_of([seen[row].label for row in kept])
    return ExternalImages(
        origin=given.path,
        samples=samples,
        places=np.array([seen[row].place for row in kept], np.int64),
        form=seen[kept[0]].form,
        names=[seen[row].name for row in kept],
        labels=labels,
        label_names=base.names_of(labels, given.label_map),
    )


def _look(image: np.ndarray, policy: ImagePolicy) -> ImageFacts:
    if _form_of(image) == _ENCODED:
        return image_files.inspect(
            image.tobytes(), decode=policy.decode, max_megapixels=policy.max_megapixels
        )
    return image_files.limited(ImageFacts("array", image.shape[0], image.shape[1]), policy.max_megapixels)


def _form_of(image: np.ndarray) -> str:
    return _ENCODED if image.ndim == 1 else image.dtype.name


def _samples(item: Any, whose: str) -> list[_Sample]:
    """What a step gave, as samples."""
    if isinstance(item, list):
        return [_sample(part, f"{whose}, place {place}") for place, part in enumerate(item)]
    images, labels = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    if not isinstance(images, list) and not (isinstance(images, np.ndarray) and images.ndim == 4):
        return [_sample(item, whose)]
    if labels is None:
        labels = [None] * len(images)
    if not hasattr(labels, "__len__") or len(labels) != len(images):
        raise UserError(f"{whose} gave {len(images)} images, and not as many labels")
    return [
        _sample((image, label), f"{whose}, place {place}")
        for place, (image, label) in enumerate(zip(images, labels, strict=True))
    ]


def _sample(item: Any, whose: str) -> _Sample:
    image, label = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    if isinstance(image, bytes | bytearray | memoryview):
        image = np.frombuffer(image, np.uint8)
    if not isinstance(image, np.ndarray):
        raise UserError(f"{whose} gave {type(image).__name__}: {_WANTED}")
    is_encoded = image.ndim == 1 and image.dtype == np.uint8
    is_array = image.ndim == 3 and image.dtype in (np.uint8, np.float32) and image.size
    if not is_encoded and not is_array:
        raise UserError(f"{whose} gave {image.dtype} of the shape {image.shape}: {_WANTED}")
    if label is not None:
        label = np.asarray(label)
        if label.size != 1 or label.dtype.kind not in "iuf":
            raise UserError(f"{whose} gave the label {label.tolist()!r}: a label is one whole number")
        label = base.check_label(label.item(), whose)
    return np.ascontiguousarray(image), label


_WANTED = "an image is bytes, uint8 (bytes,), or uint8 or float32 (height, width, channels)"
