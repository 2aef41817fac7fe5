"""tutorials/troubleshooting.md and the errors of the package lead to each other: texts and titles, word for word."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tutorials/troubleshooting.md").read_text()
# (title, quoted text): an entry quotes one or several.
QUOTED = [
    (title, quoted)
    for title, entry in re.findall(r"^#### (.+)\n((?:(?!^#{1,4} ).*\n?)*)", PAGE, re.MULTILINE)
    for quoted in re.findall(r"^> (.+)$", entry, re.MULTILINE)
]
TITLES = {title for title, _ in QUOTED}
VARIES = "\0"


def text_of(node: ast.AST) -> str:
    """A string of the source, with one character for what an f-string computes; titles of entries as they are."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Call):
        called = node.value
        if isinstance(called.func, ast.Name) and called.func.id == "see":
            return f'. See "{ast.literal_eval(called.args[0])}" in'
    return str(node.value) if isinstance(node, ast.Constant) else VARIES


def strings_of(node: ast.AST):
    """The whole strings of a source; an f-string is one, not its parts."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        yield text_of(node)
        return
    for child in ast.iter_child_nodes(node):
        yield from strings_of(child)


@functools.cache
def texts() -> list[str]:
    """All of the package. Not when this file is imported: every worker of a run imports it."""
    paths = sorted((ROOT / "cp_styles").rglob("*.py"))
    return [text for path in paths for text in strings_of(ast.parse(path.read_text()))]


def texts_like(quoted: str) -> list[str]:
    """ "..." on the page stands for one value, or for words that are left out, of the same text."""
    words = re.compile(r".+?".join(re.escape(part) for part in re.split(r"\s*\.\.\.\s*", quoted) if part), re.DOTALL)
    return [text for text in texts() if words.search(text)]


def test_there_are_entries():
    assert len(QUOTED) > 35
    assert len({quoted for _, quoted in QUOTED}) == len(QUOTED) == PAGE.count("\n> ")
    titles = re.findall(r"^#### (.+)$", PAGE, re.MULTILINE)
    assert sorted(titles) == sorted(TITLES)  # each once, and none without a text


@pytest.mark.parametrize(("title", "quoted"), QUOTED, ids=[quoted[:50] for _, quoted in QUOTED])
def test_each_quoted_text_is_in_the_package_and_names_its_entry(title: str, quoted: str):
    found = texts_like(quoted)
    assert found, f"no text of cp_styles reads like this any more: {quoted}"
    for text in found:
        assert f'. See "{title}" in' in text, f"this error does not name its entry: {text}"


def test_no_error_is_longer_than_four_lines_of_100_columns():
    """Without the values in it. The entry on the page says more."""
    paths = sorted((ROOT / "cp_styles").rglob("*.py"))
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    errors = [text_of(node) for node in nodes if isinstance(node, ast.JoinedStr)]
    errors += [text for node in nodes if isinstance(node, ast.Raise) for text in strings_of(node)]
    assert len(errors) > 1000
    assert [text for text in errors if len(text) > 400] == []


def test_each_entry_that_an_error_names_is_on_the_page():
    named = set(re.findall(r'\. See "([^"\0]+)" in', "\n".join(texts())))
    assert named == TITLES
    calls = sum(len(re.findall(r"\bsee\(", path.read_text())) for path in (ROOT / "cp_styles").rglob("*.py"))
    assert calls - 1 == len(re.findall(r'\. See "([^"\0]+)" in', "\n".join(texts())))  # all but its definition
