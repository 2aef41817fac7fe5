"""Attention of queries to keys that are gathered for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd
from typing import NamedTuple

import torch

from cp_styles.kernels.autocast import without_autocast
from cp_styles.kernels.base import Kernel
from cp_styles.kernels.merge import EMPTY_LSE, accumulation_dtype
from cp_styles.kernels.reference import matmul

# The largest number of numbers of gathered keys and values that are in memory at a time.
_GATHERED = {"cpu": 2**21}
_GATHERED_ON_GPU = 2**24


class GatheredRows(NamedTuple):
    """Some queries, and as many keys for each of them.

    Attributes:
        rows_N: numbers of rows of queries [B, U, L]: see :class:`Picks`.
        columns_NW: keys of the tile.
        hidden_NW: the keys to which the query does not attend.
    """

    rows_N: torch.Tensor
    columns_NW: torch.Tensor
    hidden_NW: torch.Tensor


class Picks(NamedTuple):
    """The keys of each query of a tile.

    Attributes:
        units: U, the number of ranges of query heads. The heads of a range have one key head, and the same keys.
        sizes: the numbers of queries and of keys of each of which the tile consists. A query has one row in each unit,
            and is in one of these at most.
        gather: from (first, stop, width), the rows in an order of their own, to these rows with so many keys.
    """

    units: int
    sizes: tuple[tuple[int, int], ...]
    gather: Callable[[int, int, int], GatheredRows]

    def ranges(self, numbers: int, device: torch.device) -> Iterator[GatheredRows]:
        """The rows in ranges of bounded memory. ``numbers``: of a key and its value."""
        most, first = _GATHERED.get(device.type, _GATHERED_ON_GPU), 0
        for rows, width in self.sizes:
            step = max(most // (width * numbers), 1)
            for start in range(first, first + rows, step):
                yield self.gather(start, min(start + step, first + rows), width)
            first += rows


def units_of(heads: tuple[int, int], key_heads: int, group: int) -> int:
    """The number of ranges of ``heads`` that have one of ``key_heads``, and one choice for each ``group`` heads."""
    count = heads[1] - heads[0]
    return count // gcd(count // key_heads, group, heads[0])


class SelectedKernel(Kernel):
    """Gathers the keys of each query, and computes with them alone, in the accumulation dtype.

    Forward and backward take one more keyword, ``picks``. Memory in addition to the results: the tile's keys and values
    in the accumulation dtype, and a bounded number of gathered ones.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def forward(self, q_BHLD, k_BGMD, v_BGME, *, causal, bias, scale, picks: Picks):
        q_NRD, k_MD, v_ME, base = self._flat(picks.units, q_BHLD, k_BGMD, v_BGME)
        out_NRE = k_MD.new_zeros(*q_NRD.shape[:2], v_ME.shape[1])
        lse_NR = k_MD.new_full(q_NRD.shape[:2], EMPTY_LSE)
        with without_autocast(q_BHLD.device):
            for rows, columns, hidden in picks.ranges(k_MD.shape[1] + v_ME.shape[1], q_BHLD.device):
                columns = columns + base(rows)[:, None]
                logits = self._logits(q_NRD[rows].to(k_MD.dtype), _rows(k_MD, columns), hidden, scale)
                lse = logits.logsumexp(-1)
                lse = lse.masked_fill(lse == float("-inf"), EMPTY_LSE)
                out_NRE.index_copy_(0, rows, matmul(torch.exp(logits - lse[..., None]), _rows(v_ME, columns)))
                lse_NR.index_copy_(0, rows, lse)
        return self._by_heads(out_NRE, q_BHLD), self._by_heads(lse_NR[..., None], q_BHLD)[..., 0]

    def backward(self, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL, *, causal, bias, scale, picks: Picks):
        q_NRD, k_MD, v_ME, base = self._flat(picks.units, q_BHLD, k_BGMD, v_BGME)
        dtype = k_MD.dtype
        grad_NRE = _by_units(grad_BHLE, picks.units)
        lse_NR1 = _by_units(lse_BHL[..., None].to(dtype), picks.units)
        with without_autocast(q_BHLD.device):
            delta_NR1 = _by_units((grad_BHLE.to(dtype) * out_BHLE.to(dtype)).sum(-1, keepdim=True), picks.units)
            dq = k_MD.new_zeros(q_NRD.shape)
            dk, dv = torch.zeros_like(k_MD), torch.zeros_like(v_ME)
            for rows, columns, hidden in picks.ranges(k_MD.shape[1] + v_ME.shape[1], q_BHLD.device):
                columns = columns + base(rows)[:, None]
                q, grad, keys = q_NRD[rows].to(dtype), grad_NRE[rows].to(dtype), _rows(k_MD, columns)
                p = torch.exp(self._logits(q, keys, hidden, scale) - lse_NR1[rows])
                ds = p * (matmul(grad, _rows(v_ME, columns).mT) - delta_NR1[rows]) * scale
                dq.index_copy_(0, rows, matmul(ds, keys))
                dk.index_add_(0, columns.flatten(), matmul(ds.mT, q).flatten(0, 1))
                dv.index_add_(0, columns.flatten(), matmul(p.mT, grad).flatten(0, 1))
        return self._by_heads(dq, q_BHLD), _by_keys(dk, k_BGMD), _by_keys(dv, v_BGME)

    def check(self, q_BHLD, k_BGMD, v_BGME, *, biased):
        pass

    @staticmethod
    def _flat(units, q_BHLD, k_BGMD, v_BGME):
        """Rows of queries, of keys and of values, and from rows of queries to the first row of their key head."""
        dtype, (groups, keys), queries = accumulation_dtype(q_BHLD.dtype), k_BGMD.shape[1:3], q_BHLD.shape[2]
        k, v = (x.to(dtype).reshape(-1, x.shape[3]) for x in (k_BGMD, v_BGME))
        return _by_units(q_BHLD, units), k, v, lambda rows: rows // queries * groups // units * keys

    @staticmethod
    def _logits(q_NRD, keys_NWD, hidden_NW, scale):
        return (matmul(q_NRD, keys_NWD.mT) * scale).masked_fill(hidden_NW[:, None], float("-inf"))

    @staticmethod
    def _by_heads(x_NRE, q_BHLD):
        batch, heads, queries = q_BHLD.shape[:3]
        return x_NRE.view(batch, -1, queries, *x_NRE.shape[1:]).transpose(2, 3).reshape(batch, heads, queries, -1)


def _by_units(x_BHLD: torch.Tensor, units: int) -> torch.Tensor:
    """[B * U * L, R, D]: for each unit and query, the rows of its R heads."""
    return x_BHLD.unflatten(1, (units, -1)).transpose(2, 3).flatten(0, 2)


def _by_keys(x_ND: torch.Tensor, like_BGMD: torch.Tensor) -> torch.Tensor:
    return x_ND.view(*like_BGMD.shape[:3], x_ND.shape[1])


def _rows(x_ND: torch.Tensor, index_NW: torch.Tensor) -> torch.Tensor:
    return x_ND.index_select(0, index_NW.flatten()).view(*index_NW.shape, x_ND.shape[1])
