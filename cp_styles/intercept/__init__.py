"""Interception of attention calls: calls inside a module or a block run on the engine.

It imports _lib, engine, functions, kernels, layouts and masks. Begin with `function_mode.py`.
"""
