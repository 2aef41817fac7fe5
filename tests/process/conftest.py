"""The programs of several test modules run in processes that are started once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock

from tests.process.several import PROCESSES

ROOT = Path(__file__).parents[2]


class Finished(NamedTuple):
    """Of each rank that took part, the exit status and what it printed; and the folder that the program was given."""

    statuses: list[int]
    said: list[str]
    folder: Path


@pytest.fixture(scope="session")
def on_processes(request, tmp_path_factory) -> dict[str, Finished]:
    """The programs in PROGRAMS of all modules of this run, by name, after they have run: in a run of the night all, in
    others those that are not for the night. One worker starts them, and others wait for it."""
    items = [item for item in request.session.items if hasattr(item.module, "PROGRAMS")]
    modules = {item.module.__name__: item.module for item in items}
    night = any(item.get_closest_marker("nightly") for item in items)
    every = {name: program for module in modules.values() for name, program in module.PROGRAMS.items()}
    programs = {name: program for name, program in every.items() if night or not program.at_night}
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, errors = shared / "programs", shared / "programs" / "errors"
    with FileLock(shared / "programs.lock"):
        if not folder.exists():
            folder.mkdir()
            path = os.pathsep.join([str(ROOT), str(ROOT / "tutorials"), os.environ.get("PYTHONPATH", "")])
            caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": path}
            with errors.open("w") as file:
                subprocess.run(
                    [sys.executable, "-m", "tests.process.several", folder, json.dumps([*programs]), *sorted(modules)],
                    env=os.environ | caches,
                    cwd=ROOT,
                    stdout=file,
                    stderr=file,
                    timeout=900,  # on a busy machine; alone they take two minutes
                )
    files = [folder / f"{number}.json" for number in range(PROCESSES)]
    assert all(file.exists() for file in files), errors.read_text()
    by_process = [json.loads(file.read_text()) for file in files]
    found = {}
    for name, program in programs.items():
        taken = [by_process[number][name] for number in program.processes]
        found[name] = Finished([status for status, _ in taken], [said for _, said in taken], folder)
    return found
