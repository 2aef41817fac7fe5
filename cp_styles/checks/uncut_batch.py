"""Detects a batch that nobody has cut: every rank attends with the same query, key and value."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from cp_styles._lib.checksum import device_checksum, on_host
from cp_styles._lib.troubleshooting import see
from cp_styles.engine.observers import CheckedCall, RankCheck

_MOST_ROWS = 256  # rows of a tensor that are compared, spread over it


class UncutBatchCheck(RankCheck):
    """Compares the first causal attention of a forward between the ranks of a group.

    Compares in the forwards number 1, 2, 4, 8, ... of each model. Forwards with gradients and forwards without are
    counted separately. No communication: the number is part of the row that ranks exchange before each attention.
    """

    def __init__(self) -> None:
        self._forwards: WeakKeyDictionary[object, dict[bool, int]] = WeakKeyDictionary()

    def number(self, call: CheckedCall) -> int:
        """A checksum of query, key and value; 0 if they are not compared now. No communication."""
        # Attention without a causal order is right for replicated tokens, such as the text of a cut image.
        if not call.orders or call.where[2].size() == 1 or torch.compiler.is_exporting():
            return 0
        tensors, trains = call.tensors, call.trains
        forwards = self._forwards.setdefault(self if call.model is None else call.model, {})
        number = forwards[trains] = forwards.get(trains, 0) + 1
        if number & (number - 1) or tensors[0].shape[2] < 2 or not tensors[0].numel():
            return 0
        with torch.no_grad():
            rows = [x_BHLD[:1, :1, :: -(-x_BHLD.shape[2] // _MOST_ROWS)] for x_BHLD in tensors]
            # Equal tokens, as in a warm-up, are right on all ranks. NaN is not greater than 0.
            differ = ((rows[0] - rows[0][:, :, :1]).abs().amax() > 0).long()
            *sums, differ = on_host([*map(device_checksum, rows), differ])
        return differ * (sum(sums) % 2**62 + 1)

    def judge(self, numbers: Sequence[int], call: CheckedCall) -> None:
        """Raise on every rank if all have the same number."""
        if numbers[0] and len(set(numbers)) == 1:
            name, axis, _ = call.where
            raise ValueError(
                f"{name}: all ranks of mesh axis {axis!r} were given the same tokens, but each must have its own part "
                "of the sequence. Cut the batch, in training and in evaluation: batch = BatchSharder(mesh)(tokens), "
                "then model(batch.tokens, batch.positions). Or run the whole sequence on one device, with a copy of "
                f"the model that has no style{see('A batch that nobody has cut')}"
            )
