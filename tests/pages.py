"""The pages that users read, and the code that they show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {path: path.read_text() for path in sorted((ROOT / "tutorials").glob("*.md"))}
SHOWN = "\n".join([README, *PAGES.values()])


def example(name: str) -> str:
    """The code behind ``<!-- example: NAME -->``, a name that one page has once."""
    (code,) = re.findall(rf"<!-- example: {name} -->\n```python\n(.*?)```", SHOWN, re.DOTALL)
    return code
