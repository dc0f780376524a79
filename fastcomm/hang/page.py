"""Page of `fastcomm hang`: the chain of waiting as a graph, the evidence, what to do next."""

from collections.abc import Iterable, Mapping, Sequence

from fastcomm.hang import tables
from fastcomm.hang.result import Hang, WaitingLink
from fastcomm.show import pages
from fastcomm.show.charts import GraphChart, GraphNode, shortened
from fastcomm.show.pages import Block, Missing, Page, Section, figure, table
from fastcomm.trace.run_traces import named_ranks

_MOST_LAYERS = 9
_MOST_ACROSS = 4
_MOST_CALLS = 32
_MOST_ROWS = 64
_LONGEST = 68  # characters of a line across the graph

_MANY = (
    "Most ranks are victims: a call is open on all its members. Who holds them up is at the "
    "end of the arrows."
)
_ALONE = (
    "The arrows lead from who stands in a call that the others did not make, not to who holds "
    "it up: the ranks at their end only never call it."
)

# A node of the graph: ranks that stand alike, or the place of a link.
_Node = tuple[int, ...] | int


def page(hang: Hang, source: str) -> Page:
    """Return the page of an answer; `source` names where the dumps are."""
    ages = [link.since_ns for link in hang.links if link.since_ns is not None]
    return Page(
        title="Hang",
        source=source,
        headline=(hang.headline,),
        facts=(
            pages.fact("hang.confidence", hang.confidence, str, label="confidence"),
            pages.fact("hang.culprits", len(hang.culprits), pages.count, label="culprits"),
            pages.fact("hang.waiting", len(hang.waiting), pages.count, label="ranks wait"),
            pages.fact("hang.dumps", hang.dumps, pages.count, label="ranks with a dump"),
            pages.fact("hang.world_size", hang.world_size, pages.count, label="ranks"),
            pages.fact(
                "hang.links.since_ns",
                max(ages, default=None),
                pages.ns,
                label="longest wait",
                why="no dump has the time when it was written",
            ),
        ),
        sections=(_chain(hang), _evidence(hang), _next(hang)),
        warnings=(*hang.failed, *hang.warnings),
    )


def _chain(hang: Hang) -> Section:
    """Return the section with the graph and the table of waiting."""
    title = "Who waits for whom?"
    if not hang.links:
        why = "no rank stands in a call" if hang.hang else "nothing waits for long"
        missing = Missing(title="The chain of waiting", why=why)
        return Section(
            name="waiting", title=title, lead=(f"{why}.".capitalize(),), blocks=(missing,)
        )
    chart, absent = _graph(hang)
    rows = pages.shown(tables.chain(hang).top(_MOST_ROWS))
    drawn = figure(
        "chain-graph",
        "The chain of waiting",
        f"Graph of {pages.many(len(hang.links), 'call')}: ranks stand in calls, and calls wait "
        "for ranks. The table has all.",
        chart,
        "hang.culprits",
        "hang.links.waits_for",
        chart_note=absent,
    )
    blocks: tuple[Block, ...] = (drawn, rows) if chart.edges else (rows,)
    return Section(
        name="waiting",
        title=title,
        lead=(
            "An arrow leads from ranks to the call they stand in, and on to whom it waits for.",
        ),
        blocks=blocks,
        pitfall=_ALONE if hang.awaited else _MANY,
    )


def _evidence(hang: Hang) -> Section:
    """Return the section with the sentences that carry the answer."""
    rows = [(line,) for line in hang.evidence]
    block: Block = table("evidence-table", "Evidence", ["from dumps and other files"], rows)
    if not rows:
        block = Missing(title="Evidence", why="nothing is open for long on any rank")
    return Section(
        name="evidence",
        title="What shows it?",
        lead=("What dumps and the files beside them say, with the place where they do.",),
        blocks=(block,),
    )


def _next(hang: Hang) -> Section:
    """Return the section on the meaning of the kind, and on what would decide."""
    rows = [(line,) for line in hang.next]
    blocks = (table("next-table", "Next steps", ["what to look at"], rows),) if rows else ()
    kind = pages.fact("hang.kind", hang.kind, str)
    return Section(
        name="next", title="What to do next?", lead=(kind, ": ", hang.advice), blocks=blocks
    )


# The graph


def _graph(hang: Hang) -> tuple[GraphChart, str]:
    """Return the graph, and what it leaves out as a sentence."""
    links = hang.links[:_MOST_CALLS]
    alike = _alike(hang, links)
    edges: list[tuple[_Node, _Node]] = [
        *((ranks, at) for ranks, (inside, _) in alike.items() for at in inside),
        *((at, ranks) for ranks, (_, before) in alike.items() for at in before),
    ]
    ends = hang.culprits or hang.unreadable
    layers = _layers(edges, [ranks for ranks in alike if ranks[0] in ends])
    shown = layers[-_MOST_LAYERS:]
    nodes: list[list[GraphNode]] = []
    number: dict[_Node, int] = {}
    count = 0
    for layer in shown:
        ordered = sorted(layer, key=lambda node: _weight(node, hang, links))
        first = ordered if len(ordered) <= _MOST_ACROSS else ordered[: _MOST_ACROSS - 1]
        longest = _LONGEST // min(len(ordered), _MOST_ACROSS)
        drawn = [_node(node, hang, links, longest) for node in first]
        if rest := ordered[len(first) :]:
            drawn.append(_more(rest))
        for at, node in enumerate(ordered):
            number[node] = count + min(at, len(drawn) - 1)
        nodes.append(drawn)
        count += len(drawn)
    pairs = {(number[one], number[two]) for one, two in edges if {one, two} <= number.keys()}
    total = len(alike) + len(hang.links)
    absent = total - len(number)
    note = f"{pages.many(absent, 'box')}es" if absent > 1 else pages.many(absent, "box")
    return (
        GraphChart(layers=nodes, edges=sorted(pairs)),
        f"Left out: {note} farther from the culprits." if absent else "",
    )


