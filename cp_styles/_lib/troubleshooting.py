"""References from errors to the entries of tutorials/troubleshooting.md."""

from __future__ import annotations


def see(entry: str) -> str:
    """The end of an error's text: the title of its entry. ``tests/unit/test_troubleshooting.py`` checks the title."""
    return f'. See "{entry}" in tutorials/troubleshooting.md'
