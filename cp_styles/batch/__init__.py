"""Batches under context parallelism: labels, positions, shards, and the loss and gradients of the whole sequence.

It imports _lib, collectives, comm, engine, layouts and masks. Begin with `sharder.py`.

The functions take and return plain tensors and do not depend on attention. A training step::

    labels = next_token_labels(tokens, document_ids=ids)         # of the whole sequence, before sharding
    part = shard_batch({"tokens": tokens, "labels": labels}, layout, rank, seq_dims={"tokens": 1, "labels": 1})
    logits = model(part["tokens"], layout.positions(rank))
    losses = cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum")
    loss = global_loss(losses, global_token_count(part["labels"], cp), cp)
    loss.backward()
    sum_gradients(model, cp)

``cp`` is the process group, or the 1-D mesh, over which the sequence is sharded. ``rank`` is the rank in it.

The backward of each rank computes its share of the gradients, and exactly one reducer must sum the shares. With an
additional data-parallel axis, count tokens and sum loss and gradients over both axes: use
``both = mesh["dp", "cp"]._flatten("dp_cp")`` instead of ``cp`` in the last three lines above, and below.

- no other reducer: ``sum_gradients(model, cp)``, as above;
- FSDP2: ``fully_shard(..., mesh=cp)`` of each layer and the model, ``global_loss(..., cp, averaged_over=cp.size())``;
- HSDP: ``fully_shard(..., mesh=mesh["dp", "cp"])``, ``global_loss(..., both, averaged_over=both.size())``;
- DDP: ``DistributedDataParallel(model, process_group=cp.get_group())``, ``averaged_over=cp.size()``;
- FSDP2 over dp alone: ``global_loss(..., both, averaged_over=mesh["dp"].size())``, then ``sum_gradients(model, cp)``.

FSDP2 and DDP divide by the number of ranks that they reduce over. ``averaged_over`` multiplies the gradient by this
number first, so ranks may hold any number of tokens. (``FSDPModule.set_gradient_divide_factor(1.0)`` has the same
effect if the backend supports it; gloo does not in float32.) With accumulation, give each :func:`global_loss` the
token count of all micro-batches, and sum (or let FSDP2 and DDP synchronize) after the last micro-batch.
"""

from cp_styles.batch.gradients import sum_gradients
from cp_styles.batch.labels import IGNORE_INDEX, document_positions, next_token_labels, predicted_tokens, shard_batch
from cp_styles.batch.losses import chunked_token_losses, global_loss, global_token_count

__all__ = [
    "IGNORE_INDEX",
    "chunked_token_losses",
    "document_positions",
    "global_loss",
    "global_token_count",
    "next_token_labels",
    "predicted_tokens",
    "shard_batch",
    "sum_gradients",
]
