"""The command ``doctor``: whether a machine or cluster runs this package, how fast, and the facts of a bug report."""
