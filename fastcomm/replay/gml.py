"""Directed graphs in GML, as far as data-flow graphs of frameworks need it."""

import re
from pathlib import Path

from fastcomm.errors import TraceFileError
from fastcomm.replay.uniform import whole_text

Edges = list[tuple[str, str]]

_TOKEN = re.compile(r'"[^"]*"|[\[\]]|[^\s\[\]"]+')
_ENTITIES = {"&quot;": '"', "&#34;": '"', "&lt;": "<", "&gt;": ">", "&amp;": "&"}


def read(path: Path) -> tuple[list[str], Edges]:
    """Labels of the nodes and the edges between them, in the order of the file."""
    try:
        tokens = _TOKEN.findall(whole_text(path).decode())
    except UnicodeDecodeError as error:
        raise TraceFileError(f"{path}: {error}") from error
    labels: dict[str, str] = {}
    edges: list[tuple[str, str]] = []
    for kind, fields in _blocks(tokens):
        if kind == "node" and "id" in fields:
            labels[fields["id"]] = _text(fields.get("label", fields["id"]))
        elif kind == "edge":
            edges.append((fields.get("source", "?"), fields.get("target", "?")))
    if unknown := [end for edge in edges for end in edge if end not in labels]:
        raise TraceFileError(
            f"{path}: an edge names node {unknown[0]}, which is not in the graph"
        )
    if not labels:
        raise TraceFileError(f"{path}: no node in the graph")
    return list(labels.values()), [(labels[a], labels[b]) for a, b in edges]


def _blocks(tokens: list[str]) -> list[tuple[str, dict[str, str]]]:
    """The innermost blocks that are nodes or edges, with their plain fields."""
    found = []
    for i, token in enumerate(tokens):
        if token in {"node", "edge"} and tokens[i + 1 : i + 2] == ["["]:
            fields, depth, k = {}, 1, i + 2
            while k < len(tokens) and depth:
                depth += (tokens[k] == "[") - (tokens[k] == "]")
                if depth == 1 and tokens[k] not in "[]" and k + 1 < len(tokens):
                    fields[tokens[k]] = tokens[k + 1]
                    k += tokens[k + 1] not in "[]"
                k += 1
            found.append((token, fields))
    return found


def _text(token: str) -> str:
    token = token.strip('"')
    for entity, letter in _ENTITIES.items():
        token = token.replace(entity, letter)
    return token
