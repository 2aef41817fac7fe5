"""Attention bound to a mesh axis: what is bound, the op that runs it, and the open scopes."""
