"""Faults of one rank on real processes: how long the others wait, what they raise, and whether they can go on.

    python tests/faults.py                                   every place x fault, caught by the program and not
    python tests/faults.py --places forward --faults kill    some of them
    python tests/faults.py --every 7 --places all_to_all     an error at every 7th call of a function of the package

Three ranks repeat one action, a *place*: an attention, a collective and so on. In the third time the middle rank has
the fault in the middle of it. "When a rank fails" in tutorials/troubleshooting.md says what must be true then;
:func:`broken_promises` is that section as code. A row of the table is a place and a fault: the seconds from the fault
until the last of the others has returned from the action, and what they raise.

The ranks are forks of one process, which has imported all that they need. An error that the program does not catch ends
a rank as it ends any Python process.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import AttentionContextParallel, global_loss, global_token_count, head_tail, sum_gradients
from cp_styles.collectives import all_to_all
from cp_styles.strategies import Ring, Strategy, Ulysses
from cp_styles.verify import verify
from tests.oracle import error, randn
from tests.ranks.attention_case import EXACT, Core, DenseCore, Problem, Projected, cp_mesh

RANKS, FAULTY = 3, 1
TIMEOUT = 4.0  # of the groups, in seconds
REJOIN = 60.0  # of the groups that are made after a fault: a rank may come to them as late as the faults allow
LATE = 3.0  # seconds beyond the timeout, for a busy machine
END = 30.0  # seconds in which a process ends after its error: 8 were measured, with thirty others waiting for two cores
HANGS = REJOIN + 40.0  # seconds after which the processes of a world are ended from outside
PREPARES = 120.0  # seconds before a fault, on a busy machine: a compilation

Act = Callable[[], list[torch.Tensor]]


class Prepared(NamedTuple):
    """``prepare()`` returns the action, a function that returns tensors. These must be equal to ``expected``."""

    prepare: Callable[[], Act]
    expected: list[torch.Tensor]


def attention(rank: int, mesh: DeviceMesh, strategy: Strategy, way: str, compiled: bool = False) -> Prepared:
    ranks = mesh.size()
    problem, layout = Problem(length=24, heads=6, kv_heads=6), head_tail(24, ranks)
    style = AttentionContextParallel(layout=layout, strategy=strategy)
    core: Any = parallelize_module(nn.Sequential(Core()), mesh, {"0": style})[0]
    if compiled:
        core = torch.compile(core, backend="aot_eager")
    expected = [layout.shard(whole, 2, rank) for whole in problem.expected]

    def prepare() -> Act:
        leaves, cotangent = problem.shard(layout, rank, ranks)
        if way == "forward":
            return lambda: [core(*leaves).detach()]
        if way == "backward":
            out = core(*leaves)
            return lambda: list(torch.autograd.grad(out, leaves, cotangent))

        def both() -> list[torch.Tensor]:
            out = core(*leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]

        return both

    return Prepared(prepare, {"forward": expected[:1], "backward": expected[1:]}.get(way, expected))


def an_all_to_all(rank: int, mesh: DeviceMesh) -> Prepared:
    """Its forward and its backward, which is one too."""
    ranks = mesh.size()
    whole = randn(1, 6 * ranks, 6)
    rows = whole.split(6)[rank]

    def act() -> list[torch.Tensor]:
        x = rows.clone().requires_grad_()
        out = all_to_all(x, 1, 0, mesh)
        return [out.detach(), *torch.autograd.grad(out, x, out.detach())]

    return Prepared(lambda: act, [whole.tensor_split(ranks, 1)[rank], rows])


def gradients(rank: int, mesh: DeviceMesh) -> Prepared:
    """Several buckets, and a parameter that has a gradient on one rank alone."""
    ranks, shapes = mesh.size(), [(3, 5), (7,), (4, 4), (2,)]
    shares = [[randn(10 * each + index, *shape) for index, shape in enumerate(shapes)] for each in range(ranks)]
    for share in shares[1:]:
        share[-1].zero_()

    def prepare() -> Act:
        parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
        for parameter, share in zip(parameters[: None if rank == 0 else -1], shares[rank], strict=False):
            parameter.grad = share.clone()

        def act() -> list[torch.Tensor]:
            before = [parameter.grad for parameter in parameters]
            kept = [None if grad is None else grad.clone() for grad in before]
            try:
                sum_gradients(parameters, mesh, bucket_bytes=64)
            except BaseException:
                now = [parameter.grad for parameter in parameters]
                same = [
                    (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
                    for a, b in zip(kept, now, strict=True)
                ]
                if not all(same) and any(grad is not None for grad in now):
                    note("partial", text="some gradients are summed, others are not")
                raise
            return [parameter.grad for parameter in parameters]  # type: ignore[misc]

        return act

    return Prepared(prepare, [sum(parts) for parts in zip(*shares, strict=True)])  # type: ignore[misc]


def loss(rank: int, mesh: DeviceMesh) -> Prepared:
    ranks = mesh.size()
    losses, labels = randn(2, 4 * ranks), torch.arange(4 * ranks)

    def act() -> list[torch.Tensor]:
        mine = losses.split(4)[rank]
        return [global_loss(mine, global_token_count(labels.split(4)[rank], mesh), mesh)]

    return Prepared(lambda: act, [losses.mean()])


def verification(rank: int, mesh: DeviceMesh) -> Prepared:
    model, model_alone = Projected(Core()), Projected(DenseCore())
    batch = {"x": randn(3, 1, 12, 10), "y": randn(4, 1, 12, 10)}

    def step(model: nn.Module, batch: dict[str, torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
        own = head_tail(12, mesh.size())
        x, y = (own.shard(each, 1, mesh.get_local_rank()) for each in batch.values())
        total = global_loss((model(x) * y).sum(), 120, mesh)
        total.backward()
        sum_gradients(model, mesh)
        return total

    parallel = parallelize_module(model, mesh, {"core": AttentionContextParallel(layout=head_tail)})

    def act() -> list[torch.Tensor]:
        report = verify(parallel, mesh, batch, step, tolerance=1e-10)
        return [torch.tensor(report.loss[:1], dtype=torch.float64)]

    expected = (model_alone(batch["x"]) * batch["y"]).sum() / 120
    return Prepared(lambda: act, [expected.detach().reshape(1)])


@dataclass(frozen=True)
class Place:
    """An action, and where in it the fault is: after this share of the calls of functions in ``package``."""

    make: Callable[[int, DeviceMesh], Prepared]
    package: str
    share: float = 0.5
    user: str = ""
    """What its errors must name, a regular expression."""
    timeout: float = TIMEOUT
    waits: int = 1
    """How many waits of a timeout the page allows."""


def _attention(*arguments: Any) -> Callable[[int, DeviceMesh], Prepared]:
    return lambda rank, mesh: attention(rank, mesh, *arguments)


_STYLE = "AttentionContextParallel"
PLACES = {
    "agreement": Place(_attention(Ring(), "forward"), "cp_styles.comm.agreement", 0.3, _STYLE),
    "forward": Place(_attention(Ring(), "forward"), "cp_styles.kernels", user=_STYLE),
    "backward": Place(_attention(Ring(), "backward"), "cp_styles.kernels", user=_STYLE),
    "Ulysses": Place(_attention(Ulysses(), "both"), "cp_styles.strategies", user=_STYLE),
    "all_to_all": Place(an_all_to_all, "cp_styles.collectives", user="collectives"),
    "sum_gradients": Place(gradients, "cp_styles.batch", 0.8, "sum_gradients"),
    "global_loss": Place(loss, "cp_styles.batch", 0.85, "global_loss"),
    "compiled": Place(_attention(Ring(), "both", True), "cp_styles.kernels", 0.5, _STYLE, 20.0),
    "verify": Place(verification, "cp_styles.kernels", 0.85, "verify|VerificationError", waits=2),
}


class Interrupt(Exception):
    """An error of the user's program."""


