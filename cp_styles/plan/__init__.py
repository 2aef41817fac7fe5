"""The plan of an attention: what each rank computes and sends, derived from the layouts and the mask."""

from cp_styles.plan.plan import Part, Plan, Rows, attended_pairs, imbalance, make_plan, planning_seconds
from cp_styles.plan.tiles import Cover, Tile

__all__ = ["Cover", "Part", "Plan", "Rows", "Tile", "attended_pairs", "imbalance", "make_plan", "planning_seconds"]
