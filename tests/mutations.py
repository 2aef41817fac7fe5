"""Plants mistakes in a copy of the package, one by one, and says which of them the tests notice.

    python tests/mutations.py                  all of them, with the tests that concern each: some 8 s for each
    python tests/mutations.py merge layout     those with these words in their names
    python tests/mutations.py --places         no tests run: whether the place and the tests of each are still there
    python tests/mutations.py --fuzz           those in FUZZED, with random attentions and programs in place of tests
    python tests/mutations.py --unplanted ...  the tests without the mistakes, all of which must pass

A mistake names a function of the package, and what is exchanged in it: a piece that is there once (blanks and line
breaks do not count), and what is put there instead. Where a refactoring has taken the piece away, the script says so
and fails. It fails as well where a mistake goes unnoticed.

Not collected by pytest. Tests that a mistake makes wait for each other end with LIMIT, and count as noticed.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT = 600.0  # seconds for the tests of one mistake
FAILED = 1  # pytest's exit status when tests have failed; others say that they could not be run

# What --fuzz runs until one fails: the same seeds every time.
RANDOM = (
    "tests/fuzz.py --cases 400 --stop",
    "tests/mixers.py --cases 200 --stop",
    "tests/programs.py --cases 40 --stop",
)


class Mistake(NamedTuple):
    """``wrong`` in place of ``right`` in ``function``, a qualified name; ``tests`` are files in tests/, and -k."""

    name: str
    function: str
    right: str
    wrong: str
    tests: str


def mistakes(table: str) -> list[Mistake]:
    """From three rows each: the name and the tests, the function and the piece, the piece that takes its place. A row
    goes on in lines that are indented by 8."""
    rows = [tuple(row.strip().split(" | ", 1)) for row in re.sub(r"\n {8}", " ", table).strip().splitlines()]
    return [
        Mistake(name, function, right, "".join(wrong), tests)
        for (name, tests), (function, right), (_, *wrong) in zip(rows[::3], rows[1::3], rows[2::3], strict=True)
    ]


# What random attentions and programs are for: a wrong result, or an error that not all ranks hear, in what they call.
FUZZED = mistakes(r"""
mask: causal without the diagonal | unit/test_mask.py
    Causal.bounds | q_positions_L + 1
    becomes | q_positions_L
mask: a window one short on the left | unit/test_mask.py
    SlidingWindow.bounds | - left)
    becomes | - left + 1)
mask: the first token of a document in the one before | unit/test_mask.py
    Documents.bounds | right=True
    becomes | right=False
mask: the first token of a picture sees no later one | unit/test_mask.py
    WithBlocks.bounds | right=True
    becomes | right=False
mask: a picture hides what is before its window | unit/test_mask.py
    WithBlocks.bounds | start.minimum(first), start)
    becomes | start, start)
mask: the wider of two lower bounds | unit/test_mask.py
    All.bounds | maximum
    becomes | minimum
tree: a branch sees its elder sibling | unit/test_tree.py
    Tree.bands | paths.append([*path, (start, stop, offset)])
    becomes | paths.append([*path[:-1], (path[-1][0] if path else start, stop, offset)])
tree: a window is counted in the sequence | unit/test_tree.py
    Level.bounds | + shift[node]
    becomes nothing
tree: a token sees all of its node | unit/test_tree.py
    Level.bounds | torch.minimum(q_positions_L + 1, stop[node])
    becomes | stop[node]
tree: tiles of a band have the pairs of all bands | ranks/engine/test_parity_grid.py
    _Run._make_bias | attention.mask.bands[call.tile.band]
    becomes | attention.mask
mask: every row of the batch has the first one's | ranks/engine/test_per_row.py
    PerRow.row | masks[index]
    becomes | masks[0]
mask: partial blocks of a BlockMask as full ones | unit/test_flex_mask.py
    FlexMask.bias | states == 2
    becomes | states >= 1
mask: a key that one query hides is needed by none | unit/test_gaps.py
    Mask.needed | seen.flatten(0, -2).any(0)
    becomes | seen.flatten(0, -2).all(0)
mask: keys in another block are needed | unit/test_gaps.py
    Mask.needed | row, column = torch.nonzero(cover, as_tuple=True)
    becomes | row, column = torch.nonzero(cover >= 0, as_tuple=True)
mask: intervals that do not touch are one | unit/test_gaps.py
    Mask.needed | make_cells(self.grids, q, kv, begins)
    becomes | make_cells(self.grids, q, kv)
mask: a conjunction forgets an answer of a part | unit/test_gaps.py
    Mask.needed | found &= part.needed(q, kv)
    becomes | pass
mask: gaps next to a band are not looked at | unit/test_gaps.py
    Mask.needed | missing = found & by_pairs
    becomes | missing = found & False
mask: a mask of other bounds says what its base class said | unit/test_mask.py -k base_class
    Mask.__init_subclass__ | "bounds" in vars(cls)
    becomes | False
plan: every key of a source is sent | unit/test_gaps.py
    _make_plan | find_ranges(mask.needed(rows, kv[rank]))
    becomes | ((0, len(kv[rank])),)