def _raise(error: BaseException) -> NoReturn:
    raise error


FAULTS: dict[str, Callable[[], object]] = {
    "kill -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop, short": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stop, long": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "exception": lambda: _raise(Interrupt("planted")),
    "MemoryError": lambda: _raise(MemoryError("planted")),
    "sys.exit": lambda: sys.exit(3),
}


@dataclass(frozen=True)
class Cell:
    """``at``: the number of the call at which the fault is; 0 for the share of the place. ``worlds``: how many worlds
    one after another have the fault; only if the program catches it."""

    place: str
    fault: str
    caught: bool
    at: int = 0
    worlds: int = 1

    @property
    def package(self) -> str:
        return "cp_styles" if self.at else PLACES[self.place].package

    @property
    def timeout(self) -> float:
        return PLACES[self.place].timeout

    @property
    def pause(self) -> float:
        """Seconds between SIGSTOP and SIGCONT."""
        return self.timeout + 2.0 if self.fault == "stop, long" else 1.0


# -- what a rank does --

_log: Any = None


def note(event: str, **facts: Any) -> None:
    _log.write(json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n")
    _log.flush()


class Trap:
    """Counts calls of functions in ``package`` while it is open, and calls ``fault`` at number ``at``."""

    def __init__(self, package: str, at: int = 0, fault: Callable[[], object] | None = None) -> None:
        self.package, self.at, self.fault, self.calls = package, at, fault, 0

    def __enter__(self) -> Trap:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith(self.package):
            self.calls += 1
            if self.calls == self.at and self.fault is not None:
                sys.setprofile(None)
                note("fault", where=f"{frame.f_globals['__name__']}:{frame.f_code.co_name}")
                self.fault()


def attempt(name: str, act: Act, expected: list[torch.Tensor]) -> BaseException | None:
    """Notes the result of ``act``. The error is for a program that does not catch it."""
    try:
        found = act()
    except BaseException as caught:
        words = "\n".join([str(caught), *getattr(caught, "__notes__", ())])
        note(name, kind=type(caught).__name__, text=words)
        return caught
    apart = max((error(a, b) for a, b in zip(found, expected, strict=True)), default=0.0) if expected else 0.0
    note(name, kind="exact" if apart < EXACT else "WRONG", text=f"{apart:.1e}")
    return None


def join(folder: Path, world: int, rank: int, ranks: int, timeout: float) -> DeviceMesh:
    store = dist.FileStore(str(folder / f"store {world}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    return cp_mesh(ranks)


def rank_main(cell: Cell, rank: int, folder: Path) -> None:
    global _log
    _log = (folder / f"{rank}.jsonl").open("a")
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for world in range(cell.worlds):
        failed = faulty_world(cell, rank, folder, world)
        if failed is not None and not cell.caught:
            raise failed
        del failed
        dist.destroy_process_group()
    if not cell.caught:
        return
    living = [each for each in range(RANKS) if each != FAULTY or cell.fault != "kill -9"]
    gc.collect()
    mesh = join(folder, cell.worlds, living.index(rank), len(living), REJOIN)
    prepare, expected = PLACES[cell.place].make(mesh.get_local_rank(), mesh)
    attempt("new world", prepare(), expected)
    dist.barrier()  # a rank that ends would end the connections of the others
    dist.destroy_process_group()
    note("left", threads=len(os.listdir("/proc/self/task")), descriptors=len(os.listdir("/proc/self/fd")))
    os._exit(0)


def faulty_world(cell: Cell, rank: int, folder: Path, world: int) -> BaseException | None:
    mesh = join(folder, world, rank, RANKS, cell.timeout)
    prepare, expected = PLACES[cell.place].make(rank, mesh)
    for _ in range(2):
        act = prepare()
        with Trap(cell.package) as trap:
            attempt("before", act, expected)
    act = prepare()
    dist.barrier()
    at = cell.at or max(1, round(trap.calls * PLACES[cell.place].share))
    if cell.at > trap.calls:
        note("no such call", calls=trap.calls)
    with Trap(cell.package, at if rank == FAULTY else -1, FAULTS[cell.fault]):
        failed = attempt("first", act, expected)
    if failed is not None and not cell.caught:
        return failed
    del failed, act
    if cell.caught:
        attempt("second", lambda: prepare()(), expected)
    return None


# -- what happens to the ranks --


class Told(NamedTuple):
    """Of one rank: its notes, its exit status (that of a signal is negative; None if it did not end), and when it
    ended."""

    notes: list[dict[str, Any]]
    status: int | None
    ended: float

    def first(self, event: str) -> dict[str, Any] | None:
        return next((each for each in self.notes if each["event"] == event), None)


class Outcome(NamedTuple):
    ranks: list[Told]
    continued: float
    folder: Path


def perform(cell: Cell) -> Outcome:
    """Start the ranks, continue the one that has stopped, and wait for their ends."""
    folder = Path(tempfile.mkdtemp(prefix="faults_"))
    processes: dict[int, int] = {}
    for rank in range(RANKS):
        process = os.fork()
        if process == 0:
            raise _InRank(cell, rank, folder)
        processes[process] = rank
    statuses: dict[int, tuple[int | None, float]] = {}
    began, stopped, continued, waits = time.monotonic(), 0.0, 0.0, dict(processes)
    while waits:
        now = time.monotonic()
        for process, rank in list(waits.items()):
            ended, status = os.waitpid(process, os.WNOHANG | os.WUNTRACED)
            if ended and os.WIFSTOPPED(status):
                stopped = stopped or now
            elif ended:
                statuses[rank] = os.waitstatus_to_exitcode(status), now
                del waits[process]
        if stopped and not continued and now > stopped + cell.pause:
            continued = time.monotonic()
            os.kill(next(each for each, rank in processes.items() if rank == FAULTY), signal.SIGCONT)
        if now > began + PREPARES + HANGS * cell.worlds:
            for process in waits:
                os.kill(process, signal.SIGUSR1)
            time.sleep(0.3)
            for process, rank in waits.items():
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                statuses[rank] = None, now
            break
        time.sleep(0.01)
    told = []
    for rank in range(RANKS):
        file = folder / f"{rank}.jsonl"
        notes = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        told.append(Told(notes, *statuses[rank]))
    return Outcome(told, continued, folder)


class _InRank(BaseException):
    """Leaves the frames of the parent in a fork."""


class Verdict(NamedTuple):
    cell: Cell
    seconds: float
    errors: str
    problems: list[str]


def judged(cell: Cell) -> Verdict:
    outcome = perform(cell)
    ranks = outcome.ranks
    fault = ranks[FAULTY].first("fault")
    if fault is None:
        if cell.at and ranks[FAULTY].first("no such call"):
            return Verdict(cell, 0.0, "no such call", [])
        words = [each.get("text", "")[:200] for told in ranks for each in told.notes if each.get("kind") != "exact"]
        return Verdict(cell, 0.0, "", [f"there was no fault: {words}; see {outcome.folder}"])
    others = [each for rank, each in enumerate(ranks) if rank != FAULTY]
    returns = [each.first("first") for each in others]
    since = fault["at"]
    seconds = max(each["at"] - since if each is not None else HANGS for each in returns)
    errors = " / ".join(sorted({each["kind"] if each is not None else "HANGS" for each in returns}))
    problems = broken_promises(cell, outcome, fault)
    if not problems:
        shutil.rmtree(outcome.folder)
    else:
        problems.append(f"(at {fault['where']}; see {outcome.folder})")
    return Verdict(cell, seconds, errors, problems)


def broken_promises(cell: Cell, outcome: Outcome, fault: dict[str, Any]) -> list[str]:
    """What is not as "When a rank fails" in tutorials/troubleshooting.md says."""
    problems = []
    ranks, lives = outcome.ranks, cell.fault != "kill -9"
    for rank, told in enumerate(ranks):
        own = rank == FAULTY
        if own and not lives:
            continue
        start = outcome.continued if own and outcome.continued else fault["at"]
        first = told.first("first")
        if first is None:
            problems.append(f"rank {rank} did not return from the action")
            continue
        if first["at"] - start > PLACES[cell.place].waits * cell.timeout + LATE:
            problems.append(f"rank {rank} returned after {first['at'] - start:.1f} s")
        if told.status is None:
            problems.append(f"rank {rank} did not end")
        interrupted = own and cell.fault == "SIGINT" and told.status == -signal.SIGINT  # as any Python process
        if told.status is not None and told.status < 0 and not interrupted:
            problems.append(f"rank {rank} was ended by signal {-told.status}")
        if not cell.caught and first["kind"] != "exact" and told.ended - first["at"] > END:
            problems.append(f"rank {rank} took {told.ended - first['at']:.1f} s to end after its error")
        if partial := told.first("partial"):
            problems.append(f"rank {rank}: {partial['text']}")
        for each in told.notes:
            if each["event"] == "before" and each["kind"] != "exact":
                problems.append(f"rank {rank} before the fault: {each['kind']}: {each['text']}")
            if each.get("kind") == "WRONG" and each["event"] != "before":
                problems.append(f"rank {rank} {each['event']}: wrong by {each['text']}")
        if cell.fault == "stop, short" and first["kind"] != "exact":
            problems.append(f"rank {rank} did not go on after SIGCONT: {first['kind']}: {first['text']}")
        if not own and first["kind"] not in ("exact", "WRONG"):
            problems += [f"rank {rank}: {each}" for each in missing_words(cell, rank, first)]
    if cell.caught:
        alive = [each for rank, each in enumerate(ranks) if lives or rank != FAULTY]
        seconds = [each for told in alive for each in [told.first("second")] if each is not None]
        kinds = {each["kind"] for each in seconds}
        if len(seconds) < len(alive) or ("exact" in kinds and len(kinds) > 1):
            problems.append(f"the next call: {[(each['kind'], each['text'][:150]) for each in seconds]}")
        broken = any(first["kind"] == "TransferError" for told in alive if (first := told.first("first")))
        if broken and "exact" in kinds:
            problems.append("the next call over a broken group is not refused")
        for rank, told in enumerate(ranks):
            new = told.first("new world")
            if (lives or rank != FAULTY) and (new is None or new["kind"] != "exact"):
                problems.append(f"rank {rank} in a new world: {'nothing' if new is None else new['text']}")
    return problems


def missing_words(cell: Cell, rank: int, said: dict[str, Any]) -> Iterable[str]:
    """What the error of a rank does not name."""
    text = f"{said['kind']}: {said['text']}"
    if said["kind"] not in ("TransferError", "ValueError", "VerificationError", "OtherRankError"):
        yield f"raises {text[:300]}"
        return
    if not re.search(PLACES[cell.place].user, text):
        yield f"does not name {PLACES[cell.place].user}: {text[:300]}"
    if "'cp'" not in text:
        yield f"does not name the axis: {text[:300]}"
    named = {int(each) for words in re.findall(r"ranks? \[?([\d, ]+)", text) for each in re.findall(r"\d+", words)}
    if not named - {rank}:
        yield f"names no other rank: {text[:300]}"
    if said["kind"] == "TransferError" and f"rank {rank}" not in text:
        yield f"does not name its own rank: {text[:300]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--places", nargs="+", default=[*PLACES], choices=[*PLACES])
    parser.add_argument("--faults", nargs="+", default=[*FAULTS], choices=[*FAULTS])
    parser.add_argument("--every", type=int, default=0, help="the faults at every so many calls of the package")
    parser.add_argument("--worlds", type=int, default=1, help="how many worlds one after another have the fault")
    parser.add_argument("--caught", choices=["yes", "no", "both"], default="both", help="whether the program catches")
    options = parser.parse_args()
    caught = {"yes": [True], "no": [False], "both": [True, False]}[options.caught]
    cells = [Cell(place, fault, how) for place in options.places for fault in options.faults for how in caught]
    cells = [replace(each, worlds=options.worlds) if each.caught else each for each in cells]
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that a rank looks through its own objects alone when it ends
    bad = 0
    print(f"timeout of the groups: {TIMEOUT} s\n{'place':14} {'fault':12} {'caught':7} {'seconds':>7}  others raise")
    for first in cells:
        number = options.every
        while True:
            cell = replace(first, at=number)
            verdict = judged(cell)
            if verdict.errors == "no such call":
                break
            name = f"{cell.place}{f' {number}' if number else ''}"
            line = f"{name:14} {cell.fault:12} {'yes' if cell.caught else 'no':7}"
            print(f"{line} {verdict.seconds:7.2f}  {verdict.errors}", flush=True)
            for problem in verdict.problems:
                print(f"    PROBLEM: {problem}", flush=True)
            bad += bool(verdict.problems)
            if not options.every:
                break
            number += options.every
    print(f"{bad} broken promises")
    return int(bad > 0)


if __name__ == "__main__":
    status, forked = 0, None
    try:
        status = main()
    except _InRank as leave:
        forked = leave.args
    if forked is not None:
        rank_main(*forked)
    else:
        sys.exit(status)
