"""Where the time of a distributed training step goes, and why.

run = fastcomm.open("traces/", tp=2)
run.metrics(link_bandwidth="400Gbit/s")
run.critical_path(step=12).what_if(fastcomm.scale("comm:TP", 0.5))

The public names are those of `__init__.pyi`; each is loaded when it is first used, so that
`import fastcomm` does not wait for numba and pyarrow.
"""

import ast
from importlib import import_module
from pkgutil import get_data
from typing import Any


def _homes() -> dict[str, tuple[str, str]]:
    """Return the module and the name there of each public name."""
    stub = ast.parse(get_data(__name__, "__init__.pyi") or b"")
    return {
        name.asname or name.name: (str(line.module), name.name)
        for line in stub.body
        if isinstance(line, ast.ImportFrom)
        for name in line.names
    }


_HOMES = _homes()
__all__ = sorted(_HOMES)  # noqa: PLE0605 - the stub has the names


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, there = _HOMES[name]
    if module == __name__:
        return import_module(f"{module}.{there}")
    return getattr(import_module(module), there)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
