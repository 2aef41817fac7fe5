"""The checksum by which ranks compare values: changes that would cancel in a sum must not."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_styles._lib.checksum import _PIECE, checksum


def splitmix(words: list[int]) -> int:
    """The definition, with Python's integers."""
    total = 0
    for place, word in enumerate(words):
        key = (word + place * 0x9E3779B97F4A7C15) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            key = (key ^ key >> shift) * factor % 2**64
        total += key
    return total % 2**63


def test_the_checksum_is_that_of_its_definition():
    words = torch.randint(-(2**63), 2**63 - 1, (100,), generator=torch.Generator().manual_seed(0))
    assert checksum(words) == splitmix([int(word) % 2**64 for word in words])


def test_one_number_of_any_stride():
    number = torch.tensor(3.0)
    assert checksum(number.expand(2, 3, 4)) == checksum(number) == checksum(torch.tensor([3.0]))
    assert checksum(torch.ones(0)) == checksum(torch.ones(2, 0))


VALUES = st.lists(st.integers(-3, 3), min_size=2, max_size=12)
DTYPES = st.sampled_from([torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float64])


@given(VALUES, st.permutations(range(12)), DTYPES, st.integers(1, 3))
def test_other_orders_of_the_same_rows_differ(values, order, dtype, width):
    """Swapped, shifted and permuted rows, of words that fill 8 bytes and of those that do not."""
    rows = torch.tensor(values).to(dtype)[:, None].expand(-1, width).contiguous()
    order = [at for at in order if at < len(values)]
    for other in (rows[order], rows.roll(1, 0), rows.flip(0), rows[[1, 0, *range(2, len(values))]]):
        assert (checksum(other) == checksum(rows)) == torch.equal(other, rows)


@given(VALUES, VALUES, DTYPES)
def test_patterns_of_two_values_differ(a, b, dtype):
    """a b b a against b a a b: what is linear in words and places cannot tell them apart."""
    one, other = (torch.tensor(values).to(dtype) for values in ([*a, *b, *b, *a], [*b, *a, *a, *b]))
    assert (checksum(one) == checksum(other)) == torch.equal(one, other)


def test_pieces_have_places_of_their_own():
    """A large tensor is read in pieces; a piece in another order is another tensor."""
    words = torch.zeros(3 * _PIECE // 8, dtype=torch.int64)
    words[0] = 1
    assert len({checksum(words.roll(by)) for by in (0, _PIECE // 8, 2 * _PIECE // 8)}) == 3
