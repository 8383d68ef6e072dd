"""Stand-ins for TensorFlow and Keras: with them both apps' DALI graphs build and run without the packages.

    dali_alone.install()
    from efficientdet.pipeline import EfficientDetPipeline

Its `.pipeline` runs, its `.dataset()` does not. On a bare machine DALI is 0.5 GB of packages, and TensorFlow
with CUDA 3.4 GB more.
"""

import sys
import types
from typing import Any

_MODULES = ("tensorflow", "keras", "nvidia.dali.plugin", "nvidia.dali.plugin.tf")


class _Anything(type):
    """A class of which each attribute is such a class again: a base, a decorator, a type in a signature."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Anything(name, (), {"__init__": lambda *_, **__: None})
        setattr(cls, name, found)
        return found

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """A decorator returns what it decorates; everything else makes an object."""
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]
        return super().__call__(*args, **options)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(_Anything(self.__name__, (), {}), name)


def install() -> None:
    """Puts the stand-ins into sys.modules, before anything imports the real packages."""
    for name in _MODULES:
        sys.modules[name] = _Module(name)
