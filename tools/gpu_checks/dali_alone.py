"""Stand-ins for TensorFlow and Keras, to run DALI graphs where these packages are missing.

    dali_alone.install()
    from efficientdet.pipeline import EfficientDetPipeline

The `.pipeline` of this class then works, but `.dataset()` does not.
"""

import sys
import types
from typing import Any

_MODULES = ("tensorflow", "keras", "nvidia.dali.plugin", "nvidia.dali.plugin.tf")


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Anything(name, (), {"__init__": lambda *_, **__: None})
        setattr(cls, name, found)
        return found

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Makes an object. As a decorator, returns the decorated function."""
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
    """Puts the stand-ins into sys.modules. Call it before the real imports."""
    for name in _MODULES:
        sys.modules[name] = _Module(name)
