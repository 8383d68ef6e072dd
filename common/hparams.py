"""`--hparams`: overrides for any field of an app's frozen config dataclass, as k=v,k=v or as a YAML file.

    --hparams=learning_rate=0.02,image_size=320x512,nms_method=hard
    --hparams=my_recipe.yaml

A key that is no field is an error that suggests the nearest one; a value must fit the field's type.
"""

import dataclasses
import math
import pathlib
import re
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import yaml

from common.errors import UserError, unknown

Config = TypeVar("Config")


def override(config: Config, spec: str | None, only: Collection[str] | None = None) -> Config:
    """Returns `config` with the fields named in `spec` replaced.

    Args:
        config: a frozen dataclass instance.
        spec: `key=value,key=value` (a comma followed by `key=` starts the next pair, so a value may hold
            commas: `aspect_ratios=1.0,2.0,0.5`), the path of a YAML mapping, or None.
        only: the fields that may be changed here; None: all.

    Raises:
        UserError: unknown or repeated key, value that does not parse as the field's type, unreadable file.
    """
    if not spec:
        return config
    pairs = _read_yaml(spec) if spec.endswith((".yaml", ".yml")) else _split_pairs(spec)
    field_types = typing.get_type_hints(type(config))
    values = {}
    for key, text in pairs:
        if key not in field_types:
            raise unknown("hyper-parameter", key, sorted(field_types))
        if only is not None and key not in only:
            raise UserError(f"hyper-parameter {key!r} cannot be changed here; what can: {', '.join(only)}")
        if key in values:
            raise UserError(f"hyper-parameter {key!r} is given twice in {spec!r}: keep one")
        values[key] = parse_value(key, text, field_types[key])
    return replace(config, values)


def resolve(config: Config, a: Any) -> Config:
    """The config of a run: the model's row in the table, then --hparams, then the flags of the same names.

    Args:
        config: the row, a frozen dataclass.
        a: the flags' values as attributes, `hparams` among them; None and "" leave a field as it is.

    Raises:
        UserError: see `override`; or a value that the config refuses.
    """
    fields = [field.name for field in dataclasses.fields(config) if field.name != "model_name"]
    config = override(config, a.hparams, only=fields)
    given = {name: getattr(a, name, None) for name in fields}
    given = {name: value for name, value in given.items() if value not in (None, "")}
    if "image_size" in given:
        given["image_size"] = parse_image_size(given["image_size"])
    return replace(config, given)


def replace(config: Config, values: Mapping[str, Any]) -> Config:
    """`dataclasses.replace`; what the config's own checks refuse is a UserError."""
    try:
        return dataclasses.replace(config, **values)
    except ValueError as error:
        raise UserError(str(error)) from error


def check(
    config: Any,
    *,
    choices: Mapping[str, Collection[str]],
    at_least_one: Collection[str],
    not_negative: Collection[str],
    shares: Collection[str],
    below_one: Collection[str],
) -> None:
    """Raises ValueError with the first field of `config` that is out of its range.

    NaN and infinity always are, in any field.

    Args:
        config: a dataclass instance with the fields that follow.
        choices: field -> the words it may hold.
        at_least_one: fields that must be 1 or more.
        not_negative: fields that must be finite and 0 or more.
        shares: fields that must be 0 to 1.
        below_one: those of them that must not be 1.
    """
    for name, value in vars(config).items():
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise ValueError(f"{name}={value}: need finite numbers")
    for field, words in choices.items():
        if getattr(config, field) not in words:
            raise ValueError(f"{field}={getattr(config, field)!r} is not one of {', '.join(words)}")
    for field in at_least_one:
        if not 1 <= getattr(config, field) < math.inf:
            raise ValueError(f"{field}={getattr(config, field)}: need at least 1")
    for field in not_negative:
        if not 0 <= getattr(config, field) < math.inf:
            raise ValueError(f"{field}={getattr(config, field)}: need 0 or more")
    for field in shares:
        if not 0 <= getattr(config, field) <= 1:
            raise ValueError(f"{field}={getattr(config, field)}: need 0 to 1")
    for field in below_one:
        if getattr(config, field) == 1:
            raise ValueError(f"{field}=1: need less than 1")


