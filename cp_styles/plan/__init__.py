"""The plan of an attention: what each rank computes and sends, derived from the layouts and the mask.

It imports _lib, kernels, layouts and masks. Begin with `plan.py`.
"""

from cp_styles.plan.plan import Plan, attended_pairs, imbalance, make_plan

__all__ = [
    "Plan",
    "attended_pairs",
    "imbalance",
    "make_plan",
]
