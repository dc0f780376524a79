"""Parsed pages for tests: elements with attributes and texts."""

import re
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa

from fastcomm.metrics.links import Link
from fastcomm.metrics.partial import Partial, merge
from fastcomm.metrics.skew import Skew, Wait
from fastcomm.show.definitions import definition

VOID = {"meta", "link", "input", "br"}

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\u2028${7}"
ODD = HOSTILE + "\ud800\u202e"  # paths may have halves of letters


@dataclass(eq=False)
class Element:
    tag: str
    attrs: dict
    parent: "Element | None" = None
    children: list = field(default_factory=list)

    def all(self, tag=None, **attrs):
        for child in self.children:
            if isinstance(child, str):
                continue
            wanted = {key.rstrip("_").replace("_", "-"): value for key, value in attrs.items()}
            if tag in (None, child.tag) and all(
                value in (child.attrs.get(key) or "").split()
                if key == "class"
                else key in child.attrs and value in (..., child.attrs[key])
                for key, value in wanted.items()
            ):
                yield child
            yield from child.all(tag, **attrs)

    @property
    def text(self):
        return "".join(
            child if isinstance(child, str) else child.text for child in self.children
        )

    def inside(self, tag):
        return self.tag == tag or (self.parent is not None and self.parent.inside(tag))


class _Builder(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.root = self.here = Element("", {})

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        made = Element(tag, dict(attrs), self.here)
        self.here.children.append(made)
        if tag not in VOID:
            self.here = made

    def handle_endtag(self, tag):
        assert self.here.tag == tag, f"</{tag}> closes <{self.here.tag}>"
        self.here = self.here.parent

    def handle_data(self, data):
        self.here.children.append(data)


def parsed(text):
    """The document as a tree; an element that is closed by another fails."""
    builder = _Builder()
    builder.feed(text)
    builder.close()
    assert builder.here is builder.root
    return builder.root


def without_scripts(text):
    """The document without its scripts."""
    end = text.index("<script>")
    return text[:end] + "</body></html>"


def charts(tree):
    """Every figure with charts, by name: its images, one a view."""
    drawn = {
        figure.attrs["id"]: list(figure.all("div", class_="chart"))
        for figure in tree.all("figure", id=...)
    }
    return {name: images for name, images in drawn.items() if images}


def tips(image):
    """The texts of the marks of a chart."""
    return [mark.attrs["data-tip"] for mark in image.all(data_tip=...)]


def assert_sound(tree):
    """What holds for every page: landmarks, headings, definitions, charts."""
    _assert_structure(tree)
    ids = {each.attrs["id"] for each in tree.all(id=...)}
    for number in tree.all(class_="num"):
        assert definition(_key(number)).meaning, number.text
        assert f"def-{_key(number)}" in ids
    for images in charts(tree).values():
        for image in images:
            shapes = [each.attrs for each in image.all() if each.tag in ("rect", "path", "svg")]
            assert shapes
            for attributes in shapes:
                places = [attributes.get(name) or "" for name in ("x", "y", "width", "d")]
                assert not re.search("nan|inf|e[+]", " ".join(places)), attributes
                assert not places[2].startswith("-"), attributes


def _assert_structure(tree):
    for tag in ("h1", "main", "nav", "header", "footer", "title"):
        assert len(list(tree.all(tag))) == 1, tag
    ids = [each.attrs["id"] for each in tree.all(id=...)]
    assert len(ids) == len(set(ids))
    for name in ("aria-describedby", "aria-labelledby", "for"):
        for each in tree.all(**{name: ...}):
            assert each.attrs[name] in ids, each.attrs
    for link in tree.all("a", href=...):
        href = link.attrs["href"]
        assert href.removeprefix("#") in ids or (href.startswith("#t=") and "timeline" in ids)
    for section in tree.all("section"):
        assert next(section.all("h2")).text.strip()
    for chart in tree.all("div", role="img"):
        assert chart.attrs["aria-label"]
    for head in tree.all("th", scope="col"):
        assert head.attrs["aria-sort"] == "none"


def _key(number):
    """The key of a number's definition: its own, or that of the head of its column."""
    if number.tag != "td":
        return number.attrs.get("data-def")
    place = [each for each in number.parent.children if not isinstance(each, str)].index(number)
    table = number.parent.parent.parent
    head = list(next(table.all("thead")).all("th"))[place]
    return head.children[0].attrs.get("data-def")


SLOW = (1234, 2047)
_EVERY = 24  # of the events one: what the page shows of them are sums


def many_ranks(parts, times):
    """A partial of `times` as many ranks: the same again and again, but two are slow."""
    one = merge(parts)
    count = len(one.notes)
    rng = np.random.default_rng(0)
    return Partial(
        notes=tuple(
            replace(note, rank=note.rank + count * k)
            for k in range(times)
            for note in one.notes
        ),
        iterations=_slowed(_again(one.iterations, times, count), rng),
        events=_again(_thinned(one.events), times, count),
        windows=_again(_thinned(one.windows), times, count),
        groups=_again(one.groups, times, count),
        members=one.members,
        sent=_again(one.sent, times, count),
        exchanged=one.exchanged,
    )


def _thinned(table):
    return table.take(pa.array(np.arange(0, table.num_rows, _EVERY)))


def _again(table, times, count):
    """The rows so many times, each with the next ranks."""
    rank = table["rank"].to_numpy()
    ranks = (rank + count * np.arange(times)[:, None]).ravel()
    place = table.column_names.index("rank")
    whole = pa.concat_tables([table] * times).combine_chunks()
    return whole.set_column(place, "rank", pa.array(ranks))


def _slowed(table, rng):
    """Compute that differs a little, and of two ranks a lot; idle time makes up for it."""
    compute, idle = (table[f"exact_{name}_ns"].to_numpy() for name in ("compute", "idle"))
    is_slow = np.isin(table["rank"].to_numpy(), SLOW)
    more = compute * (0.003 * rng.standard_normal(len(compute)) + 0.1 * is_slow)
    more = more.astype(np.int64)
    for name, values in (("compute", compute + more), ("idle", np.maximum(idle - more, 0))):
        place = table.column_names.index(f"exact_{name}_ns")
        table = table.set_column(place, f"exact_{name}_ns", pa.array(values))
    return table


WAITS = tuple(
    Wait(
        rank=rank,
        tag="TP",
        collectives=4,
        wait_ns=1e6 * (rank != 5),
        transfer_ns=9e6,
        last=4 * (rank == 5),
        last_share=float(rank == 5),
        wait_caused_ns=5e6 * (rank == 5),
        later_ns=5e6 * (rank == 5) - 1e5,
        exposed_wait_ns=0.0,
        exposed_transfer_ns=0.0,
    )
    for rank in range(50)
)
SKEW = Skew(
    op="AllReduce",
    tag="TP",
    size_from=None,
    count=4,
    **{
        f"{what}_{how}_ns": 2e5
        for what in ("skew", "transfer")
        for how in ("mean", "p50", "p95")
    },
    wait_ns=4e6,
    wait_share=None,
)
LINK_OF_TWELVE = Link(
    group=None,
    ranks=tuple(range(12)),
    tag="DP",
    op="AllReduce",
    size_from=1024,
    count=3,
    bus_bw=2e10,
    peers_bus_bw=4e10,
    ratio=0.5,
    excess_ns=1e5,
    is_slow=True,
)
NOTHING = {"bus_bw": None, "peers_bus_bw": None, "ratio": None, "excess_ns": None}
LINKS = (LINK_OF_TWELVE, replace(LINK_OF_TWELVE, group="DATA", ranks=(), **NOTHING))
