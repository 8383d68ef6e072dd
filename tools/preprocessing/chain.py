"""`--ops`: a chain of operators, read from text and applied in either of DALI's APIs.

    resize:short=256 | crop:224x224 | color_twist:brightness=0.8..1.2 | flip:p=0.5

Operators are separated by `|`, an operator's arguments by `,`; `name=value`, or for the first one often just
the value. `low..high` is a random number for each image; `/` or `x` separates the numbers of a list. This is
a table of calls and no language: there are no expressions.
"""

import dataclasses
from typing import Any, NamedTuple

from nvidia.dali import types

from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from common.errors import UserError, unknown
from tools.preprocessing.apis import Api, Data
from tools.preprocessing.arguments import Range, draw
from tools.preprocessing.decoding import DECODERS
from tools.preprocessing.operators import OPERATORS, Operator


class Step(NamedTuple):
    """An operator with its arguments."""

    operator: Operator
    arguments: dict[str, Any]

    def apply(self, api: Api, images: Data, **fixed: str) -> Data:
        """Draws what is random and calls the operator; `fixed` are arguments that the chain knows."""
        known = self.operator.arguments
        drawn = {name: draw(api, known[name], value) for name, value in self.arguments.items()}
        return self.operator.apply(api, images, drawn | fixed)


@dataclasses.dataclass(frozen=True)
class Chain:
    """What is done to an image, in order.

    Attributes:
        decoder: the first step; it is left out where a source has arrays instead of encoded images.
        steps: the others.
    """

    decoder: Step
    steps: tuple[Step, ...]

    @property
    def color(self) -> types.DALIImageType:
        """What the channels mean."""
        return self.decoder.arguments.get("color", types.RGB)

    @property
    def layout(self) -> str:
        """ "HWC" or "CHW", of what comes out."""
        given = [step.arguments["output_layout"] for step in self.steps if "output_layout" in step.arguments]
        return given[-1] if given else "HWC"

    @property
    def is_random(self) -> bool:
        """Whether the same image may come out differently."""
        return any(_is_random(step) for step in (self.decoder, *self.steps))

    def apply(self, api: Api, images: Data, *, is_decoded: bool = False, device: str = "cpu") -> Data:
        """
        Args:
            api: of `images`.
            images: uint8 (bytes,), encoded; or (H, W, C) where `is_decoded`.
            is_decoded: nothing is to be decoded.
            device: "cpu", or "gpu": images are there from the decoder on.

        Returns:
            Images in `layout`.
        """
        if not is_decoded:
            images = self.decoder.apply(api, images, device=device)
        elif device == "gpu":
            images = images.gpu()
        for step in self.steps:
            is_bgr = step.operator.needs_color and self.color == types.BGR
            if is_bgr:  # `image_type=types.BGR` of these operators changes nothing (DALI 2.4 on a CPU)
                images = api.ops.color_space_conversion(images, image_type=types.BGR, output_type=types.RGB)
            images = step.apply(api, images)
            if is_bgr:
                images = api.ops.color_space_conversion(images, image_type=types.RGB, output_type=types.BGR)
        return images


def parse(ops: str, *, is_decoded: bool = False) -> Chain:
    """Reads `--ops`; an empty text is decoding alone.

    Raises:
        UserError: an operator or argument that is not known, with the nearest one that is; a value that does
            not fit; operators in an order that cannot work.
    """
    texts = [text.strip() for text in ops.split("|")] if ops.strip() else []
    steps = [_step(text) for text in texts]
    decoder = Step(DECODERS["decode"], {})
    if steps and steps[0].operator.name in DECODERS:
        if is_decoded:
            raise UserError(f"--ops: {texts[0]}: there is nothing to decode, this source has arrays")
        decoder = steps.pop(0)
    color = decoder.arguments.get("color", types.RGB)
    chain = Chain(decoder, tuple(_with_statistics(step, color) for step in steps))
    _check_order(chain)
    return chain


