"""Interception of attention calls: calls inside a module or a block run on the engine."""