layout: chunks of a rank in reverse | unit/test_layout.py
    rows_in | (parts,
    becomes | (parts[::-1],
plan: a causal tile without its mask | unit/test_plan.py
    _tile_run | .CAUSAL
    becomes | .FULL
plan: a source's first chunk has no rows before its positions | unit/test_plan.py
    Chunks.rows | torch.minimum(positions + self._to_row[chunk], self._stop_row[chunk])
    becomes | positions + self._to_row[chunk]
merge: rows that are begun are overwritten | unit/test_merge.py
    _overlaps | place % 2 == 1 or
    becomes nothing
merge: a sink's share and the rest exchanged | ranks/test_random.py -k attentions
    apply_sink | lse_BHL - _sink_logit(sink_H, lse_BHL.dtype, level_BHL)
    becomes | _sink_logit(sink_H, lse_BHL.dtype, level_BHL) - lse_BHL
strategy: a tile's band is not masked | ranks/engine/test_parity_grid.py
    _masked_bias | ).masked_fill(outside, float("-inf")
    becomes nothing
Ulysses: sinks of the first heads | ranks/engine/test_parity_grid.py
    _Levels.select_heads | self._local_heads
    becomes | : self._heads
Ulysses: masks of the first heads | ranks/engine/test_parity_grid.py
    _Levels.__init__ | before + start, before + stop
    becomes | 0, stop - start
Ulysses: key heads counted from the first rank's | ranks/engine/test_parity_grid.py
    _make_geometry | share - kv_start
    becomes | share
doors: in float32, autocast is forgotten | ranks/engine/test_precision.py
    cast_for_attention | () and not any_autocast
    becomes nothing
functions: a call has the mask of an earlier one | ranks/engine/test_wire.py
    binding_of_call | key = name, mesh, strategy, layout, mask, kernel, kv_layout, checks
    becomes | key = name, mesh, strategy, layout, kernel, checks
kernel: a negative scale's sign is lost | unit/test_kernels.py
    _BoundBackward.run | dq * self.sign
    becomes | dq
kernel: the logsumexp's gradient with the other sign | ranks/flex/test_flex.py
    LseGradient.backward | value=-
    becomes | value=
batch: labels across documents | unit/test_batch.py
    next_token_labels | starts.narrow(seq_dim, shift, length) == starts.narrow(seq_dim, 0, length
    becomes | torch.ones_like(ahead, dtype=torch.bool
engine: backwards begin without the other ranks | ranks/engine/test_half_way.py -k another_order
    run_backward | begin_backward(binding.group, forward, agrees)
    becomes | pass
agreement: a refusal is not heard | ranks/doors/test_errors.py ranks/engine/test_disagreement.py
    _StartedMeeting._compare | rank for rank, row in enumerate(rows) if not row.good
    becomes nothing
agreement: ranks that differ go on | ranks/engine/test_disagreement.py
    compare | rank for rank, number in enumerate(numbers) if number != numbers[0]
    becomes nothing
mask: a window one short on the right | unit/test_mask.py
    SlidingWindow.bounds | right + 1
    becomes | right
mask: chunks that see one key of the next | unit/test_mask.py
    Chunked.bounds | start + self.size
    becomes | start + self.size + 1
mask: prefixes counted from the sequence's start | unit/test_mask.py
    Documents.bounds | start + prefixes[0][index]
    becomes | prefixes[0][index]
mask: pieces that are cut keep their first bound | unit/test_mask.py
    Pieces.part | torch.addcmul(self.hi, self.hi_step, skipped)
    becomes | self.hi
layout: the last period of stripes like the others | unit/test_layout.py
    Stripes.rows_rank_by_rank | start.clamp(max=rest)
    becomes | start
merge: the weight of the other side | unit/test_merge.py
    TorchMerge.__call__ | weight = torch.sigmoid(new_lse_BHL - lse_BHL)
    becomes | weight = torch.sigmoid(lse_BHL - new_lse_BHL)
merge: the larger logsumexp for the sum | unit/test_merge.py
    TorchMerge.__call__ | logaddexp(lse_BHL, new_lse_BHL, out
    becomes | maximum(lse_BHL, new_lse_BHL, out
merge: a sink's gradient with the other sign | ranks/engine/test_parity_grid.py
    sink_gradient | -(p_BHL
    becomes | (p_BHL
kernel: softmax's backward without the row's mean | unit/test_kernels.py
    ReferenceKernel.backward | - (grad * out).sum(-1, keepdim=True)
    becomes nothing
strategy: causal tiles attended in full | ranks/engine/test_parity_grid.py
    _Binder._bind | tile.cover is Cover.CAUSAL
    becomes | False
strategy: the queries of another tile | ranks/engine/test_parity_grid.py
    _Queries.select | before == (call.bound, call.q_heads, call.tile.q)
    becomes | before is not None
strategy: a kernel is not bound anew | ranks/engine/test_prepared.py -k switch_changes
    _Setup.prepare | key = phase, kernel.switches()
    becomes | key = phase
strategy: keys that a later group of heads has are freed | ranks/engine/test_gpu_rules.py
    make_schedule | group.heads[1] == key_heads
    becomes | True
keys: the layout of the queries for keys of another sequence | ranks/engine/test_other_keys.py -k own
    _named_layouts | [("kv_layout", self.kv_layout)]
    becomes | []
keys: a mask of positions over another sequence | ranks/engine/test_other_keys.py -k bad_layouts
    _attention | crosses = kv_length != q_length or binding.kv_layout is not None
    becomes | crosses = kv_length != q_length
keys: numbers of another sequence without its layout | ranks/engine/test_other_keys.py -k bad_layouts
    _attention | binding.mask.crosses and binding.kv_layout is None
    becomes | False
keys: ranks with other layouts of keys | ranks/engine/test_other_keys.py -k bad_layouts
    facts | None if self.kv_layout is None else describe_cut(self.kv_layout)
    becomes | None
keys: marks of keys are compared with the layout of queries | ranks/engine/test_other_keys.py -k bad_layouts
    row | side=0 if cut[0] is q else -1
    becomes | side=0
keys: selected keys of another sequence are told by the layout of queries | ranks/engine/test_other_keys.py -k selected
    _share | layouts[1], chosen if
    becomes | layouts[0], chosen if
keys: a window that has not ended | ranks/engine/test_other_keys.py -k own
    EndedWindows.bounds | (q_positions_L + 1) // self.size
    becomes | q_positions_L // self.size + 1
keys: a later part begins at 0 | ranks/engine/test_other_keys.py -k own
    Shifted.bounds | q_positions_L + self.first
    becomes | q_positions_L
keys: pieces of one rank in one sequence | ranks/engine/test_other_keys.py -k joined
    join_layouts | (first + start, first + stop)
    becomes | (start, stop)
join: the sink counts twice | ranks/engine/test_other_keys.py -k one_softmax
    join_attentions | lses.append(sink_H[:, None]
    becomes | lses.append(0.7 + sink_H[:, None]
join: a query without keys divides by 0 | ranks/engine/test_other_keys.py -k one_softmax
    join_attentions | weights_PBHL / total_BHL.masked_fill(is_empty, 1.0)
    becomes | weights_PBHL / total_BHL
halo: a rank with fewer parts calls the module less often | ranks/mixers/test_halo.py -k equally
    halo_plan | missing = most - len(calls[peer])
    becomes | missing = 0 if calls[peer] else 1
keys: a later part of a tree is an interval | ranks/engine/test_other_keys.py -k masks_over
    Shifted.__post_init__ | or len(self.inner.bands) > 1
    becomes nothing
groups: windows stay behind after an error | clients/test_groups.py -k leaves_no
    _run_grouped_attention | take_windows(layer)
    becomes | pass
groups: a window without the window before it | clients/test_groups.py -k exact
    _windows_in_a_row | max(start - overlap, 0)
    becomes | start
groups: the number of a window for its position | clients/test_groups.py -k exact
    store_compression_weights | (numbers - torch.arange(len(numbers), device=kv.device)) * self._size
    becomes | numbers * 0
groups: windows without the sink | clients/test_groups.py -k exact
    _attend_to_windows | sink_H=sink_H
    becomes | sink_H=None
groups: padding in windows | clients/test_groups.py -k refused
    _run_grouped_attention | whole.padding is not None or not known.issuperset((*map(type, mask.parts), *own_parts))
    becomes | False
groups: padding in pools | clients/test_groups.py -k refused
    _run_pool_indexer | has_padding or calls.binding.mask.parts
    becomes | calls.binding.mask.parts
groups: pools of queries that are taken for the last ones | clients/test_groups.py -k exact
    get_visible_tokens | keys <= self._positions_L[:, None]
    becomes | keys <= keys[-len(self._positions_L) :, None]
groups: scores of blocks that have not ended decide | clients/test_groups.py -k exact
    select_blocks | tail > at[:, None]
    becomes | tail < 0
messages: a large block over gloo in one all-to-all | ranks/engine/test_attention_costs.py -k largest_block
    has_all_to_all | nbytes <= MOST_OVER_GLOO
    becomes | True
kernel: bands that are masks take the arguments of each other | ranks/engine/test_parity_grid.py -k by_name
    ByTile.bind | bound.run(copy(queries), k, v
    becomes | bound.run(queries, k, v
messages: k and v of a large block in one order | ranks/engine/test_prepared.py -k as_they_lie
    Block.places | self.dims[0] if self.joined else self.sizes[0]
    becomes | self.dims[0]
messages: blocks of several sources lie one after another | unit/test_schedule.py -k match_by_order
    _join_arrivals | x[:half] + y[:1] + x[half:] + y[1:]
    becomes | x + y
kernel: a subclass's own forward is left out | ranks/engine/test_prepared.py -k own_forward
    bind_tile | if "bind" in defined else Kernel.bind(kernel, phase, specs, **options)
    becomes nothing
residual: kept keys that are not aligned | ranks/engine/test_prepared.py -k any_offset
    ResidualPlaces.views | if residual.storage_offset() % _ALIGNMENT:
    becomes | if False:
Ulysses: of several queries' gradients for a key head, one | ranks/engine/test_parity_grid.py
    _Levels.unpair_gradients | index_add_
    becomes | index_copy_
batch: tokens without a label are counted | ranks/engine/test_batch.py
    global_token_count | (counted.sum(),
    becomes | (torch.tensor(labels.numel()),
agreement: ranks at different places go on | ranks/engine/test_disagreement.py
    _are_at_different_calls | len({(row.meeting, row.who) for row in rows}) > 1 or len(which - {0}) > 1
        or len(index - {0}) > 1
    becomes | False
scope: not there in a recomputation | ranks/doors/test_scope.py
    SequenceScope.for_checkpoint | ), self
    becomes | ), contextlib.nullcontext()
latents: gradients of the weight of the first heads | ranks/doors/test_latents.py -k exact
    LatentKernel.with_heads | self.share_HKR[slice(*heads)]
    becomes | self.share_HKR[: heads[1] - heads[0]]
latents: heads of the first rank's weight | ranks/doors/test_latents.py -k exact
    LatentKernel.with_heads | self.weight_HKR[slice(*heads)]
    becomes | self.weight_HKR[: heads[1] - heads[0]]
latents: the rotary gradient of one head | ranks/doors/test_latents.py -k exact
    LatentKernel.backward | .sum(1, dtype=wide)
    becomes | [:, 0]
latents: the weight's gradient of the last tile | ranks/doors/test_latents.py -k exact
    LatentKernel.backward | self.share_HKR[slice(*heads)] +=
    becomes | self.share_HKR[slice(*heads)] =
latents: the gradient of the last range of heads | ranks/doors/test_latents.py -k a_tile
    LatentKernel.backward | dlatent_BMR += dkv_BMN
    becomes | dlatent_BMR = dkv_BMN
""")

# What they do not call: kernels of CUDA, other libraries, collectives, decoding, verify, guards, and what a rank does
# that leaves. And what is seldom: backwards in another order on one rank.
OTHERS = mistakes(r"""
engine: backwards of all forwards are alike | ranks/engine/test_half_way.py -k another_order
    begin_backward | pack_call_number(forward, 0)
    becomes | 0
rows of queries: of another position | ranks/flex/test_query_rows.py -k exact
    _rows_by_position | torch.arange(len(own)
    becomes | 1 - torch.arange(len(own)
rows of queries: another rank's are this rank's first | ranks/flex/test_query_rows.py -k is_nan
    QueryRows.__getitem__ | torch.where(at >= 0, found, float("nan"))
    becomes | found
rows of queries: the tensor itself is marked too | ranks/flex/test_query_rows.py -k beside_its_rows
    QueryRows.__init__ | x.view_as(x)
    becomes | x
rows of queries: ranks compare them | ranks/flex/test_query_rows.py -k exact
    FlexKernel.content | if _for_queries(tensor) is None
    becomes nothing
rows of queries: queries may change ranks | ranks/flex/test_query_rows.py -k other_queries
    _make_setup | in kernel.only_for:
    becomes | in ():
rows of queries: the first rows alone have a layout | ranks/flex/test_query_rows.py -k each_of_several
    _make_setup | in kernel.only_for:
    becomes | in kernel.only_for[:1]:
rows of queries: of another axis of the mesh | ranks/flex/test_query_rows.py -k another_axis
    _make_setup | attention.group.group_name if attention.group else group
    becomes | group
rows of queries: largest scores of other ranks | ranks/flex/test_query_rows.py -k maxima_of_other_queries
    MaxScores.only_for | self.scores.only_for
    becomes | ()
rows of queries: of the first row of the batch | clients/test_query_biases.py -k padding
    _of_row | b + row
    becomes | b
rows of queries: sinks of the first query | clients/test_query_biases.py -k exact
    _sink_logit | sink_H.to(dtype) if sink_H.ndim > 1 else
    becomes | sink_H.to(dtype)[..., :1] if sink_H.ndim > 1 else
rows of queries: Inkling scales queries by their rows on the rank | clients/test_query_biases.py -k exact
    _QueryPositions.get_query_offset | self._positions_L - torch
    becomes | 0 * self._positions_L - 0 * torch
rows of queries: one token too few before a part | clients/test_query_biases.py -k exact
    _run_with_rows_before | layer.conv_kernel_size - 1
    becomes | layer.conv_kernel_size - 2
rows of queries: a convolution sees padding | clients/test_query_biases.py -k padding
    _run_with_rows_before | None if kept is x_BLC else kept
    becomes | None
rows of queries: masks by layer mask no convolution | clients/test_query_biases.py -k padding
    _mask_padding | mask_BS = attention_mask
    becomes | return x_BLC
rows of queries: a block's own mask masks no convolution | clients/test_query_biases.py -k in_blocks
    _mask_padding | return function(x_BLC, attention_mask)
    becomes | return x_BLC
rows of queries: positions through a pack | clients/test_query_biases.py -k packed
    _run_at_positions | (at - starts[torch.searchsorted(starts, at, right=True) - 1])
    becomes | at
rows of queries: documents of a convolution are dropped | clients/test_query_biases.py -k packed
    _run_with_rows_before | binding.layout, documents, binding
    becomes | binding.layout, None, binding
rows of queries: a bias behind the window | clients/test_query_biases.py -k exact
    _add_biases_of_queries | (distance < reach)
    becomes | (distance <= reach)
packs: a sample is cut in two ways | unit/test_whole_documents.py
    _cut | parts[-1 - piece]
    becomes | parts[piece - 1]
packs: work alone decides | unit/test_whole_documents.py
    _place | max(of_rank)
    becomes | of_rank[0]
packs: tokens alone decide | unit/test_whole_documents.py
    _place | max(of_rank)
    becomes | of_rank[1]
packs: more tokens than the most | unit/test_whole_documents.py -k most_tokens
    whole_documents | max(found.lengths) <= most
    becomes | True
packs: the smallest document of a rank is cut | unit/test_whole_documents.py
    whole_documents | max(movable
    becomes | min(movable
packs: samples of copies are there twice | ranks/doors/test_packs.py -k step_is
    pack_samples | if leader == group.rank() else []
    becomes nothing
packs: documents of another order | ranks/doors/test_packs.py -k entries_keep
    pack_samples | sum(of_ranks[:leader])
    becomes | 0
packs: copies are not compared | ranks/doors/test_packs.py -k copies_that_differ
    _compare | if content != ranks[leader][1]:
    becomes | if False:
packs: a large pack is tried as often as a small one | unit/test_whole_documents.py -k few_tries
    whole_documents | min(64, max(1, _MOST_PAIRS // (len(documents) * ranks)))
    becomes | 64
packs: one long document begins whole | unit/test_whole_documents.py -k few_tries
    whole_documents | max(min(count, size, ranks), 1)
    becomes | 1
packs: the layout gets one document | ranks/doors/test_packs.py -k fits_a_rank
    BatchSharder._make_layout | if ids_BS is None else
    becomes | if True else
packs: a pack of more than all ranks hold | ranks/doors/test_packs.py -k step_is
    _split | if tokens + size > room:
    becomes | if tokens > room:
packs: other entries on a rank | ranks/doors/test_packs.py -k bad_samples
    _compare | if kind != expected:
    becomes | if False:
maxima: of the latest tile | ranks/flex/test_max_scores.py -k all_keys
    MaxMerge.__call__ | torch.maximum(lse_BHL, new_lse_BHL, out=lse_BHL)
    becomes | lse_BHL.copy_(new_lse_BHL)
maxima: of the latest pack | ranks/flex/test_max_scores.py -k several_packs
    MaxMerge.__call__ | torch.maximum(lse_BHL.index_select(2, index), new_lse_BHL)
    becomes | new_lse_BHL
maxima: of the latest block of keys | ranks/flex/test_max_scores.py -k few_scores
    _max_of_blocks | torch.maximum(block, scores.amax(-1), out=block)
    becomes | block.copy_(scores.amax(-1))
maxima: a block at the end of a window is left out | ranks/flex/test_max_scores.py -k few_scores
    _max_of_blocks | most < -before or least > after: continue
    becomes | most < -before or most > after: continue
maxima: causal tiles without their mask | ranks/flex/test_max_scores.py -k all_keys
    MaxScores.forward | (-1, 0) if causal else window or (-1, -1)
    becomes | window or (-1, -1)
maxima: a bias is no part of the scores | ranks/flex/test_max_scores.py -k all_keys
    _max_of_blocks | scores += bias[:, :, first:last, first_key:last_key]
    becomes | pass
maxima: values travel with the keys | ranks/flex/test_max_scores.py -k alone_travel
    max_scores | (q_BHLD, k_BGMD, k_BGMD[..., :0])
    becomes | (q_BHLD, k_BGMD, k_BGMD)
maxima: received keys are kept | ranks/flex/test_max_scores.py -k not_kept
    max_scores | binding = binding.without_kept_keys()
    becomes | pass
maxima: products of 16 bits are rounded | ranks/flex/test_max_scores.py -k all_keys
    _max_of_blocks | scores = matmul(q, k_BGMD[:, :, first_key:last_key].to(dtype).mT)
    becomes | scores = (q.to(q_BHLD.dtype) @ k_BGMD[:, :, first_key:last_key].mT).to(dtype)
maxima: all queries of a tile at once | ranks/flex/test_max_scores.py -k memory
    _max_of_blocks | max(1, _SCORES // (batch * heads * columns))
    becomes | queries
maxima: before the score_mod | ranks/flex/test_max_scores.py -k flex_attention
    flex_attend | modified=modified
    becomes | modified=None
maxima: of masked scores too | ranks/flex/test_max_scores.py -k flex_attention
    _Tile.max_scores | scores.masked_fill(masked, float("-inf")).amax(-1)
    becomes | scores.amax(-1)
maxima: that only some ranks ask for | ranks/flex/test_max_scores.py -k what_is_wrong
    flex_attend | if wants.max_scores:
    becomes | if wants.max_scores and binding.group.rank() > 0:
merge: what rows of a pack had before keeps its weight | unit/test_merge.py ranks/flex/test_varlen_kernel.py
    TorchMerge.__call__ | out_BHLE.mul_(weight.unsqueeze(-1))
    becomes | pass
plan: stripes of keys like those of queries | unit/test_plan.py
    make_holders | all(isinstance(layout.held, Stripes) and layout.held.block == 1 for layout in (q_layout, kv_layout))
    becomes | isinstance(q_layout.held, Stripes) and q_layout.held.block == 1
kernels: a window that no kernel is told of | unit/test_cuda_kernels.py ranks/flex/test_varlen_kernel.py
    _BoundOp.__init__ | if window is not None:
    becomes | if False:
kernels: bands of other widths in one pack | ranks/flex/test_varlen_kernel.py
    make_calls | (tile.cover, tile.window),
    becomes | tile.cover,
doctor: a row that fails is no failure | ranks/test_doctor.py -k "a_rank_that_fails or exit_status"
    examine | int(count["FAIL"] > 0)
    becomes | 0
doctor: ranks go on that have left messages half way | ranks/test_doctor.py -k a_rank_that_fails
    World.run | not isinstance(error, _HARMLESS)
    becomes | False
doctor: a wrong result ends all checks | ranks/test_doctor.py -k a_strategy_that_is_wrong
    World.run | not isinstance(error, _HARMLESS)
    becomes | True
doctor: peers wait for a rank that has left | ranks/test_doctor.py -k half_way
    World.run | abort_group(dist.group.WORLD, error)
    becomes | pass
doctor: a rank that has failed says nothing at once | ranks/test_doctor.py -k exit_status
    World.run | self.complain(text)
    becomes | pass
doctor: a rank that does not come is waited for | ranks/test_doctor.py -k does_not_come
    World.gather | timedelta(seconds=patience)
    becomes | timedelta(seconds=1000)
doctor: ranks go on without a rank that is missing | ranks/test_doctor.py -k does_not_come
    World.gather | len(rows) < self.size or
    becomes nothing
doctor: the errors of peers are not read | ranks/test_doctor.py -k "a_rank_that_fails or exit_status"
    World.gather | if any(errors.values()):
    becomes | if errors[self.rank]:
doctor: a hang on a device has no end | ranks/test_doctor.py -k hangs
    World._set_deadline | self.seconds if self.device.type == "cuda" else
    becomes nothing
doctor: a rank that waits for its peers ends itself | ranks/test_doctor.py -k hangs
    World.gather | before, self.deadline, self._gathers = self.deadline, inf, self._gathers + 1
    becomes | before, self._gathers = self.deadline, self._gathers + 1
doctor: a process that hangs does not end | ranks/test_doctor.py -k hangs
    end_if_late | os._exit(1)
    becomes | pass
doctor: reasons come after the errors of peers | ranks/test_doctor.py -k half_way
    examine | any(word in item[1] for word in _TRANSPORTS)
    becomes | 0
doctor: an attention of any error passes | ranks/test_doctor.py -k a_strategy_that_is_wrong
    check_attention | error <= limit
    becomes | True
doctor: gradients are not compared | ranks/test_doctor.py -k a_strategy_that_is_wrong
    check_attention | (("out", "dq", "dk", "dv"), found, alone, exact, strict=True)
    becomes | (("out",), found, alone, exact)
doctor: 16 bits have no limit | ranks/test_doctor.py -k a_strategy_that_is_wrong
    check_attention | _LIMITS.get(dtype, _RATIO * usual)
    becomes | _LIMITS.get(dtype, 1.0)
doctor: the bytes of a message are not read | ranks/test_doctor.py -k "a_fault and bytes"
    check_pairs | (received == peer % 256).all()
    becomes | True
doctor: blocks are not read | ranks/test_doctor.py -k "a_fault and blocks"
    check_blocks | not torch.equal(wait_tensor(start()).cpu(), wanted)
    becomes | False
doctor: rows of the agreement are not read | ranks/test_doctor.py -k "a_fault and mixed"
    agree | != expected
    becomes | is None
doctor: an agreement over NCCL passes | ranks/test_doctor.py -k "a_fault and gloo"
    check_agreement | world.size > 1 and not
    becomes | False and not
doctor: other versions pass | ranks/test_doctor.py -k versions
    check_versions | text != (first := world.gather(text)[0])
    becomes | text != (first := text)
doctor: ranks share a GPU | ranks/test_doctor.py -k without_a_gpu
    check_devices | <= world.device.index
    becomes | < 0
doctor: pairs of many ranks share a rank | ranks/test_doctor.py -k pairs_that
    rounds_of | range(first, size - size % 2, 2)
    becomes | range(first, size, 2)
doctor: links between nodes count as links inside | ranks/test_doctor.py -k options_that
    check_options | is near
    becomes | is True
doctor: kernels by a list of its own | ranks/test_doctor.py -k kernels_are
    check_kernels | dict.fromkeys(call.kernel for run in runs for call in run.forward.calls)
    becomes | ["_scaled_dot_product_flash_attention_for_cpu"]
doctor: the model is not compared | ranks/test_doctor.py -k "a_fault and model"
    check_model | verify(model, world.mesh, tokens, step)
    becomes | type("Report", (), {"line": ": equal to one device", "worst": 0.0})
doctor: measured links are dropped by explain | ranks/test_doctor.py -k options_that
    machine_of | replace(MACHINES[args.hardware], **given)
    becomes | replace(MACHINES[args.hardware])
verify: an attention is not cut | ranks/verify/test_planted.py -k "causal or third"
    Resolved._attention | mask = planted.mask(mask, q_length, kv_length)
    becomes | pass
verify: an attention that ran before is not cut | ranks/verify/test_planted.py -k again
    Resolved.attention | or self.binding.role.planted is not None
    becomes nothing
verify: a mixer is not cut | ranks/verify/test_planted.py -k "roll or convolution or recurrence"
    CutSequence._agree | sizes if planted is None else planted.documents(sizes)
    becomes | sizes
verify: a new token attends across the cut | ranks/verify/test_planted.py -k decode
    decode | mask if planted is None else planted.mask(mask, cache.length, cache.length)
    becomes | mask
verify: a sequence is not cut where the parts end | ranks/verify/test_planted.py -k contiguous
    PlantedCut._lengths | edges or {length // 3 or 1}
    becomes | {length // 3 or 1}
verify: the planted mistake stays | ranks/verify/test_planted.py -k gone
    _replace_group | replacing.planted = planted_before
    becomes | pass
verify: what is in a dict stays | ranks/verify/test_verify.py -k left_behind
    ModelState.restore | container.clear()
    becomes | pass
verify: a proof that sees nothing passes | ranks/verify/test_verify.py -k blind
    _Verification._with_power | not (seen or power.loss) and
    becomes | False and
verify: another model of the step is proved too | ranks/verify/test_verify.py -k only_what
    _Verification.report | model is None or self._others.isdisjoint(map(id, model.parameters()))
    becomes | True
ranks as threads: a wait counts from when it was seen | ranks/engine/test_testing.py -k sees_late
    _Look.waited | now - self.before >= seconds
    becomes | now - self.first >= seconds
ranks as threads: a wait of which little was seen counts | ranks/engine/test_testing.py -k sees_late
    _Look.waited | > 0.75 * seconds
    becomes | >= 0.0 * seconds
ranks as threads: the count of a higher-order operator stays | ranks/engine/test_testing.py -k graph_breaks
    thread_local_world | set_count(count)
    becomes | None
ranks as threads: the default device stays | ranks/engine/test_testing.py -k in_turns
    thread_local_world | _device.CURRENT_DEVICE = default_device
    becomes | pass
compile: modules of all classes have one code object | ranks/compile/test_compile.py -k many_classes
    insert_mixin | member.__code__.replace()
    becomes | member.__code__
verify: a situation is noted without a look | ranks/verify/test_situations.py -k warns_once
    Proof._note | situations is self.proved_in and
    becomes | situations is not self.proved_in and
verify: a length is beyond one earlier length | ranks/verify/test_situations.py -k says_nothing
    Situations.judge | rows > _FACTOR * most
    becomes | rows > most
verify: float64 has the tolerance of float32 | ranks/verify/test_verify.py -k float64
    tolerance_for | 1e-5 if
    becomes | 1e-4 if
verify: blocks of tokens may end anywhere | ranks/verify/test_situations.py -k divide
    Situations.judge | rows % multiple
    becomes | rows < 0
verify: the whole batch of a proof is no length | ranks/verify/test_situations.py -k odd_number
    _Verification._run_and_compare | x.length for x in layouts if
    becomes | x.lengths[rank] for x in layouts if
verify: what trains counts as proved | ranks/verify/test_situations.py -k training_proves
    Proof.attends | new += situations.judge(rows)
    becomes | new += situations.judge(rows); situations.lengths.add(rows)
verify: a step of the optimizer is not seen | ranks/verify/test_situations.py -k says_nothing
    Proof._accumulates | version_of(parameter) == self._version
    becomes | version_of(parameter) >= 0
verify: a second proof takes the place of the first | ranks/verify/test_situations.py -k second_proof
    Proof.proved | self.proved_in.facts |= situations.facts
    becomes | self.proved_in = situations
verify: gradients outside of the model are not compared | ranks/verify/test_verify.py -k only_what
    _Verification._with_outside | {**run.gradients, **outside}
    becomes | run.gradients
verify: gradients outside of the model are lost | ranks/verify/test_verify.py -k only_what
    OutsideParameters.__exit__ | parameter.grad = before
    becomes | parameter.grad = None
verify: equal parts prove that a mean is one of all | ranks/doors/test_first_hour.py -k Mean
    BatchSharder.sum_gradients | proof.verified and not proof.unseen
    becomes | proof.verified
verify: a later proof forgets what an earlier one saw | ranks/doors/test_first_hour.py -k Mean
    Proof.proved | self.unseen & unseen if self.verified else unseen
    becomes | unseen
verify: collectives over another group are not seen | ranks/verify/test_verify.py -k group
    _Verification._plant | self._refuse(groups.found)
    becomes | pass
verify: reducers of torch are refused | ranks/verify/test_verify.py -k "collectives or fsdp"
    _describe_caller | f"{module}.".startswith(_LIBRARIES)
    becomes | False
mixers: what came before a fragment does not decay in it | ranks/mixers/test_recurrence.py
    _KernelCall.compose | factor @ before
    becomes | before
mixers: a map reaches back less far than it is taken to | ranks/mixers/test_recurrence.py
    plan_rounds | distance *= 2
    becomes | distance *= 3
mixers: a recomputation may end before its last exchange | ranks/test_random.py -k mixers
    _KeepInGraph.forward | ctx.save_for_backward(x.new_empty(0))
    becomes | ctx.save_for_backward()
mixers: layouts of balancers are not compared | ranks/mixers/test_recurrence.py -k balancers
    agree_on_layouts | agree_on_facts(make_layouts, Meeting.LAYOUT, where) if may_differ else make_layouts()
    becomes | make_layouts()
mixers: ranks that wait for a kernel's state do not hear of its error
        | ranks/mixers/test_recurrence.py -k error_in_a_kernel
    CutSequence.compared_call | with Operation(self.group, state):
    becomes | if True:
mixers: arguments that cannot be understood are passed on
        | ranks/mixers/test_by_name.py ranks/mixers/test_signatures.py ranks/mixers/test_recurrence.py -k refused
    refuse_arguments | if used:
    becomes | if False:
mixers: one rank runs what replaces a layer | clients/test_own_code.py -k "noticed and not biases and not latents"
    _runs_own_code | binding.group.size() == 1
    becomes | False
mixers: a planted mistake is not put into what replaces a layer | clients/test_own_code.py -k shift
    _runs_own_code | and binding.role.planted is None
    becomes nothing
mixers: one rank does not know the documents of a scope | clients/test_own_code.py -k documents_on_one_rank
    _runs_own_code | find_documents(binding.name, calls.binding.mask) is None
    becomes | True
mixers: one rank does not know documents in arguments | clients/test_own_code.py -k in_arguments
    _call_handler | any(arguments.get(name) is not None for name in DOCUMENT_ARGUMENTS)
    becomes | False
mixers: one rank takes a cache that its layers do not know | clients/test_mixers.py -k keeps_its_states
    _runs_own_code | and find_cache(calls.inputs) is None
    becomes nothing
mixers: one rank calls a kernel for fragments | ranks/mixers/test_by_name.py -k one_rank
    Cut.whole | self.peers.size == len(self.documents) == 1
    becomes | False
selection: one rank gathers the keys of an indexer | clients/test_own_code.py -k indexer
    Cut.whole | self.peers.size == len(self.documents) == 1
    becomes | False
transformers: one rank computes biases and latents anew | clients/test_own_code.py -k "biases or latents"
    attention_function | binding.group.size() == 1
    becomes | False
transformers: one rank must know the table of biases | clients/test_own_code.py -k a_hook
    attention_function | or sinks is not None or own.requires_grad or bool((own != 0).any())
    becomes nothing
CUDA: a dead row's logsumexp is a number | unit/test_cuda_kernels.py
    _BoundBackward.queries | .masked_fill(lse_BHL <= EMPTY_LSE / 2, float("inf"))
    becomes nothing
rollouts: earlier turns have no backward | ranks/doors/test_rollouts.py -k turns
    SharedRollouts._loss_in_turns | turn < len(turns) - 1 and torch.is_grad_enabled()
    becomes | False
rollouts: each turn is a whole step | ranks/doors/test_rollouts.py -k turns
    SharedRollouts._loss_in_turns | loss / len(turns)
    becomes | loss
rollouts: earlier turns are not scaled for accumulation | ranks/doors/test_rollouts.py -k turns
    SharedRollouts._loss_in_turns | loss / scale
    becomes | loss
rollouts: a rank has the loss of the last turn | ranks/doors/test_rollouts.py -k turns
    SharedRollouts._loss_in_turns | own if turn != group.rank() else loss.detach()
    becomes | loss.detach()
rollouts: log-probabilities of another rank's rows | ranks/doors/test_rollouts.py -k turns
    SharedRollouts._get_per_token_logps_and_entropies | results[group_now(binding.group).rank()]
    becomes | results[-1]
rollouts: log-probabilities have this rank's gradients alone | ranks/doors/test_rollouts.py -k turns
    of_whole_rows | reduce_gradients=True
    becomes | reduce_gradients=False
rollouts: ranks generate together | ranks/doors/test_rollouts.py -k generates
    SharedRollouts._generate | on_this_rank(self._trainer.model)
    becomes | nullcontext()
on one rank: functions have all ranks | clients/test_on_this_rank.py -k functions
    on_this_rank | stack.enter_context(as_one_rank(mesh, mesh, is_off=True))
    becomes | pass
positions: padding in front moves the positions of OPT | clients/test_transformers.py -k counts_the_mask
    PositionCheck._refuse_uncounted | (shown & (counted != positions)).any()
    becomes | False
rollouts: samples with fewer tokens than the ranks | ranks/doors/test_rollouts.py -k few_tokens
    with_tokens_for_all | missing <= 0
    becomes | True
on one rank: the model's attention stays ours | clients/test_on_this_rank.py -k own
    on_this_rank | attention.get(name) is attention_function
    becomes | False
on one rank: the style stays off | clients/test_on_this_rank.py -k back
    _replace_group | vars(role).update(before)
    becomes | pass
on one rank: gradients are taken | clients/test_on_this_rank.py -k gradients
    on_this_rank | torch.no_grad(), ExitStack()
    becomes | ExitStack()
on one rank: modules intercept attention | clients/test_on_this_rank.py -k layers_with_states
    _InterceptedForward.forward | calls.role.is_off
    becomes | False
on one rank: a verified step attends with all ranks | clients/test_on_this_rank.py -k verified
    _replace_group | role.stand_in is not None and not is_off
    becomes | role.stand_in is not None
rollouts: a reward model is given other rows on each rank | ranks/doors/test_rollouts.py -k reward_model
    SharedRollouts._calculate_rewards | each if binding is None else OwnRows(each, binding.group)
    becomes | each
rollouts: rows are not compared | ranks/doors/test_rollouts.py -k refused_on_all
    rows_of_ranks | {"the entries": [(key, str(x.dtype)) for key, x in rows.items()]}
    becomes | {}
rollouts: log-probabilities are not proved | ranks/doors/test_rollouts.py -k are_proved
    ContextParallelTrainer._prove | self._loss_to_prove(model, batch)
    becomes | next(iter(model.parameters())).sum()
backbone: a container of a class of its own is a leaf | ranks/doors/test_backbone.py -k does_not_open
    _holds_gradients | isinstance(held, Mapping)
    becomes | False
backbone: much is not looked through | ranks/doors/test_backbone.py -k does_not_open
    _holds_gradients | return bool(waiting)
    becomes | return False
verify: metrics of TRL are the step's | ranks/verify/test_verify.py -k metrics_of
    _describe_caller | f"{module}.".startswith(_LIBRARIES)
    becomes | module.startswith("torch")
trainers: a proof without keys of other ranks is refused | clients/test_trainers.py -k accelerate
    ContextParallelTrainer._prove | or error.report.power.takes
    becomes | or True
trainers: samples are not compared | ranks/doors/test_batch_sharder.py
    BatchSharder.__call__ | {f"the samples ({name})": describe_content(x) for name, x in whole.items()}
    becomes | {}
tree: a window of a conjunction is left out | unit/test_tree.py -k window
    Tree.joined | self if left == self.left else Tree(self.lengths, self.parents, left)
    becomes | self
tree: full blocks of a BlockMask next to a tree | unit/test_tree.py -k full_blocks
    _tiles_of_cells | (part.has_bias or len(part.bands) > 1)
    becomes | part.has_bias
tree: keys that a BlockMask and a tree hide together | unit/test_tree.py -k every_pair
    Mask.needed | or len(part.bands) > 1
    becomes nothing
tree: the next token of the sequence is predicted | unit/test_tree.py
    predicted_tokens | tree.predecessors
    becomes | torch.arange(-1, tree.length - 1)
tree: a shared token has the weight of its last rollout | unit/test_tree.py -k weights
    Tree.weights | of_nodes[parent] + of_nodes[node]
    becomes | of_nodes[node]
tree: a chunked mask is intersected | unit/test_tree.py -k mean_something_else
    Tree.joined | part.local or isinstance
    becomes | isinstance
tree: a scope without the tree | ranks/doors/test_batch_sharder.py -k tree_without_a_scope
    ShardedBatch.scope | self._document_ids, self._tree
    becomes | self._document_ids, None
tree: labels of the tokens of a part | ranks/doors/test_batch_sharder.py -k 'tree_has_labels or loss_of_a_tree'
    BatchSharder.__call__ | index_select(1, tokens)
    becomes | index_select(1, rows)
tree: trees of the ranks are not compared | ranks/doors/test_batch_sharder.py -k other_trees
    describe_content | return repr(value)
    becomes | return type(value).__name__
tree: states go from branch to branch | clients/test_preferences.py -k branch
    find_documents | find_tree(mask) is not None
    becomes | False
tree: a state under a style with a tree | ranks/doors/test_batch_sharder.py -k carry_a_state
    CutSequence.from_call | find_documents(name, mode.unscoped.mask)
    becomes | pass
tree: positions of the sequence in a tree | clients/test_preferences.py -k not_in_the_rollouts
    _expected_positions | tree is None or
    becomes | True or
tree: runs of positions are documents in front of blocks | clients/test_preferences.py -k backbone
    _make_whole_mask | tree is not None and attention_mask is None
    becomes | False
tree: new tokens see siblings | ranks/doors/test_decode.py -k 'refused and tree'
    _check_call | any(len(row.bands) > 1 for row in mask.rows)
    becomes | False
tree: a dry run has one mask for all bands | ranks/explain/test_explain_is_what_runs.py -k short_branches
    _UnfilledMask.bands | * len(self.inner.bands)
    becomes nothing
transformers: a mask that is dropped is not missed | clients/test_transformers.py -k dropped
    attention_function | attention_mask is None and is_causal and calls.forward_state.layer_mask is not None
    becomes | False
transformers: a mask that a model cuts in full is refused | clients/test_gemma4.py -k 'cuts_its or test_text'
    _keeps_all | part.indices(size) == (0, size, 1)
    becomes | part == slice(None)
transformers: any cut of a mask keeps it | clients/test_gemma4.py -k cuts_its
    _keeps_all | part.indices(size) == (0, size, 1)
    becomes | True
transformers: inputs of each layer stay whole | clients/test_gemma4.py -k multimodal
    cut_inputs_of.cut | if dim is not None and
    becomes | if dim is not None and name != "per_layer_inputs" and
transformers: a prompt keeps the last query of each part | clients/test_generate.py -k gemma4
    prefill | torch.tensor([-1], device=input_ids.device)
    becomes | 1
transformers: pictures of one part | clients/test_gemma4.py -k refused
    _make_prompt_mask | {flag >> _FLAGS for flag in flags} - {0, whole}
    becomes | set()
transformers: pictures by positions in documents | clients/test_gemma4.py -k refused
    _build_mask | documents is not None and pieces.unpacked
    becomes | False
transformers: several pictures that see each other are one interval | clients/test_pictures.py -k ready
    _find_blocks | ids[inside].unique().numel() < int(inside.sum())
    becomes | False
positions: patches are tokens | ranks/doors/test_guards.py -k other_things
    PositionCheck.of | if not _NOT_OF_TOKENS.intersection(name.split("_"))
    becomes nothing
positions: a model counts the tokens of its part | clients/test_transformers.py -k count
    _CutTokens.hand_over | layout.positions(self._calls.unscoped.group.rank(), device)
    becomes | torch.arange(layout.lengths[self._calls.unscoped.group.rank()], device=device)
positions: a hook of the user's is overruled | clients/test_transformers.py -k counts_its
    _CutTokens.hand_over | torch.where((given == counted).all(), positions, given)
    becomes | positions
functions: attention over any ranks counts | ranks/doors/test_module_door.py -k functions_alone
    AttentionCalls.note_function | group_name == self.unscoped.group_name
    becomes | True
functions: a forward counts those of the one before | ranks/doors/test_module_door.py -k functions_alone
    AttentionCalls.begin_forward | self.forward_state.functions = False
    becomes | pass
backbone: tables without rows for the first tokens, from the first token on | clients/test_pictures.py -k dinov3
    _Region._cut.cut | layout.positions(rank, "cpu") - (length - size)
    becomes | layout.positions(rank, "cpu")
agreement: messages leave before the rows of the others are read | ranks/engine/test_agreement.py -k no_message_is_left
    exchange | operations.check is not None: operations.run_deferred_check()
    becomes | False: pass
agreement: an interrupted rank leaves messages out | ranks/engine/test_mailbox.py
    Mailbox.start | (number - 1, number)
    becomes | (number,)
backbone: outputs have whole gradients | ranks/doors/test_backbone.py -k each_way
    Backbone._end | factor=self._averaged / group.size()
    becomes | factor=1.0
backbone: a reducer that averages is not found | ranks/doors/test_backbone.py -k each_way
    Backbone._count_averaged | return max(over, 1)
    becomes | return 1
backbone: the DDP module of the attention is taken | ranks/doors/test_backbone.py -k frozen
    Backbone._count_averaged | running_ddp()
    becomes | self._proof.reducer and self._proof.reducer()
backbone: a recomputation looks for the reducer | ranks/doors/test_backbone.py -k reentrant
    Backbone._end | if graph_task_id() < 0 and (
    becomes | if (
backbone: gradients of the ranks are not summed behind the blocks | ranks/doors/test_backbone.py -k each_way
    _Region._gather | reduce_gradients=True
    becomes | reduce_gradients=False
backbone: inputs are not compared | ranks/doors/test_backbone.py -k refused
    Backbone.begin | describe_content(x)
    becomes | None
backbone: gradients of outputs are not compared | ranks/doors/test_backbone.py -k refused
    Backbone._compare | len(set(columns.q_length)) == 1
    becomes | False
backbone: gradients are compared behind outputs that differ | ranks/doors/test_backbone.py -k dropout
    Backbone._compare | len(set(columns.q_length)) == 1
    becomes | True
backbone: a failure outside of the blocks is not reported | ranks/doors/test_backbone.py -k fails
    Backbone._end | tell_peers(self.name, group, error) return None
    becomes | return None
backbone: a head outside may be summed | ranks/doors/test_backbone.py -k outside
    Backbone._share | reduced=factor == 1
    becomes | reduced=True
backbone: an output may be an input | ranks/doors/test_backbone.py -k refused
    Backbone._refuse_inputs | "_ShareBackward"
    becomes | "None"
backbone: an encoder of another length is cut as the tokens | clients/test_heads.py -k another_length
    _Region._cut.cut | own = layout if size == length else binding.layout_for(x.shape[dim])
    becomes | own = layout
backbone: hidden states between the blocks stay parts | ranks/doors/test_backbone.py -k between
    _Region.end | for part, dim in alive
    becomes | for part, dim in alive[:0]
backbone: what is made for a part in the loop is taken | ranks/doors/test_backbone.py -k made_in_the_loop
    _Region._refuse_other_parts | if x.dtype == torch.bool or
    becomes | if True or
backbone: hidden states behind a reentrant checkpoint are unknown | ranks/doors/test_backbone.py -k positions_between
    _Region._cut | self._nodes |= {hidden.grad_fn} - {None}
    becomes | pass
backbone: a text that a block returns is cut again | ranks/doors/test_backbone.py -k text_of
    _Region._join | facts_about(x)[_IS_PART] = True
    becomes | pass
recurrence: arguments of the outputs are columns of a map | ranks/mixers/test_recurrence.py -k left_out
    _KernelCall.affine_map | **self._left_out(both.shape[-1]),
    becomes nothing
batch: documents without a scope pass | ranks/doors/test_batch_sharder.py -k without_a_scope
    BatchSharder._refuse_joined_documents | > before >= state.get_or_create(Forwards).separated
    becomes | < before
batch: documents of several batches pass | ranks/doors/test_batch_sharder.py -k without_a_scope
    BatchSharder.sum_gradients | self._first_at if self._all_packed else
    becomes nothing
batch: documents in a mask of the call are not seen | ranks/doors/test_batch_sharder.py -k without_a_scope
    Call.judge | self.attn_mask is not None or binding.separates
    becomes | binding.separates
batch: any averaged_over is taken | ranks/doors/test_first_hour.py -k held_against
    _refuse_other_average | if divided:
    becomes | if True:
batch: parameters are not compared over the ranks of a loss | ranks/doors/test_loss_over_dp.py -k training
    _ComparedModels.refuse_diverged | if diverged:
    becomes | if False:
batch: shards of FSDP2 are not compared with their replicas | ranks/doors/test_loss_over_dp.py -k training
    replicas_of | if held_by < len(ranks) and
    becomes | if not place and
batch: parameters that differ from the beginning count | ranks/doors/test_loss_over_dp.py -k experts
    _ComparedModels.refuse_diverged | if each.equal_before
    becomes nothing
batch: named parameters are compared over a loss | ranks/doors/test_loss_over_dp.py -k experts
    replicas_of | for item in local for x in
    becomes | for item in () for x in
watch: functions in a module have no model | ranks/engine/test_unreduced.py -k nobody_reduces
    ParameterWatch.number | _running_model() if call.model is None else call.model
    becomes | call.model
watch: only the part with the style is compared | ranks/engine/test_unreduced.py -k parts_of_a_model
    _model_of | model = _running_model()
    becomes | model = None
watch: a style on each layer has a count of its own | ranks/engine/test_unreduced.py -k interval
    ParameterWatch.number | key if model is None else model
    becomes | key
watch: a layer that is unfrozen is no news | ranks/engine/test_unreduced.py -k unfrozen
    _Count.has_news | or parameter.requires_grad != trained
    becomes nothing
watch: the first change of a parameter is no news | ranks/engine/test_unreduced.py -k 'news and first'
    _Count.has_news | news |= changed or
    becomes | news |=
watch: one model a turn is looked at | ranks/engine/test_unreduced.py -k two_models
    ParameterWatch.number | if count.step != self._step:
    becomes | if not self._forwards.open:
watch: forwards of reentrant checkpoints do not count | ranks/engine/test_unreduced.py -k reentrant
    ParameterWatch.number | self._recomputes = trains
    becomes | pass
watch: ranks with other parameters compare nothing | ranks/engine/test_unreduced.py -k share
    shared_replicas | if key in shared
    becomes | if False
watch: parts of FSDP1 are compared | ranks/engine/test_unreduced.py -k fsdp1
    replicas_of | left_out |= _cut_by_fsdp1(model, ranks)
    becomes | pass
watch: an error is told once | ranks/engine/test_unreduced.py -k told_again
    ParameterWatch.judge | count.attentions = 0
    becomes | pass
batch: a sum follows a loss for a mean | ranks/doors/test_loss_over_dp.py -k training
    _refuse_other_reducers | if means is not None and
    becomes | if False and
batch: a sum is refused after an earlier loss for a mean | ranks/doors/test_loss_over_dp.py -k by_hand
    _refuse_other_average | proof.by_hand.averaged_over != averaged_over
    becomes | False
batch: ranks have models of a loss in other orders | ranks/doors/test_loss_over_dp.py -k one_class
    _refuse_other_average | for proof in forwards.training:
    becomes | for proof in list(forwards.training)[:: 1 - 2 * (dist.get_rank() % 2)]:
batch: losses are no notes of verify | ranks/doors/test_loss_over_dp.py -k axis
    note_loss | notes.losses.append((dist.get_process_group_ranks(group), count))
    becomes | pass
batch: a verified block hides its model | ranks/doors/test_loss_over_dp.py -k block
    _BlockCalls.check_call | module.training and torch.is_grad_enabled()
    becomes | module.training and not self._entry.verified and torch.is_grad_enabled()
verify: gradients of other axes are not looked at | ranks/doors/test_loss_over_dp.py -k Verify
    _judge | if not max(sums) - min(sums) <= _TOLERANCE * max(norms[key], floor):
    becomes | if False:
verify: token counts of other axes are not looked at | ranks/doors/test_loss_over_dp.py -k Verify
    _judge | any(each != counts[0] for each in counts)
    becomes | False
backbone: detached hidden states are refused | ranks/doors/test_backbone.py -k between_the_blocks
    _Region._refuse_other_parts | if any(_share_memory
    becomes | if False and any(_share_memory
batch: weights stay where they are | ranks/doors/test_batch_sharder.py -k belong_to_labels
    BatchSharder._add_entries | torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), 1)
    becomes | x
kernel: any result of a kernel from outside is taken | ranks/engine/test_contributing.py -k outside_returns
    check_result | if not fits:
    becomes | if False:
kernel: the logsumexp of float64 tiles in float32 | ranks/engine/test_contributing.py -k outside_returns
    check_result | [sums] if name == "lse"
    becomes | [x.dtype] if name == "lse"
strategy: any rounds are taken | ranks/engine/test_contributing.py -k each_distance_once
    MovingKV.on | if sorted(named, key=str) != sorted(range(1, ranks), key=str):
    becomes | if False:
kernel: a kernel's own takes is not asked | ranks/engine/test_contributing.py -k leaves_tiles
    Kernel.takes_all | type(self).takes is Kernel.takes
    becomes | True
engine: attention along another dim is taken | ranks/doors/test_unseen.py -k another_dim
    _refuse_other_dims | and q.shape[0] % tokens == 0
    becomes | and False
contents: the memory itself is kept | ranks/flex/test_changed_in_place.py
    Contents.__init__ | _numbers(tensor).clone()
    becomes | _numbers(tensor)
contents: what the device has found is not raised | ranks/engine/test_gpu_doors.py -k kernel_fills
    raise_what_was_found | if result():
    becomes | if False:
contents: levels of an additive mask are kept on a CPU | ranks/flex/test_changed_in_place.py -k additive
    _make_setup | q.device.type != "cpu" and not
    becomes | not
backbone: a mask in front of the blocks has no documents | clients/test_heads.py -k packed
    _make_whole_mask | pieces.documents is not None and attention_mask is None
    becomes | False
backbone: a mask in front of the blocks has no padding | clients/test_heads.py -k exact
    _make_whole_mask | bool(attention_mask.all())
    becomes | True
backbone: a Trainer counts the tokens of each rank | clients/test_trainers.py -m nightly -k more
    ContextParallelTrainer.get_tp_size | if has_copies else 1
    becomes | if False else 1
batch: some gradients are sums, and others are not | ranks/engine/test_half_way.py -k no_optimizer
    sum_gradients | parameter.grad = None
    becomes | pass
compiled: a graph's backward remembers no scope | ranks/compile/test_compile.py -k documents
    _attention | _pickle_scope(scope, binding.name)
    becomes | b""
checkpoint: received keys outlive the layer | ranks/doors/test_selective_checkpoint.py -k outlive
    results_are_kept | return any(
    becomes | return False and any(
ring: heads in turns have the mask of the first ones | ranks/engine/test_attention_parity.py -k by_turns
    MovingKV.forward | before + queries.start, before + min(queries.stop, q_BHLD.shape[1])
    becomes | 0, at_once * share
decoding: room for new tokens counts as keys | ranks/doors/test_decode.py
    KVCache._view_used | self._count_unused() : self._used_rows]
    becomes | self._count_unused() :]
engine: a rank leaves an operation, and nobody hears of it | ranks/engine/test_half_way.py -k 'stand_still or goes_on'
    abort_group | end_connections(gloo)
    becomes | pass
style: an error behind the first attention is not told | ranks/engine/test_turns.py -k core
    CoreState._handle_failure | self._binding.unscoped.tell_peers(failure)
    becomes | self.calls.forward_state.calls or self._binding.unscoped.tell_peers(failure)
agreement: a rank that has heard of an error tells it again | ranks/engine/test_turns.py -k backbone
    _StartedMeeting.__call__ | self.turn.note_known(error)
    becomes | pass
agreement: an error that wraps a known one is told again | unit/test_turn.py
    Turn.must_tell | for each in _chain(error)
    becomes | for each in [error]
agreement: a known error hides the errors of the next step | unit/test_turn.py
    Turn.begin | self._number += 1
    becomes | pass
agreement: peers are not told the reason | ranks/engine/test_turns.py -k eager
    _read_reason | return mailbox.read_text(rank)
    becomes | pass
agreement: an interrupt leaves a reason unread | ranks/engine/test_half_way.py -k reads_why
    _StartedMeeting.__call__ | if not isinstance(error, Exception):
    becomes | if False:
agreement: a rank ends between the agreement and its messages | ranks/engine/test_half_way.py -k between_the_agreement
    _attention | Operation(binding.group, binding.group_state, meets=True)
    becomes | Operation(binding.group, binding.group_state, 0, (RuntimeError,), meets=True)
engine: all ranks refuse a call, and none can go on | ranks/engine/test_half_way.py -k can_go_on
    _attention | binding.group_state.turn.note_known(error)
    becomes | pass
checkpoint: an error in a recomputation is not told | ranks/engine/test_turns.py -k recomputed
    _Recomputed.__call__ | stack.enter_context(mode.unscoped.telling())
    becomes | pass
checkpoint: the end of a recomputation is an error | ranks/engine/test_turns.py -k to_nobody
    tell_peers | or stops_recomputation(error)
    becomes nothing
functions: an error of the call before hides the next one | ranks/engine/test_turns.py -k function
    binding_of_call | known.turn.begin()
    becomes | pass
compile: an error of the call before hides the next one | ranks/compile/test_compile_refusals.py -k second_error
    _attention | config.group_state.turn.begin()
    becomes | pass
messages: a batch does not start at once | unit/test_batches.py -k calls_of_torch
    start_batch | group._start_coalescing(device)
    becomes | pass
messages: each has a batch of its own | unit/test_account.py -k ring
    exchange | for batch in batches:
    becomes | for batch in [[one] for many in batches for one in many]:
messages: heads move one by one | unit/test_account.py -k Ulysses
    has_all_to_all | 2 * group.size() <= MOST_OPERATIONS
    becomes | False
messages: backwards without agreement by all-to-all | ranks/engine/test_half_way.py -k without_agreement
    Operation.__enter__ | bool(self.backward_of) and not self.meets
    becomes | False
messages: a backend without batches gets an all-to-all | ranks/engine/test_gpu_rules.py -k all_to_all
    has_all_to_all | device.type == "cpu" and cpu_backend_of(group, "gloo")
    becomes | True
checks: a projection by signs | unit/test_replicas.py
    project | torch.randn(values.numel(), generator=generator, dtype=torch.float64, device="cpu")
    becomes | torch.ones(values.numel(), dtype=torch.float64, device="cpu")
mask: a key that a mask's own answer leaves out | unit/test_gaps.py -k leaves_out
    _make_plan | refuse_contradictions(mask, q, kv)
    becomes | pass
mask: a pair that is allowed outside of the bounds | unit/test_gaps.py -k outside_of_its_bounds
    refuse_contradictions | pairs & ~Mask.allowed(part, some, columns)
    becomes | pairs & False
mask: a few queries of a short plan are looked at | unit/test_gaps.py -k short_plan
    refuse_contradictions | rows[::step]
    becomes | rows[::16]
backbone: an error in a recomputation is not told | ranks/engine/test_turns.py -k 'backbone and recomputed'
    _WithLength.__call__ | with binding.telling():
    becomes | with contextlib.nullcontext():
backbone: a checkpoint recomputes with the latest length | ranks/doors/test_backbone.py -k two_lengths
    _Region._cut | self._wrap_checkpoints()
    becomes | pass
threads: the forwards of another thread are ended too | process/test_threads_of_a_rank.py
    forwards_here | or forwards.thread == threading.get_ident() or
    becomes | or True or
threads: the only forward is not met in another thread | process/test_threads_of_a_rank.py
    forwards_here | or len(others) != 1 else
    becomes | or True else
threads: a forward of another thread than its loss is not met | process/test_threads_of_a_rank.py
    forwards_here | or caller.group_name in losses:
    becomes | :
keys: joined pieces are taken for one sequence | ranks/doors/test_joined_keys.py
    Call._refuse_joined_keys | if not any(map(any, marks)):
    becomes | if False:
keys: a mask of a style is no mask | ranks/doors/test_joined_keys.py
    Call._refuse_joined_keys | or binding.mask.has_bias
    becomes nothing
keys: a score_mod is no mask | ranks/doors/test_joined_keys.py
    Call._refuse_joined_keys | or (binding.kernel is not None and binding.kernel.positional)
    becomes nothing
keys: the user's function of lengths is not believed | ranks/doors/test_joined_keys.py -k tells
    Call._refuse_joined_keys | is cut(*wanted)
    becomes | is not cut(*wanted) and False
keys: any function is believed | ranks/doors/test_joined_keys.py -k tells
    Call._refuse_joined_keys | (made := cut(*wanted)) is cut(*wanted)
    becomes | (made := cut(*wanted))
keys: marks of query, key and value alone | ranks/doors/test_joined_keys.py -k one_longer
    Call._refuse_joined_keys | find_cuts((*self.tensors, *inputs))
    becomes | find_cuts(self.tensors)
keys: marks of a module's own inputs are lost | ranks/doors/test_joined_keys.py -k tells
    CoreState._begin | {layout.length for _, layout in cut}
    becomes | ()
joint: an image that nobody cut | ranks/doors/test_joint.py -k nobody_cut
    _compare_tokens | if uncut and not differs
    becomes | if False
joint: a call that is refused does not count | ranks/doors/test_joint.py -k after_an_error
    AttentionCalls._attend | self._joint_calls.get(trains, 0) + 1
    becomes | self._joint_calls.get(trains, 0) + (dropout_p == 0)
joint: a layout of a known length is not believed | ranks/doors/test_joint.py -k pattern
    _compare_tokens | and not isinstance(joint.rest, SequenceLayout)
    becomes nothing
scopes: a block's recomputation forgets its scope | ranks/doors/test_scope.py -k block_without
    _BlockEntry.enter | self._was_scoped = calls.forward_state.was_scoped
    becomes | pass
copies: the state of forwards is the model's | ranks/doors/test_copies.py
    AttentionCalls.__deepcopy__ | copy.deepcopy(self.source, memo)
    becomes | self.source
copies: the proof is the model's | ranks/doors/test_copies.py
    Binding.__deepcopy__ | copy.deepcopy(self.model, memo)
    becomes | self.model
copies: positions wait for the model's next look | ranks/doors/test_copies.py -k positions
    PositionCheck.__deepcopy__ | copied._forwards = 0
    becomes | pass
mixing layers: a recurrence is called on a part | ranks/doors/test_guards.py -k 'mixes or local'
    refuse_mixing_layers | isinstance(layer, _MIXING) and
    becomes | False and
mixing layers: the layer that a mixer calls is refused | ranks/doors/test_guards.py -k mixers_call
    mark_mixing | state.mixing = True
    becomes | state.mixing = False
tp: rows that it does not divide leave as plain tensors | ranks/tensor_parallel/test_tp_refusals.py
    OnMeshAxis._refuse_uneven | % axis.size() ==
    becomes | >
selection: keys that other queries have selected | ranks/mixers/test_selection.py
    Selected.bias | sorted_M[place_BGLK] == wanted_BGLK
    becomes | place_BGLK >= 0
selection: keys of another rank's queries | ranks/mixers/test_selection.py
    Selection.needed | self.selected_S[kv_positions_M] if peer == self.rank else self.sent[peer]
    becomes | self.selected_S[kv_positions_M]
selection: every key is sent | ranks/mixers/test_selection.py -k travel
    _share | wait_received(started, peers)
    becomes | wait_received(started, peers).fill_(1)
selection: heads with the choice of another group | ranks/mixers/test_selected_blocks.py -k any_choice
    Selected.bias | bias.repeat_interleave(self.heads // groups, 1)
    becomes | bias.repeat(1, self.heads // groups, 1, 1)
selection: gathered keys of another group's choice | ranks/mixers/test_selected_blocks.py -k any_choice
    Selected.picks | group_U[unit % units]
    becomes | group_U[0]
selection: a key that is selected twice counts twice | ranks/mixers/test_selected_blocks.py -k any_choice
    Selected.picks | wanted[:, 1:] == wanted[:, :-1]
    becomes | False
selection: gathered keys that the rest of the mask forbids | ranks/mixers/test_selected_blocks.py -k any_choice
    Selected.picks | (wanted >= hi[query, None])
    becomes | (wanted < 0)
selection: gathered gradients of a key that one query has | ranks/mixers/test_selected_blocks.py -k any_choice
    SelectedKernel.backward | dk.index_add_(
    becomes | dk.index_copy_(
selection: a block counts for its first rank alone | ranks/mixers/test_selected_blocks.py -k any_choice
    holders_of_blocks | owner[:, :most]
    becomes | owner[:, :1]
selection: gathered keys begin at the first rank | ranks/mixers/test_selected_blocks.py -k any_choice
    Selected.picks | starts[row][:, None] + torch.arange
    becomes | torch.zeros_like(row)[:, None] + torch.arange
selection: all queries have as many gathered keys | ranks/mixers/test_selected_blocks.py -k pairs
    Selection.widths | keys < _LEAST_FILLED * width
    becomes | False
selection: many keys are gathered too | ranks/mixers/test_selected_blocks.py -k close
    gathers_keys | <= keys * band
    becomes | >= 0
selection: a kernel of one's own is passed over | ranks/mixers/test_selected_blocks.py -k close
    kernel_for_selected | isinstance(kernel, SdpaKernel | ReferenceKernel) and is_own(kernel)
    becomes | True
selection: all keys of a block of the sequence are listed | ranks/mixers/test_selected_blocks.py -k no_list
    Picks.ranges | max(most // (width * numbers), 1)
    becomes | rows
selection: the host waits for each range | ranks/mixers/test_selected_blocks.py -k waits
    Selected.picks | order[first:stop]
    becomes | order[first:stop][order[first:stop] >= 0]
selection: gradients through scores that are cut off | ranks/mixers/test_selection.py
    _Select.backward | torch.where(product > 0, grad * w_BLI[..., None], 0.0)
    becomes | (grad * w_BLI[..., None])
selection: keys that the mask forbids | ranks/mixers/test_selection.py
    _Select.forward | total.masked_fill_(~allowed(rows), float("-inf"))
    becomes nothing
selection: the indexer of a model without its mask | clients/test_transformers.py -k selected_keys
    _run_indexer | calls.binding.mask & (mask if whole.padding is None else mask & Dense(whole.padding))
    becomes | calls.binding.mask
halo: rows of another document | ranks/mixers/test_halo.py -k each_layout
    halo_plan | min(reach[0], start - edges[document - 1])
    becomes | min(reach[0], start)
halo: no rows behind | ranks/mixers/test_halo.py -k each_layout
    halo_plan | min(reach[1], edges[document] - stop)
    becomes | 0
halo: a document begins inside of a call | ranks/mixers/test_halo.py -k each_layout
    halo_plan | front == reach[0]
    becomes | front <= reach[0]
halo: a document ends inside of a call | ranks/mixers/test_halo.py -k each_layout
    halo_plan | before[0][-1].behind == reach[1]
    becomes | True
halo: outputs of the rows in front are kept | ranks/mixers/test_halo.py -k each_layout
    Halo._own_rows | end + part.front
    becomes | end
halo: a rank without tokens computes zeros of nobody | ranks/mixers/test_halo.py -k bytes_and_calls
    halo_plan | [0] * (missing * first)
    becomes | []
halo: messages inside of the module | ranks/mixers/test_halo.py -k messages_inside
    Halo.run | operations.check = self._refuse_messages
    becomes | pass
halo: a recomputation without the layout of the style | ranks/mixers/test_halo.py -k checkpoint
    Halo.run | calls.begin_call()
    becomes | pass
halo: an error of the module is not told | ranks/mixers/test_halo.py -k reaches_every_rank
    Halo.run | telling(self.name, group, agrees=self.checks.agreement)
    becomes | mark_mixing()
halo: a cache of the model itself | clients/test_mixers.py -k "halo and zaya"
    Halo.run | () if calls is None else CACHE_ARGUMENTS
    becomes | ()
halo: two halos of a module | ranks/mixers/test_halo.py -k handle
    context_halo | if not isinstance(module, _RunsWithHalo):
    becomes | if True:
halo: a second halo is taken | ranks/mixers/test_halo.py -k second_halo
    context_halo | if inside:
    becomes | if False:
halo: a tensor that has no tokens | ranks/mixers/test_halo.py -k arguments_that
    Halo._check | or len(set(lengths.values())) > 1
    becomes nothing
halo: an object that may hold tokens | ranks/mixers/test_halo.py -k arguments_that
    Halo._check | not isinstance(leaf, _PLAIN)
    becomes | False
halo: an output without tokens | ranks/mixers/test_halo.py -k results_that
    Halo._own_rows | or x.shape[self.seq_dim] != rows
    becomes nothing
halo: a convolution with a halo is refused | ranks/mixers/test_halo.py -k style_around
    _refuse_mixing | or reach_of(layer) is not None
    becomes nothing
halo: verify does not name a small reach | ranks/mixers/test_halo.py -k names_a_reach
    _WrongCall._describe_small_reach | if reach is None:
    becomes | if True:
windows: the rank with the first token has a window | ranks/mixers/test_windows.py -k layout_of
    window_layout | (start // size, stop // size) for
    becomes | (-(-start // size), -(-stop // size)) for
windows: rows are sent for each window | ranks/mixers/test_windows.py -k bytes
    window_exchanges | positions[there].unique()
    becomes | positions[there]
windows: packed documents are taken | ranks/mixers/test_windows.py -k packed
    context_windows | len(document_lengths(packed)) > 1
    becomes | False
windows: rows before the sequence | ranks/mixers/test_windows.py -k each_layout
    window_exchanges | torch.nonzero(there.flatten()).flatten()
    becomes | torch.arange(int(there.sum()), device="cpu")
random numbers: a rank draws for the first positions | ranks/mixers/test_randomness.py
    _draw | cut.layout.positions(cut.peers.rank, x.device)
    becomes | torch.arange(x.shape[seq_dim], device=x.device)
random numbers: rows of the batch by the length of a part | ranks/mixers/test_randomness.py
    _draw | cut.layout.length * inner
    becomes | len(positions) * inner
latents: positions of the first heads | ranks/doors/test_latents.py -k a_tile
    LatentKernel._ranges | head=options["where"].head + first
    becomes | head=options["where"].head
latents: the bias of the first heads | ranks/doors/test_latents.py -k a_tile
    _heads_of | [..., heads, :, :]
    becomes | [..., : heads.stop - heads.start, :, :]
windows: all ranges of an indexer have the first positions | clients/test_groups.py -k token_by_token
    select_by_states | run(cache, at[0], *part)
    becomes | run(cache, positions[: at.shape[1]], *part)
windows: keys without a window stay in the graph | clients/test_groups.py -k without_windows
    compress | keys_BnD if windows.length else keys_BnD.detach()
    becomes | keys_BnD
latents: the weight's gradient in a dtype that no graph declares | ranks/doors/test_latents.py -k compiled
    _attention_backward | .to(learned.dtype)
    becomes nothing
latents: a weight that trains alone has no backward | ranks/doors/test_latents.py -k only_one
    attend | or (learned is not None and learned.requires_grad)
    becomes nothing
latents: no expanded row is compared | clients/test_latents.py -k other_keys
    _is_expanded | known[_is_expanded] = torch.equal(
    becomes | known[_is_expanded] = True or torch.equal(
latents: a weight that is cut is taken | clients/test_latents.py -k other_keys
    take_latents | not {*kinds} <= {torch.Tensor, nn.Parameter}
    becomes | kinds is None
latents: products are no work | ranks/doors/test_latents.py -k explain
    seconds_of | spent += event.flops / (hardware.flops * hardware.cudnn_rate)
    becomes nothing
fit: shards are not padded | clients/test_fit.py -k padded
    padded_numel | math.ceil(x.shape[0] / gpus)
    becomes | x.shape[0] / gpus
fit: whole parameters of layers stay | clients/test_fit.py -k 'peak and llama and plain'
    FsdpBuffers.hooks | del self._whole[number]
    becomes | self._shards.append(self._whole.pop(number))
fit: the next layer is not gathered ahead | clients/test_fit.py -k buffers
    FsdpBuffers._backward_begins | self._ahead[unit - 1] = self._gather(unit - 1)
    becomes | self._ahead[unit - 1] = None
fit: a reduction holds no buffer | clients/test_fit.py -k buffers
    FsdpBuffers._backward_ends | self._reduced = self._make(
    becomes | self._make(
fit: gradients of a layer stay whole | clients/test_fit.py -k buffers
    FsdpBuffers._backward_ends | x.grad = None
    becomes | pass
fit: the last buffer of the forward stays | clients/test_fit.py -k 'peak and llama and plain'
    FsdpBuffers.forward_ends | self._late = None
    becomes | pass
fit: an attention keeps nothing for its backward | clients/test_fit.py -k 'peak and llama and plain'
    Step.peak | + self.waiting @ kept
    becomes nothing
fit: an attention takes nothing while it runs | clients/test_fit.py -k in_the_attention
    Step.peak | + here[self.inside]
    becomes | + 0 * here[self.inside]
fit: every strategy keeps its inputs | clients/test_fit.py -k 'peak and llama'
    _Attention.forward | kept = trace.options.reads_inputs
    becomes | kept = True
fit: outputs have their rows first | clients/test_fit.py -k 'peak and gpt_oss'
    _Attention.forward | _has_rows_first(q) or not kept
    becomes | True
fit: logits of 16 bits make the loss | clients/test_fit.py -k 'peak and llama and plain'
    StepModel._loss | logits.float()
    becomes | logits
fit: a sequence of the batch alone is counted | clients/test_fit.py -k 'batch'
    Fit._nbytes | rows * self.model.batch
    becomes | rows
fit: all experts are used | clients/test_fit.py -k chooses
    StepTrace._note_experts | numel * args[place].shape[-1] // module.num_experts
    becomes | numel
fit: any head makes a loss from chunks | clients/test_fit.py -k leaves_chunks_out
    StepModel._loss | seen[2] == _storage_of(logits)
    becomes | True
fit: recurrences run their own code | clients/test_fit.py -k by_name
    _find_mixer | if type(module) is not kind else None
    becomes | if False else None
fit: softcaps and biases cost nothing | clients/test_fit.py -k without_a_dry_run
    _attend_without_data | changes or isinstance(attention_mask, torch.Tensor)
    becomes | False
fit: sizes are taken for linear | clients/test_fit.py -k not_linear
    StepModel.parts | sum(parts.values()) != peak
    becomes | False
fit: the optimizer takes no memory | clients/test_fit.py -k batch
    Fit._nbytes | + sum(self.held.values())
    becomes nothing
fit: nothing is left to the allocator | clients/test_fit.py -k allocator
    Fit.__init__ | * (1 - RESERVE)
    becomes nothing
fit: the first form that fits is taken | clients/test_fit.py -k 'fastest'
    Fit._plan | min(fitting, key=lambda cost: sum(cost[1]))
    becomes | fitting[-1]
fit: the longest sequence is one unit too long | clients/test_fit.py -m nightly -k longest
    Fit.longest | return fits * _UNIT
    becomes | return (fits + 1) * _UNIT
fit: a layer that runs again attends once | clients/test_fit.py -k time_of_attention
    Fit._seconds | forwards * report
    becomes | backwards * report
fit: products of checkpoints are left out | clients/test_fit.py -k operations
    StepTrace.__torch_dispatch__ | self.flops += 2
    becomes | self.flops += 2 * (graph_task_id() == -1)
fit: quantized parameters are counted | clients/test_fit.py -k refused
    read_config | if fields.get("quantization_config")
    becomes | if False
fit: the printed loss is averaged over the sequence alone | clients/test_fit.py -k code_trains
    code_of | 'both' if plan.dp > 1 else 'cp'
    becomes | 'cp'
style: the first axis of a mesh for its own | ranks/doors/test_styles.py -k another_name
    take_axis | return device_mesh[axis]
    becomes | return device_mesh[device_mesh.mesh_dim_names[0]]
style: a core that has the style gets it again | ranks/doors/test_state.py -k style_applied_twice
    AttentionContextParallel._apply | if hasattr(module, _STATE):
    becomes | if False:
style: a plan is applied twice | ranks/doors/test_state.py -k plan_applied_twice
    OnMeshAxis._apply | if mark in module.__dict__.get(_APPLIED, ()):
    becomes | if False:
style: a path of a plan matches no module | ranks/doors/test_guards.py -k path_matches_nothing
    parallelize_module | if unmatched:
    becomes | if False:
style: each rank gets the parameters of rank 0 | ranks/doors/test_styles.py -k src_data_rank
    parallelize_module | src_data_rank=src_data_rank)
    becomes | src_data_rank=0)
style: all modules of a style are one place | ranks/engine/test_disagreement.py -k leave_out
    ContextParallelStyle.bind | numbers[self] = site = numbers.get(self, 0) + 1
    becomes | numbers[self] = site = 1
style: arguments of models are looked at on request alone | ranks/doors/test_guards.py -k labels
    ModuleContextParallel.__init__ | checks: Checks = CHECKS
    becomes | checks: Checks = Checks(inputs=False)
style: a model is taken for proved | ranks/verify/test_verify.py -k never_compared
    ModuleContextParallel.__init__ | verified: bool = False
    becomes | verified: bool = True
style: a forward without attention is told to nobody | ranks/engine/test_disagreement.py -k does_not_attend
    _ObservedForward.end | self.calls.unscoped.tell_peers(error)
    becomes | pass
style: a scripted attention stays local | ranks/doors/test_unseen.py -k torchscript
    ModuleContextParallel._apply | if scripted is not None:
    becomes | if False:
style: a core that calls no attention | ranks/doors/test_errors.py -k modules_that_do_something_else
    CoreState._convert_output | if not self.calls.forward_state.calls and graph_task_id() < 0:
    becomes | if False:
style: parts that DTensor cuts otherwise are handed out as its own | ranks/engine/test_attention_parity.py -k
        uneven_dtensors
    CoreState._declarable_length | if layout.lengths != even:
    becomes | if False:
style: gradients of parameters over the axes of another forward | ranks/tensor_parallel/test_tp_refusals.py -k
        inputs_of_one_form
    CoreState._keep_form | if before is not None and before[0] != cut:
    becomes | if False:
style: a parameter inside has the gradient of this rank's heads | ranks/tensor_parallel/test_tp_attention.py -k
        parameter_inside
    InputForm.reduce_gradient | Partial() if placement.is_shard() else Replicate() for placement
    becomes | Replicate() for placement
style: outputs whose heads are not known | ranks/tensor_parallel/test_tp_refusals.py -k do_not_show
    InputForm.place_output | if (rows and not has_rows) or (heads and not (has_rows and has_heads)):
    becomes | if False:
style: gradients of replicated keys are of this rank's heads | ranks/tensor_parallel/test_tp_attention.py -k placements
    SequenceBoundary.local | key if key == of_query else Partial()
    becomes | key
style: handlers of others are dropped | ranks/doors/test_leaks_life.py -k handlers_of_others
    _Handler.__call__ | (self._previous or default_dispatch)
    becomes | default_dispatch
style: the mesh inside of a core communicates | ranks/tensor_parallel/test_tp_refusals.py -k gathering
    private_mesh | without_communication(mesh, NO_COMMUNICATION)
    becomes | mesh
style: a gradient in other placements is taken as it is | ranks/engine/test_attention_parity.py
        ranks/tensor_parallel/test_tp_attention.py
    _Placed.backward | if grad is not None and grad.placements != spec.placements:
    becomes | if False:
style: inputs that want no gradient make one | ranks/doors/test_derivatives.py -k some_inputs_require_grad
    _Placed.forward | ctx.mark_non_differentiable(*itertools.compress(dtensors, map(operator.not_,
        ctx.needs_input_grad[1:])))
    becomes | pass
style: views of a DTensor have the strides of another order | ranks/engine/test_attention_parity.py -k reshapes
    _strides | key=lambda d: (local_strides[d], -d)
    becomes | key=lambda d: -d
style: only the rank without its key heads refuses them | ranks/tensor_parallel/test_tp_refusals.py -k another_rank_than
    find_local_heads | range(mesh.size(axis)) if axis in cut else (coordinates[axis],)
    becomes | (coordinates[axis],)
style: key heads in blocks where they are not | ranks/tensor_parallel/test_tp_attention.py -k 'key_heads and 12'
    select_key_heads | all(pair == first + index // group for index, pair in enumerate(pairs))
    becomes | True
style: a mesh over other ranks by the name of an axis | ranks/tensor_parallel/test_tp_refusals.py -k other_dtensors
    axis_in | if not torch.equal(mesh.mesh, composed.mesh[index].permute([sorted(axes).index(axis) for axis in axes])):
    becomes | if False:
style: query and key in placements that do not fit | ranks/tensor_parallel/test_tp_refusals.py -k other_dtensors
    refuse_placements | keys[0] != keys[1] or not
    becomes | not keys or not keys and
tp: ranks of the sequence hear nothing of rows that it does not divide | ranks/tensor_parallel/test_tp_refusals.py -k
        a_part_that
    OnMeshAxis._refuse_uneven | tell_peers(f"{type(self).__name__} on {where}", group, problem)
    becomes | pass
tp: a module's outputs in rows that it does not divide | ranks/doors/test_rare_options.py -k norm_along
    PrepareModuleOutput._prepare_out_fn | if self.use_local_output:
    becomes | if False:
tp: replicated inputs over the sequence axis | ranks/tensor_parallel/test_tp_cp.py -k refuse
    AxisAdapter._take_own_axis | if len(cut) < len(other_axes) or features_dim in cut.values():
    becomes | if False:
intercept: arguments of a later torch are dropped | ranks/doors/test_unseen.py -k later_torch
    refuse_options | if others:
    becomes | if False:
intercept: dropout is left out | ranks/doors/test_module_door.py -k dropout
    refuse_options | if dropout_p:
    becomes | if False:
intercept: an argument that a call refuses is told to nobody | ranks/engine/test_disagreement.py -k catches
    AttentionCalls._attend | problem = tell_of_call(source, error)
    becomes | problem = error.args[0]
intercept: torch's flex_attention attends to a part | ranks/flex/test_flex.py -k torchs_own
    AttentionCalls.__exit__ | if isinstance(exception[1], Exception) and passes_flex_attention(exception[1],
        but=flex_attend):
    becomes | if False:
intercept: flex_attention inside attends to a part | ranks/flex/test_flex.py -k inside_a_module
    flex_attention | if calls is None:
    becomes | if True:
intercept: operators of other attention functions run on a part | ranks/doors/test_torch_api_refusals.py -k operator
    AttentionCalls.__torch_function__ | func in _REFUSED_FUNCTIONS or name in _REFUSED_OPERATORS
    becomes | func in _REFUSED_FUNCTIONS
intercept: nested modules enter the mode again | ranks/doors/test_module_door.py -k however_deep
    AttentionCalls.__enter__ | bool(self._entries) and self.current() is self
    becomes | False
intercept: a mode stays open for graphs | ranks/doors/test_leaks.py -k exception
    AttentionCalls.__exit__ | del modes[len(modes) - 1 - modes[::-1].index(self)]
    becomes | pass
intercept: a checkpoint of another library attends outside | ranks/doors/test_module_door.py -k not_torchs
    AttentionCalls.wrap_checkpoints | if entry.grad and not torch.is_grad_enabled():
    becomes | if False:
intercept: a checkpoint around the module is wrapped too | ranks/doors/test_leaks_life.py -k around_both
    AttentionCalls.wrap_checkpoints | if id(owner) in entry.checkpoints:
    becomes | if False:
intercept: calls of the forward before count | ranks/doors/test_module_door.py -k functions_alone
    AttentionCalls.begin_forward | self.forward_state.calls, self.forward_state.layer_mask = 0, None
    becomes | self.forward_state.layer_mask = None
intercept: an error of the model's code is told to nobody | ranks/engine/test_disagreement.py -k whatever
    AttentionCalls.end_forward | self.unscoped.tell_peers(error)
    becomes | pass
intercept: inputs stay behind a forward | ranks/doors/test_leaks_life.py -k freed
    AttentionCalls.end_forward | self.forward_state.inputs, self.forward_state.module_call = {}, ()
    becomes | pass
intercept: a trace of one process is taken | ranks/doors/test_errors.py -k not_traced
    AttentionCalls.refuse_tracer | if graph_task_id() < 0 and self.unscoped.group.size() > 1:
    becomes | if False:
intercept: a sink that flex_attention does not add | ranks/doors/test_module_sinks.py -k does_not_fit
    AttentionCalls.begin_call | if self._sink is not None and not takes_sinks:
    becomes | if False:
intercept: whole tokens beside flex_attention | ranks/doors/test_joint.py -k refused
    AttentionCalls.begin_call | if self._joint is not None:
    becomes | if False:
functions: an error in an argument is told to nobody | ranks/engine/test_turns.py -k function
    context_attention | problem = tell_of_call(source, error)
    becomes | problem = error.args[0]
functions: an output in another order of dims than its inputs | ranks/engine/test_parity_grid.py
    context_attention | out = _swap_seq_and_heads(out) if seq_dim == 1 else out
    becomes | pass
functions: padding takes the place of a mask | ranks/doors/test_multi_head.py -k exact
    multi_head_attention | mask = padding if mask is None else mask + padding
    becomes | mask = padding
functions: a boolean mask of MultiheadAttention shows what it hides | ranks/doors/test_multi_head.py -k boolean
    _make_bias | masked_fill(mask, float("-inf"))
    becomes | masked_fill(~mask, float("-inf"))
functions: masks by head of MultiheadAttention by row | ranks/doors/test_multi_head.py -k exact
    multi_head_attention | mask.unflatten(0, (-1, num_heads))
    becomes | mask.unflatten(0, (num_heads, -1)).transpose(0, 1)
functions: documents of the batch before | ranks/flex/test_changed_in_place.py -k documents
    _read_documents | or not contents.are_in(cu_seqlens, f"cu_seqlens of shape {tuple(cu_seqlens.shape)}")
    becomes nothing
functions: keys of varlen_attn have the documents of queries | ranks/flex/test_varlen.py -k refused
    varlen_operator | cu_seq_k is None or (cu_seq_k is not cu_seq_q and not torch.equal(cu_seq_k, cu_seq_q))
    becomes | cu_seq_k is None
functions: a pack that one rank refuses is told to nobody | ranks/engine/test_turns.py -k every_rank_hears_of_it
    _attend_packed | binding.telling(), without_dispatch_modes()
    becomes | without_dispatch_modes()
functions: the largest position of this rank | ranks/doors/test_largest_position.py -k the_largest_of_all_ranks
    largest_position | largest.new_tensor(max(row.q_length for row in rows))
    becomes | largest
functions: any maximum in a model is over all ranks | ranks/doors/test_largest_position.py -k the_largest_of_all_ranks
    largest_position | or not any(_is_view(args[0], x) for x in position_ids)
    becomes nothing
functions: latents that one rank refuses are told to nobody | ranks/engine/test_turns.py -k latents
    context_latent_attention | with binding.telling():
    becomes | if True:
functions: a kernel of flex_attention that is not asked for | ranks/flex/test_flex.py -k refused
    FlexCall.check | if backend not in ("AUTO", "TRITON"):
    becomes | if False:
functions: a user's kernel in place of a score_mod | ranks/doors/test_shared_arguments.py -k score_mod
    _bind_call | if binding.kernel is not None:
    becomes | if False:
torch's API: a change of a part in place changes the whole buffer | ranks/doors/test_torch_api.py -k "leaves_as_buffers
        or all_kinds"
    CutBuffer.cut | .clone(memory_format=torch.contiguous_format)
    becomes nothing
torch's API: a gradient that arrives after the block | ranks/doors/test_torch_api.py -k leaves_as_buffers
    CutBuffer.follow_gradient | if not (self.buffer.requires_grad and self.buffer.is_leaf):
    becomes | if True:
torch's API: a buffer counts as cut after its block | ranks/doors/test_torch_api.py -k buffers_of_all_kinds
    CutBuffer.replace_data | mark_cut(buffer, previous_cut)
    becomes | pass
torch's API: a change in place of what the backward needs | ranks/doors/test_torch_api.py -k is_noticed
    Aliases.__init__ | if alias._version != version:
    becomes | if False:
torch's API: offloading does not get what a block saves | ranks/doors/test_torch_api_life.py -k the_backward_is_right
    Aliases.__init__ | outer = saved_tensors_hooks_on_top()
    becomes | outer = None
torch's API: buffers that are to stay cut are made whole | ranks/doors/test_torch_api.py -k
        any_length_and_leaves_as_buffers
    _BlockEntry.enter | if again or part.restored:
    becomes | if True:
torch's API: a buffer is cut twice | ranks/doors/test_torch_api_refusals.py -k what_is_refused_on_every_rank
    context_parallel._refuse_part | if cut is not None and cut[0].ranks > 1 and buffer.shape[dim] == cut[0].lengths[rank
        % cut[0].ranks]:
    becomes | if False:
torch's API: buffers of the ranks are not compared | ranks/doors/test_torch_api_refusals.py -k
        what_is_refused_on_every_rank
    check_on_ranks | facts(results[0])
    becomes | []
torch's API: an error in a block is told to nobody | ranks/engine/test_turns.py -k 'block and eager and not backbone'
    context_parallel.__exit__ | tell_peers(entry.name, self._group, exception[1])
    becomes | pass
torch's API: the parts of a layout of one's own are joined by the default | ranks/doors/test_torch_api.py -k cut_belongs
    context_parallel.__enter__ | self._balancer if self._layout is None else None
    becomes | self._balancer
torch's API: parts that the layout does not give | ranks/doors/test_torch_api_refusals.py -k
        what_is_refused_on_every_rank
    context_parallel_unshard | if layouts[-1].lengths != lengths:
    becomes | if False:
torch's API: a rotate method that outlives its with | ranks/doors/test_torch_api_life.py -k rotate_method
    set_rotate_method | restore.callback(rotation.set, rotation.get())
    becomes | pass
torch's API: a suspended generator's block takes attention | ranks/doors/test_torch_api_life.py -k
        blocks_that_do_not_end_in_the_reverse_order
    _BlockCalls.__torch_function__ | if _open.get() != (self._entry,) and not self.encloses_call():
    becomes | if False:
torch's API: a block without attention says nothing | ranks/doors/test_unseen.py -k blocks_without
    _BlockCalls.__exit__ | if self._entry.parts and not
    becomes | if False and not
torch's API: switched off balance cuts in heads and tails | ranks/doors/test_torch_api.py -k switch_of_the_balance
    context_parallel._make_entry | self._balancer = head_tail if torch_balances_load() else contiguous
    becomes | self._balancer = head_tail
collectives: gradients of shared key heads in 16 bits | ranks/collectives/test_collectives_heads.py -k float32
    merge_columns | wide = further and dtype in (torch.float16, torch.bfloat16)
    becomes | wide = False
collectives: integers that gloo does not know | ranks/collectives/test_collectives_all_to_all.py -k dtypes
    _view_for_wire | or packed.dtype in _UNKNOWN_TO_GLOO
    becomes nothing
collectives: gathered rows in the order of ranks | ranks/collectives/test_collectives_split_gather.py -k split_cuts
    Blocks.unpack_columns | self.op.rows.to_global(wire.view(self._whole_shape))
    becomes | wire.view(self._whole_shape)
collectives: backwards in another order | ranks/engine/test_half_way.py -k collectives_whose
    all_to_all | return differentiable(op, x, check=checks.agreement)
    becomes | return differentiable(op, x, check=False)
collectives: key heads pair with the queries of another rank | ranks/collectives/test_collectives_heads.py -k
        heads_it_needs
    _repeat_kv_heads | if not count or (count % heads == 0 and kv_heads == tuple([i // (count // heads) for i in
        range(count)])):
    becomes | if not count or count % heads == 0:
collectives: the last key head of a rank is left out | ranks/collectives/test_collectives_heads.py -k heads_it_needs
    head_ranges | -(-stop // group)
    becomes | max(stop // group, start // group + 1)
collectives: calls of the ranks are not compared | ranks/collectives/test_collectives_errors.py -k one_did_wrong
    exchange_rows | return agree_on_facts(facts, Meeting.COLLECTIVE, where, path=call)
    becomes | return agree_on_facts(lambda: ({}, facts()[1]), Meeting.COLLECTIVE, where, path=call)
collectives: some ranks have a backward | ranks/collectives/test_collectives_errors.py -k requires_grad
    make_signature | grad = x.requires_grad and torch.is_grad_enabled()
    becomes | grad = False
collectives: padding travels | ranks/collectives/test_collectives_heads.py -k padding
    Rows.trim | x if self.shard is None else x.narrow(dim, 0, self.sizes[rank])
    becomes | x
collectives: a shard that another layout has cut | ranks/doors/test_cut.py -k other_functions
    check_local | refuse_other_cut("cp_styles.collectives", (x,), rows.layout, f"{rows.layout.length} positions")
    becomes | pass
collectives: a mean over the group is a sum | ranks/collectives/test_collectives_split_gather.py -k grad_scale
    GradScale.factor | 1.0 / ranks
    becomes | 1.0
collectives: whole gradients behind a split are summed once more | ranks/engine/test_batch.py -k in_front_of_a_split
    split | if grad_scale is not GradScale.DOWN:
    becomes | if False:
collectives: a sample that cannot be sent | ranks/collectives/test_collectives_sync.py -k cannot_send
    sync_inputs | pickle.dumps(skeleton)
    becomes | pass
collectives: the next sample travels when this one has arrived | ranks/collectives/test_collectives_sync.py -k
        next_sample
    _iterate | if rank + 1 < peers.size: following = _start_broadcast(rank + 1, skeletons[rank + 1], local_tensors,
        peers) with collective(resolve_group(peers.name), "sync_inputs"): for work in works: work.wait() received =
        iter(tensors)
    becomes | [work.wait() for work in works]; received = iter(tensors)
collectives: samples have gradients | ranks/collectives/test_collectives_sync.py -k without_gradients
    _extract_tensor | leaf.detach() if device is None
    becomes | leaf if device is None
collectives: each wait receives anew | ranks/collectives/test_collectives_all_to_all.py -k async
    Pending.wait | self._result, self._finish = self._finish(), None
    becomes | self._result = self._finish()
collectives: a rank that uses no result of an exchange | ranks/mixers/test_by_channels.py -k equals_one_process
    _KeepInGraph.backward | return grad, *(zero if needed else None
    becomes | return grad, *(None if needed else None
comm: a recomputed attention meets a first run | ranks/engine/test_disagreement.py -k recompute
    start_status | _RECOMPUTED if meeting not in _BACKWARD_MEETINGS and graph_task_id() >= 0 else 0
    becomes | 0
comm: an error without agreement leaves peers waiting | ranks/engine/test_half_way.py -k do_not_agree
    tell_peers | if not agrees: abort_group(group, error)
    becomes | if not agrees:
comm: ranks without agreement take any layout | ranks/engine/test_agreement.py -k needs_a_layout
    start_status | if assumed is None:
    becomes | if False:
comm: facts without a text leave peers waiting | ranks/engine/test_agreement.py -k texts
    compare | except Exception as error:
    becomes | except KeyError as error:
comm: one order of ranks on each rank | ranks/engine/test_disagreement.py -k composed_mesh
    refuse_other_order | else [line for line in lines if ascending and line != sorted(line)]
    becomes | else []
comm: a mesh in any order | ranks/engine/test_disagreement.py -k composed_mesh
    axis_and_group | refuse_other_order(mesh, group)
    becomes | pass
comm: a rank that is not in the mesh | ranks/doors/test_first_hour.py -k not_in_it
    _group_on | except IndexError:
    becomes | except KeyError:
comm: a rank that is not in the group | ranks/collectives/test_collectives_errors.py -k none
    axis_and_group | if mesh is dist.GroupMember.NON_GROUP_MEMBER:
    becomes | if False:
comm: verify's step with one rank has the groups of all | ranks/verify/test_verify.py -k real_mesh
    group_now | return group if role is None or role.stand_in is None else role.stand_in
    becomes | return group
comm: functions of verify's step are bound to all ranks | ranks/verify/test_verify.py -k real_mesh
    state_if_simple | return state if role is None or role.stand_in is None else state_of(role.stand_in)
    becomes | return state
comm: an axis of one common rank shares the group | ranks/engine/test_unreduced.py -k "tensor_parallel or fsdp"
    shares_ranks | > 1 for axis
    becomes | > 0 for axis
comm: checks with other parameters are equal | ranks/doors/test_rare_options.py -k meant_to_differ
    Checks.__post_init__ | object.__setattr__(self, "_ids", tuple(map(id, self.local)))
    becomes | object.__setattr__(self, "_ids", ())
comm: nothing that is known of a group is kept | ranks/engine/test_disagreement.py -k leave_out
    GroupState.get_or_create | self.objects.setdefault(kind, kind()) if found is None else found
    becomes | kind() if found is None else found
engine: a graph agrees though its style does not | ranks/compile/test_compile.py -k
        without_agreement_the_ranks_do_not_meet
    config_in_graph | checks.agreement, checks.only_warn, has_layout
    becomes | True, False, has_layout
engine: functions without a name in a graph | unit/test_config.py -k by_name
    _is_found_by_name | is value
    becomes | is not None
engine: fields that a constructor does not take | unit/test_config.py -k there_and_back
    _fields_of | if field.init)
    becomes | if True)
engine: two dense masks in a graph | unit/test_config.py -k dense_masks
    config_in_graph | if len(tensors) > 1:
    becomes | if False:
engine: sinks of the ranks are not compared | ranks/engine/test_disagreement.py -k one_thing_different
    _attention | arguments["sink"] = None if sink is None else digest(sink) if sink.device.type == "cpu" else 0
    becomes | arguments["sink"] = None
engine: inputs of several dtypes | ranks/doors/test_errors.py -k query_that_no
    check_local | if not (equal and q.is_floating_point()):
    becomes | if False:
engine: a backward does not ask whether the model was proved | ranks/verify/test_verify.py -k
        a_model_that_was_never_compared_warns_once
    run_backward | binding.model.backward_begins(binding.forwards)
    becomes | pass
engine: forwards stay open after their backward | ranks/engine/test_unreduced.py -k news
    run_backward | binding.forwards.open &= not agrees
    becomes | pass
engine: gradients that only the logsumexp has | ranks/engine/test_attention_parity.py -k logsumexp_alone
    _differentiate | if grad is None and grad_lse is None:
    becomes | if grad is None:
engine: some ranks train, and others do not | ranks/doors/test_backbone.py -k without_gradients
    Call.row | *arguments.values(), self.trains)
    becomes | *arguments.values())
engine: parts that the layout does not give | ranks/doors/test_errors.py -k cannot_cut
    Call._compare_rows | if layout.lengths != local_lengths:
    becomes | if False:
engine: a mask of a part is not explained | ranks/doors/test_guards.py -k mask_of_this_ranks
    _explain_local_mask | if 1 < size != sum(local) and size in local
    becomes | if False
engine: a BlockMask whose tensors were filled again | ranks/flex/test_changed_in_place.py -k
        every_rank_raises_at_the_next_call
    Call.row | binding.mask.check_unchanged()
    becomes | pass
engine: values of another length than keys | ranks/doors/test_errors.py -k values_of_another
    Call.row | if v.shape[dim] != k.shape[dim]:
    becomes | if False:
engine: one's own policy of a checkpoint is dropped | ranks/doors/test_selective_checkpoint.py -k policy
    _contexts | if others is None else others(context, op, *args, **kwargs)
    becomes nothing
engine: fewer key heads without being asked | ranks/doors/test_module_door.py -k gqa
    refuse_grouped | if heads != kv_heads and kv_heads != 1 and not enable_gqa:
    becomes | if False:
engine: a layout for another length is taken | ranks/doors/test_errors.py -k cannot_cut
    Binding.layout_for | if layout.length != length:
    becomes | if False:
engine: calls of functions keep kernels alive | ranks/doors/test_leaks_life.py -k share_a_binding
    binding_of_call | if mask.pattern == mask and is_value(kernel) and not checks.local:
    becomes | if True:
scope: an axis without attention says nothing | ranks/doors/test_scope.py -k applies_to_nothing
    SequenceScope.__exit__ | if exception[0] is None and entry.unscoped_axes and not entry.applied:
    becomes | if False:
scope: a scope in another thread is passed by | ranks/doors/test_scope.py -k thread
    ScopeHistory.find_scope | if task < 0 and any(entry.scope.mesh_axis == axis for entry in _list_entries_of_rank()):
    becomes | if False:
scope: another layout than the style's | ranks/doors/test_scope.py -k fixed_layout
    ScopeHistory.find_scope | if layout is not None and cut != (
    becomes | if False and cut != (
scope: the latest scope for a generator's own | ranks/doors/test_scope.py -k reverse_order
    innermost | if last._suspended:
    becomes | if False:
scope: tensors of a mask in a graph's record | ranks/compile/test_compile_refusals.py -k what_no_text_can_stand_for
    _pickle_scope | if scope.mask.pattern != scope.mask:
    becomes | if False:
checks: labels that a model would shift after the cut | ranks/doors/test_guards.py -k labels
    _refuse_labels | if "labels" in has and "shift_labels" not in has:
    becomes | if False:
checks: classes of sequences pooled from a part | clients/test_heads.py -k classes_under_the_other_style
    _refuse_labels | if "labels" in has and getattr(inputs["labels"], "ndim", 0) == 1:
    becomes | if False:
checks: a cache that is not cut | ranks/doors/test_guards.py -k cache_with_tokens
    TransformersCheck.forward_begins | if cached > 0:
    becomes | if False:
checks: generate() appends tokens to each part | clients/test_generate.py -k refused
    TransformersCheck.forward_begins | if frame_of("generate") is not None:
    becomes | if False:
checks: one token of a rank is taken for a new one | clients/test_transformers.py -k "one_token or token"
    TransformersCheck.forward_begins | if by_sdpa and tokens is not None and tokens.shape[1] == 1:
    becomes | if False:
checks: pictures in a vision tower | clients/test_pictures.py -k what_is_refused
    TransformersCheck.forward_begins | if pictures := [name for name, x in inputs.items() if x is not None and
        name.startswith("pixel_values")]:
    becomes | if pictures := []:
checks: the balance of experts on a part | clients/test_transformers.py -k "aux or expert or balance"
    TransformersCheck.forward_ends | or output.get("aux_loss") is None
    becomes | or True
checks: windows of a part | ranks/doors/test_guards.py -k windows
    TransformersCheck._refuse_windows | if binding.mask.local:
    becomes | if True:
checks: a cache that an earlier generate() has used | clients/test_generate.py -k refused
    _check_new_tokens | if last != expected:
    becomes | if False:
checks: layers of all models have the first config's windows | clients/test_transformers.py -k window
    list_windows | kinds = kinds[layer : layer + 1]
    becomes | pass
checks: a warm-up of equal tokens is a batch that nobody cut | ranks/doors/test_first_hour.py -k
        of_equal_tokens_is_no_batch
    UncutBatchCheck.number | return differ * (sum(sums) % 2**62 + 1)
    becomes | return sum(sums) % 2**62 + 1
checks: a batch that nobody has cut | ranks/doors/test_first_hour.py -k is_refused_in_training_and_in_evaluation
    UncutBatchCheck.judge | if numbers[0] and len(set(numbers)) == 1:
    becomes | if False:
checks: no positions for a model that takes them | ranks/doors/test_guards.py -k positions
    PositionCheck._refuse_missing | if inputs.get(name) is not None:
    becomes | if True:
checks: positions that count from 0 on each rank | ranks/doors/test_guards.py -k positions
    _refuse_local_positions | if begin:
    becomes | if False:
checks: positions in documents are refused | ranks/doors/test_guards.py -k positions
    _refuse_local_positions | if not from_first or binding.mask.separates:
    becomes | if not from_first:
checks: positions of new tokens are refused | clients/test_generate.py -k states_of_other_generations
    PositionCheck.forward_begins | if past is not None and past.prefilled:
    becomes | if False:
checks: a token at the position of padding | clients/test_transformers.py -k padding
    PositionCheck._refuse_positions_of_padding | if bool(((positions <= padding) & (tokens != padding)).any()):
    becomes | if False:
checks: parts that tensor parallelism does not divide | ranks/doors/test_first_hour.py -k sequence_parallelism
    refuse_uneven_sequence_parallelism | if parameters and all(
    becomes | if False and all(
checks: an embedding outside of the layers counts a part | clients/test_transformers.py -k "rotary or rope or longest"
    refuse_rotary_embedding_outside | if rope is not None and not any(hasattr(layer, "rope_type") for layer in
        model.modules()):
    becomes | if False:
checks: a model that is wrong in a later run warns each time | ranks/verify/test_verify.py -k never_compared
    Proof.warn_if_unverified | self.missed = True
    becomes | pass
checks: a model that is only evaluated says nothing | ranks/verify/test_situations.py -k only_evaluated
    Proof.attends | if not (self.verified or self.missed or call.trains) and next(model.parameters(), None) is not None:
    becomes | if False:
verify: a value that is no number is no error | ranks/verify/test_verify.py -k finite
    Squares.error | return math.inf if math.isnan(ratio) else ratio
    becomes | return ratio
verify: infinities of both steps differ | ranks/verify/test_verify.py -k finite
    squares | equal = (actual == expected) | (actual.isnan() & expected.isnan())
    becomes | equal = torch.zeros_like(actual, dtype=torch.bool)
verify: the errors of one rank | ranks/verify/test_verify.py -k what_is_compared
    _add_ranks | keys = dict.fromkeys(key for rank in ranks for key in rank)
    becomes | ranks = ranks[:1]; keys = dict.fromkeys(key for rank in ranks for key in rank)
verify: a gradient that one step alone has is not compared | ranks/verify/test_verify.py -k what_is_compared
    gradient_pair | if first is None and second is None:
    becomes | if first is None or second is None:
verify: rounding of low precision is an error | ranks/verify/test_verify.py -k low_precision
    Leeway.of | return self.tolerance + 4 * noise
    becomes | return self.tolerance
verify: tokens that are flattened with the batch are not compared | ranks/verify/test_verify.py -k what_is_compared
    ShardLookup.parts | if rest or shape[dim] != times * index.numel():
    becomes | if rest or times > 1 or shape[dim] != times * index.numel():
verify: gradients that vanish are relative to themselves | ranks/verify/test_verify.py -k a_proof_that_is_blind
    gradient_errors | return {name: total.error(floor) for name, total in totals.items()}
    becomes | return {name: total.error() for name, total in totals.items()}
verify: labels that are rolled after the cut have no name | ranks/verify/test_wrong_programs.py -k a_program
    Comparison._loss_gradient | last[:-1] = positions.diff() != 1
    becomes | last[:-1] = False
verify: a factor of one rank's loss is the factor of all | ranks/verify/test_wrong_programs.py -k a_program
    Comparison.loss_factor | return factors[0] if common and factors[0] else None
    becomes | return factors[0]
verify: a wrong step is reported as equal | ranks/verify/test_verify.py -k "plain_step or reports"
    Report.line | if self.findings:
    becomes | if False:
verify: a mean that equal parts hide is not named | ranks/doors/test_first_hour.py -k Mean
    Report.line | means = f". The ranks had equally many {means}, {_MEANS}" if means else ""
    becomes | means = ""
verify: the command ends well with a wrong step | ranks/verify/test_verify.py -k command
    main | print(first) raise SystemExit(1) from None
    becomes | return
verify: hooks stay on the model | ranks/verify/test_verify.py -k "left_behind or hooks_that"
    Hooks.__exit__ | handle.remove()
    becomes | pass
verify: outputs on which nothing depends must be right | ranks/verify/test_verify.py -k nothing_depends
    Outputs.results | return [key for key in keys if not self.trained or (not key[0] and key in self.trained)]
    becomes | return [*keys]
kernel: a level that is not subtracted | ranks/engine/test_numerics.py -k rows
    RowLevels.subtract | return bias - level.unsqueeze(-1)
    becomes | return bias
kernel: drowned rows attend by their logits | ranks/engine/test_numerics.py -k rows
    RowLevels.zero_drowned | q_BHLD if self.drowned is None else q_BHLD.masked_fill(self.drowned, 0.0)
    becomes | q_BHLD
kernel: keys have no gradient of drowned queries | ranks/engine/test_numerics.py -k
        rows_that_are_masked_throughout_with_numbers
    SplitQueries.backward | dk[..., :dim] + dk[..., dim:]
    becomes | dk[..., :dim]
kernel: too many shapes for torch.compile | ranks/flex/test_flex_fused.py -k one_shape_more
    CompiledFlexKernel.forward | except RecompileLimitHit:
    becomes | except KeyError:
kernel: a compiled tile has the gradient of the whole | unit/test_flex_gradients.py -k
        summed_over_tiles_they_are_the_wholes
    tile_gradients | (out_tile.detach().to(grad.dtype) - out_BHLE)
    becomes | (out_tile.detach().to(grad.dtype))
kernel: a pack of any size | unit/test_packing.py -k largest_size
    bytes_of_tile | return batch * (copies + sums)
    becomes | return copies + sums
kernel: queries of a pack are cut by their keys | unit/test_packing.py -k one_by_one
    Pack.one_by_one | self.lengths[index in keys]
    becomes | self.lengths[0]
mixers: parameters of the first channels | ranks/mixers/test_by_channels.py -k equals_one_process
    _run_on_channels | x.narrow(0, low, high - low) for at, x in parameters.items()
    becomes | x.narrow(0, 0, high - low) for at, x in parameters.items()
mixers: channels carry a state from document to document | ranks/mixers/test_by_channels.py -k equals_one_process
    _run_on_channels | spans = list(zip(accumulate(cut.documents, initial=0), cut.documents, strict=False))
    becomes | spans = [(0, sum(cut.documents))]
mixers: a convolution that cuts its end | ranks/mixers/test_convolution.py -k cut_their_end
    run_convolution | if out.shape[along] != rows.shape[along]:
    becomes | if False:
mixers: a row's gradient of its last slot | ranks/mixers/test_convolution.py -k
        equals_one_process_and_sends_the_rows_before
    RowMap.__call__ | index_add(0, targets, packed.to(wide))
    becomes | index_copy(0, targets, packed.to(wide))
mixers: taps of one rank are the taps of all | ranks/mixers/test_convolution.py -k cut_their_end
    run_convolution | return [x], seq_dim, {"width": width, "seq_dim": seq_dim}
    becomes | return [x], seq_dim, {}
mixers: a roll wraps around the sequence | ranks/mixers/test_roll.py -k any_cut
    roll_exchange | source = source % size + end - size
    becomes | source = (source + end - size) % layout.length
strategy: sinks have the gradient of the last row of the batch | ranks/engine/test_parity_grid.py -k by_name
    PerRowStrategy.backward | reduce(torch.add, dsink)
    becomes | dsink[-1]
strategy: rows have the attention of an earlier row | ranks/engine/test_per_row.py -k
        each_row_sends_what_its_own_mask_needs
    PerRowStrategy._split_rows | key = PerRowStrategy, index
    becomes | key = PerRowStrategy
explain: a plan that does not fit is ranked | unit/test_explain_command.py -k come_last
    rank_candidates | if memory > hardware.memory:
    becomes | if False:
explain: hidden pairs are computed | ranks/explain/test_hardware.py -k causal
    KernelCall.pairs | sum(whole) - self.edges * sum(hidden)
    becomes | sum(whole)
explain: latents travel for each head | ranks/doors/test_latents.py -k "explain or explained"
    Shapes._kv_heads | self.kv_heads if self.latent is None else 1
    becomes | self.kv_heads
explain: ranks that exchange heads have work of their own | ranks/explain/test_hardware.py -k share_their_work
    Explanation.layout_imbalance | join_neighbours(self.layout, exchange)
    becomes | self.layout
derivatives: second derivatives of what a graph saves | ranks/doors/test_derivatives.py -k second
    first_derivatives_only | for x in (*grads, *ctx.saved_tensors)
    becomes | for x in grads
derivatives: transforms of torch.func see one rank | ranks/doors/test_derivatives.py -k torch_func
    refuse_transforms | if tensor is not None and is_in_torch_func(tensor):
    becomes | if False:
introspect: values in a closure are no part of a function | unit/test_introspect.py -k
        what_a_function_has_is_in_its_text
    _describe | value.__kwdefaults__, *around)]
    becomes | value.__kwdefaults__)]
introspect: results of a score_mod are tensors that it reads | ranks/flex/test_flex.py -k queries_some_at_a_time
    _CaptureMode.__torch_function__ | self.note(result)
    becomes | pass
introspect: a star reaches through dots | ranks/doors/test_guards.py -k local_names_modules
    matches | len(names) == len(patterns) and all(map(fnmatch, names, patterns))
    becomes | fnmatch(path, pattern)
device: tables of all streams | ranks/engine/test_steady_steps.py -k tables_of_devices
    DeviceTables.on | **dict([*self._copies.items()][-3:]), key: copies
    becomes | key: copies
caches: entries without an end | unit/test_cache.py -k latest_entries
    LatestEntries.put | while len(self) > self.most:
    becomes | while False:
caches: a context's cache stays | unit/test_cache.py -k another_cache
    another_cache | _current.reset(token)
    becomes | pass
caches: tensors of inference mode are remembered | ranks/engine/test_steady_steps.py -k another_mode
    as_constants | torch.inference_mode(False), without_dispatch_modes()
    becomes | without_dispatch_modes()
caches: a tensor of a caller is a value | ranks/doors/test_leaks_life.py -k share_a_binding
    is_value | return made.frozen and all(is_value(getattr(thing, each.name)) for each in fields(cast(Any, thing)))
    becomes | return made.frozen
checksum: rows in another order are equal | unit/test_checksum.py -k the_checksum_is_that_of_its_definition
    device_checksum | keys = torch.arange(start, start + words.numel(), device=words.device).mul_(_GOLDEN).add_(words)
    becomes | keys = words.clone()
checksum: pieces begin at the same place | unit/test_checksum.py -k pieces_have_places_of_their_own
    device_checksum | start = index * _PIECE // 8
    becomes | start = 0
checksum: a tensor that was changed in place | ranks/doors/test_attn_mask.py -k differ_in_one
    digest | if entry is None or entry[0] != version_of(tensor):
    becomes | if entry is None:
memory: storages that have ended are alive | ranks/engine/test_memory.py -k what_strategies_hold
    LiveStorages.nbytes | if entry.reference.expired()
    becomes | if False
generate: beams of a prompt with fewer rows | clients/test_generate.py -k "beams or rows or refused"
    TransformersCache.update | if self.prefilled and rows not in (-1, key_states.shape[0]):
    becomes | if False:
generate: a state goes back to earlier tokens | clients/test_generate.py -k states_that_are_not_handed_over_are_refused
    TransformersCache.crop | if self.states:
    becomes | if False:
generate: a prompt with another padding | clients/test_generate.py -k "padding or refused"
    TransformersCache.check_padding | if len(both) == 1 or (both and not torch.equal(*both)):
    becomes | if False:
generate: keys before a window stay | clients/test_generate.py -k whole_cache
    TransformersCache.attended | cache.forget(min(int(row.bounds(last)[0]) for row in mask.rows))
    becomes | pass
style: an unknown option of the attention is dropped | ranks/doors/test_unseen.py -k later_torch
    CoreCalls._attend | refuse_options(self._name, query, key, dropout_p, enable_gqa, others)
    becomes | pass
explain: a sample of many ranks has the first and the last one alone | ranks/explain/test_hardware.py -k sample
    _sample_ranks | ranks // 2
    becomes | 0
""")


def pattern(text: str) -> re.Pattern[str]:
    """``text`` with any blanks and line breaks, or none, where it has some, or between what is no word."""
    pieces = re.findall(r"\w+|[^\w\s]", text)
    joints = [r"\s+" if a[-1].isalnum() and b[0].isalnum() else r"\s*" for a, b in pairwise(pieces)]
    return re.compile("".join(re.escape(piece) + joint for piece, joint in zip(pieces, [*joints, ""], strict=True)))


def functions(node: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions of a module or a class, and their qualified names."""
    for child in ast.iter_child_nodes(node):
        name = f"{within}{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else ""
        if isinstance(child, ast.FunctionDef):
            yield name, child
        yield from functions(child, f"{name}." if name else within)


@cache
def text_of(file: Path) -> str:
    """The text of a file without a mistake."""
    return file.read_text()


@cache
def functions_of(text: str) -> list[tuple[str, ast.FunctionDef]]:
    return [*functions(ast.parse(text))]


def places(mistake: Mistake, package: Path) -> list[tuple[Path, int, int]]:
    """Where the piece stands that the mistake replaces: file, start, stop."""
    found = []
    for file in sorted(package.rglob("*.py")):
        text = text_of(file)
        if mistake.function.rpartition(".")[2] not in text:
            continue
        ends = [0, *(match.end() for match in re.finditer("\n", text))]
        for name, function in functions_of(text):
            if not f".{name}".endswith(f".{mistake.function}"):
                continue
            start, stop = ends[function.lineno - 1], ends[function.end_lineno]
            found += [(file, *match.span()) for match in pattern(mistake.right).finditer(text, start, stop)]
    return found


def tests_of(tests: str) -> list[str]:
    return [f"tests/{word}" if ".py" in word else word for word in shlex.split(tests)]


def run(tests: str, copy: Path) -> tuple[int | None, str]:
    """pytest's exit status, None after LIMIT, and its last lines."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-p", "no:cacheprovider", *tests_of(tests)]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return None, ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, failed[0][:100] if failed else done.stdout[-300:] + done.stderr[-300:]


def run_random(copy: Path) -> tuple[int | None, str]:
    """The exit status of the first of RANDOM that fails, and which case or program has."""
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    for command in RANDOM:
        words = [sys.executable, *command.split()]
        done = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True)
        if done.returncode:
            return done.returncode, f"{words[1]}: {done.stdout[:200].strip() or done.stderr[-300:]}"
    return 0, ""


def plant(mistake: Mistake, copy: Path, runs: Callable[[], tuple[int | None, str]]) -> str | None:
    """Run the tests with the mistake; what is wrong about them, or None where they have noticed it."""
    found = places(mistake, copy / "cp_styles")
    if len(found) != 1:
        return f"{mistake.function} has {mistake.right!r} {len(found)} times"
    file, start, stop = found[0]
    original = file.read_text()
    file.write_text(original[:start] + mistake.wrong + original[stop:])
    try:
        status, said = runs()
    finally:
        file.write_text(original)
    if status is None:
        print(f"    no end after {LIMIT} s")
        return None
    if status == FAILED or status < 0:  # or a rank has crashed
        print(f"    {said}" if said else "", end="\n" if said else "")
        return None
    return "UNNOTICED" if status == 0 else f"pytest could not run (status {status}): {said}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mistakes with one of these in their names")
    parser.add_argument("--places", action="store_true", help="only look whether each piece is there once")
    parser.add_argument("--fuzz", action="store_true", help="random attentions and programs in place of the tests")
    parser.add_argument("--unplanted", action="store_true", help="run the tests without the mistakes")
    options = parser.parse_args()
    mistakes = FUZZED if options.fuzz else FUZZED + OTHERS
    chosen = [x for x in mistakes if not options.words or any(word in x.name for word in options.words)]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for path in ("cp_styles", "tests", "tutorials"):
            shutil.copytree(ROOT / path, copy / path, ignore=shutil.ignore_patterns("__pycache__"))
        for path in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "noxfile.py"):
            shutil.copy(ROOT / path, copy)
        if options.fuzz:
            status, said = run_random(copy)
            if status:
                print(f"without any mistake: {said}")
                return 1
        if options.unplanted:
            for tests in dict.fromkeys(mistake.tests for mistake in chosen):
                status, said = run(tests, copy)
                wrong += status != 0
                print(f"{'passed' if status == 0 else f'FAILED: {said}'}: {tests}", flush=True)
            return int(wrong > 0)
        for mistake in chosen:
            start = time.perf_counter()
            if options.places:
                absent = [word for word in tests_of(mistake.tests) if ".py" in word and not (ROOT / word).exists()]
                problem = f"{absent} are not there" if absent else plant(mistake, copy, lambda: (FAILED, ""))
            else:
                problem = plant(
                    mistake, copy, partial(run_random, copy) if options.fuzz else partial(run, mistake.tests, copy)
                )
            wrong += problem is not None
            said = problem or ("found" if options.places else "noticed")
            print(f"{mistake.name}: {said} ({time.perf_counter() - start:.0f} s)", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
