"""The turn of a rank in a group: which of its errors the other ranks know."""

from __future__ import annotations

from collections.abc import Iterator

_KNOWN = "_cp_styles_known"


# [Note: turns] Peers may wait for this rank from the beginning of a forward, a block or a call on. So an error must
# reach them. All raise an error of a meeting. In an operation, after its meeting, the rank ends its connections.
# Before, between and after operations the hook, block or function that sees the error first tells the peers, by the row
# of a meeting: see :func:`~cp_styles.comm.agreement.tell_peers`.
#
# Hooks of several modules may see one error, and each row is one meeting of all ranks. So an error that is known has a
# note. An error that was raised while a known one was handled is known too: a program may wrap errors. Notes end with
# the next meeting or beginning, because a program may run its next step where it handles the error of the last step.
class Turn:
    """The errors of this rank that the other ranks of a group know."""

    __slots__ = ("_number",)

    def __init__(self) -> None:
        self._number = 0

    def begin(self) -> None:
        """Begin a forward, a block, a call or a meeting. Errors that are known until now are of earlier ones."""
        self._number += 1

    def note_known(self, error: BaseException) -> None:
        """Note that all ranks know of ``error``."""
        # A number and no reference to the error: its traceback would keep the group and its connections.
        vars(error).setdefault(_KNOWN, []).append((self, self._number))

    def must_tell(self, error: BaseException) -> bool:
        """Whether no other rank knows of ``error``."""
        noted = (self, self._number)
        return not any(noted in vars(each).get(_KNOWN, ()) for each in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and all errors that were being handled when it was raised."""
    chain = [error]
    for each in chain:
        yield each
        chain += [x for x in (each.__cause__, each.__context__) if x is not None and x not in chain]
