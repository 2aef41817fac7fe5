"""Simulate an attention before it runs: bytes, memory, imbalance and predicted time of each strategy and layout.

It imports _lib, batch, engine, integrations, kernels, layouts, masks, plan, strategies and verify. Begin with
`report.py`.
"""

from cp_styles.explain.hardware import A100, CPU, H100, H200, Hardware
from cp_styles.explain.report import Explanation, explain, explain_calls

__all__ = ["A100", "CPU", "H100", "H200", "Explanation", "Hardware", "explain", "explain_calls"]
