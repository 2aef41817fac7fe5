"""Communication between ranks: messages, the agreement before each operation, and what a rank knows of a group.

It imports _lib. Begin with `agreement.py`.
"""
