"""Plants mistakes in a copy of the package, one by one, and says which of them the tests notice.

    python tests/mutations.py                  all of them, with the tests that concern each: 20 minutes on 2 cores
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
from functools import partial
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


# What random attentions and programs are for: a wrong result, or an error that not all ranks hear, in what they call.
FUZZED = [
    Mistake(
        "mask: causal without the diagonal", "Causal.bounds", "q_positions_L + 1", "q_positions_L", "unit/test_mask.py"
    ),
    Mistake(
        "mask: a window one short on the left", "SlidingWindow.bounds", "- left)", "- left + 1)", "unit/test_mask.py"
    ),
    Mistake(
        "mask: the first token of a document in the one before",
        "Documents.bounds",
        "right=True",
        "right=False",
        "unit/test_mask.py",
    ),
    Mistake("mask: the wider of two lower bounds", "All.bounds", "maximum", "minimum", "unit/test_mask.py"),
    Mistake(
        "mask: every row of the batch has the first one's",
        "PerRow.row",
        "masks[index]",
        "masks[0]",
        "ranks/engine/test_per_row.py",
    ),
    Mistake(
        "mask: partial blocks of a BlockMask as full ones",
        "FlexMask.bias",
        "states == 2",
        "states >= 1",
        "unit/test_flex_mask.py",
    ),
    Mistake("layout: chunks of a rank in reverse", "rows_in", "(parts,", "(parts[::-1],", "unit/test_layout.py"),
    Mistake("plan: a causal tile without its mask", "_tile_run", ".CAUSAL", ".FULL", "unit/test_plan.py"),
    Mistake(
        "plan: a source's first chunk has no rows before its positions",
        "Chunks.rows",
        "torch.minimum(positions + self._to_row[chunk], self._stop_row[chunk])",
        "positions + self._to_row[chunk]",
        "unit/test_plan.py",
    ),
    Mistake("merge: rows that are begun are overwritten", "_overlaps", "place % 2 == 1 or", "", "unit/test_merge.py"),
    Mistake(
        "merge: a sink's share and the rest exchanged",
        "apply_sink",
        "lse_BHL - _sink_logit(sink_H, lse_BHL.dtype, level_BHL)",
        "_sink_logit(sink_H, lse_BHL.dtype, level_BHL) - lse_BHL",
        "ranks/test_random.py -k attentions",
    ),
    Mistake(
        "strategy: a tile's band is not masked",
        "_masked_bias",
        ').masked_fill(outside, float("-inf")',
        "",
        "ranks/engine/test_parity_grid.py",
    ),
    Mistake(
        "Ulysses: sinks of the first heads",
        "_Levels.select_heads",
        "self._local_heads",
        ": self._heads",
        "ranks/test_random.py -k attentions",
    ),
    Mistake(
        "Ulysses: masks of the first heads",
        "_Levels.__init__",
        "before + start, before + stop",
        "0, stop - start",
        "ranks/engine/test_parity_grid.py",
    ),
    Mistake(
        "Ulysses: key heads counted from the first rank's",
        "_make_geometry",
        "share - kv_start",
        "share",
        "ranks/engine/test_parity_grid.py",
    ),
    Mistake(
        "doors: in float32, autocast is forgotten",
        "cast_for_attention",
        "() and not any_autocast",
        "",
        "ranks/engine/test_precision.py",
    ),
    Mistake(
        "functions: a call has the mask of an earlier one",
        "binding_of_call",
        "key = name, mesh, strategy, layout, mask, kernel, checks",
        "key = name, mesh, strategy, layout, kernel, checks",
        "ranks/engine/test_wire.py",
    ),
    Mistake(
        "kernel: a negative scale's sign is lost", "SdpaKernel.backward", "dq * sign", "dq", "unit/test_kernels.py"
    ),
    Mistake(
        "kernel: the logsumexp's gradient with the other sign",
        "LseGradient.backward",
        "value=-",
        "value=",
        "ranks/flex/test_flex.py",
    ),
    Mistake(
        "batch: labels across documents",
        "next_token_labels",
        "starts.narrow(seq_dim, shift, length) == starts.narrow(seq_dim, 0, length",
        "torch.ones_like(ahead, dtype=torch.bool",
        "unit/test_batch.py",
    ),
    Mistake(
        "engine: backwards begin without the other ranks",
        "run_backward",
        "begin_backward(binding.group, forward, binding.checks.agreement)",
        "pass",
        "ranks/engine/test_half_way.py -k another_order",
    ),
    Mistake(
        "agreement: a refusal is not heard",
        "_raise_if_refused",
        "rank for rank, row in enumerate(rows) if row.status == status",
        "",
        "ranks/doors/test_errors.py ranks/engine/test_disagreement.py",
    ),
    Mistake(
        "agreement: ranks that differ go on",
        "compare",
        "rank for rank, number in enumerate(numbers) if number != numbers[0]",
        "",
        "ranks/engine/test_disagreement.py",
    ),
    Mistake("mask: a window one short on the right", "SlidingWindow.bounds", "right + 1", "right", "unit/test_mask.py"),
    Mistake(
        "mask: chunks that see one key of the next",
        "Chunked.bounds",
        "start + self.size",
        "start + self.size + 1",
        "unit/test_mask.py",
    ),
    Mistake(
        "mask: prefixes counted from the sequence's start",
        "Documents.bounds",
        "start + prefixes[0][index]",
        "prefixes[0][index]",
        "unit/test_mask.py",
    ),
    Mistake(
        "mask: pieces that are cut keep their first bound",
        "Pieces.part",
        "torch.addcmul(self.hi, self.hi_step, skipped)",
        "self.hi",
        "unit/test_mask.py",
    ),
    Mistake(
        "layout: the last period of stripes like the others",
        "Stripes.rows_rank_by_rank",
        "start.clamp(max=rest)",
        "start",
        "unit/test_layout.py",
    ),
    Mistake(
        "merge: the weight of the other side",
        "TorchMerge.__call__",
        "weight = torch.sigmoid(new_lse_BHL - lse_BHL)",
        "weight = torch.sigmoid(lse_BHL - new_lse_BHL)",
        "unit/test_merge.py",
    ),
    Mistake(
        "merge: the larger logsumexp for the sum",
        "TorchMerge.__call__",
        "logaddexp(lse_BHL, new_lse_BHL, out",
        "maximum(lse_BHL, new_lse_BHL, out",
        "unit/test_merge.py",
    ),
    Mistake(
        "merge: a sink's gradient with the other sign",
        "sink_gradient",
        "-(p_BHL",
        "(p_BHL",
        "ranks/test_random.py -k attentions",
    ),
    Mistake(
        "kernel: softmax's backward without the row's mean",
        "ReferenceKernel.backward",
        "- (grad * out).sum(-1, keepdim=True)",
        "",
        "unit/test_kernels.py",
    ),
    Mistake(
        "strategy: causal tiles attended in full",
        "_PlanRun._call_kernel",
        "call.cover is Cover.CAUSAL",
        "False",
        "ranks/engine/test_parity_grid.py",
    ),
    Mistake(
        "Ulysses: of several queries' gradients for a key head, one",
        "_Levels.unpair_gradients",
        "index_add_",
        "index_copy_",
        "ranks/engine/test_parity_grid.py",
    ),
    Mistake(
        "batch: tokens without a label are counted",
        "global_token_count",
        "(counted.sum(),",
        "(torch.tensor(labels.numel()),",
        "ranks/engine/test_batch.py",
    ),
    Mistake(
        "agreement: ranks at different places go on",
        "_are_at_different_calls",
        "len({(row.meeting, row.who) for row in rows}) > 1 or len(which - {0}) > 1 or len(index - {0}) > 1",
        "False",
        "ranks/engine/test_disagreement.py",
    ),
    Mistake(
        "scope: not there in a recomputation",
        "SequenceScope.for_checkpoint",
        "), self",
        "), contextlib.nullcontext()",
        "ranks/doors/test_scope.py",
    ),
]

# What they do not call: kernels of CUDA, other libraries, collectives, decoding, verify, guards, and what a rank does
# that leaves. And what is seldom: backwards in another order on one rank.
OTHERS = [
    Mistake(
        "engine: backwards of all forwards are alike",
        "begin_backward",
        "pack_call_number(forward, 0)",
        "0",
        "ranks/engine/test_half_way.py -k another_order",
    ),
    Mistake(
        "merge: what rows of a pack had before keeps its weight",
        "TorchMerge.__call__",
        "out_BHLE.mul_(weight.unsqueeze(-1))",
        "pass",
        "unit/test_merge.py ranks/flex/test_varlen_kernel.py",
    ),
    Mistake(
        "plan: stripes of keys like those of queries",
        "make_holders",
        "all(isinstance(layout.held, Stripes) and layout.held.block == 1 for layout in (q_layout, kv_layout))",
        "isinstance(q_layout.held, Stripes) and q_layout.held.block == 1",
        "unit/test_plan.py",
    ),
    Mistake(
        "kernels: a window that no kernel is told of",
        "_run",
        "window or",
        "None or",
        "unit/test_cuda_kernels.py ranks/flex/test_varlen_kernel.py",
    ),
    Mistake(
        "kernels: bands of other widths in one pack",
        "make_calls",
        "(tile.cover, tile.window), ",
        "tile.cover, ",
        "ranks/flex/test_varlen_kernel.py",
    ),
    Mistake(
        "mixers: what came before a fragment does not decay in it",
        "_KernelCall.after",
        "factor @ before",
        "before",
        "ranks/mixers/test_recurrence.py",
    ),
    Mistake(
        "mixers: a map reaches back less far than it is taken to",
        "rounds_of",
        "distance *= 2",
        "distance *= 3",
        "ranks/mixers/test_recurrence.py",
    ),
    Mistake(
        "mixers: a recomputation may end before its last exchange",
        "_Tied.forward",
        "ctx.save_for_backward(x.new_empty(0))",
        "ctx.save_for_backward()",
        "ranks/test_random.py -k mixers",
    ),
    Mistake(
        "mixers: layouts of balancers are not compared",
        "agree_on_layouts",
        "agree_on_facts(make_layouts, Meeting.LAYOUT, where) if may_differ else make_layouts()",
        "make_layouts()",
        "ranks/mixers/test_recurrence.py -k balancers",
    ),
    Mistake(
        "mixers: ranks that wait for a kernel's state do not hear of its error",
        "CutSequence.compared_call",
        "with Operation(self.group, state):",
        "if True:",
        "ranks/mixers/test_recurrence.py -k error_in_a_kernel",
    ),
    Mistake(
        "mixers: arguments that cannot be understood are passed on",
        "refuse_arguments",
        "if used:",
        "if not given:",
        "ranks/mixers/test_by_name.py ranks/mixers/test_signatures.py ranks/mixers/test_recurrence.py -k refused",
    ),
    Mistake(
        "CUDA: a dead row's logsumexp is a number",
        "SdpaKernel.backward",
        '.masked_fill(lse_BHL <= EMPTY_LSE / 2, float("inf"))',
        "",
        "unit/test_cuda_kernels.py",
    ),
    Mistake(
        "trainers: samples are not compared",
        "BatchSharder.__call__",
        '{f"the samples ({name})": _content(x) for name, x in whole.items()}',
        "{}",
        "ranks/doors/test_batch_sharder.py",
    ),
    Mistake(
        "transformers: a mask that is dropped is not missed",
        "_attention.refuse",
        "attention_mask is None and is_causal and calls.forward_state.layer_mask is not None",
        "False",
        "clients/test_transformers.py -k dropped",
    ),
    Mistake(
        "agreement: messages leave before the rows of the others are read",
        "exchange",
        "operations.run_deferred_check() tag",
        "tag",
        "ranks/engine/test_agreement.py -k no_message_is_left",
    ),
    Mistake(
        "agreement: an interrupted rank leaves messages out",
        "Mailbox.start",
        "self._post(number - 1, previous)",
        "pass",
        "ranks/engine/test_mailbox.py",
    ),
    Mistake(
        "batch: some gradients are sums, and others are not",
        "sum_gradients",
        "parameter.grad = None",
        "pass\n       ",
        "ranks/engine/test_half_way.py -k no_optimizer",
    ),
    Mistake(
        "compiled: a graph's backward remembers no scope",
        "_attention",
        "_pickle_scope(scope, binding.name)",
        'b""',
        "ranks/compile/test_compile.py -k documents",
    ),
    Mistake(
        "checkpoint: received keys outlive the layer",
        "results_are_kept",
        "return any(",
        "return False and any(",
        "ranks/doors/test_selective_checkpoint.py -k outlive",
    ),
    Mistake(
        "ring: heads in turns have the mask of the first ones",
        "MovingKV.forward",
        "before + queries.start, before + min(queries.stop, q_BHLD.shape[1])",
        "0, at_once * share",
        "ranks/engine/test_attention_parity.py -k by_turns",
    ),
    Mistake(
        "decoding: room for new tokens counts as keys",
        "KVCache._marked",
        "self._unused() : self._used_rows]",
        "self._unused() :]",
        "ranks/doors/test_decode.py",
    ),
    Mistake(
        "engine: a rank leaves an operation, and nobody hears of it",
        "abort_group",
        "            end_connections(gloo)",
        "            pass",
        "ranks/engine/test_half_way.py -k 'stand_still or goes_on'",
    ),
    Mistake(
        "mixing layers: a recurrence is called on a part",
        "refuse_mixing_layers",
        "isinstance(layer, _MIXING) and",
        "False and",
        "ranks/doors/test_guards.py -k 'mixes or local'",
    ),
    Mistake(
        "mixing layers: the layer that a mixer calls is refused",
        "mixing",
        "forward_state.mixing = True",
        "forward_state.mixing = False",
        "ranks/doors/test_guards.py -k mixers_call",
    ),
    Mistake(
        "tp: rows that it does not divide leave as plain tensors",
        "OnMeshAxis._refuse_uneven",
        "% axis.size() ==",
        ">",
        "ranks/tensor_parallel/test_tp_refusals.py",
    ),
]


def pattern(text: str) -> re.Pattern[str]:
    """``text`` with any blanks and line breaks, or none, where it has some, or between what is no word."""
    pieces = re.findall(r"\w+|[^\w\s]", text)
    joints = [r"\s+" if a[-1].isalnum() and b[0].isalnum() else r"\s*" for a, b in pairwise(pieces)]
    return re.compile("".join(re.escape(piece) + joint for piece, joint in zip(pieces, [*joints, ""], strict=True)))


def functions(node: ast.AST, name: str) -> Iterator[ast.FunctionDef]:
    """Those with this qualified name in a module or a class."""
    first, _, rest = name.partition(".")
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.name == first and child is not node:
            yield from functions(child, rest) if rest else [child] if isinstance(child, ast.FunctionDef) else []


def places(mistake: Mistake, package: Path) -> list[tuple[Path, int, int]]:
    """Where the piece stands that the mistake replaces: file, start, stop."""
    found = []
    for file in sorted(package.rglob("*.py")):
        text = file.read_text()
        if mistake.function.rpartition(".")[2] not in text:
            continue
        ends = [0, *(match.end() for match in re.finditer("\n", text))]
        for function in functions(ast.parse(text), mistake.function):
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
