"""Prove a model under context parallelism: one step of it with all ranks, and the same step with one rank, compared.

It imports _lib, checks, collectives, comm, engine, functions, layouts, masks, mixers, styles and testing. Begin with
`verification.py`.

::

    verify(model, mesh, batch, step)  # once, before training

``step`` is the user's own: what a training loop does between ``zero_grad`` and the optimizer. See :func:`verify`.
"""

from cp_styles.verify.report import ModuleErrors, Report, VerificationError
from cp_styles.verify.verification import verify

__all__ = ["ModuleErrors", "Report", "VerificationError", "verify"]
