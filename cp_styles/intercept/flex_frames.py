"""Interception of torch's flex_attention, for :class:`~cp_styles.intercept.function_mode.AttentionCalls`.

[Note: catching flex_attention] flex_attention is a plain Python function, so a mode does not see the call itself. A
mode sees the queries on its tensors (size, device, requires_grad, numel), and then its operator. At the first query, of
a device, the function's variables are still what the call was given, so the call is noted then. The function would
refuse two things: a BlockMask of the whole sequence, because the local query is shorter, and inputs that require grad
on CPU. So the mode answers these queries as on one device: lengths are those of the BlockMask (the engine compares them
with the real lengths of all ranks), and nothing requires grad.

torch.compile would trace the mode instead of calling it, both if a user compiles flex_attention and if flex_attention
compiles its own operator. So while the mode is entered, this thread runs both without compiling. If torch.compile
traces a caller of flex_attention, the graph is broken there (:func:`traced_part`). Calls that reach the operator in
another way are refused.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from cp_styles._compat import (
    FLEX_FUNCTION,
    FLEX_RENAMED,
    RESUMED,
    constant_under_compile,
    flex_locals,
    never_compiled,
    traced_functions,
    within_compiled,
)
from cp_styles.functions.flex import FlexCall

_SIZE, _NUMEL = torch.Tensor.size, torch.Tensor.numel
_DEVICE, _REQUIRES_GRAD = torch.Tensor.device.__get__, torch.Tensor.requires_grad.__get__  # pyright: ignore
QUESTIONS = frozenset((_SIZE, _NUMEL, _DEVICE, _REQUIRES_GRAD))
"""What a running flex_attention asks of tensors, where the real answer may be wrong."""


class NotedCall(NamedTuple):
    """A call of flex_attention in its ``frame``. ``answers`` has those that are not the real ones: by the question, the
    id of the tensor, which the frame keeps alive, and the other arguments."""

    frame: FrameType
    call: FlexCall
    answers: dict[tuple[Any, ...], Any]


class FlexCalls:
    """The flex_attention calls of one thread, one at a time. See [Note: catching flex_attention].

    Attributes:
        noted: the call that was seen last. None from when its operator is reached.
    """

    noted: NotedCall | None = None

    @never_compiled
    def note(self, frame: FrameType | None) -> NotedCall | None:
        """Note the call in ``frame``, which has called the check of devices. None if it is not flex_attention's."""
        if frame is None or not _IS_PART(frame.f_code.co_name) or FLEX_RENAMED:  # then the operator is refused
            return None
        query, key, value, block_mask, *others = flex_locals(frame)
        answers: dict[tuple[Any, ...], Any] = {(_REQUIRES_GRAD, id(x)): False for x in (query, key, value)}
        if block_mask is not None:
            queries, keys = block_mask.seq_lengths
            answers |= {(_SIZE, id(key), -2): keys, (_SIZE, id(query), -2): queries}
        call = FlexCall(block_mask, *others, compiled=within_compiled(frame.f_back))
        self.noted = NotedCall(frame, call, answers)
        return self.noted

    def take(self) -> NotedCall | None:
        """The call whose operator is reached. None if the operator was reached in another way, because an exception may
        have kept the noted call from its own."""
        noted, self.noted = self.noted, None
        frame: FrameType | None = sys._getframe(1)
        while noted is not None and frame is not noted.frame and frame is not None:
            frame = frame.f_back
        return None if frame is None else noted

    def results(
        self, noted: NotedCall, out: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The results of the operator. flex_attention expects the logsumexp to base 2 and converts it."""
        nothing = out.new_empty(0)
        bits = nothing if lse is None else lse / math.log(2.0)
        if lse is not None and not lse.numel():  # flex_attention takes it for one that was not requested
            self.noted = noted._replace(answers={(_NUMEL, id(bits)): 1})
        return out, bits, nothing


FIRST_QUESTION = torch.Tensor.dim
"""The first call that torch.compile sees when it traces flex_attention."""


@constant_under_compile
def traced_part(inlined: bool) -> str:
    """The part of flex_attention that torch.compile is tracing at FIRST_QUESTION.

    "whole": the function. "rest": what follows after a graph break at its beginning. "": another function. Also "rest"
    if all of a module's forward is traced, in which the mode is ``inlined``: after a graph break (Python 3.12) the mode
    would be on without having been entered, and flex_attention's own operator be compiled under it.
    """
    traced = traced_functions()
    names = [name for file, name in traced if file == _FILE and _IS_PART(name)]
    alone = inlined and Path(traced[0][0]).is_relative_to(_PACKAGE)
    return "" if not names else "rest" if alone or names[0] != FLEX_FUNCTION.__name__ else "whole"


# Whether a function of torch's module is flex_attention, or its rest after a graph break; by its name.
_IS_PART = re.compile(rf"({RESUMED}_{FLEX_FUNCTION.__name__}_.*)|{FLEX_FUNCTION.__name__}", re.DOTALL).fullmatch
_FILE, _PACKAGE = FLEX_FUNCTION.__code__.co_filename, Path(__file__).parents[1]
