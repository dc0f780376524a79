"""Recognize kernels of communication by name.

Whether a kernel communicates depends on its function and on the namespaces around it, never on
template arguments or parameters. The first row of `LIBRARIES` to which a kernel belongs, by its
namespaces or else by its function, decides; the words of the name decide on all others.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from fastcomm.formats.kernel_libraries import (
    ALONE,
    COMMUNICATION,
    COMPUTE_SCOPES,
    LIBRARIES,
    OTHER_LIBRARY,
    Library,
    operation_of,
    spaced,
)
from fastcomm.formats.symbols import LIMIT, MANGLED, Symbol, parse
from fastcomm.formats.unlisted_kernels import FUSING, unlisted_operation
from fastcomm.trace.host_names import HOST_LIBRARIES

# Kernels that torch.compile makes of many operators, whose names it lists.
_INDUCTOR = re.compile(r"triton_(?:poi|red|per|tem|for)_")
_HOST = re.compile(rf"({'|'.join(HOST_LIBRARIES)}):(\w+)")
# Namespaces of libraries inside of those without communication.
_EXCEPTED = tuple(
    f"{scope}::"
    for library in LIBRARIES
    for scope in library.scopes
    if scope.partition("::")[0] in COMPUTE_SCOPES
)
# Namespaces of what c10d launches besides its collectives: sums, casts, sorted indices.
_BESIDE = frozenset({"at", "at_cuda_detail", "cub", "hipcub", "rocprim", "thrust"})
# Generated names count up or have a hash; no library is told from another by long numbers.
_LONG_NUMBER = re.compile(r"[0-9]{4,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a name tells of communication."""

    library: str
    op: str
    tag: str | None = None
    fused: bool = False  # whether the kernel does more than communicate


def recognize(name: str) -> Named | None:
    """Return what the name of a kernel tells of communication; None: it is compute."""
    text = name[:LIMIT]
    return _recognized(text if MANGLED.match(text) else _LONG_NUMBER.sub("0000", text))


@lru_cache(maxsize=1 << 12)
def _recognized(name: str) -> Named | None:
    """Return what a name tells whose numbers, but for lengths, are short."""
    if _INDUCTOR.match(name):
        return None
    if host := _HOST.match(name):
        op = operation_of(spaced(host[2]), COMMUNICATION)
        return Named(library=host[1], op=op if isinstance(op, str) else "OTHER")
    symbol = parse(name)
    if not symbol.function or _is_compute(symbol):
        return None
    text = spaced(symbol.function)
    library, op = _attribute(symbol, text)
    if op == ALONE:
        return None
    is_fused = not FUSING.isdisjoint(text.split())
    return Named(library=library.name, op=op, tag=library.tag, fused=is_fused)


def is_helper(name: str) -> bool:
    """Whether a name is of a helper on one device; names of no library with helpers are not.

    A collective's call launches such helpers besides, and they carry its metadata.
    """
    symbol = parse(name)
    if not symbol.function:
        return False
    if not _BESIDE.isdisjoint(symbol.scopes[:1]):
        return _is_compute(symbol)
    library, op = _attribute(symbol, spaced(symbol.function))
    return library in LIBRARIES and op == ALONE


def _is_compute(symbol: Symbol) -> bool:
    """Return whether a kernel is in a namespace without communication."""
    is_compute = not COMPUTE_SCOPES.isdisjoint(symbol.scopes[:1])
    return is_compute and not "::".join((*symbol.scopes, "")).startswith(_EXCEPTED)


def _attribute(symbol: Symbol, text: str) -> tuple[Library, str]:
    """Return the library of a kernel and its operation, or ALONE."""
    path = "::".join((*symbol.scopes, ""))
    function = symbol.function.lstrip("_")
    for row in sorted(set(_rows(symbol, function, text))):
        library = LIBRARIES[row]
        if (
            path.startswith(tuple(f"{scope}::" for scope in library.scopes))
            or function.startswith(library.prefixes)
            or any(f" {phrase} " in text for phrase in library.phrases)
        ):
            return library, _decide(library, symbol, text)
    name = symbol.scopes[0] if symbol.scopes else OTHER_LIBRARY
    return Library(name=name), unlisted_operation(symbol, text)


def _keys(library: Library) -> Iterator[str]:
    """Yield what kernels of a library have: a namespace, first letters, or a word."""
    yield from (f"{scope.partition('::')[0]}::" for scope in library.scopes)
    yield from (f"{prefix[:3]}*" for prefix in library.prefixes)
    yield from (phrase.partition(" ")[0] for phrase in library.phrases)


def _rows_by_key(libraries: Iterable[Library]) -> dict[str, list[int]]:
    """Return the rows of libraries by each key."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row, library in enumerate(libraries):
        for key in _keys(library):
            rows[key].append(row)
    return dict(rows)


_ROWS = _rows_by_key(LIBRARIES)


def _rows(symbol: Symbol, function: str, text: str) -> Iterator[int]:
    """Yield the rows of libraries to which a kernel may belong."""
    for key in (*(f"{scope}::" for scope in symbol.scopes[:1]), f"{function[:3]}*"):
        yield from _ROWS.get(key, ())
    for word in text.split():
        yield from _ROWS.get(word, ())


def _decide(library: Library, symbol: Symbol, text: str) -> str:
    """Return the operation of a kernel of a library, or ALONE."""
    op = operation_of(text, library.exceptions)
    if op is None:
        is_local = not library.local.isdisjoint(text.split())
        op = ALONE if is_local else operation_of(text, library.operations) or library.default
    return op if isinstance(op, str) else op(symbol)
