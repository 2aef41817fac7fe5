"""Real text that every machine has: the sources of the Python standard library, byte by byte."""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

# Zero begins a document: no Python source contains it.
BEGIN = 0
VOCABULARY = 256

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def standard_library() -> Iterator[bytes]:
    """The sources, one document a file, in the order of their paths.

    Raises:
        FileNotFoundError: this Python came without its sources (some embedded ones do).
    """
    path = None
    for path in _sources(Path(sysconfig.get_path("stdlib"))):
        yield path.read_bytes()
    if path is None:
        raise FileNotFoundError("this Python has no standard library sources (*.py) to train on")


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in _LEFT_OUT:
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path


def packed_documents(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``rows * length`` bytes, every document behind a ``BEGIN``, documents in order and end to end.

    Returns:
        tokens and document ids, both int64 ``[rows, length]``. A document that does not fit goes on in the next row.
    """
    wanted = rows * length
    tokens, ids = torch.empty(wanted, dtype=torch.int64), torch.empty(wanted, dtype=torch.int64)
    # Again and again, should the library be too short; a document's second time is another document.
    texts = itertools.chain.from_iterable(standard_library() for _ in itertools.count())
    filled = 0
    for document, text in enumerate(texts):
        piece = torch.frombuffer(bytearray([BEGIN, *text]), dtype=torch.uint8)[: wanted - filled]
        tokens[filled : filled + len(piece)] = piece
        ids[filled : filled + len(piece)] = document
        filled += len(piece)
        if filled == wanted:
            break
    return tokens.view(rows, length), ids.view(rows, length)
