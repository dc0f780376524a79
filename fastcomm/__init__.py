"""Find where the time of a distributed training step goes, and why.

run = fastcomm.open("traces/", tp=2)
run.metrics(link_bandwidth="400Gbit/s")
run.critical_path(step=12).what_if(scale=["comm:TP=0.5"])

The public names are those of `__init__.pyi`; each is loaded when it is first used, so that
`import fastcomm` does not wait for numba and pyarrow.
"""

from importlib import import_module
from typing import Any


def _homes() -> dict[str, tuple[str, str]]:
    """Return the module and the name there of each public name."""
    loader: Any = __spec__.loader  # pkgutil, which asks it too, takes 5 ms to import
    stub = loader.get_data(f"{__path__[0]}/__init__.pyi").decode()
    # Each line is "from MODULE import NAME as PUBLIC"; parsing Python takes 10 ms.
    lines = (line.partition("#")[0].split() for line in stub.splitlines())
    return {public: (module, name) for _, module, _, name, _, public in lines}


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
    return list(__all__)
