"""Processor seconds of the tests by folder, by file and by test: python -m pytest -p tests.cpu_times

They depend little on what else the machine runs. Processes that a test has started count when it has waited for them,
so the programs of tests/process/several.py count for the test that waits for the last one.
"""

from __future__ import annotations

import resource
from collections import Counter
from pathlib import PurePath
from typing import Any

import pytest

_NAME = "processor seconds"
_FOLDERS_OF = 2, 3  # parts of a path: tests/unit, tests/ranks/engine


def _used() -> float:
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class _Meter:
    def __init__(self) -> None:
        self._before = _used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        report = yield
        now = _used()
        report.user_properties.append((_NAME, now - self._before))
        self._before = now
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        by_file, by_test, by_row, tests = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
        for report in (each for reports in terminalreporter.stats.values() for each in reports):
            # A report has the properties of the ones before it: the last is its own.
            own = [value for name, value in getattr(report, "user_properties", ()) if name == _NAME][-1:]
            for seconds in own:
                test = report.nodeid.partition("[")[0]
                file = test.partition("::")[0]
                by_file[file] += seconds
                by_test[test] += seconds
                by_row[report.nodeid] += seconds
                for name in (file, test):
                    tests[name] += report.when == "call"
        by_folder = Counter[str]()
        for file, seconds in by_file.items():
            parts = PurePath(file).parts[:-1]
            by_folder["/".join(parts[: _FOLDERS_OF["ranks" in parts]])] += seconds
        shortest = dict[str, float]()
        for row, seconds in by_row.items():
            test = row.partition("[")[0]
            shortest[test] = min(seconds, shortest.get(test, seconds))
        terminalreporter.section(f"{_NAME}: {sum(by_file.values()):.0f}")
        terminalreporter.line(f"{sum(shortest.values()):8.1f}  the shortest row of each of {len(shortest)} tests")
        for folder, seconds in by_folder.most_common():
            terminalreporter.line(f"{seconds:8.1f}  {folder}")
        for name, seconds in by_file.most_common(40) + by_test.most_common(80):
            terminalreporter.line(f"{seconds:8.1f}  {tests[name]:4d} tests  {name}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Meter())
