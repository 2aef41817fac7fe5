"""Plants mistakes in a copy of the package, one by one, and says which of them the tests notice.

    python tests/mutations.py                  all of them, with the tests that concern each: an hour on 2 cores
    python tests/mutations.py merge layout     those with these words in their names
    python tests/mutations.py --texts          no tests run: whether the text and the tests of each are still there
    python tests/mutations.py --fuzz           those in FUZZED, with random attentions and programs in place of tests
    python tests/mutations.py --unplanted ...  the tests without the mistakes, all of which must pass

A mistake is a short piece of the package's text, which may stand in any file but in one place only (blanks and line
breaks do not count), and what is put there instead. Where a refactoring has changed the text, the script says so and
fails: give the mistake the text that the code has now. It fails as well where a mistake goes unnoticed.

Not collected by pytest. Tests that a mistake makes wait for each other end with LIMIT, and count as noticed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT = 600.0  # seconds for the tests of one mistake
FAILED = 1  # pytest's exit status when tests have failed; others say that they could not be run

# What --fuzz runs until one fails: the same seeds every time.
RANDOM = ("tests/fuzz.py --cases 400 --odd --stop", "tests/programs.py --programs 40 --stop")
# The mistakes that random attentions and programs are for: a wrong result, or an error that not all ranks hear, in what
# they call. Not among them are those that change only costs and memory, and those of what they do not call: CUDA's
# kernels, verify, explain, trainers and other libraries, collectives, tensor parallelism, the guards for layers
# other than attention. Of several mistakes in one line of the code, one is here.
FUZZED = (
    "mask: causal without the diagonal",
    "mask: a window one short on the right",
    "mask: a window one short on the left",
    "mask: chunks that see one key of the next",
    "mask: the first token of a document in the one before",
    "mask: prefixes counted from the sequence's start",
    "mask: the wider of two lower bounds",
    "mask: every row of the batch has the first one's",
    "mask: partial blocks of a BlockMask as full ones",
    "layout: chunks of a rank in reverse",
    "layout: the last period of stripes like the others",
    "layout: stripes by their first chunks alone",
    "plan: a causal tile without its mask",
    "plan: a source's first chunk has no rows before its positions",
    "plan: a rank that holds the bound like the ranks after it",
    "plan: stripes of keys like those of queries",
    "mask: pieces that are cut keep their first bound",
    "merge: the weight of the other side",
    "merge: the larger logsumexp for the sum",
    "merge: a waiting gradient is overwritten",
    "merge: a sink's share and the rest exchanged",
    "strategy: own keys left out of the forward",
    "strategy: causal tiles attended in full",
    "strategy: a tile's band is not masked",
    "Ulysses: sinks of the first heads",
    "Ulysses: masks of the first heads",
    "Ulysses: key heads counted from the first rank's",
    "Ulysses: of several queries' gradients for a key head, one",
    "Ulysses: every chunk has the first one's key heads",
    "doors: in float32, autocast is forgotten",
    "functions: a call has the mask of an earlier one",
    "kernel: softmax's backward without the row's mean",
    "kernel: a negative scale's sign is lost",
    "kernel: the logsumexp's gradient with the other sign",
    "batch: labels across documents",
    "batch: tokens without a label are counted",
    "engine: backwards begin without the other ranks",
    "agreement: ranks that differ go on",
    "agreement: a refusal is not heard",
    "scope: not there in a recomputation",
)


class Mistake(NamedTuple):
    """``wrong`` in place of ``right``; ``tests`` are arguments of pytest."""

    name: str
    right: str
    wrong: str
    tests: str


MISTAKES = [
    # -- linear attention, state spaces, convolutions --
    Mistake(
        "mixers: what came before a fragment does not decay in it",
        "factor @ state",
        "state",
        "tests/ranks/mixers/test_recurrence.py",
    ),
    Mistake(
        "mixers: what was mixed before a kernel is not asked",
        "mixed = flow.mixed_before(tensors, dim)",
        "mixed = None",
        "tests/ranks/mixers/test_by_name.py",
    ),
    Mistake(
        "mixers: it is not known what a kernel has returned",
        "flow.attended(out[0] if isinstance(out, tuple) else out, tensors, dim)",
        "tensors",
        "tests/ranks/mixers/test_by_name.py",
    ),
    Mistake(
        "mixers: the layer that calls is not compared",
        "{name} of {calls.path or 'the module itself'}",
        "{name}",
        "tests/clients/test_mixers.py",
    ),
    Mistake(
        "mixers: parameters are not compared",
        "watch.look(tensors, self.group) if self.compares else 0",
        "0",
        "tests/clients/test_mixers.py",
    ),
    Mistake(
        "mixers: padding cut as if this part were the last",
        "return function(x_BLC, layout.shard(mask_BS, 1, rank))",
        "return function(x_BLC, attention_mask)",
        "tests/clients/test_mixers.py",
    ),
    # -- what ranks compare, and the loss --
    Mistake(
        "checksum: words and places are added, not mixed",
        "total += _mixed(keys).sum()",
        "total += keys.sum()",
        "tests/unit/test_checksum.py",
    ),
    Mistake(
        "score_mod: names in methods are not followed",
        "waiting += sorted(_names_in(function).difference(waiting))",
        "_names_in(function)",
        "tests/unit/test_introspect.py",
    ),
    Mistake(
        "gradient watch: the parameters of all optimizers",
        "if not among.isdisjoint(map(id, parameters))]",
        "if parameters]",
        "tests/ranks/engine/test_unreduced.py",
    ),
    Mistake(
        "gradient watch: another FSDP model counts as this one",
        "return own is None or own in others or not any(others)",
        "return True",
        "tests/ranks/engine/test_unreduced.py",
    ),
    Mistake(
        "loss: one of two numbers is compared",
        "apart = (same != same[:, :1]).any()",
        "apart = (same[1] != same[1, :1]).any()",
        "tests/ranks/engine/test_batch.py",
    ),
    Mistake(
        "loss: labels below 0 count",
        "(counted & (labels < 0)).sum()",
        "(counted & (labels < ignore_index)).sum()",
        "tests/ranks/engine/test_batch.py",
    ),
    Mistake(
        "padding: negative numbers in unsigned dtypes",
        "return bounds[0] <= value <= bounds[1] and value == int(value)",
        "return value <= bounds[1] and value == int(value)",
        "tests/unit/test_batch.py",
    ),
    Mistake(
        "cut: a layout for other ranks passes in the model's inputs",
        "if of_model := cuts_of(binding.tally.inputs.values()):",
        "if of_model := cuts_of(()):",
        "tests/ranks/doors/test_cut.py",
    ),
    Mistake(
        "sum_gradients: infinite gradients are taken for DDP's",
        "if any(nonzero) and all(finite) else 0",
        "if any(nonzero) else 0",
        "tests/ranks/engine/test_batch.py",
    ),
    # -- masks --
    Mistake(
        "mask: causal without the diagonal",
        "torch.zeros_like(q_positions_L), q_positions_L + 1",
        "torch.zeros_like(q_positions_L), q_positions_L",
        "tests/unit/test_mask.py",
    ),
    Mistake(
        "mask: a window one short on the right",
        "q_positions_L + right + 1",
        "q_positions_L + right",
        "tests/unit/test_mask.py",
    ),
    Mistake(
        "mask: a window one short on the left",
        "(q_positions_L - left).clamp(min=0)",
        "(q_positions_L - left + 1).clamp(min=0)",
        "tests/unit/test_mask.py",
    ),
    Mistake(
        "mask: chunks that see one key of the next",
        "return start, start + self.size",
        "return start, start + self.size + 1",
        "tests/unit/test_mask.py",
    ),
    Mistake(
        "mask: the first token of a document in the one before",
        "torch.bucketize(q_positions_L, ends, right=True)",
        "torch.bucketize(q_positions_L, ends, right=False)",
        "tests/unit/test_mask.py",
    ),
    Mistake(
        "mask: prefixes counted from the sequence's start",
        "start + prefixes[index])",
        "prefixes[index])",
        "tests/unit/test_mask.py",
    ),
    Mistake(
        "mask: the wider of two lower bounds",
        "reduce(torch.maximum, los), reduce(torch.minimum, his)",
        "reduce(torch.minimum, los), reduce(torch.minimum, his)",
        "tests/unit/test_mask.py",
    ),
    Mistake(
        "mask: every row of the batch has the first one's",
        "mask=attention.mask.row(index)",
        "mask=attention.mask.row(0)",
        "tests/ranks/engine/test_per_row.py",
    ),
    Mistake(
        "mask: partial blocks of a BlockMask as full ones",
        "(states == 2) | (states == 1) & facts",
        "(states >= 1) | (states == 1) & facts",
        "tests/unit/test_flex_mask.py",
    ),
    Mistake(
        "mask: blocks of a BlockMask reach beyond the sequence",
        "bits & (q < queries)[:, :, None] & (kv < keys)[:, None, :]",
        "bits",
        "tests/unit/test_flex_mask.py",
    ),
    # -- layouts and plans --
    Mistake(
        "cache: what entries share counts for each of them",
        "self.held += 0 if users else size",
        "self.held += size",
        "tests/unit/test_cache.py",
    ),
    Mistake(
        "cache: nothing leaves it",
        "while self.held > self.limit and len(self.entries) > 1:",
        "while False:",
        "tests/unit/test_cache.py",
    ),
    Mistake(
        "cache: keeps the tensor of a mask by which a layout is made",
        "value.pattern if isinstance(value, Mask) else value",
        "value",
        "tests/unit/test_cache.py",
    ),
    Mistake(
        "layout: chunks of a rank in reverse",
        "torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)",
        "torch.cat(parts[::-1], dim) if parts else tensor.narrow(dim, 0, 0)",
        "tests/unit/test_layout.py",
    ),
    Mistake(
        "layout: put together in the order of ranks",
        "pieces.sort(key=lambda piece: piece[0])",
        "pass",
        "tests/unit/test_layout.py",
    ),
    Mistake(
        "plan: a rank sends rows to itself",
        "torch.nonzero((last > first) & (pieces.rank != rank))",
        "torch.nonzero(last > first)",
        "tests/unit/test_plan.py",
    ),
    Mistake(
        "plan: a causal tile without its mask",
        "(below, end), Cover.CAUSAL)",
        "(below, end), Cover.FULL)",
        "tests/unit/test_plan.py",
    ),
    Mistake(
        "plan: no rectangle of one key before a triangle",
        "if below > lo else",
        "if below > lo + 1 else",
        "tests/unit/test_plan.py",
    ),
    Mistake(
        "plan: rows that see nothing yet",
        ".part(late, count - late - early)",
        ".part(late * 0, count - early)",
        "tests/unit/test_plan.py",
    ),
    Mistake(
        "plan: a row in two runs",
        "free = broken[before] ^ ((index - before) % 2 == 0)",
        "free = broken[before]",
        "tests/unit/test_plan.py",
    ),
    Mistake(
        "plan: a source's first chunk has no rows before its positions",
        "torch.minimum(positions + self._to_row[chunk], self._stop_row[chunk])",
        "positions + self._to_row[chunk]",
        "tests/unit/test_plan.py",
    ),
    Mistake(
        "plan: tables of a layout made for each plan",
        "return chunks_of(q_layout), chunks_of(kv_layout)",
        "return Chunks(q_layout), Chunks(kv_layout)",
        "tests/unit/test_plan.py",
    ),
    Mistake(
        "layout: the last period of stripes like the others",
        "start * periods + start.clamp(max=rest)",
        "start * periods + start",
        "tests/unit/test_layout.py",
    ),
    Mistake(
        "layout: stripes by their first chunks alone",
        "return stripes if stripes.chunks() == chunks else None",
        "return stripes",
        "tests/unit/test_layout.py",
    ),
    Mistake(
        "layout: chunks that are stripes stay chunks",
        "held = _as_stripes(held, sum(lengths)) or held",
        "pass",
        "tests/unit/test_layout.py",
    ),
    Mistake(
        "layout: a text that lists the chunks of stripes",
        "name, fields = _fields_of(type(value))",
        'name, fields = _fields_of(type(value)); getattr(value, "chunks", None)',
        "tests/unit/test_layout.py",
    ),
    Mistake(
        "layout: neighbours with stripes as wide as one's",
        "block=held.block * size)",
        "block=held.block)",
        "tests/unit/test_layout.py",
    ),
    Mistake(
        "layout: the end of a long document without a short one's share",
        "of_long, of_short = long.left, long.left * of_short // of_long",
        "of_long, of_short = long.left, 0",
        "tests/unit/test_layout.py",
    ),
    Mistake(
        "plan: stripes planned from tables of their chunks",
        "if all(isinstance(layout.held, Stripes) and layout.held.block == 1 for layout in (q_layout, kv_layout)):",
        "if False:",
        "tests/unit/test_plan.py",
    ),
    Mistake(
        "plan: stripes of keys like those of queries",
        "if all(isinstance(layout.held, Stripes) and layout.held.block == 1 for layout in (q_layout, kv_layout)):",
        "if isinstance(q_layout.held, Stripes) and q_layout.held.block == 1:",
        "tests/unit/test_plan.py",
    ),
    Mistake(
        "plan: each source planned for itself",
        "if not queries.block == keys.block > 0:",
        "if True:",
        "tests/unit/test_plan.py",
    ),
    Mistake(
        "plan: a rank that holds the bound like the ranks after it",
        "ends, ends + keys.block - 1))",
        "ends))",
        "tests/unit/test_plan.py",
    ),
    Mistake(
        "plan: stripes of other blocks seen alike",
        "if not queries.block == keys.block > 0:",
        "if not keys.block > 0:",
        "tests/unit/test_plan.py",
    ),
    Mistake(
        "plan: rows sent for windows that pass between them",
        "return first, torch.where(nothing, first, last)",
        "return first, last",
        "tests/unit/test_plan.py",
    ),
    Mistake(
        "mask: pieces that are cut keep their first bound",
        "torch.addcmul(self.hi, self.hi_step, skipped)",
        "self.hi",
        "tests/unit/test_mask.py",
    ),
    Mistake(
        "layout: heads of documents without their tails",
        "first, last = tokens - tokens // 2, tokens // 2",
        "first, last = tokens, 0",
        "tests/unit/test_layout.py tests/unit/test_balance.py",
    ),
    Mistake(
        "layout: ranks exchange no blocks",
        "_exchange(holder, done, work) by_rank",
        "by_rank",
        "tests/unit/test_balance.py",
    ),
    # -- merging --
    Mistake(
        "merge: the weight of the other side",
        "torch.sigmoid(lse_BHL - lse)",
        "torch.sigmoid(lse - lse_BHL)",
        "tests/unit/test_merge.py",
    ),
    Mistake(
        "merge: the larger logsumexp for the sum",
        "torch.logaddexp(lse, lse_BHL, out=lse)",
        "torch.maximum(lse, lse_BHL, out=lse)",
        "tests/unit/test_merge.py",
    ),
    Mistake(
        "merge: a waiting gradient is overwritten",
        "self._waiting[1].add_(tile)",
        "self._waiting[1].copy_(tile)",
        "tests/unit/test_merge.py",
    ),
    Mistake(
        "merge: accumulation in low precision",
        "return torch.float64 if dtype == torch.float64 else torch.float32",
        "return dtype",
        "tests/ranks/engine/test_precision.py tests/unit/test_merge.py",
    ),
    Mistake(
        "merge: a sink's share and the rest exchanged",
        "torch.sigmoid(lse_BHL - _logit_of_sink(sink_H, lse_BHL.dtype, level_BHL))",
        "torch.sigmoid(_logit_of_sink(sink_H, lse_BHL.dtype, level_BHL) - lse_BHL)",
        "tests/ranks/doors/test_options.py -k sink",
    ),
    Mistake(
        "merge: a sink's gradient with the other sign",
        "return -(p_BHL * dots_BHL).sum((0, 2))",
        "return (p_BHL * dots_BHL).sum((0, 2))",
        "tests/ranks/doors/test_options.py -k sink",
    ),
    # -- strategies --
    Mistake(
        "strategy: few rows travel in groups of heads too",
        "if size > limit:",
        "if size:",
        "tests/ranks/engine/test_attention_costs.py -k few_rows",
    ),
    Mistake(
        "strategy: what travels with all heads is computed at once",
        "all_heads if size * len(groups) <= limit else groups",
        "all_heads",
        "tests/ranks/engine/test_memory.py",
    ),
    Mistake(
        "strategy: tiles of different numbers of heads in one kernel call",
        "by_heads.setdefault(part.q_heads, [])",
        "by_heads.setdefault(part.block.heads[:0], [])",
        "tests/ranks/engine/test_parity_grid.py",
    ),
    Mistake(
        "strategy: what was sent is kept beside what is sent next",
        "del self._packed[block]",
        "pass",
        "tests/ranks/engine/test_memory.py",
    ),
    Mistake(
        "strategy: two ranks group the heads of a message by their own queries",
        "query * min(lengths[rank], lengths[other])",
        "query * lengths[rank]",
        "tests/ranks/engine/test_parity_grid.py",
    ),
    Mistake(
        "strategy: own keys left out of the forward",
        "forward += [*own_keys, ",
        "forward += [",
        "tests/ranks/engine/test_attention_parity.py",
    ),
    Mistake(
        "strategy: causal tiles attended in full",
        '"causal": tile.cover is Cover.CAUSAL',
        '"causal": False',
        "tests/ranks/engine/test_attention_parity.py",
    ),
    Mistake(
        "strategy: a tile's band is not masked",
        'bias.to(outside.device).masked_fill(outside, float("-inf"))',
        "bias.to(outside.device)",
        "tests/ranks/engine/test_attention_masks.py",
    ),
    Mistake(
        "strategy: nothing is kept for the backward",
        "kept = distances[:keep]",
        "kept = distances[:0]",
        "tests/ranks/engine/test_attention_costs.py",
    ),
    Mistake(
        "Ulysses: sinks of the first heads",
        "per_head_H[self._own]",
        "per_head_H[: self._heads]",
        "tests/ranks/doors/test_options.py -k sink",
    ),
    Mistake(
        "Ulysses: masks of the first heads",
        "heads=(before + start, before + stop)",
        "heads=(0, stop - start)",
        "tests/ranks/engine/test_attention_masks.py tests/ranks/doors/test_options.py "
        "tests/ranks/engine/test_parity_grid.py",
    ),
    Mistake(
        "Ulysses: key heads counted from the first rank's",
        "head // share - kv_start",
        "head // share",
        "tests/ranks/engine/test_attention_parity.py tests/ranks/engine/test_parity_grid.py",
    ),
    Mistake(
        "Ulysses: of several queries' gradients for a key head, one",
        ".index_add_(1, self._pairs, x)",
        ".index_copy_(1, self._pairs, x)",
        "tests/ranks/engine/test_attention_parity.py tests/ranks/engine/test_parity_grid.py",
    ),
    # -- CUDA, on stand-ins --
    Mistake(
        "doors: tensors that another layout cut pass",
        "if cut_tensors := cuts_of(self.tensors):",
        "if False:",
        "tests/ranks/doors/test_cut.py",
    ),
    Mistake(
        "doors: DTensors pass as plain tensors",
        "plain = type(q) is type(k) is type(v) is torch.Tensor",
        "plain = True",
        "tests/ranks/doors/test_errors.py",
    ),
    Mistake(
        "doors: in float32, autocast is forgotten",
        "if not torch.compiler.is_compiling() and not any_autocast():",
        "if not torch.compiler.is_compiling():",
        "tests/ranks/engine/test_precision.py",
    ),
    Mistake(
        "style: other tensors beside the three pass",
        "if len(args) + len(kwargs) == 3:",
        "if len(args) + len(kwargs) <= 4:",
        "tests/ranks/doors/test_errors.py tests/ranks/doors/test_attn_mask.py",
    ),
    Mistake(
        "style: attention past the mode is local",
        "**{kernel.forward_op: _refuse for kernel in SDPA_KERNELS},",
        "",
        "tests/ranks/doors/test_leaks.py",
    ),
    Mistake(
        "run: after an error the ranks do not compare what they called",
        "settle(self._group)  # what the ranks disagree on may be the cause",
        "state_of(self._group).operations.check = None",
        "tests/ranks/engine/test_agreement.py",
    ),
    Mistake(
        "functions: a call has the mask of an earlier one",
        "key = *said, gradient_check, agreement",
        "key = *said[:5], gradient_check, agreement",
        "tests/ranks/engine/test_wire.py",
    ),
    Mistake(
        "Ulysses: every chunk has the first one's key heads",
        "tuple((cut[index], cut[index + 1]) for cut in edges)",
        "tuple((cut[0], cut[1]) for cut in edges)",
        "tests/ranks/engine/test_parity_grid.py",
    ),
    Mistake(
        "CUDA: efficient attention's backward is given out as it is",
        "    out_by_rows=True,\n    row_bytes=16,\n    one_dim=False,\n)",
        "    row_bytes=16,\n    one_dim=False,\n)",
        "tests/unit/test_cuda_kernels.py",
    ),
    Mistake(
        "CUDA: a dead row's logsumexp is a number",
        'lse_BHL.masked_fill(lse_BHL <= EMPTY_LSE / 2, float("inf"))',
        "lse_BHL",
        "tests/unit/test_cuda_kernels.py",
    ),
    Mistake(
        "CUDA: the logsumexp is padded with 0",
        '-queries % self.lse_multiple), value=float("inf"))',
        "-queries % self.lse_multiple))",
        "tests/unit/test_cuda_kernels.py",
    ),
    Mistake(
        "CUDA: cuDNN where torch prefers it",
        "[preferred, *rest] if preferred and preferred != CUDA_CUDNN else rest",
        "[preferred, *rest] if preferred else rest",
        "tests/unit/test_kernels.py",
    ),
    Mistake(
        "CUDA: a tile goes to a kernel whatever its rows are",
        "not any(size % self.whole_rows for size in rows) and",
        "",
        "tests/unit/test_kernels.py tests/unit/test_cuda_kernels.py",
    ),
    Mistake(
        "CUDA: rows may start anywhere",
        "if tensor.stride(-1) == 1 and (self.row_bytes == 1 or self._is_aligned(tensor)):",
        "if tensor.stride(-1) == 1:",
        "tests/unit/test_cuda_kernels.py",
    ),
    Mistake(
        "CUDA: padded columns of a gradient are not cut off",
        "if dims != (dim, padded_v):",
        "if False:",
        "tests/unit/test_cuda_kernels.py",
    ),
    Mistake(
        "CUDA: numbers are copied to the device by a copy that blocks",
        "return made.to(device, non_blocking=True)",
        "return made.to(device)",
        "tests/ranks/engine/test_gpu_rules.py",
    ),
    Mistake(
        "CUDA: sinks are compared at once",
        'if tensor.device.type == "cpu":\n        return digest(tensor)',
        "if True:\n        return digest(tensor)",
        "tests/ranks/engine/test_gpu_rules.py",
    ),
    # -- around the attention calls --
    Mistake(
        "flow: tokens that meet in one value are not noticed",
        "if not bool(meet.any()): return one, False",
        "return one, False",
        "tests/unit/test_token_flow.py",
    ),
    Mistake(
        "flow: a sum over tokens is by token",
        "if not bool(meet.any()): return last, False",
        "return last, False",
        "tests/unit/test_token_flow.py",
    ),
    Mistake(
        "flow: what is written into a part of a tensor is forgotten",
        "self._flat = replace(flat, **tracks)",
        "self._flat = None",
        "tests/unit/test_token_flow.py",
    ),
    Mistake(
        "flow: the first rows of a table are any rows",
        "taken != length or start != 0",
        "True or start != 0",
        "tests/unit/test_token_flow.py",
    ),
    Mistake(
        "flow: a module that ran in evaluation is not followed in training",
        "return (id(module), module.training) in self._done",
        "return any(id(module) == each for each, _ in self._done)",
        "tests/ranks/doors/test_first_forward.py -k evaluation",
    ),
    Mistake(
        "guards: positions of a part are taken",
        "if from_0 and mine.numel() and int(mine[0]) != 0:",
        "if False:",
        "tests/ranks/doors/test_guards.py",
    ),
    Mistake(
        "windows: those of a config are not seen",
        "yield from _window(option, _of_layers(module, config, option, named), config)",
        "yield from ()",
        "tests/clients/test_transformers.py -k window",
    ),
    Mistake(
        "positions: padding is counted",
        "present = (tokens_BS != padding).long()",
        "present = torch.ones_like(tokens_BS)",
        "tests/clients/test_transformers.py -k positions_after",
    ),
    Mistake(
        "mask: a tensor changed in place is not noticed at the call",
        "binding.mask.check_unchanged()",
        "pass",
        "tests/ranks/flex/test_changed_in_place.py",
    ),
    Mistake(
        "guards: windows are never too small",
        "if window is None or window.size >= whole or given",
        "if window is None or window.size >= length or given",
        "tests/ranks/doors/test_guards.py",
    ),
    Mistake(
        "guards: pooled logits are taken",
        "and logits.ndim == 2 and length not in",
        "and logits.ndim == 5 and length not in",
        "tests/ranks/doors/test_batch_sharder.py",
    ),
    Mistake(
        "guards: the balance of a rank's experts is taken",
        'if output.get("aux_loss") is not None:',
        "if False:",
        "tests/ranks/doors/test_batch_sharder.py",
    ),
    Mistake(
        "guards: a count of this rank's labels is taken",
        "inputs=zlib.crc32(repr(number).encode())",
        "inputs=0",
        "tests/ranks/doors/test_batch_sharder.py",
    ),
    Mistake(
        "trainers: labels are shifted after the cut",
        "batch[name] = next_token_labels(labels, document_ids=ids, shift=ahead, seq_dim=1)",
        "batch[name] = labels",
        "tests/ranks/doors/test_batch_sharder.py",
    ),
    Mistake(
        "trainers: samples are not compared",
        "if row.inputs != rows[0].inputs]\n        if odd:\n            shapes",
        "if row.who != rows[0].who]\n        if odd:\n            shapes",
        "tests/ranks/doors/test_batch_sharder.py",
    ),
    Mistake(
        "trainers: labels are counted on each rank",
        'because each rank counts the whole batch."""\n        return self._cut._group.size()',
        'because each rank counts the whole batch."""\n        return 1',
        "tests/clients/test_trainers.py",
    ),
    Mistake(
        "trainers: the last batch is filled up",
        "sharded.even_batches = False",
        "pass",
        "tests/clients/test_trainers.py",
    ),
    Mistake(
        "trainers: each rank's rows are results",
        "[self._firsts].flatten(0, 1)",
        ".flatten(0, 1)",
        "tests/clients/test_trainers.py",
    ),
    Mistake(
        "trainers: a rank's share is the loss of an evaluation",
        "dist.all_reduce(loss, group=self._cut._group)",
        "pass",
        "tests/clients/test_trainers.py",
    ),
    Mistake(
        "transformers: a mask that is dropped is not missed",
        "if attention_mask is None and is_causal and calls.made_mask is not None:",
        "if False:",
        "tests/clients/test_transformers.py -k dropped",
    ),
    Mistake(
        "transformers: documents are not separated",
        "rows = [Documents(lengths if chunk is None else _chunks(lengths, chunk)) for lengths in documents]",
        "rows = []",
        "tests/clients/test_transformers.py -k packed",
    ),
    Mistake(
        "transformers: chunks are not counted from the padding's end",
        "lengths = [[*([low] if low else []), length - low] for low in first]",
        "lengths = [[length] for low in first]",
        "tests/clients/test_transformers.py -k padding",
    ),
    Mistake(
        "transformers: a window one short",
        "SlidingWindow(window - 1, None) if window > 0",
        "SlidingWindow(window - 2, None) if window > 0",
        "tests/clients/test_transformers.py -k mistral",
    ),
    Mistake(
        "transformers: no sink beside a softcap",
        "out = beside_sink(out, torch.cat([lse for _, lse in found if lse is not None]), sink_H)",
        "pass",
        "tests/clients/test_transformers.py -k softcap",
    ),
    Mistake(
        "generating: a cache may be used for another prompt",
        "if last != expected:",
        "if False:",
        "tests/clients/test_generate.py -k another_prompt",
    ),
    # -- forwards whose hooks have not run --
    Mistake(
        "forwards: one that is called without the hooks is not looked at",
        "if not compiling and not calls.running and graph_task_id() < 0:",
        "if False:",
        "tests/ranks/doors/test_guards.py -k itself",
    ),
    Mistake(
        "forwards: a forward never ends",
        "            self._tally.running = False",
        "            pass",
        "tests/ranks/doors/test_guards.py -k itself",
    ),
    Mistake(
        "forwards: models inside of a model are not looked at",
        'return "input_ids" in inspect.signature(type(module).forward).parameters',
        "return False",
        "tests/ranks/doors/test_guards.py -k itself",
    ),
    Mistake(
        "forwards: each part that is called alone has to attend",
        "attends=module is self._top",
        "attends=True",
        "tests/ranks/doors/test_guards.py -k alone",
    ),
    # -- agreement --
    Mistake(
        "agreement: messages leave before the rows of the others are read",
        "settle(group) tag = 0",
        "tag = 0",
        "tests/ranks/engine/test_agreement.py -k no_message_is_left",
    ),
    Mistake(
        "agreement: rows of one gather are taken for those of another",
        "_FIRST_TAG + number % _TAGS",
        "_FIRST_TAG",
        "tests/ranks/engine/test_mailbox.py",
    ),
    Mistake(
        "agreement: an interrupted rank leaves messages out",
        "self._post(number - 1, before)",
        "pass",
        "tests/ranks/engine/test_mailbox.py",
    ),
    Mistake(
        "agreement: what was left unread is kept for ever",
        "self._gathers.pop(old, None)",
        "pass",
        "tests/ranks/engine/test_mailbox.py",
    ),
    Mistake(
        "agreement: a rank that is interrupted before its row goes on",
        "break_off(group, error) raise operations.user, operations.axis =",
        "raise\n    operations.user, operations.axis =",
        "tests/ranks/engine/test_half_way.py -k interrupt_in",
    ),
    Mistake(
        "agreement: a rank that is interrupted while it waits goes on",
        "break_off(self.group, error) if isinstance(error, RuntimeError):",
        "if isinstance(error, RuntimeError):",
        "tests/ranks/engine/test_half_way.py -k interrupt_in",
    ),
    Mistake(
        "batch: some gradients are sums, and others are not",
        "parameter.grad = None raise",
        "pass\n        raise",
        "tests/ranks/engine/test_half_way.py -k no_optimizer",
    ),
    Mistake(
        "verify: an interrupted rank keeps its connections",
        "for axis in range(mesh.ndim): break_off(mesh.get_group(axis), error)",
        "pass",
        "tests/process/test_faults.py -m nightly -k every_fault_keeps_the_promise[verify]",
    ),
    Mistake(
        "groups: what is known of a group keeps it alive",
        "_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()",
        "_states: dict[dist.ProcessGroup, GroupState] = {}",
        "tests/process/test_leaks.py",
    ),
    Mistake(
        "agreement: rows belong to the mode in which they were asked for",
        "with torch.inference_mode(False):  # a result",
        "if True:  # a result",
        "tests/ranks/engine/test_mailbox.py",
    ),
    Mistake(
        "agreement: rows always look alike",
        "self.alike = len(set(map(_but_lengths, self))) == 1",
        "self.alike = True",
        "tests/ranks/engine/test_disagreement.py",
    ),
    Mistake(
        "agreement: the status of a row is not compared",
        "_but_lengths = itemgetter(slice(2, None))",
        "_but_lengths = itemgetter(slice(3, None))",
        "tests/ranks/engine/test_unreduced.py -k error",
    ),
    Mistake(
        "agreement: what is assumed of the others is this rank's length",
        "rows = [mine._replace(q_length=length, kv_length=length) for length in layout.lengths]",
        "rows = [mine for length in layout.lengths]",
        "tests/ranks/engine/test_agreement.py",
    ),
    Mistake(
        "agreement: ranks may choose differently",
        "for part in (self.strategy, self.mask, self.kernel, self.agreement)]",
        "for part in (self.strategy, self.mask, self.kernel)]",
        "tests/ranks/engine/test_agreement.py -k alike",
    ),
    # -- explain --
    Mistake(
        "explain: a call costs nothing by itself",
        "now = copies = hardware.call_floor",
        "now = copies = 0.0",
        "tests/ranks/explain",
    ),
    Mistake(
        "explain: messages one after the other in both directions",
        "way = link, event.outgoing",
        "way = link, True",
        "tests/ranks/explain/test_hardware.py",
    ),
    Mistake(
        "explain: a link never carries two messages at once",
        "free[way] = max(free.get(way, 0.0), now) + event.nbytes / bandwidth",
        "free[way] = now + event.nbytes / bandwidth",
        "tests/ranks/explain/test_hardware.py",
    ),
    Mistake(
        "explain: ranks that exchange heads are balanced as the layout deals",
        "exchange = self.strategy.size_on(self.ranks) if isinstance(self.strategy, Ulysses) else 1",
        "exchange = 1",
        "tests/ranks/explain/test_hardware.py",
    ),
    Mistake(
        "explain: planning is read from the cache",
        "with another_cache():",
        "if True:",
        "tests/ranks/explain/test_hardware.py",
    ),
    Mistake(
        "explain: the slowest is chosen",
        "best = min(rows, key=lambda choice: (bool(choice.problem), choice.seconds))",
        "best = max(rows, key=lambda choice: (not choice.problem, choice.seconds))",
        "tests/ranks/explain/test_auto.py",
    ),
    Mistake(
        "groups: the parts of a hybrid are named by how many groups a rank is in",
        'name = f"{group.group_name}.cp_styles.{size}"',
        'name = f"{len(dist.distributed_c10d._world.pg_names)}.cp_styles.{size}"',
        "tests/ranks/engine/test_disagreement.py::test_ranks_in_different_numbers_of_groups",
    ),
    # -- compiled and recomputed --
    Mistake(
        "compiled: a graph's backward remembers no scope",
        "said = _scope_text(scope, name)",
        'said = ""',
        "tests/ranks/compile/test_compile.py -k documents",
    ),
    Mistake(
        "compiled: results in another order of strides than graphs were promised",
        'out = _laid_out(out, _like_query(q.to("meta"), v.shape[3]))',
        "out = out.contiguous()",
        "tests/ranks/compile/test_compile.py -k strides",
    ),
    Mistake(
        "compiled: what a rank finds while it traces is not said",
        "if problem: raise NotImplementedError(problem)",
        "if False: raise NotImplementedError(problem)",
        "tests/ranks/compile/test_compile_refusals.py",
    ),
    Mistake(
        "compiled: what one rank alone gives a graph is not checked",
        "if not live: check_local(name, (q, k, v))",
        "if False: check_local(name, (q, k, v))",
        "tests/ranks/compile/test_compile_refusals.py -k one_rank_alone",
    ),
    Mistake(
        "checkpoint: received keys outlive the layer",
        "if not dispatch_modes_entered() or _saving.isdisjoint(dispatch_modes()):",
        "if True:",
        "tests/ranks/doors/test_selective_checkpoint.py -k outlive",
    ),
    Mistake(
        "block: an equal one inside goes on with the outer one's count",
        "tally.update(vars(Tally()))",
        "pass",
        "tests/ranks/doors/test_torch_api.py -k equal_blocks",
    ),
    Mistake(
        "block: the count of an equal one inside stays",
        "stack.callback(tally.update, dict(tally))",
        "pass",
        "tests/ranks/doors/test_torch_api.py -k equal_blocks",
    ),
    Mistake(
        "style: an input without a gradient gets zeros",
        "ctx.set_materialize_grads(False)\n        ctx.placements = placements",
        "ctx.placements = placements",
        "tests/ranks/doors/test_leaks.py -k nothing_depends",
    ),
    Mistake(
        "style: handlers that somebody removed stay away",
        "if list(map(type, table.values())).count(_Handler) == len(_HANDLED):",
        "if list(map(type, table.values())).count(_Handler):",
        "tests/ranks/doors/test_leaks_life.py",
    ),
    Mistake(
        "derivatives: tangents are not looked for",
        "tensors if forward_mode_level() >= 0",
        "tensors if forward_mode_level() > 0",
        "tests/ranks/doors/test_derivatives.py",
    ),
    Mistake(
        "checkpoint: a recomputation agrees again",
        "# varlen_attn too\n        ops.gather_numbers.default,",
        "",
        "tests/ranks/doors/test_selective_checkpoint.py -k communicates_nothing",
    ),
    # -- kernels --
    Mistake(
        "flex: the arguments of a score_mod are compared as its tables",
        "reading.note(arguments) # vmap",
        "# vmap",
        "tests/ranks/flex/test_flex_on_cuda.py -k waits",
    ),
    Mistake(
        "flex: compiled tiles count heads from 0",
        "score = mod(score, b, h + head, q_L[q_idx], kv_M[kv_idx])",
        "score = mod(score, b, h, q_L[q_idx], kv_M[kv_idx])",
        "tests/ranks/flex/test_flex_on_cuda.py",
    ),
    Mistake(
        "kernel: softmax's backward without the row's mean",
        "ds = p * (product(grad, v.mT) - (grad * out).sum(-1, keepdim=True)) * scale",
        "ds = p * product(grad, v.mT) * scale",
        "tests/unit/test_kernels.py",
    ),
    Mistake(
        "kernel: the diagonal is the future",
        "device=logits.device).triu(1)",
        "device=logits.device).triu(0)",
        "tests/unit/test_kernels.py",
    ),
    Mistake(
        "kernel: a negative scale's sign is lost",
        "return dq if sign == 1.0 else dq * sign",
        "return dq if sign == 1.0 else dq",
        "tests/unit/test_kernels.py tests/ranks/doors/test_options.py",
    ),
    Mistake(
        "kernel: the logsumexp's gradient with the other sign",
        "F.pad(out_BHLE, (0, 8), value=-1.0)",
        "F.pad(out_BHLE, (0, 8), value=1.0)",
        "tests/ranks/flex/test_flex.py",
    ),
    Mistake(
        "kernel: rows that see nothing keep what the op left",
        "out = out.masked_fill(dead.unsqueeze(-1), 0.0)",
        "out = out + 0.0",
        "tests/ranks/engine/test_parity_grid.py",
    ),
    Mistake(
        "kernel: numbers that stand apart in memory",
        "if tensor.stride(-1) == 1 and (self.row_bytes == 1 or self._is_aligned(tensor)):",
        "if self.row_bytes == 1 or self._is_aligned(tensor):",
        "tests/ranks/doors/test_strides.py",
    ),
    # -- batch: labels, losses, gradients --
    Mistake(
        "batch: labels across documents",
        "same = starts.narrow(seq_dim, shift, kept) == starts.narrow(seq_dim, 0, kept)",
        "same = torch.ones_like(ahead, dtype=torch.bool)",
        "tests/unit/test_batch.py",
    ),
    Mistake(
        "batch: positions run through documents",
        "return _index_along(document_ids, seq_dim) - _document_starts(document_ids, seq_dim)",
        "return _index_along(document_ids, seq_dim) + 0 * _document_starts(document_ids, seq_dim)",
        "tests/unit/test_batch.py",
    ),
    Mistake(
        "batch: tokens without a label are counted",
        "torch.stack((counted.sum(),",
        "torch.stack((torch.tensor(labels.numel()),",
        "tests/ranks/engine/test_batch.py",
    ),
    Mistake(
        "batch: a reducer's division stays",
        "grads[0] * ctx.factor.to(grads[0].dtype)",
        "grads[0]",
        "tests/ranks/engine/test_gradients_over_cp.py -k fsdp",
    ),
    Mistake(
        "batch: sums of gradients are added to the gradients",
        "gradient.copy_(piece.view(gradient.shape))",
        "gradient.add_(piece.view(gradient.shape))",
        "tests/ranks/engine/test_batch.py",
    ),
    Mistake(
        "batch: bfloat16 gradients are summed in bfloat16",
        "reduce_dtype or torch.promote_types(bucket[0].dtype, torch.float32)",
        "reduce_dtype or bucket[0].dtype",
        "tests/ranks/engine/test_batch.py tests/ranks/engine/test_precision.py",
    ),
    Mistake(
        "batch: partial gradients of DTensors stay partial",
        "if gradient.placements != parameter.placements:",
        "if len(gradient.placements) != len(parameter.placements):",
        "tests/ranks/engine/test_batch.py tests/ranks/engine/test_gradients_over_cp.py",
    ),
    # -- placements on the axes of a mesh --
    Mistake(
        "placements: attention keeps anything apart",
        "return placement.is_replicate() or placement == Shard(0) or placement == Shard(head_dim)",
        "return True",
        "tests/ranks/tensor_parallel/test_tp_refusals.py",
    ),
    Mistake(
        "placements: parts of a dim are as large as the first",
        "return min(index * size, length), min((index + 1) * size, length)",
        "return index * size, (index + 1) * size",
        "tests/ranks/tensor_parallel",
    ),
    Mistake(
        "engine: backwards begin without the other ranks",
        "begin_backward(binding.group, forward, binding.agreement)",
        "pass",
        "tests/ranks/engine/test_disagreement.py",
    ),
    Mistake(
        "agreement: layers of one class are alike",
        'zlib.crc32(f"{self.site} {self.tally.path}".encode())',
        "1",
        "tests/ranks/engine/test_disagreement.py -k leave_out",
    ),
    Mistake(
        "agreement: dtypes are those before autocast",
        "self.dtypes = attended_dtypes(self.tensors)",
        "self.dtypes = [x.dtype for x in self.tensors]",
        "tests/ranks/engine/test_disagreement.py -k autocast",
    ),
    Mistake(
        "engine: backwards of all forwards are alike",
        "row = StatusRow(place=place_of(forward, 0))",
        "row = StatusRow()",
        "tests/ranks/engine/test_half_way.py -k backwards_in_another_order",
    ),
    Mistake(
        "engine: a rank leaves an operation, and nobody hears of it",
        "            end_connections(gloo)",
        "            pass",
        "tests/ranks/engine/test_half_way.py -k 'stand_still or goes_on'",
    ),
    Mistake(
        "engine: a rank that has left half way goes on",
        "state.operations.broken = f",
        "_ = f",
        "tests/ranks/engine/test_half_way.py -k goes_on",
    ),
    Mistake(
        "collectives: a backward begins without the other ranks",
        "if ctx.check and not is_traced()",
        "if False and not is_traced()",
        "tests/ranks/engine/test_half_way.py -k collectives",
    ),
    # -- agreement and warnings --
    Mistake(
        "agreement: a refusal is not heard",
        "refused = [rank for rank, row in enumerate(rows) if row.status == status]",
        "refused = []",
        "tests/ranks/doors/test_errors.py tests/ranks/engine/test_disagreement.py",
    ),
    Mistake(
        "agreement: ranks that differ go on",
        "odd = [rank for rank, number in enumerate(numbers) if number != numbers[0]]",
        "odd = []",
        "tests/ranks/engine/test_disagreement.py",
    ),
    Mistake(
        "agreement: ranks at different places go on",
        "len({(row.meeting, row.who) for row in rows}) == 1 and len(which - {0}) < 2 and len(index - {0}) < 2",
        "rows",
        "tests/ranks/engine/test_disagreement.py",
    ),
    Mistake(
        "unreduced: nobody is warned",
        "if 0 in numbers or len(set(numbers)) == 1:",
        "if numbers:",
        "tests/ranks/engine/test_unreduced.py",
    ),
    Mistake(
        "unreduced: what an optimizer steps beside is not compared",
        "stepped = [(each, _trained(each)) for each in _optimizers_here()]",
        "stepped = []",
        "tests/ranks/engine/test_unreduced.py",
    ),
    Mistake(
        "unreduced: experts are compared",
        "if id(parameter) not in left_out and",
        "if",
        "tests/ranks/engine/test_unreduced.py",
    ),
    Mistake(
        "unreduced: rounding is an error",
        "difference <= tolerance * norm",
        "difference <= 0",
        "tests/ranks/engine/test_unreduced.py",
    ),
    Mistake(
        "token flow: memory that no operator wrote is clean",
        "return CLEAN if self.zeros and not bool(tensor.any()) else Label(mixed=self.made)",
        "return CLEAN",
        "tests/unit/test_token_flow.py",
    ),
    Mistake(
        "token flow: operators of other libraries keep tokens apart",
        "if foreign and takes_tokens else UNKNOWN",
        "if False else UNKNOWN",
        "tests/unit/test_token_flow.py",
    ),
    Mistake(
        "block: what is read outside of all modules is not looked at",
        "looks_at_readers=True)",
        "looks_at_readers=False)",
        "tests/ranks/doors/test_unseen.py",
    ),
    Mistake(
        "block: only the first is followed",
        "return due or not self._blocks & (self._blocks - 1)",
        "return self._blocks == 1",
        "tests/ranks/doors/test_unseen.py",
    ),
    Mistake(
        "block: a new model does not make the next block a followed one",
        "return due or not self._blocks & (self._blocks - 1)",
        "return not self._blocks & (self._blocks - 1)",
        "tests/ranks/doors/test_unseen.py",
    ),
    Mistake(
        "token flow: TorchScript's attention is one that was intercepted",
        "if call.is_attention and self._unseen is None:",
        "if False and self._unseen is None:",
        "tests/ranks/doors/test_unseen.py",
    ),
    Mistake(
        "scope: another thread's is ignored",
        "if task < 0 and any(",
        "if task > 0 and any(",
        "tests/ranks/doors/test_scope.py",
    ),
    Mistake(
        "unreduced: parts that are meant to differ are compared",
        "if spread[mesh]: continue",
        "pass",
        "tests/ranks/engine/test_unreduced.py",
    ),
    Mistake(
        "plan: further modules of a class with a style are not counted",
        "if len(paths) > self._plain[cls]:",
        "if False:",
        "tests/ranks/doors/test_put_in_later.py",
    ),
    Mistake(
        "block: the arguments of the models in it are not checked",
        "if module not in self._guards and (",
        "if False and (",
        "tests/clients/test_transformers.py",
    ),
    # -- scopes and collectives --
    Mistake(
        "scope: stays open",
        "self._variable.set(others)",
        "pass",
        "tests/ranks/doors/test_scope.py",
    ),
    Mistake(
        "scope: a generator that goes on has that of another",
        "if last._stopped:",
        "if False:",
        "tests/ranks/doors/test_scope.py",
    ),
    Mistake(
        "scope: one that ends in another context stays open",
        "self.ended = True",
        "pass",
        "tests/ranks/doors/test_scope.py",
    ),
    Mistake(
        "block: the innermost mode ends and not its own",
        "leave_function_mode(self)",
        "super().__exit__(*exception)",
        "tests/ranks/doors/test_torch_api_life.py",
    ),
    Mistake(
        "reruns: the modes are entered in the reverse order",
        "key=lambda each: each[0]",
        "key=lambda each: -each[0]",
        "tests/ranks/doors/test_module_door.py",
    ),
    Mistake(
        "scope: not there in a recomputation",
        "return contextlib.nullcontext(), self",
        "return contextlib.nullcontext(), contextlib.nullcontext()",
        "tests/ranks/doors/test_scope.py",
    ),
    Mistake(
        "collectives: gradients of a gather are not reduced",
        "exchange if reduce_gradients else Replicated(exchange)",
        "Replicated(exchange)",
        "tests/ranks/collectives/test_collectives_split_gather.py",
    ),
    Mistake(
        "collectives: tensors of one message overlap",
        "at += prod(shape)",
        "at += 0",
        "tests/ranks/collectives/test_collectives_heads.py",
    ),
    Mistake(
        "collectives: a key head that two ranks need goes to one",
        "(start // group, -(-stop // group)) for start, stop in ranges",
        "(start // group, stop // group) for start, stop in ranges",
        "tests/ranks/collectives/test_collectives_heads.py",
    ),
    # -- decoding, and tokens that are whole on every rank --
    Mistake(
        "decode: every rank keeps each new key",
        "mine = slice((self._rank - self._length) % self._ranks, None, self._ranks)",
        "mine = slice(None)",
        "tests/ranks/doors/test_decode.py",
    ),
    Mistake(
        "decode: the parts of all ranks weigh alike",
        "weights = torch.exp(lses_PBHL - lse_BHL)",
        "weights = torch.softmax(lses_PBHL * 0, 0)",
        "tests/ranks/doors/test_decode.py",
    ),
    Mistake(
        "decode: each token of a further prompt sees the next one",
        "for x in (lo, hi))",
        "for x in (lo, hi + 1))",
        "tests/ranks/doors/test_decode.py",
    ),
    Mistake(
        "decode: a window's keys are freed one too early",
        "self._first = max(self._first, min(position, self._length))",
        "self._first = max(self._first, min(position + 1, self._length))",
        "tests/ranks/doors/test_decode.py",
    ),
    Mistake(
        "decode: different tokens pass",
        "if different:",
        "if different > 1:",
        "tests/ranks/doors/test_decode.py",
    ),
    Mistake(
        "decode: different random states pass",
        "* 0x9E3779B97F4A7C1 + alike)",
        "* 0x9E3779B97F4A7C1)",
        "tests/ranks/doors/test_decode.py",
    ),
    Mistake(
        "joint: the gradient of the text is that of one rank",
        "text = gather(own, 2, group, reduce_gradients=True,",
        "text = gather(own, 2, group, reduce_gradients=False,",
        "tests/ranks/doors/test_joint.py",
    ),
    Mistake(
        "joint: another text on each rank passes",
        "> 0.05 * parts_P8.abs().amax()",
        "> 50 * parts_P8.abs().amax()",
        "tests/ranks/doors/test_joint.py",
    ),
    # -- verify --
    Mistake(
        "verify: NaN is no error",
        "return math.inf if math.isnan(found) else found",
        "return found if found > 0 else 0.0",
        "tests/ranks/verify/test_judgement.py",
    ),
    Mistake(
        "verify: the groups of a failed step go on",
        "for group in groups: dist.destroy_process_group(group)",
        "for group in (): dist.destroy_process_group(group)",
        "tests/ranks/verify/test_judgement.py",
    ),
    Mistake(
        "verify: a part alone is always one that mixes tokens",
        "mixes = self._holds(lambda: self._differs_here(run(self._others_changed), right, mine), every=False)",
        "mixes = True",
        "tests/ranks/verify/test_judgement.py",
    ),
    Mistake(
        "verify: gradients that were removed count as none",
        "removed = [name for name in had if",
        "removed = [name for name in () if",
        "tests/ranks/verify/test_judgement.py",
    ),
    Mistake(
        "tp: rows that it does not divide leave as plain tensors",
        "if dim == len(shape) - 1 or shape[dim] % axis.size() == 0:",
        "if dim == len(shape) - 1 or shape[dim] > 0:",
        "tests/ranks/tensor_parallel/test_tp_refusals.py",
    ),
    Mistake(
        "tp: other ranks of the sequence do not hear of uneven rows",
        "for name, group in self._others:",
        "for name, group in ():",
        "tests/ranks/tensor_parallel/test_tp_refusals.py",
    ),
    Mistake(
        "default device: document lengths on it",
        'lengths = torch.tensor(self.lengths, dtype=torch.int64, device="cpu")',
        "lengths = torch.tensor(self.lengths, dtype=torch.int64)",
        "tests/ranks/doors/test_default_device.py",
    ),
]