def _alike(
    hang: Hang, links: Sequence[WaitingLink]
) -> dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return ranks that stand in the same calls and are waited for by the same.

    Each set has the places of these links, and of those.
    """
    inside: dict[int, list[int]] = {rank: [] for rank in hang.culprits}
    before: dict[int, list[int]] = {}
    for at, link in enumerate(links):
        for rank in link.ranks:
            inside.setdefault(rank, []).append(at)
        for rank in link.waits_for:
            before.setdefault(rank, []).append(at)
    missing, unreadable, culprits = {*hang.missing}, {*hang.unreadable}, {*hang.culprits}
    sets: dict[tuple[object, ...], list[int]] = {}
    for rank in sorted(inside.keys() | before.keys()):
        ends = tuple(inside.get(rank, ())), tuple(before.get(rank, ()))
        look = rank in missing, rank in unreadable, rank in culprits
        sets.setdefault((ends, *look), []).append(rank)
    return {
        tuple(ranks): (tuple(inside.get(ranks[0], ())), tuple(before.get(ranks[0], ())))
        for ranks in sets.values()
    }


def _layers(edges: Iterable[tuple[_Node, _Node]], ends: Sequence[_Node]) -> list[list[_Node]]:
    """Return the nodes in layers by their distance from the culprits, who come last.

    What culprits stand in themselves, and nobody waits for, is below them.
    """
    sources: dict[_Node, list[_Node]] = {}
    targets: dict[_Node, list[_Node]] = {}
    for one, other in edges:
        sources.setdefault(other, []).append(one)
        targets.setdefault(one, []).append(other)
    depth = dict.fromkeys(ends, 0)
    _walk(depth, [*ends], sources, 1)
    _walk(depth, [*depth], targets, -1)
    layers: dict[int, list[_Node]] = {}
    for node, layer in depth.items():
        layers.setdefault(layer, []).append(node)
    return [layers[layer] for layer in sorted(layers, reverse=True)]


def _walk(
    depth: dict[_Node, int],
    nodes: list[_Node],
    ways: Mapping[_Node, Sequence[_Node]],
    step: int,
) -> None:
    """Add the nodes that can be reached, with their depth."""
    for node in nodes:  # grows
        for other in ways.get(node, ()):
            if other not in depth:
                depth[other] = depth[node] + step
                nodes.append(other)


def _weight(node: _Node, hang: Hang, links: Sequence[WaitingLink]) -> tuple[bool, int]:
    """Return the order of a node in its layer: culprits, then those of most ranks."""
    if isinstance(node, int):
        return True, -len(links[node].ranks)
    return node[0] not in hang.culprits, -len(node)


def _node(node: _Node, hang: Hang, links: Sequence[WaitingLink], longest: int) -> GraphNode:
    """Return the box of ranks, or of a call, with lines of at most `longest` characters."""
    if isinstance(node, int):
        link = links[node]
        since = "" if link.since_ns is None else f", since {pages.ns(link.since_ns)}"
        return GraphNode(
            lines=(shortened(link.call, longest), shortened(link.group, longest)),
            name="call",
            look="idle",
            tip=f"{link.call} of {link.group}{since}",
        )
    ranks, is_culprit = named_ranks(node), node[0] in hang.culprits
    is_missing = node[0] in hang.missing
    is_inside = any(node[0] in link.ranks for link in hang.links)
    waits = ("waits" if len(node) == 1 else "wait") if is_inside else "waited for"
    line = ("culprits" if len(node) > 1 else "culprit") if is_culprit else waits
    line = f"{line}, no dump" if is_missing else line
    line = "dump unreadable" if node[0] in hang.unreadable else line
    return GraphNode(
        lines=(shortened(ranks, longest), line),
        name="culprits" if is_culprit else "ranks",
        look="open" if is_culprit else "compute",
        tip=f"{shortened(ranks, 200)}: {line}",
        is_dashed=is_missing or node[0] in hang.unreadable,
    )


def _more(nodes: Sequence[_Node]) -> GraphNode:
    """Return the box that stands for several of a layer."""
    if isinstance(nodes[0], int):
        text = pages.many(len(nodes), "more call")
        return GraphNode(lines=(text,), name="call", look="idle", tip=text)
    count = sum(len(node) for node in nodes if isinstance(node, tuple))
    text = pages.many(count, "more rank")
    return GraphNode(lines=(text,), name="ranks", look="compute", tip=text)
