"""The drawing of one call in CONTRIBUTING.md is what happens."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor.parallel import parallelize_module

import cp_styles
from cp_styles import AttentionContextParallel, SequenceScope, head_tail
from cp_styles.testing import run_ranks
from tests.oracle import attention_inputs
from tests.ranks.attention_case import Core, cp_mesh

ROOT = Path(__file__).parents[3]
PACKAGE = Path(cp_styles.__file__).parent


def drawn() -> dict[str, list[str]]:
    """Files and folders of each half of the drawing, from top to bottom."""
    text = re.search(r"### One call, .*?```\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[1]
    halves = text.split("\n\n")
    assert len(halves) == 2
    found: dict[str, list[str]] = {}
    for name, half in zip(("forward", "backward"), halves, strict=True):
        folder, files = "", []
        for word in re.findall(r"(?:\w+/)+(?:\w+\.py)?|\w+\.py", half):
            path = word if "/" in word else folder + word
            folder = path.rpartition("/")[0] + "/"
            files.append(path)
        found[name] = files
    return found


def entered(run: Callable[[], Any]) -> list[str]:
    """Files of the package in the order in which their functions are called; a file comes again after another one."""
    files = [""]

    def note(frame: Any, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(f"{PACKAGE}/"):
            file = Path(name).relative_to(PACKAGE).as_posix()
            if file != files[-1]:
                files.append(file)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return files[1:]


@pytest.fixture(scope="module")
def called() -> dict[str, list[str]]:
    def on(rank: int) -> dict[str, list[str]]:
        module = parallelize_module(Core(), cp_mesh(2), AttentionContextParallel(verified=True))
        qkv, grad = attention_inputs(length=16)
        local = [x.chunk(2, 2)[rank].requires_grad_() for x in qkv]
        outputs: list[Any] = []
        with SequenceScope(head_tail(16, 2)):
            files = {"forward": entered(lambda: outputs.append(module(*local)))}
        return files | {"backward": entered(lambda: outputs[0].backward(grad.chunk(2, 2)[rank]))}

    return run_ranks(on, 2)[0]


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_the_files_come_in_the_order_of_the_drawing(called: dict[str, list[str]], half: str):
    left = called[half]
    for path in drawn()[half]:
        places = [
            place for place, file in enumerate(left) if file == path or (path.endswith("/") and file.startswith(path))
        ]
        assert places, f"{path} is not called after what is drawn above it"
        left = left[places[0] + 1 :]
