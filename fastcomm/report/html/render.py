"""A page into one file: the template, the style, the scripts, nothing from elsewhere.

The page's policy lets scripts run by their digest alone and loads nothing: text of a trace that
got past the escaping would still be inert.
"""

import base64
import hashlib
import json
import os
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from fastcomm.errors import FastcommError
from fastcomm.inert import inert
from fastcomm.report import files
from fastcomm.report.html import (
    Fact,
    Figure,
    Missing,
    Page,
    PageTable,
    Quantiles,
    plain,
    used_keys,
)
from fastcomm.report.html.glossary import GLOSSARY
from fastcomm.version import __version__

# What would end a script element inside of JSON.
_INERT = {ord(c): f"\\u{ord(c):04x}" for c in "<>&'\x7f"}


def html(page: Page) -> str:
    """The whole document; the same page gives the same bytes."""
    # Ours comes first: tables and definitions work while plotly.js is being read.
    scripts = [_text("page.js"), _plotly()]
    template = _environment().get_template("page.html.j2")
    return template.render(
        page=page,
        scripts=[Markup(each) for each in scripts],
        style=Markup(_text("style.css")),
        policy=_policy(scripts),
        glossary={key: GLOSSARY[key] for key in GLOSSARY if key in used_keys(page)},
        version=__version__,
    )


def write(page: Page, path: str | Path) -> None:
    """Write the file; it gets its name when it is whole."""
    path = Path(path)
    if path.is_dir():
        raise FastcommError(f"{path}: is a directory; wanted a file, as in report.html")
    files.write(path.parent, {path.name: files.text(html(page))})


def json_text(value: Any) -> Markup:
    """JSON that can stand in a script element, whatever its texts are."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_INERT))


@cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("fastcomm.report.html"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_inert,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"json": json_text, "plain": plain, "url": _url}
    made.tests |= {
        "fact": lambda part: isinstance(part, Fact),
        "figure": lambda block: isinstance(block, Figure),
        "table": lambda block: isinstance(block, PageTable),
        "missing": lambda block: isinstance(block, Missing),
        "quantiles": lambda block: isinstance(block, Quantiles),
    }
    return made


def _url(name: str) -> str:
    """Return a file name as a link has it, bytes that are not UTF-8 included."""
    return quote(os.fsencode(name))


def _inert(value: Any) -> Any:
    """Texts of others without what hides letters or turns their order; markup is ours."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return inert(value) if is_text else value


@cache
def _text(name: str) -> str:
    return (resources("fastcomm.report.html") / "templates" / name).read_text("utf-8")


@cache
def _plotly() -> str:
    """plotly.js as the package of that name brings it."""
    script = resources("plotly") / "package_data" / "plotly.min.js"
    return script.read_text("utf-8").replace("</script", "<\\/script")


def _policy(scripts: list[str]) -> str:
    digests = " ".join(f"'sha256-{_digest(each)}'" for each in scripts)
    return (
        f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
