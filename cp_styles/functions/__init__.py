"""Attention as functions of local tensors."""
