"""The command doctor on ranks that are threads: a machine that is well, and planted faults, each named by a row."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cp_styles import AllGather, Ring, Ulysses
from cp_styles._lib.compat import in_process_store
from cp_styles.comm.point_to_point import exchange, gather_numbers
from cp_styles.doctor import checks, command
from cp_styles.doctor.ranks import Line, RanksFailed, World
from cp_styles.explain.command import main as explain
from cp_styles.kernels import choice_by_tile
from cp_styles.strategies import Strategy
from cp_styles.testing import run_ranks
from tests.covering import at_night

CPU = torch.device("cpu")
FIRST = [("hosts", checks.check_devices), ("group", checks.check_group), ("mesh", checks.check_mesh)]


def doctor(*options: object) -> int:
    """The exit status of the command."""
    with pytest.raises(SystemExit) as end:
        command.main(["doctor", *map(str, options), "--mib", "0.1"])
    assert isinstance(end.value.code, int)
    return end.value.code


def rows_with(monkeypatch, capsys, path: Path, ranks: int, *planted: Callable[[World], Line], timeout: float = 20):
    """The exit status, and rows of the table: the checks of FIRST, the ``planted`` ones by their numbers, agreement."""
    named = [*FIRST, *((str(number), check) for number, check in enumerate(planted))]
    monkeypatch.setattr(command, "checks_of", lambda size: [*named, ("agreement", checks.check_agreement)])
    status = doctor("--ranks", ranks, "--json", path, "--timeout", timeout)
    said = capsys.readouterr().out
    rows = {row["check"]: row for row in json.loads(path.read_text())["checks"]}
    *lines, last = said.splitlines()
    assert [line.split()[0] for line in lines if line.endswith((" ok", " FAIL", " skipped"))] == [*rows]
    return status, rows, last


@pytest.mark.parametrize("ranks", [1, *at_night(4)])
def test_a_machine_that_is_well(capsys, tmp_path: Path, ranks: int):
    path = tmp_path / "doctor.json"
    assert doctor("--ranks", ranks, "--json", path) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == ("all 31 checks passed" if ranks == 4 else "all 22 checks passed, 6 skipped")
    assert max(map(len, said.splitlines())) < 100
    assert said.isascii()
    facts = json.loads(path.read_text())
    assert facts["title"].startswith(f"{ranks} ranks on cpu, timeout 30 s, threads; processes: torchrun ")
    rows = {row["check"]: row for row in facts["checks"]}
    assert len(rows) == (31 if ranks == 4 else 28)
    assert all(row["seconds"] > 0 for row in rows.values())
    assert f"torch {torch.__version__}" in rows["versions"]["result"]
    if ranks == 4:
        assert {row["state"] for row in rows.values()} == {"ok"}
        assert rows["mesh"]["facts"] == [[[0, 1, 2, 3]], [[0, 1], [2, 3]]]
        assert [link[:2] for link in rows["messages of pairs"]["facts"]] == [
            [0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]
        ]  # fmt: skip
        assert "equal to one device" in rows["a model, by verify"]["result"]
        assert "at most 1.0e-12" in rows["ulysses:2 float64"]["result"]
        assert "equal to one device" in said
    else:
        assert rows["ulysses, ring inside"]["result"] == "1 is no product of two numbers above 1"


def fail(error: type[Exception], world: World) -> Line:
    if world.rank == 1:
        raise error("planted")
    return Line("well")


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_rank_that_fails(monkeypatch, capsys, tmp_path, error: type[Exception]):
    """The row names it. The ranks go on, but not after an error with which a rank may have left messages half way."""
    status, rows, last = rows_with(monkeypatch, capsys, tmp_path / "rows", 3, partial(fail, error))
    assert status == 1
    assert rows["0"]["state"] == "FAIL"
    assert rows["0"]["result"] == f"rank 1: {error.__name__}: planted"
    if error is ValueError:
        assert rows["agreement"]["state"] == "ok"
        assert last == "1 of 5 checks failed"
    else:
        assert rows["agreement"]["state"] == "skipped"
        assert rows["agreement"]["result"] == "the ranks could not go on after '0'"
        assert last == "1 of 4 checks failed, 1 skipped"


def test_a_rank_that_fails_while_its_peers_exchange_values(monkeypatch, capsys, tmp_path):
    """They read its error in place of its value, and the next values belong to the next check."""

    def exchange_then(world: World) -> Line:
        line = fail(ValueError, world)
        world.gather(world.rank)
        return line

    status, rows, last = rows_with(monkeypatch, capsys, tmp_path / "rows", 3, exchange_then, checks.check_devices)
    assert status == 1
    assert last == "1 of 6 checks failed"
    assert rows["0"]["facts"] == {"1": "ValueError: planted"}
    assert rows["1"]["result"] == rows["hosts"]["result"]


def test_every_rank_has_the_exit_status_and_says_no_error_but_its_own(monkeypatch, capsys):
    monkeypatch.setattr(command, "checks_of", lambda size: [*FIRST, ("planted", partial(fail, ValueError))])
    store = in_process_store()
    assert run_ranks(lambda rank: command.examine(World(store, rank, 3, CPU, 20.0, 8), "", None), 3) == [1, 1, 1]
    said = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(said) == 1
    assert said[0].startswith("doctor: rank 1 on ")
    assert said[0].endswith(", 'planted': ValueError: planted")


def test_peers_hear_at_once_of_a_rank_that_leaves_half_way(monkeypatch, capsys, tmp_path):
    """They wait for its messages. Its reason comes before their errors."""

    def leave(world: World) -> Line:
        fail(RuntimeError, world)
        dist.all_reduce(torch.ones(1))
        return Line("well")

    start = time.monotonic()
    status, rows, _ = rows_with(monkeypatch, capsys, tmp_path / "rows", 3, leave, timeout=60)
    assert time.monotonic() - start < 40
    assert status == 1
    assert rows["0"]["facts"].keys() == {"0", "1", "2"}
    assert rows["0"]["result"].startswith("rank 1: RuntimeError: planted\n")


def test_a_rank_that_does_not_come(monkeypatch, capsys, tmp_path):
    def sleep(world: World) -> Line:
        if world.rank == 1:
            time.sleep(3)
        return Line("well")

    start = time.monotonic()
    status, rows, _ = rows_with(monkeypatch, capsys, tmp_path / "rows", 2, sleep, timeout=0.5)
    assert time.monotonic() - start < 20
    assert status == 1
    assert rows["0"]["result"].startswith("rank 1: has not come to the end in 2 s")
    assert rows["agreement"]["state"] == "skipped"


def test_a_process_that_hangs_ends_itself(monkeypatch, capsys):
    """And not while it waits for its peers, whose errors it is to hear."""
    world = World(in_process_store(), 0, 1, CPU, 30.0, 8)
    seen = []

    def check(world: World) -> Line:
        seen.append(world.deadline)
        monkeypatch.setattr(world.store, "wait", lambda *_: seen.append(world.deadline))
        world.gather()
        seen.append(world.deadline)
        return Line("well")

    world.store = Store()
    assert world.run("a check", check) == Line("well")
    before, during, after, at_the_end = seen
    assert 70 < before - time.monotonic() < 90
    assert during == at_the_end == world.deadline == math.inf
    assert before <= after < math.inf
    world.device = torch.device("cuda", 0)
    world._set_deadline()
    assert world.deadline - time.monotonic() < 31  # nothing else ends a wait for a device

    class Ended(BaseException):
        pass

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(command.os, "_exit", end)
    world.deadline = time.monotonic() + 0.1
    with pytest.raises(Ended, match="1"):
        command.end_if_late(world)
    assert "'a check': this rank has not come to the end" in capsys.readouterr().err


class Store:
    """A store of one rank, whose methods a test may replace."""

    def __init__(self) -> None:
        store = in_process_store()
        self.set, self.get, self.wait, self.multi_get, self.check = (
            store.set, store.get, store.wait, store.multi_get, store.check
        )  # fmt: skip


@dataclass(frozen=True)
class Larger(Ring):
    """A ring whose output, or gradient of keys, is 2 % too large on a rank."""

    of: int = 1
    forward_too: bool = True

    def forward(self, attention, *tensors):
        out = super().forward(attention, *tensors)
        return out * 1.02 if self.forward_too and attention.group.rank() == self.of else out

    def backward(self, attention, *tensors):
        dq, dk, *rest = super().backward(attention, *tensors)
        return (dq, dk if self.forward_too or attention.group.rank() != self.of else dk * 1.02, *rest)


def plan_of(strategy: Strategy, dtype: torch.dtype):
    return partial(checks.check_attention, strategy, dtype)


def test_a_strategy_that_is_wrong(monkeypatch, capsys, tmp_path):
    """In each dtype, on each rank, forward or backward; and the next checks run."""
    strategies = [Larger(of=rank, forward_too=forward) for rank, forward in WRONG]
    cases = [(strategy, dtype) for dtype in checks.DTYPES.values() for strategy in strategies]
    status, rows, last = rows_with(monkeypatch, capsys, tmp_path / "rows", 3, *(plan_of(*case) for case in cases))
    assert status == 1
    assert last == f"{len(cases)} of {len(cases) + 4} checks failed"
    for number, (strategy, dtype) in enumerate(cases):
        facts = rows[str(number)]["facts"]
        assert facts[str(strategy.of)].startswith(f"Wrong: {strategy}, {dtype}: error ")
        if not strategy.forward_too:  # a backward on other ranks reads no gradient of keys
            assert [*facts] == [str(strategy.of)]
            assert " of dk, at most " in facts[str(strategy.of)]


WRONG = [(1, True), (0, False), (2, False)]


@pytest.mark.parametrize("ranks", [2, 3, *at_night(5, 7)])
def test_attention_on_other_numbers_of_ranks(monkeypatch, capsys, tmp_path, ranks: int):
    """The errors are below their limits, and not far below."""
    strategies = (Ring(), AllGather(), Ulysses())
    cases = [(strategy, dtype) for strategy in strategies for dtype in (torch.float32, torch.bfloat16)]
    status, rows, _ = rows_with(monkeypatch, capsys, tmp_path / "rows", ranks, *(plan_of(*case) for case in cases))
    assert status == 0
    for number in range(len(cases)):
        assert all(-1 < ratio < -0.01 for ratio, _ in rows[str(number)]["facts"])


def other_bytes(sends, receives, group):
    sends = [(peer, x ^ 1 if dist.get_rank() == 2 and len(x) > 8 else x) for peer, x in sends]
    return exchange(sends, receives, group)


def other_numbers(start: Callable[..., Any]) -> Callable[..., Any]:
    return lambda sent, *rest: start(sent * 2, *rest)


# A name of the checks and the wrong function in its place; the number of ranks; the check whose row has the words, or
# None for the row of the agreement.
FAULTS: dict[str, tuple[str, Any, int, Callable[[World], Line] | None, str]] = {
    "model": ("BatchSharder.sum_gradients", lambda *_: None, 2, checks.check_model,
              "VerificationError: Model on 2 ranks"),
    "bytes": ("exchange", other_bytes, 3, checks.check_pairs,
              "rank 0: RuntimeError: a message of rank 2 has come with other bytes"),
    "equal blocks": ("start_all_gather", other_numbers(checks.start_all_gather), 2, partial(checks.check_blocks, False),
                     "blocks have come with other numbers"),
    "other blocks": ("start_all_to_all", other_numbers(checks.start_all_to_all), 2, partial(checks.check_blocks, True),
                     "blocks have come with other numbers"),
    "gloo": ("Mailbox", type(None), 2, None, "set GLOO_SOCKET_IFNAME"),
    "mixed up": ("gather_numbers", lambda *given: gather_numbers(*given)[::-1], 2, None, "each rank gave its number"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault(monkeypatch, capsys, tmp_path, fault: str):
    name, wrong, ranks, check, words = FAULTS[fault]
    monkeypatch.setattr(f"cp_styles.doctor.checks.{name}", wrong)
    status, rows, _ = rows_with(monkeypatch, capsys, tmp_path / "rows", ranks, *([] if check is None else [check]))
    assert status == 1
    assert words in rows["agreement" if check is None else "0"]["result"]


def test_versions_that_differ(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(checks.platform, "python_version", lambda: f"3.1{dist.get_rank() == 2:d}")
    status, rows, _ = rows_with(monkeypatch, capsys, tmp_path / "rows", 3, checks.check_versions)
    assert status == 1
    assert [*rows["0"]["facts"]] == ["2"]
    assert "python 3.11, torch" in rows["0"]["result"]
    assert "and rank 0 has python 3.10, torch" in rows["0"]["result"]


def test_hosts_that_differ_have_lines_of_their_own(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(checks, "gethostname", lambda: "ab"[dist.get_rank() % 2])
    status, rows, _ = rows_with(monkeypatch, capsys, tmp_path / "rows", 4, checks.check_devices)
    assert status == 0
    first, *hosts = rows["0"]["result"].splitlines()
    assert first == "ranks: 4, hosts: 2"
    assert [line.split(";")[0] for line in hosts] == ["ranks 0 2: a", "ranks 1 3: b"]


def test_a_process_without_a_gpu_of_its_own(monkeypatch):
    world = World(in_process_store(), 0, 1, torch.device("cuda", 3), 1.0, 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RanksFailed) as failed:
        world.run("hosts and devices", checks.check_devices)
    assert failed.value.fatal
    assert "LOCAL_RANK=3, and torch sees 2 GPUs" in failed.value.errors[0]


def test_what_is_said_of_gpus(monkeypatch):
    """With names in place of GPUs. A GPU without figures of its own gets no name for explain."""
    world = World(in_process_store(), 0, 1, torch.device("cuda", 0), 1.0, 8, links=[(0, 0, 1e-5, 1e11)])
    found = SimpleNamespace(name="NVIDIA H200", total_memory=2**37, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: found.name)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert "; NVIDIA H200, 128.0 GiB, capability 9.0; " in checks.check_devices(world).text
    assert chosen == [world.device]
    world.size = 2
    assert checks.check_options(world).text.startswith("--hardware h200 --node-ranks 1 --bandwidth 1.00e+11")
    found.name = "NVIDIA B200"
    assert checks.check_options(world).text.startswith("--node-ranks 1 --bandwidth 1.00e+11")


def test_kernels_are_the_ones_that_attention_takes(monkeypatch):
    world = World(in_process_store(), 0, 1, CPU, 1.0, 8)
    assert "flash_attention_for_cpu" in checks.check_kernels(torch.float32, world).text
    monkeypatch.setattr(choice_by_tile, "SDPA_KERNELS", ())
    assert checks.check_kernels(torch.float32, world).text == "ReferenceKernel (Causal, SlidingWindow, Dense)"


@pytest.mark.parametrize("ranks", [2, 5, 16, 17, 18, 64])
def test_pairs_that_exchange_messages(ranks: int):
    rounds = checks.rounds_of(ranks)
    for pairs in rounds:
        members = [rank for pair in pairs for rank in pair]
        assert len(set(members)) == len(members)
        assert set(members) <= set(range(ranks))
    pairs = {frozenset(pair) for pairs in rounds for pair in pairs}
    assert len(pairs) == sum(map(len, rounds))
    if ranks <= 16:
        assert len(pairs) == ranks * (ranks - 1) // 2
        assert all(len(pairs) == 1 for pairs in rounds)
    else:
        assert pairs >= {frozenset((rank, rank + 1)) for rank in range(ranks - 1)}
        assert pairs >= {frozenset((rank, rank + ranks // 2)) for rank in range(ranks // 2)}
        assert len(rounds) == 3


def test_options_that_explain_takes(capsys):
    """With the medians of links inside of a node, and between nodes."""
    rates = [(0, 1, 1e-4, 2e9), (2, 3, 3e-4, 4e9), (0, 2, 1e-3, 1e8), (1, 3, 5e-3, 3e8)]
    world = World(None, 0, 4, CPU, 1.0, 8, hosts=["a", "a", "b", "b"], links=rates)
    text = checks.check_options(world).text
    assert text == (
        "--hardware cpu --node-ranks 2 --bandwidth 3.00e+09 --latency 2.0e-04 "
        "--far-bandwidth 2.00e+08 --far-latency 3.0e-03"
    )
    model = "explain --ranks 4 --heads 4 --head-dim 8 --seq-len 512 --strategy ring --layout contiguous --json"
    found = []
    for options in (text, f"{text} --far-latency 3"):
        explain([*model.split(), *options.split()])
        found.append(json.loads(capsys.readouterr().out)[0]["forward"]["exposed"])
    assert found[1] > found[0] + 2


@pytest.mark.parametrize(
    ("arguments", "launched", "says"),
    [
        ("--ranks 2", True, "argument --ranks: torchrun has started the ranks"),
        ("--ranks 0", False, "must be above 0"),
        ("--timeout 0", False, "must be above 0"),
        ("--mib -1", False, "must be above 0"),
        ("--mib nan", False, "must be above 0, and finite"),
        ("--device cuda", False, "torchrun --nproc-per-node N -m cp_styles doctor"),
        ("--json no_such_folder/file", False, "argument --json: [Errno 2]"),
        ("--all", False, "unrecognized arguments: --all"),
    ],
)
def test_bad_options_say_what_to_do(arguments: str, launched: bool, says: str, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value) if launched else monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as end:
        command.main(["doctor", *arguments.split()])
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_rows_of_the_page():
    """Lines of 8 ranks, in this order."""
    page = (Path(__file__).parents[2] / "tutorials/gpus.md").read_text()
    (output,) = re.findall(r"<!-- output: doctor -->\n```text\n(.*?)```", page, re.DOTALL)
    names = [name for name, _ in checks.checks_of(8)]
    shown = [line[: command._NAME].rstrip() for line in output.splitlines()[1:-1] if line[0] != " "]
    assert shown == [name for name in names if name in shown]
    assert output.splitlines()[-1] == f"all {len(names)} checks passed"


def test_values_of_all_ranks_by_the_store():
    store = in_process_store()

    def on(rank: int) -> Any:
        world = World(store, rank, 3, CPU, 5.0, 8)
        return [world.gather(rank * 10), world.gather([rank])]

    assert run_ranks(on, 3) == [[[0, 10, 20], [[0], [1], [2]]]] * 3
