"""Parses `--ops`, a chain of operators, and applies it in either of DALI's two APIs.

    resize:short=256 | crop:224x224 | color_twist:brightness=0.8..1.2 | flip:p=0.5

`|` separates operators. `,` separates the arguments of an operator, which are written as `name=value`. Many
operators have one argument whose name may be left out. `low..high` is a random number for each image. `/` or
`x` separates numbers.
"""

from typing import Any, NamedTuple

from nvidia.dali import types

from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD, Data
from common.errors import UserError, unknown
from tools.preprocessing.apis import Api
from tools.preprocessing.arguments import ALIASES, IMAGENET, WORDS
from tools.preprocessing.operators import DECODERS, NEED_RGB, OPERATORS, Operator


class Step(NamedTuple):
    operator: Operator
    arguments: dict[str, Any]

    def apply(self, api: Api, images: Data, **fixed: str) -> Data:
        """Draws the random arguments, and calls the operator."""
        known = self.operator.arguments
        drawn = {name: known[name].draw(api, value) for name, value in self.arguments.items()}
        return self.operator.apply(api, images, drawn | fixed)


class Chain(NamedTuple):
    """All operators that are applied to an image, in order.

    Attributes:
        decoder: the first step, only for encoded images.
        steps: all other steps.
        color: the meaning of the channels: RGB, BGR or gray.
        layout: layout of the result, "HWC" or "CHW".
    """

    decoder: Step
    steps: tuple[Step, ...]
    color: types.DALIImageType
    layout: str

    def apply(self, api: Api, images: Data, *, is_decoded: bool = False, device: str = "cpu") -> Data:
        """Applies all operators, and returns the images.

        Args:
            images: encoded images, uint8 (bytes,); or arrays (H, W, C).
            is_decoded: whether `images` are arrays.
            device: "cpu" or "gpu". With "gpu", the decoded images and all later images are in GPU memory.
        """
        if not is_decoded:
            images = self.decoder.apply(api, images, device=device)
        elif device == "gpu":
            images = images.gpu()
        rgb, bgr = {"image_type": types.RGB}, {"image_type": types.BGR}
        for step in self.steps:
            is_swapped = self.color == types.BGR and step.operator.name in NEED_RGB
            if is_swapped:
                images = api.ops.color_space_conversion(images, **bgr, output_type=types.RGB)
            images = step.apply(api, images)
            if is_swapped:
                images = api.ops.color_space_conversion(images, **rgb, output_type=types.BGR)
        return images


def parse(ops: str, *, is_decoded: bool = False) -> Chain:
    """Parses `--ops`. An empty text means only decoding.

    Raises UserError for an unknown name, a value that is not allowed, or operators in a wrong order.
    """
    steps = [_step(text.strip()) for text in ops.split("|")] if ops.strip() else []
    decoder = Step(OPERATORS["decode"], {})
    if steps and steps[0].operator.name in DECODERS:
        if is_decoded:
            raise UserError(f"--ops={ops}: remove the decoder, because the images of this source are arrays")
        decoder = steps.pop(0)
    color = decoder.arguments.get("color", types.RGB)
    layout = "HWC"
    for operator, arguments in steps:
        _name_statistics(arguments, color)
        if operator.name in DECODERS:
            raise UserError(
                f"--ops: {operator.name} must be the first operator, and the only decoder: move or remove it"
            )
        if operator.name in NEED_RGB and color == types.GRAY:
            raise UserError(
                f"--ops: {operator.name} needs colour images, but decode makes gray ones: remove"
                f" {operator.name}, or decode to another color"
            )
        if layout != "HWC" and operator.name != "layout":
            raise UserError(f"--ops: {operator.name} needs the layout HWC: put it before the change to CHW")
        target = arguments.get("output_layout", layout)
        if operator.name == "layout" and target == layout:
            raise UserError(f"--ops: layout:{target} has no effect, images are {layout} already: remove it")
        layout = target
    return Chain(decoder, tuple(steps), color, layout)


def _name_statistics(arguments: dict[str, Any], color: types.DALIImageType) -> None:
    """Replaces `imagenet` by numbers. mean=imagenet implies std=imagenet."""
    if arguments.get("mean") == IMAGENET:
        arguments.setdefault("std", IMAGENET)
    for name, numbers in (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD)):
        if arguments.get(name) == IMAGENET:
            arguments[name] = numbers[::-1] if color == types.BGR else numbers


def _step(text: str) -> Step:
    name, _, rest = (part.strip() for part in text.partition(":"))
    try:
        if name not in OPERATORS:
            raise unknown("operator", name, OPERATORS)
        operator = OPERATORS[name]
        arguments = _arguments(operator, rest.split(",") if rest else [])
    except UserError as error:
        raise UserError(f"--ops: {text}: {error}") from error
    return Step(operator, arguments)


def _arguments(operator: Operator, items: list[str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for item in items:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            if arguments or not operator.first:
                raise UserError(f"{key!r} is not name=value")
            key, value = operator.first, key
        name = operator.full_name(key)
        if name in arguments:
            raise UserError(f"{key} is given twice")
        arguments[name] = operator.arguments[name].parse(value)
    if operator.needs and arguments.keys().isdisjoint(operator.needs):
        raise UserError(f"give {' or '.join(operator.needs)}")
    return arguments


def describe() -> str:
    lines = []
    for operator in OPERATORS.values():
        lines.append(f"{operator.name}: {operator.about}")
        for name, argument in operator.arguments.items():
            names = [*(alias for alias, full in ALIASES.items() if name in full), name]
            kind = " | ".join(WORDS.get(argument.kind, [argument.kind]))
            varies = ", may be a range" if argument.may_vary and argument.kind not in WORDS else ""
            first = ", first" if name == operator.first else ""
            lines.append(f"    {', '.join(names)}: {kind}{varies}{first}")
    return "\n".join(lines)
