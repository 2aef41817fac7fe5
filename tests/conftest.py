"""What holds for all tests: one profile of property tests, and how threads and garbage are treated."""

import contextlib
import gc
import os

import pytest
from hypothesis import settings

from tests.covering import Sampled

# The same examples every time, so that a failure is a change's and not the day's (others with
# --hypothesis-profile=default); no deadline, because a process' first example pays for torch's lazy imports.
settings.register_profile("cp_styles", deadline=None, derandomize=True)
settings.load_profile("cp_styles")

# A full collection looks at all that torch has loaded: half a second, again and again. run_ranks collects what its
# ranks have made.
gc.set_threshold(20_000, 20, 1000)

# A thread that another one wakes does not interrupt it. Threads of gloo and of ranks wake each other all the time, and
# one that is interrupted often holds the lock for which the other one polls: an eighth of all the time.
with contextlib.suppress(AttributeError, OSError):  # where there is no such policy, or it may not be chosen
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Before torch is imported, and for the processes that tests start. Workers with several ranks each share the cores
# already: threads of their own for every rank's small operations cost a quarter more time, and gain nothing.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where inductor's cache is empty, compiling its C++ takes most of a test's time. It takes half of that without vector
# code and without precompiled headers. The process compiles by itself, without workers of its own.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads travel over gloo in messages, as large blocks do, and their memory can be measured."""
    # The thread of gloo may hold the blocks of an all-to-all for a moment after the wait.
    monkeypatch.setattr("cp_styles.comm.point_to_point.MOST_OVER_GLOO", 0)


# pytest -m quick: files that enter the package by each of its doors, two minutes on 2 cores.
QUICK = (
    "first_hours",
    "ranks/collectives/test_collectives_heads.py",
    "ranks/doors/test_batch_sharder.py",
    "ranks/doors/test_decode.py",
    "ranks/doors/test_docstring_examples.py",
    "ranks/doors/test_joint.py",
    "ranks/doors/test_module_door.py",
    "ranks/doors/test_readme.py",
    "ranks/doors/test_styles.py",
    "ranks/doors/test_torch_api.py",
    "ranks/engine/test_attention_parity.py",
    "ranks/flex/test_varlen.py",
    "ranks/mixers/test_roll.py",
    "ranks/tensor_parallel/test_tp_cp.py",
    "unit/test_explain_command.py",
    "unit/test_layout.py",
    "unit/test_mask.py",
)


def pytest_collection_modifyitems(config, items):
    folder = config.rootpath / "tests"
    quick = {
        path for path in {item.path for item in items} if any(path.is_relative_to(folder / name) for name in QUICK)
    }
    for item in items:
        if item.path in quick and not any(map(item.get_closest_marker, ("nightly", "notebook", "gpu"))):
            item.add_marker("quick")


def pytest_configure(config):
    """Set a filter that names a class of the package, and so imports torch, in the processes that run tests.

    The process that only distributes tests to workers starts sooner without it.
    """
    Sampled.night = "not nightly" not in config.option.markexpr
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.addinivalue_line("filterwarnings", "error::cp_styles.UnreducedGradientsWarning")
