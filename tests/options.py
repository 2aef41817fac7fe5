"""In how many test files each option of a public function or style is given: python -m tests.options

An option counts for a file that names what takes it, and gives an option of this name, as a keyword or as the key of a
dict: to whichever function. Or that gives it by its place.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections import Counter
from enum import Enum
from pathlib import Path

import cp_styles
from cp_styles import batch, collectives, decoding, joint_layout, torch_api


def signatures() -> dict[str, list[inspect.Parameter]]:
    """The parameters of what is public and can be called, by name."""
    packages = (cp_styles, batch, collectives, decoding, joint_layout, torch_api)
    public = {name: getattr(package, name) for package in packages for name in package.__all__}
    return {
        name: list(inspect.signature(value).parameters.values())
        for name, value in public.items()
        if callable(value) and not (isinstance(value, type) and issubclass(value, BaseException | Enum))
    }


def uses() -> Counter[tuple[str, str]]:
    """The number of files that give each option; 0 for those that none gives."""
    taken = signatures()
    options = {(name, x.name) for name, found in taken.items() for x in found if x.default is not x.empty}
    counts = Counter(dict.fromkeys(options, 0))
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        named = {x.id if isinstance(x, ast.Name) else x.attr for x in nodes if isinstance(x, ast.Name | ast.Attribute)}
        keys = {x.arg for x in nodes if isinstance(x, ast.keyword)}
        keys |= {x.value for x in nodes if isinstance(x, ast.Constant) and isinstance(x.value, str)}
        given = {(name, key) for name in named & taken.keys() for key in keys}
        for call in (x for x in nodes if isinstance(x, ast.Call)):
            name = ast.unparse(call.func).rpartition(".")[2]
            given |= {(name, x.name) for x, _ in zip(taken.get(name, ()), call.args, strict=False)}
        counts.update(options & given)
    return counts


def main() -> int:
    counts = uses()
    for (name, option), count in sorted(counts.items(), key=lambda entry: (entry[1], entry[0])):
        print(f"{count:4} {name}({option})")
    return int(not all(counts.values()))


if __name__ == "__main__":
    sys.exit(main())
