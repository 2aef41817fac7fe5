"""Strategies: how queries, keys and values of a sharded sequence meet.

It imports _lib, collectives, comm, kernels, layouts, masks and plan. Begin with `base.py`.
"""

from cp_styles.strategies.base import Attention, Strategy
from cp_styles.strategies.moving_kv import AllGather, Ring
from cp_styles.strategies.per_row import strategy_on
from cp_styles.strategies.ulysses import Ulysses

__all__ = ["AllGather", "Attention", "Ring", "Strategy", "Ulysses", "strategy_on"]
