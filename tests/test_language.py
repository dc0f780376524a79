"""Test that names in the code are nouns of the domain."""

import ast
from pathlib import Path

import pytest

import fastcomm
import fastcomm_kernels

# Participles and pronouns that name nothing.
BANNED = {
    *("found", "said", "wanted", "asked", "words", "each", "those", "left", "held", "away"),
    *("known", "kept", "made", "given", "seen", "taken", "told", "lost", "what", "whose"),
    *("theirs", "ours", "meeting", "meetings", "lacks", "unsaid", "untold", "habits"),
}
# Keys of JSON documents.
KEYS = {("doctor.py", "found"), ("ingest.py", "kept")}
FILES = [
    path
    for package in (fastcomm, fastcomm_kernels)
    for path in sorted(Path(package.__file__).parent.rglob("*.py"))
]


def names(tree):
    """Names and lines of the variables, parameters, functions and classes of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(path.parts[-2:]))
def test_names_are_nouns(path):
    tree = ast.parse(path.read_text("utf-8"))
    banned = [
        f"{path.name}:{line}: {name}"
        for name, line in names(tree)
        if name.strip("_").lower() in BANNED and (path.name, name) not in KEYS
    ]
    assert banned == []