def _step(text: str) -> Step:
    name, _, rest = text.partition(":")
    name = name.strip()
    if not text:
        raise UserError("--ops: there is no operator before, after or between two |")
    known = DECODERS | OPERATORS
    if name not in known:
        raise _in("", unknown("operator", name, known))
    operator = known[name]
    arguments: dict[str, Any] = {}
    for number, item in enumerate(rest.split(",") if rest.strip() else []):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            if number or not operator.first:
                raise UserError(f"--ops: {text}: {item.strip()!r} is not name=value")
            key, value = operator.first, key
        argument = operator.aliases.get(key, key)
        if argument not in operator.arguments:
            names = [*operator.aliases, *operator.arguments]
            raise _in(name, unknown("argument", key, names))
        if argument in arguments:
            raise UserError(f"--ops: {text}: {key} is given twice")
        try:
            arguments[argument] = operator.arguments[argument].parse(value)
        except UserError as error:
            raise _in(f"{name}:{key}" if equals else name, error) from error
    short = {full: alias for alias, full in operator.aliases.items()}
    if operator.needs and not arguments.keys() & set(operator.needs):
        raise UserError(
            f"--ops: {text}: give {' or '.join(short.get(need, need) for need in operator.needs)}"
        )
    for argument, others in operator.excludes.items():
        beside = next((other for other in others if other in arguments), None)
        if argument in arguments and beside:
            raise UserError(f"--ops: {text}: {argument} and {beside} exclude each other: leave one out")
    return Step(operator, arguments)


def _in(place: str, error: UserError) -> UserError:
    return UserError(f"--ops: {place}: {error}" if place else f"--ops: {error}")


def _with_statistics(step: Step, color: types.DALIImageType) -> Step:
    """mean=imagenet brings std=imagenet, and both are in the order of the channels."""
    operator, arguments = step
    if arguments.get("mean") == IMAGENET_MEAN:
        arguments = {"std": IMAGENET_STD} | arguments
    if color == types.BGR:
        known = (IMAGENET_MEAN, IMAGENET_STD)
        arguments |= {k: arguments[k][::-1] for k in ("mean", "std") if arguments.get(k) in known}
    return Step(operator, arguments)


def _check_order(chain: Chain) -> None:
    layout = "HWC"
    for operator, arguments in chain.steps:
        if operator.name in DECODERS:
            raise UserError(f"--ops: {operator.name} must be the first operator: images are decoded once")
        if operator.needs_color and chain.color == types.GRAY:
            raise UserError(f"--ops: {operator.name} needs colour images, and they are decoded to gray")
        if layout != "HWC" and operator.name != "layout":
            raise UserError(f"--ops: {operator.name} comes after the channels went first: put it before")
        target = arguments.get("output_layout", layout)
        if operator.name == "layout" and target == layout:
            raise UserError(f"--ops: layout:{target}: images are {layout} already")
        layout = target


def _is_random(step: Step) -> bool:
    operator, arguments = step
    values = [v for value in arguments.values() for v in (value if isinstance(value, tuple) else [value])]
    drawn = any(isinstance(value, Range) for value in [*arguments.values(), *values])
    chance = any(0 < arguments.get(name, 0) < 1 for name in ("p", "p_vertical"))
    return drawn or chance or operator.name in ("decode_random_crop", "random_resized_crop")


def describe() -> str:
    """All operators with their arguments, for --list_ops."""
    lines = []
    for operator in (DECODERS | OPERATORS).values():
        lines.append(f"{operator.name}: {operator.about}")
        short = {full: alias for alias, full in operator.aliases.items()}
        for name, argument in operator.arguments.items():
            names = f"{short[name]}, {name}" if name in short else name
            kind = " | ".join(argument.names) if argument.kind in ("word", "flag") else ""
            varies = ", may be a range" if argument.may_vary and argument.kind != "interpolation" else ""
            first = ", first" if name == operator.first else ""
            lines.append(f"    {names}: {kind or argument.kind}{varies}{first}")
    return "\n".join(lines)
