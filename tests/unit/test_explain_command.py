"""The command: a ranking and an explanation in text or JSON, and errors that name the option."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cp_styles import AllGather, Causal, Ring, Ulysses, context_attention, contiguous, head_tail
from cp_styles import __main__ as command
from cp_styles.explain import CPU, H100, explain, report
from cp_styles.explain import command as module
from cp_styles.explain.candidates import rank_candidates
from cp_styles.explain.command import main
from cp_styles.explain.dry_run import dry_run
from cp_styles.explain.events import Shapes
from cp_styles.strategies import Strategy
from cp_styles.testing import run_ranks
from tests.ranks.attention_case import EXACT, Problem, cp_mesh, run_attention

MODEL = ["explain", "--ranks", "4", "--heads", "8:2", "--head-dim", "64"]
SHORT = [*MODEL, "--seq-len", "2K"]


def test_a_ranking_and_the_best_explained(capsys):
    main([*SHORT, "--strategy", "ring", "ulysses", "--hardware", "h100"])
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) < 100
    assert said.isascii()
    for word in ("ring", "ulysses", "head_tail", "bytes to and from", "memory of rank", "kernels"):
        assert word in said


def test_the_table_comes_first_and_sources_last(capsys):
    main([*SHORT, "--strategy", "ring", "--layout", "head_tail"])
    said = capsys.readouterr().out
    assert said.splitlines()[1].split()[:5] == ["strategy", "layout", "forward", "backward", "exposed"]
    assert "exposed: the part of forward and backward in which the rank waits" in " ".join(said.split())
    assert said.split("\n\n")[-1].startswith("figures of H100: ")


def test_names_are_taken_as_the_pages_and_the_output_write_them(capsys):
    rest = ["--layout", "head_tail", "--json"]
    main([*SHORT, "--hardware", "h100", "--strategy", "ulysses:2", "allgather", "ring:0", *rest])
    expected = json.loads(capsys.readouterr().out)
    main([*SHORT, "--hardware", "H100", "--strategy", "Ulysses:2", "AllGather", "Ring:0", *rest])
    found = json.loads(capsys.readouterr().out)
    assert found == expected


def test_progress_is_on_stderr_when_it_takes_longer(capsys, monkeypatch):
    arguments = [*SHORT, "--strategy", "ring", "ulysses", "--layout", "head_tail"]
    monkeypatch.setattr(module, "_PATIENCE", 1e6)
    main(arguments)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(module, "_PATIENCE", 0)
    main(arguments)
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "explain: 1 of 2: Ring(keep=1), head_tail",
        "explain: 2 of 2: Ulysses(inner=Ring(keep=1), size=None), head_tail",
    ]
    assert "explain: " not in said.out


def test_each_candidate_is_simulated_once(monkeypatch, capsys):
    """Dry runs are the time of the command: the busiest rank of each candidate, and the four ranks of the best."""
    runs = []
    monkeypatch.setattr(report, "dry_run", lambda *args, **options: runs.append(args) or dry_run(*args, **options))
    main([*SHORT, "--layout", "head_tail", "contiguous"])
    strategies = 5  # ring, ring:0, allgather, ulysses, ulysses:2
    assert len(runs) == 2 * strategies + 4
    assert [rank for *_, rank in runs[:-4]] == [0] * strategies + [3] * strategies  # contiguous: the last
    assert "forward of rank" in capsys.readouterr().out


def test_a_mask_that_is_balanced_has_no_layout_of_many_parts(capsys):
    for mask in ("causal", "full"):
        main([*SHORT, "--mask", mask, "--strategy", "ring"])
        assert "by_work" not in capsys.readouterr().out
    main([*SHORT, "--window", "100", "--strategy", "ring"])
    assert "by_work" in capsys.readouterr().out
    main([*SHORT, "--layout", "by_work", "--strategy", "ring"])
    assert "by_work" in capsys.readouterr().out


def test_help_says_what_the_commands_are(capsys):
    with pytest.raises(SystemExit) as found:
        command.main(["--help"])
    assert found.value.code == 0
    names = ["doctor", "explain", "verify"]
    assert re.findall(r"^(\w+) +(?:check|predict|run) ", capsys.readouterr().out, re.M) == names
    for name in names:
        with pytest.raises(SystemExit) as found:
            command.main([name, "--help"])
        assert found.value.code == 0
        assert f"usage: python -m cp_styles {name} " in capsys.readouterr().out


def test_the_rank_that_is_explained(capsys):
    for rank in (1, 2):
        main([*SHORT, "--strategy", "ring", "--layout", "contiguous", "--rank", str(rank)])
        text = capsys.readouterr().out
        assert f"forward of rank {rank}, step by step" in text
        assert "forward of rank 3" not in text


def test_json_is_ordered_by_time(capsys, tmp_path: Path):
    lengths = tmp_path / "lengths"
    lengths.write_text("600 100\n300, 1000")
    main([*MODEL, "--documents", str(lengths), "--json", "--strategy", "ring", "allgather", "--window", "256"])
    found = json.loads(capsys.readouterr().out)
    of_documents = {"per_document_head_tail", "whole_documents"}
    assert {choice["layout"] for choice in found} == {"head_tail", "contiguous", "by_work"} | of_documents
    times = [choice["forward"]["total"] + choice["backward"]["total"] for choice in found]
    assert times == sorted(times)


def test_a_strategy_that_cannot_run_says_why(capsys):
    with pytest.raises(SystemExit):
        main([*SHORT, "--strategy", "ulysses:3"])
    shown = capsys.readouterr().out
    assert "Ulysses(size=3) does not divide the 4 ranks" in shown
    assert "leave it out for all of them" in " ".join(shown.split())  # the remedy too, and in short lines
    assert max(map(len, shown.splitlines())) < 100


def test_candidates_that_cannot_run_come_last():
    """For lack of heads, or of memory."""
    shapes = Shapes(2, 2, 64, 64, torch.bfloat16, torch.device("cuda"))
    options: Any = {"length": 4096, "ranks": 4, "mask": Causal(), "shapes": [shapes]}
    ranked = partial(rank_candidates, [Ulysses(), Ring()], {"head_tail": head_tail}, **options)
    runs, wastes = ranked(hardware=H100)
    assert (runs.strategy, runs.problem, wastes.strategy) == (Ring(), "", Ulysses())
    assert "2 of them would have none" in wastes.problem
    assert "GiB for one attention" in ranked(hardware=replace(H100, memory=2**20))[0].problem


def test_ranks_that_exchange_heads_need_no_other_layout():
    made = explain(256, layout=contiguous(256, 4), strategy=Ulysses(), mask=Causal(), ranks=4, heads=8, head_dim=64)
    assert made.layout_imbalance == 1.0


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("explain --ranks 4 --heads 8 --head-dim 64", "--seq-len"),
        ("explain --seq-len 1Q --ranks 4 --heads 8 --head-dim 64", "--seq-len"),
        ("explain --seq-len 1K --ranks 0 --heads 8 --head-dim 64", "--ranks"),
        ("explain --seq-len 1K --ranks 4 --heads 8:3 --head-dim 64", "--heads"),
        (" ".join([*SHORT, "--strategy", "magic"]), "--strategy"),
        (" ".join([*SHORT, "--documents", "no_such_file"]), "--documents"),
        (" ".join([*SHORT, "--rank", "4"]), "--rank"),
        (" ".join([*SHORT, "--layout", "per_document_head_tail"]), "--layout"),
        (" ".join([*SHORT, "--mask", "full", "--window", "4"]), "--window"),
    ],
)
def test_bad_input_names_the_option(arguments: str, option: str, capsys):
    with pytest.raises(SystemExit) as found:
        main(arguments.split())
    assert found.value.code == 2
    assert f"argument {option}" in capsys.readouterr().err


def test_a_reader_that_stops_reading(monkeypatch):
    """As in: explain ... | head. Neither the print nor the flush at Python's end raises."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as found:
            command.main([*SHORT, "--strategy", "ring", "--layout", "head_tail"])
        assert found.value.code == 1


