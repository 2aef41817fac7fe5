"""The command for ranks that share a GPU, on a CPU."""

import pytest

from tests.on_device import checks, main


def test_what_has_no_other_test_here(capsys):
    assert main(["decode", "selected keys", "random numbers", "latents", "pooled"]) == 0
    assert capsys.readouterr().out.endswith("5 exact, 0 others\n")


def test_a_wrong_result_and_an_error_are_counted(monkeypatch, capsys):
    def fails() -> float:
        raise ValueError("planted")

    monkeypatch.setattr("tests.on_device.checks", lambda: [("wrong", lambda: 1e-3), ("error", fails)])
    assert main([]) == 2
    assert (
        capsys.readouterr().out == "wrong    wrong: 1.0e-03\nerror    error: ValueError: planted\n0 exact, 2 others\n"
    )


@pytest.mark.nightly
def test_all():
    assert main([name for name, _ in checks()]) == 0
