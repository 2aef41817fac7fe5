"""Attention as functions of local tensors, and the checkpoint policy that keeps what they return."""
