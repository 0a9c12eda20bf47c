"""Docstrings that a stranger reads once: sentences with a verb, and fields explained where they are declared."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "api",
    "benchmarks",
    "client",
    "cluster",
    "examples",
    "kernels",
    "offline",
    "protocol",
    "resolvers",
    "sandbox",
    "src",
    "tests/support",
    "tools",
    "workers",
)
# A docstring that begins so answers a question that only its author has heard.
QUESTIONS = re.compile(r"^(Of|What|Whose|Who|Whom|Which|That|How|Where|So|Likewise)\b")
FINITE = re.compile(
    r"\b(is|are|was|were|be|been|has|have|had|does|do|did|can|could|may|might|must|shall|should|will|would|cannot|needs?"
    r"|isn't|aren't)\b"
)
THIRD_PERSON = re.compile(r"^(?!This\b|Its\b|Yes\b)[A-Z][a-z-]*[^s\W]s$")
MIN_WORDS = 4

Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented(path: Path) -> Iterator[tuple[Node, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Node) and (docstring := ast.get_docstring(node)):
            yield node, docstring


def complaint(node: Node, docstring: str) -> str | None:
    """The first rule that the docstring breaks, or None."""
    first = re.split(r"(?<=[.:?])\s", docstring, maxsplit=1)[0]
    words = first.replace("\n", " ").split()
    if QUESTIONS.match(first):
        return f"begins with {words[0]!r}"
    if len(words) < MIN_WORDS:
        return f"has fewer than {MIN_WORDS} words"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_property(node):
        return None if THIRD_PERSON.match(words[0]) or FINITE.search(first) else "has no verb"
    if isinstance(node, ast.ClassDef):
        fields = {
            one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }
        packed = [name for name in re.findall(r"(?:^|[\s(])(\w+): ", docstring) if name in fields]
        return f"explains {packed} away from where they are declared" if packed else None
    return None


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(one) for one in node.decorator_list)


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_are_read_once(folder: str):
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {why}: {docstring.splitlines()[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if folder != "src" or not any(part.is_symlink() for part in path.parents)
        for node, docstring in documented(path)
        if (why := complaint(node, docstring))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def f():\n  'Of the adapters that are in slots.'", "begins with 'Of'"),
        ("def f():\n  'Never twice.'", "has fewer than 4 words"),
        ("def f():\n  'The digest of the adapter, or none.'", "has no verb"),
        ("def f():\n  'Returns the digest of the adapter.'", None),
        ("def f():\n  'The digest is None for the base.'", None),
        ("@property\ndef f():\n  'The digest of the adapter.'", None),
        (
            "class C:\n  'One adapter of a server. rank: of its matrices.'\n  rank: int",
            "explains ['rank'] away from where they are declared",
        ),
        ("class C:\n  'One adapter in a slot.'\n  rank: int", None),
    ],
)
def test_the_rules_see_what_they_should(source: str, why: str | None):
    ((node, docstring),) = [
        (n, ast.get_docstring(n)) for n in ast.walk(ast.parse(source)) if isinstance(n, Node) and ast.get_docstring(n)
    ]
    assert complaint(node, docstring or "") == why
