"""Test that pages and schemas agree: every key has a definition, every definition is shown."""

import ast
import json
import re

import pytest
from builders.places import DOCS, ROOT, SCHEMAS

from fastcomm.idle.causes import BY_CAUSE
from fastcomm.metrics.breakdown import EXACT
from fastcomm.show.definitions import Definition, definition

KEY = re.compile(r"[a-z-]+(\.[a-z_0-9{}]+)+")
FILES = (".json", ".graphml", ".html")
MODULES = [
    path
    for path in sorted((ROOT / "fastcomm").rglob("*.py"))
    if path.name.endswith(("page.py", "tables.py")) or path.match("report/findings.py")
]


def texts(path):
    """The texts of a module; `{}` stands for a value that is filled in."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    filled = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in filled for part in node.values}
    for node in filled:
        yield "".join(
            part.value if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    for node in nodes:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in parts:
            yield node.value


KEYS = sorted(
    {
        text
        for path in MODULES
        for text in texts(path)
        if KEY.fullmatch(text) and not text.endswith(FILES)
    }
)


def properties(schema, node):
    """The named parts of a node: of an object, or of the values of a list or map."""
    yield from node.get("properties", {}).items()
    inner = [*node.get("anyOf", ()), *node.get("oneOf", ())]
    inner += [node.get("items"), node.get("additionalProperties")]
    if "$ref" in node:
        inner.append(schema["$defs"][node["$ref"].removeprefix("#/$defs/")])
    for each in inner:
        if isinstance(each, dict):
            yield from properties(schema, each)


def titled(schema, node, key):
    """Every property with a title, below a node: its path, and itself."""
    for name, inner in properties(schema, node):
        path = f"{key}.{name}"
        if "title" in inner:
            yield path, inner
        yield from titled(schema, inner, path)


TITLED = [
    pair
    for path in sorted(SCHEMAS.glob("*.json"))
    for schema in [json.loads(path.read_text("utf-8"))]
    for pair in titled(schema, schema, path.stem)
]


@pytest.mark.parametrize("key", [key for key in KEYS if "{}" not in key])
def test_every_key_of_a_module_has_a_definition(key):
    assert definition(key).meaning


def test_every_title_of_a_schema_is_shown_on_a_page():
    shown = [re.compile(re.escape(key).replace(r"\{\}", r"\w+")) for key in KEYS]
    used = {id(node) for key, node in TITLED for one in shown if one.fullmatch(key)}
    assert [key for key, node in TITLED if id(node) not in used] == []
    assert len(used) > 150


def test_a_definition_is_sentences_of_plain_text():
    for key, node in TITLED:
        assert {"title", "description"} <= set(node), key
        assert re.fullmatch(r"[^a-z`][^`]*\.", node["description"]), key
        assert not node["description"].startswith("Nanoseconds"), key


def test_definitions_agree_with_the_pages_of_metrics():
    pages = (DOCS / "metrics.md", *(DOCS / "metrics").glob("*.md"))
    text = "\n".join(page.read_text("utf-8") for page in pages)
    rows = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|$", text, re.M)
    said = {}
    for keys, meaning in rows:
        plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", meaning).replace("`", "")
        for key in re.findall(r"`(\w+)`", keys):
            said.setdefault(key, set()).add(plain.strip())
    compared = 0
    for key, node in TITLED:
        meanings = said.get(key.rpartition(".")[2], ())
        if meanings and key.startswith(DEFINED_THERE) and ".by_rank." not in key:
            text = node["description"].lower()
            assert any(meaning.lower() in text for meaning in meanings), (key, meanings)
            compared += 1
    assert compared > 45


DEFINED_THERE = tuple(
    f"metrics.{name}"
    for name in (
        *("ranks", "iterations", "link_bandwidth", "iteration", "breakdown.exact", "windows"),
        *("bandwidth", "collectives", "volume", "overlap", "groups"),
        *("waits", "skew", "links", "findings"),
    )
)


def test_a_definition_is_found_in_lists_maps_and_references():
    assert definition("metrics.links.ratio").name == "Of its peers"
    assert definition("metrics.bandwidth.avg_bw") == Definition(
        name="Bandwidth",
        meaning="Mean of bw over events.",
        formula="bw = bytes / duration, waiting included",
    )
    assert definition("compare.kernels.name.after_count").name == "Calls"


@pytest.mark.parametrize(
    "key", ["metrics.headline", "metrics.none.at_all", "metrics.bandwidth.none"]
)
def test_a_key_without_a_title_has_no_definition(key):
    with pytest.raises(KeyError):
        definition(key)


def test_every_cause_and_every_part_of_a_step_has_a_definition():
    for cause, own in BY_CAUSE.items():
        assert definition(f"metrics.idle.{cause}").name == f"Idle, {own.text}"
    for name in EXACT:
        assert definition(f"metrics.breakdown.exact.{name}").meaning.startswith("The time in")
