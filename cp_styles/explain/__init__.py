"""See a plan before it runs, predict its time, choose among strategies and layouts."""

from cp_styles.explain.auto import Auto
from cp_styles.explain.hardware import A100, CPU, H100, H200, Hardware
from cp_styles.explain.rehearse import Shapes
from cp_styles.explain.report import Explanation, explain, explain_calls

__all__ = ["A100", "CPU", "H100", "H200", "Auto", "Explanation", "Hardware", "Shapes", "explain", "explain_calls"]
