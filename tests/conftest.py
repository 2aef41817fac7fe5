"""One profile for all property tests, and one thread for every rank's operations."""

import gc
import os

from hypothesis import settings

# The same examples every time, so that a failure is a change's and not the day's (others with
# --hypothesis-profile=default); no deadline, because a process' first example pays for torch's lazy imports.
settings.register_profile("cp_styles", deadline=None, derandomize=True)
settings.load_profile("cp_styles")

# A full collection looks at all that torch has loaded: half a second, again and again. run_ranks collects what its
# ranks have made.
gc.set_threshold(700, 10, 1000)

# Before torch is imported, and for the processes that tests start. Two workers with several ranks each share the cores
# already: threads of their own for every rank's small operations cost a quarter more time, and gain nothing.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where inductor's cache is empty, compiling its C++ takes most of a test's time. It takes half of that without vector
# code and without precompiled headers. The process compiles by itself, without workers of its own.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
