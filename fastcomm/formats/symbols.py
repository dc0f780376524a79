"""Names of device functions, readable or mangled, taken apart.

A profiler shows `void deep_ep::intranode::dispatch<8, true>(int4*)`, or the Itanium name
`_ZN7deep_ep9intranode8dispatchILi8ELb1EEEvP4int4`. Both denote the function `dispatch` in the
namespaces `deep_ep` and `intranode`. Template arguments and parameters may contain any name.

Every step moves forward, and no more than `LIMIT` characters are read: a name costs time linear
in its length at most.
"""

import re
from dataclasses import dataclass

LIMIT = 4096  # characters of a name that are read; the function stands near the start
_ANONYMOUS = "(anonymous namespace)"
# What may precede a name without belonging to it.
_DECORATION = re.compile(
    r"(?:void |static |typeinfo name for |non-virtual thunk to |__device_stub__)*"
)
_IDENTIFIERS = re.compile(
    r"(?:(?:\(anonymous namespace\)|\{anonymous\}|[\w$@.\-~]++)(?:::)?)++"
)
_BRACKET = re.compile(r"[<>()]")
MANGLED = re.compile(r"_?_ZT?S?(?=[NL]?[0-9]|NK?[0-9S])")
_LENGTH = re.compile(r"[0-9]+")
_NUMBER = re.compile(r"n?[0-9]*")
_QUALIFIER = re.compile(r"N|K|St|L(?=[0-9])")
_BOOLEANS = {
    **dict.fromkeys(("true", "(bool)1", "(bool)true", "Lb1E"), True),
    **dict.fromkeys(("false", "(bool)0", "(bool)false", "Lb0E"), False),
}
# Parts of mangled template arguments. Those that open end with an E; those that hold a length
# are followed by as many characters of a name.
_PART = re.compile(
    r"(?P<length>[0-9]+)"
    r"|(?P<value>L(?:[a-z]|S[0-9A-Z]*_)n?[0-9a-f]*E)"
    r"|(?P<skip>S[0-9A-Z]*_|S[a-z]|T[0-9]*_|DF[0-9]+[_bx]?|D[A-Za-z]|A[0-9]*_)"
    r"|(?P<open>Ul|L_Z|[FIJLNXZ])"
    r"|(?P<close>E(?:[0-9]*_)?)"
    r"|(?P<other>.)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A device function: its namespaces and classes, its own name, what follows the name."""

    scopes: tuple[str, ...]
    function: str
    tail: str  # from the template arguments on
    is_mangled: bool = False

    def is_bare(self) -> bool:
        """Return whether the name has neither scopes, template arguments nor parameters."""
        return not (self.scopes or self.tail or self.is_mangled)

    def flags(self) -> list[bool | None]:
        """Return the template arguments; None for those that are not Boolean."""
        arguments = _mangled_arguments if self.is_mangled else _plain_arguments
        return [_BOOLEANS.get(argument) for argument in arguments(self.tail)]


def parse(name: str) -> Symbol:
    """Take a name apart, mangled or not."""
    text = name[:LIMIT]
    if start := MANGLED.match(text):
        return _parse_mangled(text, start.end())
    return _parse_plain(text)


def _parse_plain(text: str) -> Symbol:
    """Take a readable name apart."""
    position = _DECORATION.match(text).end()  # type: ignore[union-attr]
    path = ""
    while match := _IDENTIFIERS.match(text, position):
        path += match[0]
        position = tail = match.end()
        if text.startswith("<", position):
            position = _closing(text, position)
        following = text[position : position + 2]
        if following == "::":  # a class with template arguments
            path += "::" if not path.endswith("::") else ""
            position += 2
        elif following[:1] == " " and _IDENTIFIERS.match(text, position + 1):
            path = ""  # that was the type of the result
            position += 1
        else:
            return _symbol(path.split("::"), text[tail:])
    return _symbol(path.split("::"), text[position:])


def _symbol(path: list[str], tail: str) -> Symbol:
    """Return the symbol of a readable path."""
    named = [part for part in path if part and part not in (_ANONYMOUS, "{anonymous}")]
    return Symbol(tuple(named[:-1]), named[-1] if named else "", tail)


def _closing(text: str, position: int) -> int:
    """Return where the bracket that opens at a position has closed, or the end of the text."""
    depth = 0
    for bracket in _BRACKET.finditer(text, position):
        # "->" and operators that compare are rare in names, and stand in parentheses.
        depth += 1 if bracket[0] in "<(" else -1
        if depth == 0:
            return bracket.end()
    return len(text)


def _plain_arguments(tail: str) -> list[str]:
    """Return the template arguments at the start of a readable tail."""
    if not tail.startswith("<"):
        return []
    inner = tail[1 : _closing(tail, 0) - 1]
    arguments, start, depth = [], 0, 0
    for mark in re.finditer(r"[<>(),]", inner):
        if mark[0] == ",":
            if depth == 0:
                arguments.append(inner[start : mark.start()].strip())
                start = mark.end()
        else:
            depth += 1 if mark[0] in "<(" else -1
    return [*arguments, inner[start:].strip()]


def _parse_mangled(text: str, position: int) -> Symbol:
    """Take an Itanium name apart, from behind `_Z`."""
    is_nested = text.startswith("N", position)
    path: list[str] = []
    tail = position
    while position < len(text):
        if match := _LENGTH.match(text, position):
            position = tail = match.end() + _length(match)
            identifier = text[match.end() : position]
            if not identifier.startswith("_GLOBAL__N_"):
                path.append(identifier.removeprefix("__device_stub__"))
            if not is_nested:
                break
        elif path and text[position] == "I":  # of a class, or of the function itself
            position = _mangled_closing(text, position)
        elif match := _QUALIFIER.match(text, position):
            position = match.end()
        else:
            break
    return Symbol(tuple(path[:-1]), path[-1] if path else "", text[tail:], is_mangled=True)


def _mangled_closing(text: str, position: int, values: list[str] | None = None) -> int:
    """Return where the template arguments at a position have ended; collect their values.

    A value is the text of a literal, or "" for any other argument.
    """
    open_parts: list[str] = []
    while part := _PART.match(text, position):
        kind, position = part.lastgroup, part.end()
        if kind == "open":
            open_parts.append(part[0])
        elif kind == "close":
            closed = open_parts.pop()
            if not open_parts or closed not in ("Ul", "Z"):
                position = part.start() + 1  # a number behind belongs to what follows
        elif kind == "length":
            position += _length(part)
        if open_parts[-1:] == ["L"] and kind in ("length", "close"):
            position = _NUMBER.match(text, position).end()  # type: ignore[union-attr]  # of an enumeration
        if values is not None and len(open_parts) == 1 and kind != "open":
            values.append(part[0] if kind == "value" else "")
        if not open_parts:
            return position
    return len(text)


def _length(digits: re.Match[str]) -> int:
    """Return the length of a name, at most `LIMIT`, however many digits it has."""
    return int(digits[0]) if len(digits[0]) <= len(str(LIMIT)) else LIMIT


def _mangled_arguments(tail: str) -> list[str]:
    """Return the literals among the template arguments of a mangled tail; "" for others."""
    values: list[str] = []
    if tail.startswith("I"):
        _mangled_closing(tail, 0, values)
    return values
