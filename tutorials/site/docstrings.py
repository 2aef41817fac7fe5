"""Docstrings as Markdown: what the docstrings of cp_styles take from reStructuredText, for mkdocstrings.

Roles become links to the reference where it has the name, and code otherwise. A literal block becomes a block of code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(~?)([\w.]+)`")
_LITERAL = re.compile(
    r"^(?P<indent> *)(?P<before>\S.*?)?::\n\s*\n(?P<block>(?:(?P=indent) +\S.*\n?|\s*\n)+)", re.MULTILINE
)


def as_markdown(text: str, obj: griffe.Object) -> str:
    """``text``, the docstring of ``obj``."""
    text = _LITERAL.sub(_fenced, text)
    # Not inside code: there a role is an example of itself.
    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [_ROLE.sub(lambda role: _link(*role.groups(), obj), part) for part in parts[::2]]
    return "".join(parts)


def _fenced(found: re.Match[str]) -> str:
    """``before::`` and an indented block, as ``before:`` and a fenced one."""
    indent, before, lines = found["indent"], found["before"], found["block"].rstrip().split("\n")
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    # The block of a title of its own ("Example::") stays indented under it, as the Google style wants it.
    inner = indent + "    " if before and re.fullmatch(r"\w+", before) else indent
    code = "\n".join((inner + line[margin:]).rstrip() for line in lines)
    try:
        compile("\n".join(line[margin:] for line in lines), "docstring", "exec")
        language = "python"
    except SyntaxError:
        language = "text"
    title = f"{indent}{before}:\n" + ("" if inner != indent else "\n") if before else ""
    return f"{title}{inner}```{language}\n{code}\n{inner}```\n\n"


def _link(short: str, name: str, obj: griffe.Object) -> str:
    """A link that stays code where the reference does not have ``name``, as it is known where ``obj`` is defined."""
    target = name
    if not name.startswith(("cp_styles.", "torch.")):
        first, _, rest = name.partition(".")
        scope: Any = obj
        while scope is not None and first not in scope.members:
            scope = scope.parent
        if scope is not None:
            target = f"{scope.members[first].path}.{rest}".rstrip(".")
            member = scope.members[first]
            if member.is_alias:
                target = f"{member.target_path}.{rest}".rstrip(".")
    shown = name.rsplit(".", 1)[-1] if short else name
    return f'<autoref identifier="{target}" optional><code>{shown}</code></autoref>'


class Docstrings(griffe.Extension):
    """Applies :func:`as_markdown` to every docstring of a package, once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        def walk(obj: griffe.Object) -> None:
            if obj.docstring is not None:
                obj.docstring.value = as_markdown(obj.docstring.value, obj)
            for member in obj.members.values():
                if isinstance(member, griffe.Object):
                    walk(member)

        walk(pkg)