def test_links_that_were_measured(capsys):
    """In place of the machine's: a slow link between nodes is waited for. Figures that no link has are refused."""
    arguments = [*SHORT, "--strategy", "ring", "--layout", "contiguous", "--node-ranks", "2", "--json"]
    found = []
    for latency in ("1", "3"):
        main(
            [*arguments, "--bandwidth", "1e9", "--latency", "1e-4", "--far-bandwidth", "1e9", "--far-latency", latency]
        )
        found.append(json.loads(capsys.readouterr().out)[0]["forward"]["exposed"])
    assert found[1] > found[0] + 1.9
    with pytest.raises(SystemExit):
        main([*arguments, "--latency", "-1"])
    assert "latency must be 0 or above, got -1.0" in capsys.readouterr().err


def exact_errors(rank: int, strategy: Strategy) -> list[float]:
    attend = partial(context_attention, mesh=cp_mesh(4), strategy=strategy, mask=Causal())
    return run_attention(attend, Problem(length=29), rank, 4)


def test_the_strategy_that_a_loop_chooses_is_exact():
    """The remedy for Auto: the shortest predicted time of some candidates. A machine decides which one it is."""
    far, narrow = replace(CPU, latency=1.0), replace(CPU, bandwidth=1e6)
    candidates: tuple[Strategy, ...] = (Ring(), AllGather(), Ulysses())
    model = {"ranks": 4, "heads": 4, "head_dim": 16, "dtype": torch.float32}
    chosen = []
    for hardware in (far, narrow):
        reports = [explain(512, strategy=strategy, hardware=hardware, **model) for strategy in candidates]
        best = min(reports, key=lambda report: sum(phase.total for phase in report.seconds)).strategy
        assert max(map(max, run_ranks(exact_errors, 4, best))) < EXACT
        chosen.append(best)
        # The command has the same order.
        machine = {"length": 512, "ranks": 4, "mask": Causal(), "hardware": hardware}
        shapes = [Shapes(4, 4, 16, 16, torch.float32, torch.device("cpu"))]
        first, *_ = rank_candidates(candidates, {"head_tail": head_tail}, shapes=shapes, **machine)
        assert first.strategy.on(4) == best
    assert chosen[0] != chosen[1]
