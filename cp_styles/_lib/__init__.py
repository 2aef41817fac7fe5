"""Small modules that know nothing of attention, and the names that torch keeps private."""
