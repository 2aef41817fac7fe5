"""How many steps one attention takes through this package's Python, for each door: python tests/benchmarks/steps.py.

With --lines, how large the package is: lines by folder, the core path, floors, and state that outlives a call.

For every door one warm call, forward and backward: a ring of two ranks, sequences of 64 positions. Counted on rank 0
with sys.setprofile:

    calls     of Python functions of this package, generators' resumptions included
    files     in which these functions are
    changes   how often the file changes from one of these calls to the next, or on the way back to its caller
    before    the calls, and the changes, before the first message of a key or value to another rank

Not collected by pytest.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import cp_styles
from cp_styles import contiguous
from cp_styles.testing import run_ranks

sys.path.append(str(Path(__file__).parents[2]))
from tests.doors import causal_blocks, door
from tests.unit.test_layers import LIMITS, lines_of, module_of, package_files, sizes

PACKAGE = str(Path(cp_styles.__file__).parent)
LENGTH, RANKS, WARM = 64, 2, 3


class Steps:
    """Counts while it is entered."""

    def __init__(self) -> None:
        self.calls = self.changes = 0
        self.files: set[str] = set()
        self.before: tuple[int, int] | None = None
        self.path: list[str] = []
        self._file = ""

    def __enter__(self) -> Steps:
        sys.setprofile(self._hear)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)

    def _hear(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        file = code.co_filename[len(PACKAGE) + 1 :]
        if event == "call":
            # The messages of a ring, before they start.
            if code.co_name == "exchange" and file.endswith(("comm.py", "point_to_point.py")) and self.before is None:
                self.before = self.calls, self.changes
            self.calls += 1
            self.files.add(file)
            self.path.append(f"{file}:{code.co_name}")
        if file != self._file:
            self.changes += bool(self._file) and event == "call"
            self._file = file


class Attend(nn.Module):
    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def doors(mesh: Any) -> dict[str, Callable[..., torch.Tensor]]:
    def by(name: str, **options: Any) -> Callable[..., torch.Tensor]:
        return door(name, mesh, length=LENGTH, layout=contiguous, **options)

    return {
        "style, eager": by("style", core=Attend()),
        "style, compiled": torch.compile(by("style", core=Attend()), backend="aot_eager", fullgraph=True),
        "function": by("function"),
        "module": by("module", core=Attend()),
        "context_parallel block": by("block", core=Attend()),
        "flex, function": by("flex", causal=False, block_mask=causal_blocks(LENGTH)),
        "flex in a module": by("flex in module"),
        "varlen, function": by("varlen"),
    }


def count(rank: int) -> dict[str, tuple[Steps, Steps]]:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    found = {}
    for name, attend in doors(mesh).items():
        for _ in range(WARM):
            tensors = [torch.randn(1, 2, LENGTH // RANKS, 16, requires_grad=True) for _ in range(3)]
            forward, backward = Steps(), Steps()
            with forward:
                out = attend(*tensors)
            with backward:
                out.sum().backward()
            dist.barrier()
        found[name] = forward, backward
    return found


def print_lines() -> None:
    lines = Counter[str]()
    for path in package_files():
        lines[module_of(path)] += lines_of(path)
    print("| folder or file | lines |\n|---|---|")
    for module, count_of_lines in lines.most_common():
        print(f"| {module} | {count_of_lines} |")
    print("\n| size | now | at most |\n|---|---|---|")
    for what, size in sizes().items():
        print(f"| {what} | {size} | {LIMITS[what]} |")
    nodes = [node for path in package_files() for node in ast.walk(ast.parse(path.read_text()))]
    texts = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    docstrings = sum((text.end_lineno or 0) - text.lineno + 1 for text in texts)
    comments = sum(line.lstrip().startswith("#") for path in package_files() for line in path.read_text().splitlines())
    total = lines.total()
    print(f"\nlines of docstrings {docstrings / total:.1%}, of comments alone {comments / total:.1%}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--path", metavar="DOOR", help="print the functions that this one's forward goes through")
    options.add_argument("--lines", action="store_true", help="print the size of the package; nothing runs")
    arguments = options.parse_args()
    if arguments.lines:
        print_lines()
        return
    found = run_ranks(count, RANKS, timeout_seconds=300)[0]
    if arguments.path:
        print("\n".join(found[arguments.path][0].path))
        return
    print("| door | forward: calls / files / changes | before any key moves | backward |\n|---|---|---|---|")
    for name, (forward, backward) in found.items():
        ways = (f"{steps.calls} / {len(steps.files)} / {steps.changes}" for steps in (forward, backward))
        before = "-" if forward.before is None else "{} / {}".format(*forward.before)
        print(f"| {name} | {next(ways)} | {before} | {next(ways)} |")


if __name__ == "__main__":
    main()
