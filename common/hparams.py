"""`--hparams`: overrides of an app's config, a frozen dataclass, as name=value pairs or a YAML file.

    --hparams=learning_rate=0.02,image_size=320x512,nms_method=hard
    --hparams=my_recipe.yaml

A value must fit the field's annotation, such as `flip_prob: Share = 0.5`.
"""

import dataclasses
import math
import pathlib
import re
import typing
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import yaml

from common.errors import UserError, unknown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")

Count = Annotated[int, msgspec.Meta(ge=1)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
AtLeastOne = Annotated[float, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
ShareBelowOne = Annotated[float, msgspec.Meta(ge=0, lt=1)]

Value = TypeVar("Value")
# These mark fields, as in `flip_prob: Loader[Share]`; `marked_fields` finds them.
Loader = Annotated[Value, "loader"]  # the field changes images and boxes of a training loader
# The field changes only how outputs become detections. eval.py, infer.py and a resumed run may change it.
Detection = Annotated[Value, "detection"]


def marked_fields(config_type: type[Config], mark: str) -> tuple[str, ...]:
    """Returns the names of the fields of a config that are marked by Loader ("loader") or Detection."""
    annotations = typing.get_type_hints(config_type, include_extras=True)
    return tuple(name for name, annotation in annotations.items() if mark in typing.get_args(annotation)[1:])


def override(config: Config, spec: str | None, only: Collection[str] | None = None) -> Config:
    """Returns `config` with the fields named in `spec` replaced.

    Args:
        spec: `key=value,key=value`, the path of a YAML mapping, or None. Values may contain commas:
            `aspect_ratios=1.0,2.0,0.5`. Semicolons separate rows: `masks=0,1,2;3,4,5`.
        only: the fields that may be changed here; None: all.

    Raises:
        UserError: a key is unknown or repeated, a value does not fit its field, or a file cannot be read.
    """
    if not spec:
        return config
    pairs = _read_yaml(spec) if spec.endswith((".yaml", ".yml")) else _split_pairs(spec)
    annotations = typing.get_type_hints(type(config), include_extras=True)
    values = {}
    for key, value in pairs:
        if key not in annotations:
            raise unknown("hyper-parameter", key, sorted(annotations))
        if only is not None and key not in only:
            raise UserError(f"hyper-parameter {key!r} cannot be changed here, only {', '.join(only)}")
        if key in values:
            raise UserError(f"hyper-parameter {key!r} is given twice in {spec!r}: keep one")
        is_tuple = typing.get_origin(_type_of(annotations[key])) is tuple
        if key != "image_size" and isinstance(value, str) and is_tuple:
            rows = [re.findall(r"[^,\s]+", row) for row in value.split(";")]
            value = rows if len(rows) > 1 else rows[0]
        values[key] = value
    # PyYAML reads "1e-3" as text, so text is converted to numbers.
    return replace(config, values, strict=False)


def resolve(config: Config, a: Any, preset: Mapping[str, Any] | None = None) -> Config:
    """Returns the config of a run: `config`, changed by a preset, --hparams and flags, in this order.

    Args:
        a: the flags. A flag with a field's name sets the field, unless the flag is None or "".
        preset: name -> value of fields that the preset changes.

    Raises:
        UserError: a value is refused; see `override`.
    """
    fields = [field.name for field in dataclasses.fields(config) if field.name != "model_name"]
    config = override(replace(config, preset or {}), a.hparams, only=fields)
    flag_values = {name: getattr(a, name, None) for name in fields}
    return replace(config, {name: value for name, value in flag_values.items() if value not in (None, "")})


def replace(config: Config, values: Mapping[str, Any], *, strict: bool = True) -> Config:
    """Calls `dataclasses.replace` with values that are checked and converted to the types of their fields.

    Args:
        values: field name -> new value; image_size in any form that `parse_image_size` takes.
        strict: if False, text is also converted, for example "3" to 3.

    Raises:
        UserError: a value does not fit its field, or the config's checks refuse it.
    """
    annotations = typing.get_type_hints(type(config), include_extras=True)
    if "image_size" in values:
        values = {**values, "image_size": parse_image_size(values["image_size"])}
    try:
        converted = {name: _convert(name, values[name], annotations[name], strict) for name in values}
        return dataclasses.replace(config, **converted)
    except ValueError as error:
        raise UserError(str(error)) from error


def check(config: Any) -> None:
    """Raises ValueError for the first field of a dataclass instance that does not fit its annotation.

    NaN and infinity fit no field. An int fits a float.
    """
    for name, annotation in typing.get_type_hints(type(config), include_extras=True).items():
        _convert(name, getattr(config, name), annotation, strict=True)


def require(config: Any, rules: Mapping[str, Any]) -> None:
    """Raises ValueError for the first broken rule. `rules` maps the text of each rule to whether it holds."""
    for rule, holds in rules.items():
        if not holds:
            values = [f"{name}={value}" for name, value in vars(config).items() if name in rule.split()]
            raise ValueError(f"{', '.join(values)}: need {rule}")


def _convert(name: str, value: Any, annotation: Any, strict: bool) -> Any:
    try:
        converted = msgspec.convert(value, annotation, strict=strict)
    except msgspec.ValidationError as error:
        expected = re.split(" - at `|, got `", str(error))[0].replace("`", "")  # without msgspec's path
        kind = _type_of(annotation)
        if typing.get_origin(kind) is typing.Literal:
            expected = f"Expected one of {', '.join(map(str, typing.get_args(kind)))}"
        raise ValueError(f"{name}={value!r}: {expected[:1].lower()}{expected[1:]}") from error
    numbers = converted if isinstance(converted, tuple) else (converted,)
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        raise ValueError(f"{name}={value!r}: expected finite numbers")
    return converted


def _type_of(annotation: Any) -> Any:
    return annotation.__origin__ if typing.get_origin(annotation) is Annotated else annotation


def from_json(config_type: type[Config], fields: Mapping[str, Any]) -> Config:
    """Builds a config from the JSON that is saved with weights.

    Raises:
        UserError: another version of the project saved the config, with other fields.
    """
    surplus = sorted(fields.keys() - {field.name for field in dataclasses.fields(config_type)})
    try:
        if surplus:
            raise msgspec.ValidationError(f"unknown setting {surplus[0]!r}")
        return msgspec.convert(dict(fields), config_type)
    except msgspec.ValidationError as error:
        raise UserError(f"the weights were saved by another version of this project: {error}") from error


def parse_image_size(text: str | int | tuple[int, int] | list[int]) -> tuple[int, int]:
    """Converts `512`, `"512"` or `"320x640"` (height x width) to (height, width)."""
    joined = "x".join(map(str, text)) if isinstance(text, list | tuple) else str(text).strip()
    if not (match := re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", joined)):
        raise UserError(f"image_size={text!r} is not N or HxW of at least 1 pixel: for example 320x640")
    return int(match[1]), int(match[2] or match[1])


def _split_pairs(spec: str) -> list[tuple[str, str]]:
    pairs = []
    for part in re.split(r",(?=\s*\w+\s*=)", spec):
        key, equals, text = part.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--hparams={spec!r}: {part!r} is not key=value")
        pairs.append((key.strip(), text.strip()))
    return pairs


def _read_yaml(path: str) -> list[tuple[str, Any]]:
    """Returns all pairs of a mapping. PyYAML's own function would hide repeated keys."""
    try:
        loader = yaml.SafeLoader(pathlib.Path(path).read_bytes())
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"--hparams={path} is not a YAML mapping with `key: value` lines")
        return [(str(key.value), loader.construct_object(value, deep=True)) for key, value in node.value]
    except OSError as error:
        raise UserError(f"--hparams={path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--hparams={path} is not YAML: {' '.join(str(error).split())}") from error
