"""Some AdamW steps under every composition, on real processes: one process' training."""

import re
from functools import partial

import pytest
from expecttest import assert_expected_inline

from cp_styles.testing import run_ranks
from tests.process.composition_job import AT_NIGHT, furthest, is_the_same, main
from tests.process.conftest import Finished
from tests.process.several import Program
from tests.ranks import composition

PROGRAMS = {
    "compositions": Program(4, main),
    "other compositions": Program(4, partial(main, makers=AT_NIGHT, proved=AT_NIGHT), at_night=True),
}

pytestmark = pytest.mark.process


def sent(done: Finished, proofs: int) -> str:
    """The messages of rank 0 in a step, to the byte. The job compares losses, parameters and first gradients to
    1e-9."""
    assert done.statuses == [0] * 4, done.said[0]
    without_figures, proved = re.subn(r".*: equal to one device: 30 modules, 21 gradients.*\n", "", done.said[0])
    assert proved == proofs
    return re.sub(r": losses within .*", "", without_figures)


def test_compositions_are_the_training_of_one_process(on_processes):
    assert_expected_inline(
        sent(on_processes["compositions"], 2),
        """\
by_fsdp_over_cp_with_tp
    all_gather: 22 calls, 217904 bytes
    all_reduce: 7 calls, 1352 bytes
    reduce_scatter: 13 calls, 169600 bytes
    send: 30720 bytes
by_ddp_over_cp
    all_gather: 6 calls, 1296 bytes
    all_reduce: 3 calls, 217140 bytes
    send: 131072 bytes
by_pipeline
    all_gather: 9 calls, 648 bytes
    all_reduce: 2 calls, 72200 bytes
    send: 57344 bytes
""",
    )


@pytest.mark.nightly
def test_other_compositions_are_too(on_processes):
    assert_expected_inline(
        sent(on_processes["other compositions"], 6),
        """\
by_sum_gradients
    all_gather: 7 calls, 648 bytes
    all_reduce: 3 calls, 217140 bytes
    send: 30720 bytes
by_fsdp_over_dp_cp
    all_gather: 13 calls, 201984 bytes
    all_reduce: 2 calls, 132 bytes
    reduce_scatter: 3 calls, 108480 bytes
    send: 30720 bytes
by_fsdp_over_cp
    all_gather: 11 calls, 202704 bytes
    all_reduce: 2 calls, 132 bytes
    reduce_scatter: 3 calls, 108480 bytes
    send: 131072 bytes
by_hsdp
    all_gather: 12 calls, 135064 bytes
    all_reduce: 5 calls, 72452 bytes
    reduce_scatter: 3 calls, 72320 bytes
    send: 30720 bytes
by_fsdp_over_dp_and_sum_gradients_over_cp
    all_gather: 13 calls, 135136 bytes
    all_reduce: 3 calls, 72452 bytes
    reduce_scatter: 3 calls, 72320 bytes
    send: 30720 bytes
by_fsdp_over_cp_with_tp
    all_gather: 22 calls, 217904 bytes
    all_reduce: 7 calls, 1352 bytes
    reduce_scatter: 13 calls, 169600 bytes
    send: 30720 bytes
""",
    )


def test_what_is_wrong_is_seen(monkeypatch):
    """The least that goes wrong: a gradient that FSDP2 has averaged where it should be summed, of which AdamW, which
    divides by the gradient's size, shows next to nothing. The job's comparison, on threads."""
    original, single = composition.global_loss, composition.alone(composition.STEPS)
    monkeypatch.setattr(composition, "global_loss", lambda *args, averaged_over: original(*args, averaged_over=1))

    def on(rank: int) -> bool:
        return is_the_same(*furthest(composition.by_fsdp_over_dp_cp().run(composition.STEPS), single))

    assert run_ranks(on, composition.RANKS) == [False] * composition.RANKS
