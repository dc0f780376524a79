"""Reproduce HTA, dPRO and two original simulators exactly.

A module here may import a model; no model imports a module here.
"""

from importlib import import_module
from types import ModuleType

__all__ = ["dispatch", "dpro", "hta", "isp"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
