"""Attention as functions of local tensors: torch's calls, latents, joint tokens, decoding.

It imports _lib, collectives, comm, engine, kernels, layouts, masks and strategies. Begin with `attention.py`.
"""
