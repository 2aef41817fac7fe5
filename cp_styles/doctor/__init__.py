"""The command ``doctor``: whether a machine or cluster runs this package, how fast, and the facts of a bug report.

It imports _lib, batch, comm, explain, functions, layouts, masks, strategies, styles, testing and verify. Begin with
`command.py`.
"""
