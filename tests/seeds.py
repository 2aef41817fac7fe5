"""The command of tests/fuzz.py, mixers.py and programs.py: seeds are drawn and judged one by one, and failures reduced.

Cases run in a process of their own, because a wrong message between ranks can end it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn, Self, cast

import torch

ROOT = Path(__file__).parents[1]
_IN_ONE_PROCESS = 300  # cases; a failed one may leave threads and sockets behind
_ANSWER = "verdict: "


@dataclass(frozen=True)
class Verdict:
    """``kind`` is exact, refused, or what is wrong; ``words`` say more."""

    kind: str
    words: str = ""

    @property
    def good(self) -> bool:
        return self.kind in ("exact", "refused")

    @property
    def signature(self) -> str:
        return f"{self.kind}: {shortened(self.words)}"


def shortened(text: str) -> str:
    """The first words, without numbers, quoted text and brackets."""
    plain = re.sub(r"blocks \S+|'[^']*'|\[[^]]*\]|\([^)]*\)|-?\d+(\.\d+)?(e-?\d+)?", "_", text.split("\n")[0])
    return " ".join(plain.split()[:9])


def shown(case: Any) -> str:
    """The case as Python, without its defaults."""
    given = [field.name for field in fields(case) if getattr(case, field.name) != field.default]
    return f"{type(case).__name__}({', '.join(f'{name}={getattr(case, name)!r}' for name in given)})"


# What an odd rank may do that is no value of a field.
ACTS = ("a token less", "no call", "a call more", "an error before", "an error after")


class OddRank:
    """A case, a frozen dataclass, of which one rank may have another value of a field, or do one of ACTS."""

    ranks: int
    odd: tuple[int, str, Any] | None

    def of_rank(self, rank: int) -> Self:
        """The case as this rank runs it."""
        if self.odd is None or self.odd[0] != rank or self.odd[1] in ACTS:
            return self
        return self._but(**{self.odd[1]: self.odd[2]})

    def act_of(self, rank: int) -> str:
        return self.odd[1] if self.odd is not None and self.odd[0] == rank and self.odd[1] in ACTS else ""

    def with_odd_rank(
        self,
        dice: random.Random,
        choices: Mapping[str, Sequence[Any]],
        names: Sequence[str],
        sensible: Callable[[Any], Any],
        can_lack: Sequence[bool],
    ) -> Self:
        """The case with an odd rank, which differs in one of the fields ``names`` while both values make sense.

        ``can_lack`` says of each rank whether a token less there is a mistake.
        """
        while True:
            rank, name = dice.randrange(self.ranks), dice.choice(ACTS if dice.random() < 0.3 else tuple(names))
            if name in ACTS:
                if name != "a token less" or can_lack[rank]:
                    return self._but(agreement="every call", odd=(rank, name, None))
                continue
            value = dice.choice(choices[name])
            other = self._but(**{name: value})
            if other not in (self, sensible(self)) and sensible(other) == other:
                return self._but(agreement="every call", odd=(rank, name, value))

    def _but(self, **values: Any) -> Self:
        return cast("Self", replace(cast("Any", self), **values))


def with_defaults(case: Any, *kept: str) -> Iterator[Any]:
    """The cases with one more default value, but for the fields that are ``kept``."""
    for field in fields(case):
        if field.name not in kept and getattr(case, field.name) != field.default:
            yield replace(case, **{field.name: field.default})


def simpler(sensible: Callable[[Any], Any], case: Any) -> Iterator[Any]:
    """The cases with one thing less."""
    yield from map(sensible, with_defaults(case, "seed", "odd"))
    if case.odd is not None:
        yield replace(case, odd=None)


class Judges:
    """A process that judges cases, and its successors. One that dies fails the case that it was at."""

    def __init__(self, file: str) -> None:
        self._file, self._count = file, 0
        self._process: subprocess.Popen[str] | None = None

    def judge(self, case: Any) -> Verdict:
        if self._count >= _IN_ONE_PROCESS:
            self.end()
        if self._process is None:
            command = [sys.executable, self._file, "--judge"]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process, self._count = subprocess.Popen(command, **pipes, text=True, cwd=ROOT), 0
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        self._count += 1
        with contextlib.suppress(BrokenPipeError):
            print(repr(case), file=stdin, flush=True)
        for line in stdout:
            if line.startswith(_ANSWER):
                return Verdict(**json.loads(line.removeprefix(_ANSWER)))
        status = self._process.wait()
        self._process = None
        return Verdict("a crash", f"status {status}")

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None


@dataclass(frozen=True)
class Seeds:
    """Cases of ``kind``, in the program ``file``: ``draw(seed)`` makes one, ``judge(case)`` runs it here, and
    ``simpler(case)`` are those with one thing less."""

    kind: type
    file: str
    draw: Callable[[int], Any]
    judge: Callable[[Any], Verdict]
    simpler: Callable[[Any], Iterable[Any]]

    def reduced(self, case: Any, verdict: Verdict, judges: Judges, end: float) -> Any:
        """A case that fails in the same way, of which nothing can be left out."""
        for other in self.simpler(case):
            if time.monotonic() < end and other != case and judges.judge(other).kind == verdict.kind:
                return self.reduced(other, verdict, judges, end)
        return case

    def main(self, description: str) -> NoReturn:
        status = self._main(description)
        sys.stdout.flush()
        os._exit(status)  # threads of a failed case may still hold sockets; the process need not wait for them

    def _main(self, description: str) -> int:
        parser = argparse.ArgumentParser(description=description.splitlines()[0])
        parser.add_argument("--cases", type=int, default=200, help="number of cases")
        parser.add_argument("--first", type=int, default=0, help="the first seed")
        parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
        parser.add_argument(
            "--odd", action=argparse.BooleanOptionalAction, default=True, help="seeds in which one rank differs, too"
        )
        parser.add_argument("--stop", action="store_true", help="end with the first failure, without reducing it")
        parser.add_argument("--record", type=Path, help="a file of results: continues where an earlier run has stopped")
        parser.add_argument("--case", help="one case, as a failure prints it")
        parser.add_argument("--judge", action="store_true", help=argparse.SUPPRESS)
        options = parser.parse_args()
        torch.set_num_threads(1)
        if options.judge:
            for line in sys.stdin:
                print(_ANSWER + json.dumps(vars(self.judge(self._case(line)))), flush=True)
            return 0
        if options.case:
            verdict = self.judge(self._case(options.case))
            print(f"{verdict.kind}: {verdict.words}")
            return int(not verdict.good)
        return self._all(options)

    def _case(self, text: str) -> Any:
        return eval(text, {self.kind.__name__: self.kind, "inf": float("inf")})

    def _all(self, options: argparse.Namespace) -> int:
        verdicts: dict[int, Verdict] = {}
        if options.record and options.record.exists():
            for line in options.record.read_text().splitlines():
                entry = json.loads(line)
                verdicts[entry["seed"]] = Verdict(entry["kind"], entry["words"])
        judges, start = Judges(self.file), time.monotonic()
        printed = start
        alike: Counter[str] = Counter()  # failures with the same words, of which the first is shown and reduced
        for seed in range(options.first, options.first + options.cases):
            if seed in verdicts:
                continue
            if time.monotonic() > start + options.seconds:
                break
            case = self.draw(seed)
            if case.odd is not None and not options.odd:
                continue
            verdict = verdicts[seed] = judges.judge(case)
            if options.record:
                options.record.parent.mkdir(exist_ok=True)
                with options.record.open("a") as file:
                    file.write(json.dumps({"seed": seed, **vars(verdict)}) + "\n")
            if not verdict.good and alike[verdict.signature] == 0:
                print(f"seed {seed}: {verdict.kind}: {verdict.words}\n  {shown(case)}", flush=True)
                if options.stop:
                    judges.end()
                    return 1
                smaller = self.reduced(case, verdict, judges, time.monotonic() + 40)
                print(f"  reduced: {shown(smaller)}", flush=True)
            alike[verdict.signature] += not verdict.good
            if time.monotonic() - printed > 30:
                printed = time.monotonic()
                print(f"... {len(verdicts)} cases, {printed - start:.0f} s", file=sys.stderr, flush=True)
        judges.end()
        kinds = Counter(verdict.kind for verdict in verdicts.values())
        refusals = Counter(verdict.words for verdict in verdicts.values() if verdict.kind == "refused")
        bad = sum(not verdict.good for verdict in verdicts.values())
        print(f"{len(verdicts)} cases: {kinds['exact']} exact, {kinds['refused']} refused on every rank, {bad} others")
        for signature, count in alike.most_common():
            if count > 1:
                print(f"  {count:6} times {signature}")
        for words, count in refusals.most_common():
            print(f"  {count:6} {words}")
        return int(bad > 0)
