"""torch's context-parallel API, with this package's engine behind it.

It imports _lib, checks, collectives, comm, engine, intercept, kernels, layouts, masks and strategies. Begin with
`context_block.py`.
"""

from cp_styles.torch_api.api import context_parallel_shard, context_parallel_unshard, set_rotate_method
from cp_styles.torch_api.context_block import context_parallel

__all__ = [
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "set_rotate_method",
]
