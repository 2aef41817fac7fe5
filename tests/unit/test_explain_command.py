"""The command: a ranking and an explanation in text or JSON, and errors that name the option."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from cp_styles import Causal, Ring, Ulysses, contiguous, striped
from cp_styles import __main__ as command
from cp_styles.explain import command as module
from cp_styles.explain import explain, report
from cp_styles.explain.command import main
from cp_styles.explain.rehearse import rehearse

MODEL = ["explain", "--ranks", "4", "--heads", "8:2", "--head-dim", "64"]
SHORT = [*MODEL, "--seq-len", "2K"]


def test_a_ranking_and_the_best_explained(capsys):
    main([*SHORT, "--strategy", "ring", "ulysses", "--hardware", "h100"])
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) < 100
    assert said.isascii()
    for word in ("ring", "ulysses", "head_tail", "mask by owner", "memory of rank", "considered"):
        assert word in said


def test_the_table_comes_first_and_sources_last(capsys):
    main([*SHORT, "--strategy", "ring", "--layout", "head_tail"])
    said = capsys.readouterr().out
    assert said.splitlines()[1].split()[:5] == ["strategy", "layout", "forward", "backward", "exposed"]
    assert "exposed: the part of both in which the rank waits" in " ".join(said.split())
    assert said.split("\n\n")[-1].startswith("figures of H100: ")


def test_names_are_taken_as_the_pages_and_the_output_write_them(capsys):
    rest = ["--layout", "head_tail", "--json"]
    main([*SHORT, "--hardware", "h100", "--strategy", "ulysses:2", "allgather", "ring:0", *rest])
    expected = json.loads(capsys.readouterr().out)
    main([*SHORT, "--hardware", "H100", "--strategy", "Ulysses:2", "AllGather", "Ring:0", *rest])
    found = json.loads(capsys.readouterr().out)
    for one, other in zip(found, expected, strict=True):  # the time of planning is measured
        assert one | {"planning": 0} == other | {"planning": 0}


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


def test_each_run_is_rehearsed_once(monkeypatch, capsys):
    """Rehearsals are the time of the command. What is said of other strategies was rehearsed for the table."""
    runs = []
    monkeypatch.setattr(report, "rehearse", lambda *args, **options: runs.append(args) or rehearse(*args, **options))
    main([*SHORT, "--layout", "head_tail", "contiguous"])
    strategies = 5  # ring, ring:0, allgather, ulysses, ulysses:2
    assert len(runs) == 4 * 2 * strategies
    shown = capsys.readouterr().out.split("considered")[1]
    assert shown.count("peak memory x") == strategies - 1


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
    assert re.findall(r"^(\w+) +(?:predict|run) ", capsys.readouterr().out, re.M) == ["explain", "verify"]
    for name in ("explain", "verify"):
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


def test_long_names_leave_a_column_out(capsys, tmp_path: Path):
    lengths = tmp_path / "lengths"
    lengths.write_text("100 28 500")
    main([*MODEL, "--documents", str(lengths), "--strategy", "ulysses:2"])
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) < 100
    ranking = said.split("\n\n")[0]
    assert "per_document_head_tail" in ranking
    assert "imbalance" in ranking
    assert "planning" not in ranking


def test_layouts_of_a_hybrid(capsys):
    main([*SHORT, "--strategy", "ring", "--layout", "head_tail", "--states", "4:16:32", "--layers", "1:3"])
    said = capsys.readouterr().out.split("layouts of 1 such attentions and 3 recurrences")[1]
    assert max(map(len, said.splitlines())) < 100
    rows = {tuple(line.split()[:2]) for line in said.splitlines()[2:]}
    assert {("head_tail", "head_tail"), ("head_tail", "contiguous"), ("contiguous", "contiguous")} <= rows
    for option, given in (("--states", "4:16"), ("--layers", "3"), ("--states", "4:x:3")):
        with pytest.raises(SystemExit):
            main([*SHORT, option, given])
        assert f"argument {option}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["no/folder.png", "picture.of_no_format"])
def test_a_picture_that_cannot_be_written(name: str, capsys, tmp_path: Path):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit):
        main([*SHORT, "--strategy", "ring", "--layout", "head_tail", "--plot", str(tmp_path / name)])
    assert "argument --plot: " in capsys.readouterr().err


def test_json_is_ordered_by_time(capsys, tmp_path: Path):
    lengths = tmp_path / "lengths"
    lengths.write_text("600 100\n300, 1000")
    main([*MODEL, "--documents", str(lengths), "--json", "--strategy", "ring", "allgather", "--window", "256"])
    found = json.loads(capsys.readouterr().out)
    assert {choice["layout"] for choice in found} == {"head_tail", "contiguous", "per_document_head_tail", "by_work"}
    times = [choice["forward"]["total"] + choice["backward"]["total"] for choice in found]
    assert times == sorted(times)


def test_strategies_with_very_many_tiles_are_named_slow_instead_of_rehearsed(monkeypatch):
    # The ranks that exchange heads hold 2 of 8 stripes of one token: tiles with an explicit mask everywhere.
    length = 2**13
    monkeypatch.setattr(report, "_MANY", 10)
    made = explain(length, layout=striped(length, 8), mask=Causal(), ranks=8, heads=8, head_dim=64, rank=7)
    considered = dict(made.considered)
    assert "slow: more than 16 kernel calls on a rank" in considered[str(Ulysses(size=2))]
    assert "bytes x" in considered[str(Ring(keep=0))]


def test_a_strategy_that_cannot_run_says_why(capsys):
    with pytest.raises(SystemExit):
        main([*SHORT, "--strategy", "ulysses:3"])
    shown = capsys.readouterr().out
    assert "Ulysses(size=3) does not divide the 4 ranks" in shown
    assert "leave it out for all of them" in " ".join(shown.split())  # the remedy too, and in short lines
    assert max(map(len, shown.splitlines())) < 100


def test_ranks_that_exchange_heads_need_no_other_layout():
    made = explain(256, layout=contiguous(256, 4), strategy=Ulysses(), mask=Causal(), ranks=4, heads=8, head_dim=64)
    assert made.layout_imbalance == 1.0
    assert dict(made.considered)["layout head_tail"] == "imbalance 1.000 instead of 1.000: no better"


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
