"""Small modules that know nothing of attention, and ``compat.py``, which has the names that torch keeps private.

It imports no other folder. Begin with `bounded_cache.py`.
"""
