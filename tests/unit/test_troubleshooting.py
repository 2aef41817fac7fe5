"""The errors that tutorials/troubleshooting.md explains are those of the package, word for word."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tutorials/troubleshooting.md").read_text()
QUOTED = re.findall(r"^> (.+)$", PAGE, re.MULTILINE)
VARIES = "\0"


def text_of(node: ast.AST) -> str:
    """A string of the source, with one character for what an f-string computes."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else VARIES


def texts() -> str:
    strings = (
        text_of(node)
        for path in sorted((ROOT / "cp_styles").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    )
    # A text may have lines, so what separates texts is no line.
    return "\1".join(strings)


TEXTS = texts()


def test_there_are_quoted_texts():
    assert len(QUOTED) > 35
    assert len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("quoted", QUOTED)
def test_each_quoted_text_is_in_the_package(quoted):
    """ "..." on the page stands for one value, or for words that are left out, of the same text."""
    words = r"[^\1]+?".join(re.escape(part) for part in re.split(r"\s*\.\.\.\s*", quoted) if part)
    assert re.search(words, TEXTS), f"no text of cp_styles reads like this any more: {quoted}"
