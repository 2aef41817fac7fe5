"""Errors name the entry of tutorials/troubleshooting.md that says more."""

from __future__ import annotations


def see(entry: str) -> str:
    """The end of an error's text: the title of its entry. ``tests/unit/test_troubleshooting.py`` looks for it there."""
    return f'. See "{entry}" in tutorials/troubleshooting.md'
