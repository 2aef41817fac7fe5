"""verify notices every wrong program of tests/wrong_programs.py, names its cause, and calls no right program wrong."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

from cp_styles.testing import RankTimeout
from cp_styles.verify import VerificationError
from tests import wrong_programs
from tests.wrong_programs import DOORS, DTYPES, Program, proved, runs

MIXES = "carries values from token to token, and no attention"
UNKNOWN = "The cause is not known"
ALONE = "its attention ran on each rank's part alone"
NOT_OF_THESE_TOKENS = "its gradient is not, at .* positions .*: labels, weights or the loss itself"
OWN_LOSS = "has a number that differs between the ranks: a loss, or a mean, .* batch.loss"
LENGTH = "length of the whole sequence, layout.length"
LEAVES, SECOND = "^the state that the step leaves", "differs from one device, and so does a second step in a row"
BETWEEN = r"Make positions, or a table, before the first block.*seq_dims="
ON_CORE = "a style on the core of an attention"
# The words of the first finding, with styles in float64.
CAUSES = {
    f"{ON_CORE}: positions from 0": r"argument 'position_ids' of the model \(Position\): counts from 0",
    f"{ON_CORE}: arange in the model": r"the model \(Model\): what it gives to places, 'input', counts from 0",
    f"{ON_CORE}: a table sliced by the length": "what it gives to attention .* is the result for the first positions",
    f"{ON_CORE}: a table sliced by the length of a part that the model cuts": f"is wrong at 9 positions .*{UNKNOWN}",
    f"{ON_CORE}: divided by the length": rf"what it gives to attention depends on the number of tokens.*{LENGTH}",
    f"{ON_CORE}: a convolution": rf"layer.layer \(Conv1d\): it {MIXES} .* It reads later tokens too",
    f"{ON_CORE}: a recurrence": rf"layer.layer \(GRU\): it {MIXES} .* the state is not passed on.* context_recurrence",
    f"{ON_CORE}: a causal convolution": (
        rf"layer.layer \(CausalConvolution\): it {MIXES} .* first 2 tokens .* context_causal_conv1d.*width=3"
    ),
    f"{ON_CORE}: documents that a recurrence is not given": (
        r"scan \(Scan\): documents are not separated: .* without cu_seqlens"
    ),
    f"{ON_CORE}: attention in plain operations": rf"layer \(PlainAttention\): it {MIXES}",
    f"{ON_CORE}: the mean over tokens in the model": rf"the model \(Model\): it {MIXES}",
    f"{ON_CORE}: a softmax over tokens behind attention": (
        "carries values from token to token, in its own code between the modules"
    ),
    f"{ON_CORE}: random numbers of a rank": r"two steps with one rank differ, first in layer \(Drawn\)",
    "a second attention: FlexAttention without a style": rf"second.core \(Core\): {ALONE}",
    "a second attention: replaced": rf"second \(Attention\): {ALONE}",
    "two attentions: one without a style": rf"second.core \(Core\): {ALONE}",
    "two attentions: two layouts": r"second.core \(Core\): layout mismatch: its inputs are cut with",
    "a backward that mixes: a gradient by the number of ranks": (
        rf"are wrong: the first wrong gradient of a backward is at .*'s output. {UNKNOWN}"
    ),
    "pooled from this rank's tokens: the mean": r"the model \(Model\): its output .* pooled from this rank's part",
    "configurations: a kernel whose logsumexp is wrong": "gradients are not finite",
    "the cut of a batch: by torch.chunk": "'x' .*: layout mismatch: it is cut with contiguous",
    "labels: shifted after the cut": "Labels were rolled after the cut",
    "labels: ignored at the end of a part": "Labels were rolled after the cut",
    "labels: other weights at the end of a part": NOT_OF_THESE_TOKENS,
    "labels: of another part": NOT_OF_THESE_TOKENS,
    "a mean: of means of more tokens and fewer": r"its gradient is [\d.]+, [\d.]+ times .* own tokens",
    "a mean: that each rank weighs by itself": r"its gradient is [\d.]+, [\d.]+ times .*not parts of one mean",
    "a mean: that is this rank's loss": "is another number .*: each rank returns its share. Return the sum",
    "a mean: that is a number of the ranks": "another number .*: return the mean over the tokens of all ranks",
    "a mean: averaged_over= without a reducer that averages": "are 2 times .*: the gradient of the loss is 2 times",
    "a mean: that a model takes by itself": rf"the model \(Model\): its output {OWN_LOSS}",
    "a mean: that a model returns with its logits": rf"the model \(Model\): its output {OWN_LOSS}",
    "a mean: behind a gather in another order": "the loss: what .* is right, .* or a gather in front of it",
    "a mean: behind a gather, that is not divided": r"are 2 times .* behind a gather. Divide it: \(loss / mesh.size",
    "by collectives, without a style: Ulysses with another layout": (
        "no attention ran context parallel, and more than rounding differs from one device: .*cp_styles.collectives"
    ),
    "by collectives, without a style: no exchange, in a step without a backward and a loss": "no attention ran context",
    "a mean: that is no number": rf"the loss that the step returns .*: it is nan, nan. {UNKNOWN}",
    "gradients: not summed": "gradients are unreduced",
    "gradients: summed in part": r"partly reduced: .* \(table\)",
    "gradients: summed twice": "are 2 times .*: they are reduced twice",
    "gradients: averaged": "are 0.5 times .*averaged over",
    "gradients: scaled": "are 3 times .*: the gradient of the loss is 1 times its value on one process, and code",
    "gradients: of one number, scaled": r"1 of \d+ parameters \(part.gain\) are wrong",
    "gradients: no numbers": rf"gradients of 8 of 8 parameters .* are not finite on the ranks.* {UNKNOWN}",
    "gradients: clipped before the sum": "between the backward and their sum.* Sum gradients first",
    "gradients: no backward on several ranks": rf"are wrong.* {UNKNOWN}",
    "gradients: changed by an optimizer": r"the step changes parameters \(table",
    "gradients: of rows that a forward renormalizes": r"hold different parameters: .*words.weight .*max_norm= of nn.E",
    "rows that no loss reads: padding, which one rank alone masks": rf"{UNKNOWN}. All gradients are right.* padding",
    "gradients: removed behind an optimizer": "the step changes parameters .* Leave the optimizer out",
    "gradients: set to 0": "removes gradients before it ends",
    "parameters outside of the model: a head that is not summed": (
        r"^gradients are partly reduced: .* 2 of 10 parameters \(outside of the model: parameter 0 \(8, 8\), "
    ),
    "parameters outside of the model: another model, centred": (
        r"\(outside of the model: Model.*are wrong, and gradients of the model are right.* verify\(module, mesh, batch"
    ),
    "a proof that is blind: a head and a projection of zeros": (
        r"^the proof is blind.* \d of \d gradients are exactly 0, in attention.out, attention.qkv.* begin at zero"
    ),
    "a proof that is blind: two zeros in a row": "^the proof is blind.* gradients are exactly 0, .* begin at zero",
    "a proof that is blind: equal tokens": r"^the proof is blind.* all tokens of a row are equal \(x\)",
    "a proof that is blind: equal tokens, in a step without a backward": "^the proof is blind.* all tokens of a row",
    "a proof that is blind: documents that end with the parts": "^the proof is blind.* one document in a row",
    "a proof that is blind: a head of zeros": "is the result for the first positions",
    "buffers for the next forward: a length in a dict": rf"depends on the number of tokens.*{LENGTH}",
    "buffers for the next forward: the mean of this rank's tokens, of one forward": rf"{LEAVES} \(mean\) {SECOND}",
    "buffers for the next forward: a length in a dict, of one forward": rf"{LEAVES} \(memo\) {SECOND}",
    "around mixers: a halo whose reach is too small": (
        r"shifted \(ShiftedTwice\): its output depends on more tokens than its halo has, 1 in front of a token and 0 "
    ),
    "with a joint text: centred": f"what it gives to the attention in .* 12 positions .*{UNKNOWN}",
    "with a joint text: positions that are not cut": r"'argument 1' of the model .* attention's layout \(12 p",
    "with a joint text: positions of another cut": "'argument 1' .* layout mismatch: it is cut with contiguous",
    "with a joint text that is longer: by one token": "attention ran over 16 positions .* over 15 .*prefix=",
    "whole inputs: hidden states that are changed between the blocks, and returned": (
        r"the model \(Twice\): it returns this rank's part of what it computes between its blocks"
    ),
    "sums that a model returns: by sequence, of gradients that are not summed": "^gradients are unreduced",
    "a mean: of losses behind a gather, that is not divided": "are 2 times .* behind a gather or an all-reduce with",
    "whole inputs: a mean over a part in the blocks": rf"attention.core \(Core\): it {MIXES} .* later tokens",
    "whole inputs: positions in the blocks": rf"to the attention in attention.core .* first positions.*{BETWEEN}",
    "whole inputs: a length in the blocks": rf"to the attention in attention.core depends on the number.*{LENGTH}",
    "whole inputs: a table between the blocks": rf"what it gives to blocks.1 .* first positions.*{BETWEEN}",
    "one rank: an error": "^on rank 1: KeyError: 'image'",
    "one rank: an error in a hook": r"^on rank 0: in attention.out \(Linear\): ValueError: not this one",
    "one rank: other weights": r"begin with different weights \(the model's table\)",
    "one rank: another function": rf"what it gives to attention .* {UNKNOWN}",
}


LONG = ("higher-order operators: scan",)
# Of causes that are named differently. The remaining ones are run at night.
BY_DAY = (
    *("arange in the model", "a convolution", "a recurrence", "documents that a recurrence is not given"),
    *("labels: shifted after the cut", "a mean: of means of more tokens and fewer", "a mean: that is no number"),
    *("gradients: not summed", "gradients: summed twice", "gradients: set to 0", "one rank: an error"),
)


def chosen() -> set[tuple[str, str, str]]:
    """The first wrong program of every kind, and the first right one of every third kind with one: at the doors in
    turn, every third in bfloat16. And BY_DAY."""
    doors: dict[str, list[str]] = {}
    for program, door in runs(dtypes=["float64"]):
        doors.setdefault(str(program), []).append(door)
    first: dict[tuple[str, bool], str] = {}
    for program in wrong_programs.PROGRAMS:
        if str(program) not in LONG:
            first.setdefault((program.kind, program.right), str(program))
    right = [name for (_, is_right), name in first.items() if is_right][::3]
    names = [name for (_, is_right), name in first.items() if not is_right or name in right]
    turns = {
        (name, doors[name][index % len(doors[name])], "float64" if index % 3 else "bfloat16")
        for index, name in enumerate(names)
    }
    return turns | {(name, "style", "float64") for name in CAUSES if name.endswith(BY_DAY)}


CHOSEN = chosen()


def rows(dtype: str) -> pytest.MarkDecorator:
    """Parametrize a test with all programs and doors. Those that are not chosen run at night."""
    values: list[Any] = []
    for program, door in runs(dtypes=[dtype]):
        marks = [] if (str(program), door, dtype) in CHOSEN else [pytest.mark.nightly]
        values.append(pytest.param(program, door, id=f"{program} ({door})", marks=marks))
    return pytest.mark.parametrize(("program", "door"), values)


def judged(program: Program, door: str) -> None:
    error = proved(program, DOORS[door])
    assert not isinstance(error, RankTimeout), error
    assert (error is None) == program.right, error
    if door == "style" and program.dtype == torch.float64 and str(program) in CAUSES:
        assert isinstance(error, VerificationError)
        assert re.search(CAUSES[str(program)], error.report.findings[0]), error.report.findings


@rows("float64")
def test_a_program(program: Program, door: str):
    judged(program, door)


@rows("bfloat16")
def test_a_program_in_bfloat16(program: Program, door: str):
    judged(program, door)


def test_the_table():
    """Each row has a name of its own. Each door has right and wrong programs."""
    names = Counter(map(str, wrong_programs.PROGRAMS))
    assert max(names.values()) == 1
    assert CAUSES.keys() <= names.keys()
    everything = [(door, dtype, right) for door in DOORS for dtype in DTYPES.values() for right in (False, True)]
    assert {(door, each.dtype, each.right) for each, door in runs()} == set(everything)
