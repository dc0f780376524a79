"""A replayed graph for other tools: GraphML, and networkx where it is installed.

A node has its category, device, and in ms its duration, start and end; an edge the ms between
its two, and 1 where it leads from the start of the first; there may be both.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

from fastcomm.errors import FastcommError
from fastcomm.replay.replayer import Replayed

if TYPE_CHECKING:
    import networkx

_MS = 1e6
_NODE = {
    "category": "string",
    "device": "string",
    "avg": "double",
    "start": "double",
    "end": "double",
}
_EDGE = {"lag": "double", "at_start": "int"}


def to_networkx(replayed: Replayed) -> "networkx.MultiDiGraph[str]":
    """The graph for networkx, which has to be installed."""
    try:
        import networkx
    except ImportError as error:
        raise FastcommError(
            'to_networkx needs networkx: pip install "fastcomm[graph]"'
        ) from error
    graph: networkx.MultiDiGraph[str] = networkx.MultiDiGraph()
    graph.add_nodes_from(_nodes(replayed))
    graph.add_edges_from(_edges(replayed))
    return graph


def graphml(replayed: Replayed) -> str:
    """The same for yEd, Gephi and whatever else reads GraphML."""
    lines = ['<graphml xmlns="http://graphml.graphdrawing.org/xmlns">']
    for what, keys in (("node", _NODE), ("edge", _EDGE)):
        lines += [
            f'<key id="{key}" for="{what}" attr.name="{key}" attr.type="{type_}"/>'
            for key, type_ in keys.items()
        ]
    lines.append('<graph edgedefault="directed">')
    lines += [f"<node id={quoteattr(n)}>{_data(about)}</node>" for n, about in _nodes(replayed)]
    lines += [
        f"<edge source={quoteattr(a)} target={quoteattr(b)}>{_data(about)}</edge>"
        for a, b, about in _edges(replayed)
    ]
    return "\n".join([*lines, "</graph>", "</graphml>", ""])


def _data(about: dict[str, Any]) -> str:
    """The attributes of a node or an edge."""
    words = (
        (key, str(v).lower() if isinstance(v, bool) else str(v)) for key, v in about.items()
    )
    return "".join(f'<data key="{key}">{escape(word)}</data>' for key, word in words)


def _nodes(replayed: Replayed) -> Iterator[tuple[str, dict[str, Any]]]:
    made = replayed.replayer
    times = [replayed.duration / _MS, replayed.start / _MS, replayed.end / _MS]
    words = (made.categories, [made.devices[d] for d in made.operations.device.tolist()])
    columns = (*words, *(each.tolist() for each in times))
    for name, *values in zip(made.graph.nodes, *columns, strict=True):
        yield str(name), dict(zip(_NODE, values, strict=True))


def _edges(replayed: Replayed) -> Iterator[tuple[str, str, dict[str, Any]]]:
    made = replayed.replayer
    lag, at_start = (made.operations.lag / _MS).tolist(), made.operations.at_start.tolist()
    for (a, b), *values in zip(made.graph.edges, lag, at_start, strict=True):
        yield a, b, dict(zip(_EDGE, values, strict=True))
