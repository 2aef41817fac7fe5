"""What ranks tell each other before they attend, and what they say where it does not fit together."""

from __future__ import annotations

import enum
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from cp_styles.comm import gather_numbers

Rows = Sequence[tuple[int, ...]]
"""What each rank said, in group order: numbers, of which the first is a :class:`Word`."""


class Word(enum.IntEnum):
    """What a rank says of itself when ranks agree on what they are about to do."""

    NO_CALL = -1
    BAD_INPUTS = 0
    GOOD_INPUTS = 1
    GOOD_CALL = 2


def tell(
    say: Callable[[], Sequence[int]], width: int, group: dist.ProcessGroup, refused: Word = Word.BAD_INPUTS
) -> Rows:
    """What each rank said: ``width`` numbers, which ``say`` returns, the first a Word.

    Where it raises ValueError, TypeError or RuntimeError (NotImplementedError is one) instead, this rank raises that,
    and no rank waits for it: the others have heard ``refused``. Communication: one all-gather of ``width`` integers.
    """
    problem: Exception | None = None
    numbers: Sequence[int] = [refused, *[0] * (width - 1)]
    try:
        numbers = say()
    except (ValueError, TypeError, RuntimeError) as error:
        problem = error
    rows = gather_numbers(numbers, group)
    if problem is not None:
        raise problem
    return rows


def hear_of_refusals(rows: Rows, name: str, axis: str) -> None:
    """Raise ValueError where a rank has refused what it was given."""
    for word, what in ((Word.BAD_INPUTS, "their inputs"), (Word.NO_CALL, "the attention inside")):
        refused = [rank for rank, row in enumerate(rows) if row[0] == word]
        if refused:
            raise ValueError(
                f"{name}: ranks {refused} of mesh axis {axis!r} refused {what} (their own error says why); this rank "
                "stops with them"
            )


def compare(rows: Rows, column: int, name: str, axis: str, what: str, mine: Callable[[], Any]) -> None:
    """Raise ValueError unless the ranks have the same number in ``column``, which stands for ``mine()`` on this one."""
    odd = [rank for rank, row in enumerate(rows) if row[column] != rows[0][column]]
    if odd:
        raise ValueError(
            f"{name}: the ranks of mesh axis {axis!r} disagree on {what}: ranks {odd} differ from rank 0; here it is "
            f"{mine()}"
        )


def plain(value: Any) -> str:
    """A text that is the same on every rank: no addresses, and functions by name."""
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def fingerprint(values: Sequence[Any]) -> int:
    # Not hash(): Python salts the hash of strings differently in every process.
    return zlib.crc32(repr(values).encode())
