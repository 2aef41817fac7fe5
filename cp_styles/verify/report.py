"""The result of verify, as numbers and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from cp_styles._lib.compat import tensors_in
from cp_styles._lib.troubleshooting import see

_ROWS = 24
# Rounding of this size comes from gradients that nearly vanish, or from choices, of experts or keys.
COARSE = 0.1
_SAME_DROPOUT = (
    "Dropout, which is off here, would draw the same numbers on all ranks: torch.manual_seed(seed + rank), with the "
    f"rank in the sequence axis{see('The same dropout on all ranks')}"
)


_MEANS = (
    "so a mean of the ranks' means would not be seen: make the loss by batch.loss or global_loss, or verify once more "
    f"with one token less{see('A mean of means')}"
)


@dataclass(frozen=True)
class ModuleErrors:
    """The errors of one call of a module, relative to norms.

    Attributes:
        name: the module's name in the model.
        kind: the module's class.
        forward: the error of its outputs. None: not compared, because their shape does not fit the rank's tokens.
    """

    name: str
    kind: str
    forward: float | None


@dataclass(frozen=True)
class Power:
    """Results that a planted mistake moves in the step with one rank. Its attentions are cut as if ranks were alone.

    Attributes:
        moved: the number of gradients that it moves by more than ten tolerances; of outputs of modules, in a step
            without a backward.
        of: the number of all gradients, or outputs.
        loss: whether it moves the loss.
        zero: the parameters whose gradients are exactly 0 with one rank.
        takes: whether any attention or mixer has lost a key or a row by it.
    """

    moved: int
    of: int
    loss: bool
    zero: tuple[str, ...]
    takes: bool

    def clause(self, what: str) -> str:
        """The end of the line of a report. ``what``: gradients or outputs."""
        zero = f" ({self.described_zeros})" if self.zero else ""
        return (
            f"; a planted mistake moved {self.moved} of {self.of} {what}{'' if self.moved else ', and the loss'}{zero}"
        )

    @property
    def described_zeros(self) -> str:
        modules = dict.fromkeys(name.rpartition(".")[0] or "the model" for name in self.zero)
        shown = ", ".join([*modules][:3]) + (", ..." if len(modules) > 3 else "")
        return f"{len(self.zero)} of {self.of} gradients are exactly 0, in {shown}"


@dataclass(frozen=True)
class Report:
    """One step of a model on ranks, compared with the same step with one rank. Every rank has an equal report.

    Attributes:
        title: the model and the mesh.
        findings: the mistakes, in sentences; empty if the step is exact.
        modules: the calls of modules, in the order in which they end.
        parameters: the error of each parameter's gradient.
        loss: with one rank, and on each rank; empty if the step returned none.
        worst: the largest error of a gradient, or of an output of the model.
        unused: modules whose outputs differ although no result of the step does: nothing depends on these outputs.
        unseen: "tokens" and "labels" of which the ranks had equally many, if the step takes its mean by itself: a mean
            of the ranks' means would be right by chance.
        same_dropout: the model has dropout, and the ranks of the sequence would draw the same numbers for it.
        notes: facts about the remaining axes of the mesh that may be meant, in sentences.
        tolerance: the largest error that counts as rounding; in low precision it is larger, see ``rounding``.
        rounding: in low precision, the largest error that a change of the last bits causes.
        power: what a planted mistake moves. None: not measured, or there was no attention or mixer to plant it in.
    """

    title: str
    findings: tuple[str, ...]
    modules: tuple[ModuleErrors, ...] = ()
    parameters: tuple[tuple[str, float], ...] = ()
    loss: tuple[float, ...] = ()
    worst: float = 0.0
    unused: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    same_dropout: bool = False
    notes: tuple[str, ...] = ()
    tolerance: float = 0.0
    rounding: float = 0.0
    power: Power | None = None

    @property
    def line(self) -> str:
        """The result in one line."""
        if self.findings:
            return f"{self.title}: {'WRONG' if self.power is None else 'NOT PROVED'}"
        forward = "" if self.parameters else " in the forward (the step has made no gradients)"
        rounding = f", of which rounding {self.rounding:.0e}" if self.rounding else ""
        if self.rounding > COARSE:
            rounding += f" (a mistake below {4 * self.rounding:.0e} is not seen: run verify in float32 too)"
        power = self.power.clause("gradients" if self.parameters else "outputs") if self.power else ""
        unused = ", ".join(self.unused[:3])
        unused = f". The outputs of {unused} differ, and nothing in the step depends on them" if unused else ""
        means = " and ".join(self.unseen)
        means = f". The ranks had equally many {means}, {_MEANS}" if means else ""
        dropout = f". {_SAME_DROPOUT}" if self.same_dropout else ""
        notes = "".join(f". {note}" for note in self.notes)
        return (
            f"{self.title}: equal to one device{forward}: {len({x.name for x in self.modules})} modules, "
            f"{len(self.parameters)} gradients, worst {self.worst:.0e}{rounding}{power}{unused}{means}{dropout}{notes}"
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.line
        for finding in self.findings:
            yield textwrap.fill(finding, 99, initial_indent="  * ", subsequent_indent="    ", break_long_words=False)
        if self.modules:
            yield ""
            yield from self._table()
        if self.parameters:
            name, error = max(self.parameters, key=itemgetter(1))
            yield f"gradients of {len(self.parameters)} parameters: error at most {error:.1e} ({name})"
        if self.loss:
            yield f"loss with one rank {self.loss[0]:.8g}, on the ranks " + ", ".join(f"{x:.8g}" for x in self.loss[1:])

    def _table(self) -> Iterator[str]:
        """The first wrong module with its neighbours; the first modules of a step that is exact."""
        wrong = [at for at, errors in enumerate(self.modules) if (errors.forward or 0.0) > self.tolerance]
        first = max(0, wrong[0] - _ROWS // 2) if wrong else 0
        shown = self.modules[first : first + _ROWS]
        rows = [["module", "", "output"]]
        for at, errors in enumerate(shown, first):
            mark = " <- first wrong" if wrong and at == wrong[0] else ""
            error = "-" if errors.forward is None else f"{errors.forward:.1e}"
            rows.append([(errors.name or "(model)")[-50:], errors.kind[:24] + mark, error])
        yield from format_table(rows)
        if len(shown) < len(self.modules):
            yield f"  and {len(self.modules) - len(shown)} more"


def format_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table with its head, each column as wide as its widest cell; the first column is aligned left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  " + "  ".join(cells).rstrip()


class VerificationError(AssertionError):
    """The step on the ranks differs from the step with one rank. The message is the text of ``report``."""

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__(str(report))


def describe_blind(power: Power, batch: Any, modules: Sequence[str]) -> str:
    """The finding for a planted mistake that moves no result of the step. ``modules``: whose outputs it moves."""
    entries = batch.items() if isinstance(batch, Mapping) else [("the batch", batch)]
    rows = [(str(name), x) for name, value in entries for x in tensors_in(value) if x.ndim > 1 and x.shape[1] > 1]
    if not power.takes:
        why = (
            "no query of this batch attends to a key of another rank's part: documents or windows end where the parts "
            "do. Verify with a batch whose documents cross the ends of the parts: one document in a row"
        )
    elif rows and all(bool((x == x[:, :1]).all()) for _, x in rows):
        why = (
            f"all tokens of a row are equal ({', '.join(name for name, _ in rows[:4])}), and attention to equal values "
            "returns the same for all keys. Verify with a batch of your data, or with random tokens"
        )
    elif power.zero or modules:
        facts = [power.described_zeros] if power.zero else []
        if modules:
            facts.append(f"the mistake moves the outputs of {', '.join(modules[:3])}, on which no result depends")
        why = (
            f"{'; '.join(facts)}: parts of the model begin at zero. Verify after some steps of training, or give these "
            "weights other values, verify, and put the zeros back"
        )
    else:
        why = "nothing in the step depends on attention. Verify with another batch, or other weights"
    return (
        "the proof is blind. All results are equal, and they also are with a planted mistake: with one rank, every "
        f"attention was cut as if the ranks attended alone, and neither the loss nor a gradient has moved. Why: {why}"
        f"{see('A proof that is blind')}"
    )
