"""Write a page as one HTML document, with the definitions of its numbers.

Equal pages have equal bytes. The template escapes all text; a content security policy allows no
network, and only the scripts of the page.
"""

import base64
import hashlib
import json
import os
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from fastcomm.errors import FastcommError, inert
from fastcomm.report import files
from fastcomm.report.html import (
    Block,
    Fact,
    Figure,
    Missing,
    Page,
    PageTable,
    PageTimeline,
    Quantiles,
    plain,
)
from fastcomm.report.html.draw import draw
from fastcomm.report.html.glossary import GLOSSARY, Definition
from fastcomm.report.html.svg import patterns, style_of_looks
from fastcomm.version import __version__

# What would end a script element inside of JSON.
_INERT = {ord(c): f"\\u{ord(c):04x}" for c in "<>&'\x7f"}

# Words of a device, and those of a run without one; longer ones first.
_HOST = (
    ("a compute kernel runs", "an operator runs"),
    ("no compute kernel does", "no operator does"),
    ("no compute kernel", "no operator"),
    ("a communication kernel", "a collective"),
    ("nothing runs on the device", "no operator and no communication runs"),
    ("the GPU is idle", "the rank is idle"),
    ("GPU's link", "rank's link"),
    ("step and GPU", "step and rank"),
)


def definitions(keys: Set[str], *, is_host_run: bool) -> dict[str, Definition]:
    """Return the definitions of some keys, in the order of the glossary."""
    chosen = {key: GLOSSARY[key] for key in GLOSSARY if key in keys}
    return (
        {key: _of_host(definition) for key, definition in chosen.items()}
        if is_host_run
        else chosen
    )


def _of_host(definition: Definition) -> Definition:
    """Return a definition in words of a run without a device."""
    name, meaning = definition.name, definition.meaning
    for device, host in _HOST:
        name, meaning = name.replace(device, host), meaning.replace(device, host)
    return replace(definition, name=name, meaning=meaning)


def used_keys(page: Page) -> set[str]:
    """Return the keys of all definitions that the page refers to."""
    keys = {fact.key for fact in page.facts}
    keys |= _of_words(page.headline)
    for finding in page.findings:
        keys |= _of_words((*finding.title, *finding.answer)) | {
            fact.key for fact in finding.evidence
        }
    for section in page.sections:
        keys |= _of_words(section.lead)
        for block in section.blocks:
            keys |= _of_block(block)
    return keys


def _of_words(parts: Sequence[str | Fact]) -> set[str]:
    """Return the keys of the definitions that a text refers to."""
    return {part.key for part in parts if isinstance(part, Fact)}


def _of_block(block: Block) -> set[str]:
    """Return the keys of the definitions that a chart or table refers to."""
    if isinstance(block, Figure):
        of_table = _of_block(block.table) if block.table is not None else set()
        return set(block.terms) | of_table
    if isinstance(block, PageTable):
        return {column.key for column in block.columns if column.key}
    if isinstance(block, Quantiles):
        return {key for _, key in block.rows}
    return set()


def html(page: Page) -> str:
    """Return the whole document; equal pages have equal bytes."""
    blocks = [block for section in page.sections for block in section.blocks]
    has_timeline = any(isinstance(block, PageTimeline) for block in blocks)
    scripts = [_text("page.js"), *([_text("timeline.js")] if has_timeline else [])]
    template = _environment().get_template("page.html.j2")
    return template.render(
        page=page,
        scripts=[Markup(script) for script in scripts],
        style=Markup(_text("style.css") + style_of_looks()),
        patterns=patterns(),
        policy=_policy(scripts),
        glossary=definitions(used_keys(page), is_host_run=page.is_host_run),
        version=__version__,
    )


def write(page: Page, path: str | Path) -> None:
    """Write the page to a file, which appears when it is complete. Raises FastcommError."""
    path = Path(path)
    if path.is_dir():
        raise FastcommError(f"{path}: is a directory. Name a file, such as report.html")
    files.write(path.parent, {path.name: files.text(html(page))})


def json_text(value: Any) -> Markup:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_INERT))


@cache
def _environment() -> jinja2.Environment:
    """Return the template environment, which escapes all text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fastcomm.report.html"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_inert,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "json": json_text,
        "plain": plain,
        "drawn": draw,
        "url": lambda name: quote(os.fsencode(name)),
    }
    environment.tests |= {
        "fact": lambda part: isinstance(part, Fact),
        "figure": lambda block: isinstance(block, Figure),
        "table": lambda block: isinstance(block, PageTable),
        "missing": lambda block: isinstance(block, Missing),
        "quantiles": lambda block: isinstance(block, Quantiles),
        "timeline": lambda block: isinstance(block, PageTimeline),
    }
    return environment


def _inert(value: Any) -> Any:
    """Make text of traces harmless: spell out characters that hide or reorder letters."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return inert(value) if is_text else value


@cache
def _text(name: str) -> str:
    """Return the content of a file of the templates."""
    return (resources("fastcomm.report.html") / "templates" / name).read_text("utf-8")


def _policy(scripts: list[str]) -> str:
    """Return the content security policy: no network, and only these scripts, by hash."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
