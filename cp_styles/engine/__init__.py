"""Attention bound to a mesh axis: what is bound, the op and the DTensor handlers that run it, and the open scopes."""