def pattern(text: str) -> re.Pattern[str]:
    """``text`` with any blanks and line breaks, or none, where it has some, or between what is no word."""
    pieces = re.findall(r"\w+|[^\w\s]", text)
    joints = [r"\s+" if a[-1].isalnum() and b[0].isalnum() else r"\s*" for a, b in pairwise(pieces)]
    return re.compile("".join(re.escape(piece) + joint for piece, joint in zip(pieces, [*joints, ""], strict=True)))


def places(mistake: Mistake, package: Path) -> list[tuple[Path, re.Match[str]]]:
    """Where the text stands that the mistake replaces."""
    files = sorted(package.rglob("*.py"))
    return [(file, match) for file in files for match in pattern(mistake.right).finditer(file.read_text())]


def run(tests: str, copy: Path) -> tuple[int | None, str]:
    """pytest's exit status, None after LIMIT, and its last lines."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-p", "no:cacheprovider", *tests.split()]
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
            return done.returncode, done.stdout[:200].strip() or done.stderr[-300:]
    return 0, ""


def plant(mistake: Mistake, copy: Path, runs: Callable[[], tuple[int | None, str]]) -> str | None:
    """Run the tests with the mistake; what is wrong about them, or None where they have noticed it."""
    found = places(mistake, copy / "cp_styles")
    if len(found) != 1:
        return f"its text is there {len(found)} times: {mistake.right}"
    file, match = found[0]
    original = file.read_text()
    file.write_text(original[: match.start()] + mistake.wrong + original[match.end() :])
    try:
        status, said = runs()
    finally:
        file.write_text(original)
    if status is None:
        print(f"    no end after {LIMIT} s")
        return None
    if status == FAILED or status < 0:  # or a rank has crashed
        print(f"    {said}")
        return None
    return "UNNOTICED" if status == 0 else f"pytest could not run (status {status}): {said}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mistakes with one of these in their names")
    parser.add_argument("--texts", action="store_true", help="only look whether each text is there once")
    parser.add_argument("--fuzz", action="store_true", help="random attentions and programs in place of the tests")
    parser.add_argument("--unplanted", action="store_true", help="run the tests without the mistakes")
    options = parser.parse_args()
    chosen = [x for x in MISTAKES if not options.words or any(word in x.name for word in options.words)]
    chosen = [x for x in chosen if not options.fuzz or x.name in FUZZED]
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
            if options.texts:
                found = places(mistake, copy / "cp_styles")
                problem = None if len(found) == 1 else f"its text is there {len(found)} times: {mistake.right}"
                absent = [word for word in mistake.tests.split() if word.endswith(".py") and not (ROOT / word).exists()]
                problem = problem or (f"{absent} are not there" if absent else None)
            else:
                problem = plant(
                    mistake, copy, partial(run_random, copy) if options.fuzz else partial(run, mistake.tests, copy)
                )
            wrong += problem is not None
            said = problem or ("found" if options.texts else "noticed")
            print(f"{mistake.name}: {said} ({time.perf_counter() - start:.0f} s)", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
