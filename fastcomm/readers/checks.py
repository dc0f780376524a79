"""Check keys and values of a configuration, with errors that name what is valid."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from reprlib import Repr
from typing import Any, NoReturn

from fastcomm.errors import ConfigError

_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong = 2, 60, 30


def refuse(where: str, key: str, found: object, wanted: str) -> NoReturn:
    """Raise a ConfigError for a value of a wrong kind."""
    raise ConfigError(f"{where} {key}: found {_SHORT.repr(found)}, wanted {wanted}")


def choice(table: Mapping[str, Any], key: str, wanted: Iterable[str], where: str) -> str | None:
    """The word under `key`, one of `wanted`; None where there is none."""
    found = table.get(key)
    names = tuple(wanted)
    if found is None or found in names:
        return found
    refuse(where, key, found, f"one of {', '.join(names)}{_hint(found, names)}")


def check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """ConfigError for the first key that is not known."""
    names = tuple(known)
    for key in table:
        if key not in names:
            raise ConfigError(
                f"{where}: unknown key {_SHORT.repr(key)}, wanted one of"
                f" {', '.join(names)}{_hint(key, names)}"
            )


def _hint(found: object, names: tuple[str, ...]) -> str:
    near = get_close_matches(found[:40], names, 1) if isinstance(found, str) else ()
    return f"; did you mean {near[0]!r}?" if near else ""
