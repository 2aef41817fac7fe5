"""Simulate an attention before it runs: bytes, memory, imbalance and predicted time of each strategy and layout."""

from typing import Any

from cp_styles.explain.hardware import A100, CPU, H100, H200, Hardware
from cp_styles.explain.report import Explanation, explain, explain_calls

__all__ = ["A100", "CPU", "H100", "H200", "Explanation", "Hardware", "explain", "explain_calls"]

_CHOOSE = (
    "run `python -m cp_styles explain ...` once, or compare explain(...) of each candidate in a loop, and pass the "
    "best strategy and layout"
)
_RECURRENCES = (
    "take layout=contiguous where recurrences take most of the time, else the best layout of the attention; "
    "cp_styles.testing.CommunicationTrace counts the bytes of a call"
)
_REMOVED = {
    "Auto": _CHOOSE,
    "HybridChoice": _RECURRENCES,
    "explain_hybrid": _RECURRENCES,
    "ChannelShapes": _RECURRENCES,
    "RowShapes": _RECURRENCES,
    "StateShapes": _RECURRENCES,
    "Shapes": "explain(...) takes heads=, head_dim=, dtype= and batch=",
}


def __getattr__(name: str) -> Any:
    if name in _REMOVED:  # ImportError, because Python replaces an AttributeError in `from ... import`
        raise ImportError(f"cp_styles.explain.{name} was removed: {_REMOVED[name]}. See the page Migration")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
