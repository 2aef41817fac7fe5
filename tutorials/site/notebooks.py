"""Runs notebooks in one kernel, whose start and imports take longer than most of them: for the site and the tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the site can be built without them, and then shows notebooks without outputs
    import nbclient

TUTORIALS = Path(__file__).parents[1]


def environment() -> dict[str, str]:
    """That of a kernel: it imports the package and what lies beside the notebooks, and draws into the notebook."""
    path = os.pathsep.join([str(TUTORIALS.parent), str(TUTORIALS), os.environ.get("PYTHONPATH", "")])
    return {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | {"PYTHONPATH": path}


class Kernel:
    """Each notebook begins without names, in a folder of its own."""

    def __init__(self, client: nbclient.NotebookClient, new_folder: Callable[[str], Path]) -> None:
        self._client, self._new_folder = client, new_folder
        self._done: dict[Path, tuple[Any, Path]] = {}

    def executed(self, path: Path) -> tuple[Any, Path]:
        """A notebook with its outputs, and the folder in which it ran, once. Raises if a cell does."""
        import nbformat

        if path not in self._done:
            folder, notebook = self._new_folder(path.stem), nbformat.read(path, as_version=4)
            begin = nbformat.v4.new_code_cell(f"%reset -f\nimport os\nos.chdir({str(folder)!r})\ndel os")
            self._client.nb = nbformat.v4.new_notebook(cells=[begin, *notebook.cells])
            self._client.reset_execution_trackers()
            for index, cell in enumerate(self._client.nb.cells):
                self._client.execute_cell(cell, index)
            self._done[path] = notebook, folder
        return self._done[path]


@contextlib.contextmanager
def one_kernel(new_folder: Callable[[str], Path]) -> Iterator[Kernel]:
    """``new_folder`` makes a folder for the notebook of a name. Needs what the extra "notebook" installs."""
    import nbclient
    import nbformat

    client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=240, kernel_name="python3")
    with client.setup_kernel(env=environment()):
        yield Kernel(client, new_folder)
