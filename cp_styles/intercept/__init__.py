"""Interception of the attention calls inside a module or a block, which then run on the engine."""
