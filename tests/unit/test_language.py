"""Sentences that hide their subject, counted in docstrings, comments, errors and pages. Limits only go down."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each names a thing by a pronoun, or begins a sentence with something else than a noun or a verb.
PATTERNS = [
    r"\b(?:that|those) of\b",
    r"\bthe (?:others?|ones?)\b(?! (?:ranks?|hand|process))",
    r"(?:^|[.!?:] )What (?:is|are|has|a|the|was|it|one)\b",
    r"(?:^|[.!?] )(?:Of|That|Those|The same)\b",
    r"\b(?:beside|alike|apart)\b",
]
# For 1,000 sentences. The goal is 2.
LIMITS = {"package": 3, "pages": 4}


def paragraphs_of(source: str) -> Iterator[str]:
    """Paragraphs of docstrings, comments, and texts of errors."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (ast.get_docstring(node) or "").split("\n\n")
        if isinstance(node, ast.Raise):
            constants = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            yield " ".join(value for value in constants if isinstance(value, str))
    lines: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines.append(token.string.lstrip("# "))
        elif token.type != tokenize.NL and lines:
            yield " ".join(lines)
            lines = []


def paragraphs_of_page(page: str) -> list[str]:
    return re.sub(r"```.*?```", "", page, flags=re.DOTALL).split("\n\n")


def rate(paragraphs: Iterable[str]) -> float:
    """How often the patterns occur in 1,000 sentences."""
    found, sentences = 0, 0
    for paragraph in paragraphs:
        text = " ".join(paragraph.split())
        sentences += len(re.findall(r"[.!?:](?= |$)", text)) or bool(text)
        found += sum(len(re.findall(pattern, text)) for pattern in PATTERNS)
    return 1000 * found / sentences


def test_each_pattern_is_found():
    bad = "The mask is that of the others. What is kept, is kept apart. Those stay."
    assert rate([bad]) == pytest.approx(5000 / 3)
    assert rate(["The layout names the remaining ranks. A rank waits."]) == 0
    assert list(paragraphs_of('"""A."""\n# b\n# c\nraise ValueError("d")\n')) == ["A.", "d", "b c"]


@pytest.mark.parametrize("kind", LIMITS)
def test_the_language_does_not_get_worse(kind: str):
    if kind == "package":
        sources = [path.read_text() for path in sorted((ROOT / "cp_styles").rglob("*.py"))]
        measured = rate(paragraph for source in sources for paragraph in paragraphs_of(source))
    else:
        pages = [ROOT / "README.md", *sorted((ROOT / "tutorials").glob("*.md"))]
        measured = rate(paragraph for page in pages for paragraph in paragraphs_of_page(page.read_text()))
    assert measured <= LIMITS[kind], f"{measured:.1f} in 1,000 sentences of the {kind}"
    assert measured > LIMITS[kind] - 5, f"only {measured:.1f} are left: lower the limit of {LIMITS[kind]}"
