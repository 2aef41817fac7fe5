"""The plan of an attention: what each rank computes and sends, derived from the layouts and the mask."""

from cp_styles.plan.plan import Plan, RowRanges, SourcePart, attended_pairs, imbalance, make_plan
from cp_styles.plan.tiles import Cover, Tile

__all__ = [
    "Cover",
    "Plan",
    "RowRanges",
    "SourcePart",
    "Tile",
    "attended_pairs",
    "imbalance",
    "make_plan",
]
