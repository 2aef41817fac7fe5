"""Guarantees that surround the attention: one file each. Nothing in comm, engine or intercept imports them."""

from cp_styles.checks.gradient_watch import ParameterWatch
from cp_styles.checks.uncut_batch import UncutBatchCheck
from cp_styles.engine.observers import RANK_CHECKS

RANK_CHECKS += [ParameterWatch, UncutBatchCheck]
