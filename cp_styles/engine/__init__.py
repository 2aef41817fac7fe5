"""Attention bound to a mesh axis: its configuration, the op that runs it, and the open scopes."""
