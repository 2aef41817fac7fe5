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
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from cp_styles._compat import (
    FLEX_CHECKS_DEVICE,
    FLEX_FUNCTION,
    FLEX_GLOBALS,
    FLEX_RENAMED,
    RESUMED,
    FlexLocals,
    constant_under_compile,
    flex_locals,
    never_compiled,
    traced_functions,
    within_compiled,
)
from cp_styles.functions.flex import FlexCall

_SIZE = torch.Tensor.size
_DEVICE, _REQUIRES_GRAD = torch.Tensor.device.__get__, torch.Tensor.requires_grad.__get__  # pyright: ignore
_NUMEL = torch.Tensor.numel


class FlexCalls:
    """The flex_attention calls of one thread, one at a time. See [Note: catching flex_attention].

    Attributes:
        pending: the call that was noted and has not reached its operator: its frame, and the variables of that.
    """

    def __init__(self) -> None:
        self.pending: tuple[FrameType, FlexLocals] | None = None
        self._empty_lse: torch.Tensor | None = None

    @never_compiled
    def answer(self, frame: FrameType, func: Any, args: tuple[Any, ...]) -> Any:
        """The answer to one of QUESTIONS from ``frame``. None if the real answer is right."""
        while frame.f_code.co_name == _BY_MODE and frame.f_back is not None:  # a mode entered later
            frame = frame.f_back
        if frame.f_globals is not FLEX_GLOBALS or FLEX_RENAMED:  # then the operator is refused
            return None
        noted, call = self.pending or (None, None)
        if func is _SIZE:
            if call is None or call.block_mask is None or frame is not noted:
                return None
            queries, keys = call.block_mask.seq_lengths
            return queries if args[0] is call.query else keys if args[0] is call.key else None
        if func is _NUMEL:  # flex_attention takes an empty logsumexp for one that was not requested
            return 1 if self._empty_lse is not None and args[0] is self._empty_lse else None
        if frame.f_code.co_name != FLEX_CHECKS_DEVICE:
            return None
        if func == _REQUIRES_GRAD:
            return False
        if frame.f_back is not noted and frame.f_back is not None and _IS_PART(frame.f_back.f_code.co_name):
            self.pending = frame.f_back, flex_locals(frame.f_back)
        return None

    def take(self) -> FlexCall | None:
        """The call whose operator is reached. None if the operator was reached in another way, because an exception may
        have kept the noted call from its own."""
        (noted, call), self.pending = self.pending or (None, None), None
        frame: FrameType | None = sys._getframe(1)
        while frame is not noted and frame is not None:
            frame = frame.f_back
        if call is None or frame is None:
            return None
        given = call._asdict()
        del given["query"], given["key"]
        return FlexCall(**given, compiled=within_compiled(frame.f_back))

    def results(self, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The results of the operator. flex_attention expects the logsumexp to base 2 and converts it."""
        nothing = out.new_empty(0)
        bits = nothing if lse is None else lse / math.log(2.0)
        self._empty_lse = None if lse is None or lse.numel() else bits
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
_PART = rf"({RESUMED}_{FLEX_FUNCTION.__name__}_.*)|{FLEX_FUNCTION.__name__}"
_IS_PART = re.compile(_PART, re.DOTALL).fullmatch
_BY_MODE = "__torch_function__"  # of a mode that was entered later, which hands the question on
QUESTIONS: dict[Any, tuple[tuple[Any, ...], Callable[[str], object]]] = {
    _SIZE: ((-2,), re.compile(f"{_PART}|{_BY_MODE}", re.DOTALL).fullmatch),
    _DEVICE: ((), frozenset((FLEX_CHECKS_DEVICE, _BY_MODE)).__contains__),
    _REQUIRES_GRAD: ((), frozenset((FLEX_CHECKS_DEVICE, _BY_MODE)).__contains__),
    _NUMEL: ((), bool),
}
"""The calls that :meth:`FlexCalls.answer` may have an answer to: their arguments beside the tensor, and whether the
function of this name may ask it. Most calls come from other functions, and cost a look into this table."""
_FILE, _PACKAGE = FLEX_FUNCTION.__code__.co_filename, Path(__file__).parents[1]
