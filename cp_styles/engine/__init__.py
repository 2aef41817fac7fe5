"""Attention bound to a mesh axis: its configuration, the op that runs it, and the open scopes.

It imports _lib, collectives, comm, kernels, layouts, masks and strategies. Begin with `custom_ops.py`.
"""
