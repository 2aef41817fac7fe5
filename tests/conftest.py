"""One profile for all property tests."""

from hypothesis import settings

# The same examples every time, so that a failure is a change's and not the day's (others with
# --hypothesis-profile=default); no deadline, because a process' first example pays for torch's lazy imports.
settings.register_profile("cp_styles", deadline=None, derandomize=True)
settings.load_profile("cp_styles")
