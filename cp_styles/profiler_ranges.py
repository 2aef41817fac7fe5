"""Named ranges in the traces of torch.profiler: which module, which step, whose keys."""

from __future__ import annotations

import contextlib

import torch

from cp_styles._compat import is_profiling

_NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


def named_range(*words: object) -> contextlib.AbstractContextManager[object]:
    """A range with this name, in the trace of the profiler that is running; if none is, a context that does nothing."""
    return torch.profiler.record_function(" ".join(map(str, words))) if is_profiling() else _NOTHING
