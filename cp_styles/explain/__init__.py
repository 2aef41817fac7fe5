"""See a plan before it runs, predict its time, choose among strategies and layouts."""

from cp_styles.explain.auto import Auto, HybridChoice, explain_hybrid
from cp_styles.explain.hardware import A100, CPU, H100, H200, Hardware
from cp_styles.explain.rehearse import Shapes
from cp_styles.explain.report import Explanation, explain, explain_calls
from cp_styles.explain.states import ChannelShapes, RowShapes, StateShapes

__all__ = [
    "A100",
    "CPU",
    "H100",
    "H200",
    "Auto",
    "ChannelShapes",
    "Explanation",
    "Hardware",
    "HybridChoice",
    "RowShapes",
    "Shapes",
    "StateShapes",
    "explain",
    "explain_calls",
    "explain_hybrid",
]
