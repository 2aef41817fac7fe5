"""One profile for all property tests, and one thread for every rank's operations."""

import os

from hypothesis import settings

# The same examples every time, so that a failure is a change's and not the day's (others with
# --hypothesis-profile=default); no deadline, because a process' first example pays for torch's lazy imports.
settings.register_profile("cp_styles", deadline=None, derandomize=True)
settings.load_profile("cp_styles")

# Before torch is imported, and for the processes that tests start. Two workers with several ranks each share the cores
# already: threads of their own for every rank's small operations cost a quarter more time, and gain nothing.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What inductor makes is compiled by a C++ compiler, where nothing has made it before for longer than all else takes:
# without vectors and without headers compiled beforehand for half as long, and by this process, not by others of its.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