def from_json(config_type: type[Config], fields: Mapping[str, Any]) -> Config:
    """A config from the JSON form that travels with the weights (lists become tuples again, nested ones too).

    Raises:
        UserError: another version wrote it, with a setting that this one does not have, or without one that
            it needs.
    """
    known = {field.name for field in dataclasses.fields(config_type)}
    required = {f.name for f in dataclasses.fields(config_type) if f.default is dataclasses.MISSING}
    surplus, missing = sorted(fields.keys() - known), sorted(required - fields.keys())
    if surplus or missing:
        difference = f"had the setting {surplus[0]!r}" if surplus else f"had no setting {missing[0]!r}"
        raise UserError(f"the weights were saved by another version: it {difference}")
    return config_type(**{name: _tuples(value) for name, value in fields.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def parse_image_size(text: str | int | tuple[int, int] | list[int]) -> tuple[int, int]:
    """`512`, `"512"` or `"320x640"` (height x width) -> (height, width)."""
    if isinstance(text, list | tuple) and len(text) == 2 and all(isinstance(side, int) for side in text):
        size = tuple(text)
    else:
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", str(text).strip())
        if not match:
            raise UserError(f"image_size={text!r} is not N or HxW, for example 512 or 320x640")
        size = (int(match[1]), int(match[2] or match[1]))
    if min(size) < 1:
        raise UserError(f"image_size={text!r}: both sides must be at least 1 pixel")
    return size


def parse_value(key: str, value: Any, field_type: Any) -> Any:
    """Converts text (or a YAML scalar or list) to `field_type`; raises UserError naming the key."""
    if key == "image_size":
        return parse_image_size(value)
    if isinstance(field_type, types.UnionType):  # X | None
        if value is None or str(value).lower() == "none":
            return None
        (field_type,) = [t for t in typing.get_args(field_type) if t is not types.NoneType]
    try:
        if typing.get_origin(field_type) is tuple:
            items = value if isinstance(value, list | tuple) else [v for v in re.split(r"[,\s]+", value) if v]
            item_type = typing.get_args(field_type)[0]
            return tuple(parse_value(key, item, item_type) for item in items)
        if field_type is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
                str(value).lower()
            ]
        if isinstance(value, bool):  # YAML's yes and no are no numbers and no names
            raise ValueError(value)
        if field_type is int and isinstance(value, float) and not value.is_integer():
            raise ValueError(value)
        return field_type(value)  # float("1e-3") works, where PyYAML alone would leave a string
    except (KeyError, ValueError, TypeError) as error:
        wanted = getattr(field_type, "__name__", str(field_type))
        raise UserError(f"hyper-parameter {key}={value!r} is not a {wanted}") from error


def _split_pairs(spec: str) -> list[tuple[str, str]]:
    pairs = []
    for part in re.split(r",(?=\s*\w+\s*=)", spec):
        key, equals, text = part.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--hparams={spec!r}: {part!r} is not key=value")
        pairs.append((key.strip(), text.strip()))
    return pairs


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's own rule for a repeated key is that the last one wins, silently."""


def _mapping_as_pairs(loader: yaml.SafeLoader, node: yaml.MappingNode) -> list[tuple[str, Any]]:
    return [(str(loader.construct_object(k)), loader.construct_object(v, deep=True)) for k, v in node.value]


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_as_pairs)


def _read_yaml(path: str) -> list[tuple[str, Any]]:
    try:
        pairs = yaml.load(pathlib.Path(path).read_text(), Loader=_UniqueKeyLoader)  # a SafeLoader
    except OSError as error:
        raise UserError(f"--hparams={path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--hparams={path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise UserError(f"--hparams={path} holds no key: value mapping")
    return pairs
