"""The mistakes of mutations.py against every file of tests: who notices what, and which files notice nothing new.

    python tests/matrix.py reach      the tests by day, once, with coverage: which test runs the place of a mistake
    python tests/matrix.py run WORDS  each mistake against each file that reaches it; goes on where it ended: a night
    python tests/matrix.py table      writes tests/records/matrix.txt, and says what no file notices

A mistake is planted in the functions of a running process: a fork of one that has collected all tests. So tests that
start processes of their own do not see it, and a mistake in what an import runs is not seen at all: mutations.py puts
those into files. From a file of tests, ``--tests`` tests that reach a mistake are run until one fails: those that take
the shortest, of as many functions as there are. A mistake that fewer than two files notice has others that reach it,
of ``--seconds`` together.

``reach`` needs ``pip install -e ".[mutations]"``. Its data, and those of ``run``, are in runs/matrix: delete them to
begin anew.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.mutations import FUZZED, OTHERS, Mistake, places  # noqa: E402

PACKAGE = ROOT / "cp_styles"
DATA = ROOT / "runs" / "matrix"
RECORD = ROOT / "tests" / "records" / "matrix.txt"
HUNG = 20.0  # seconds; a test that takes fifteen times its own time and longer than this waits for a rank
ENOUGH = 2  # files that must notice a mistake
MANY = 30  # files that reach a mistake: one test of each is run


class Place(NamedTuple):
    """Where a mistake is planted: a file, and the lines of the piece that it replaces."""

    file: Path
    first: int
    last: int
    source: str  # of the file, with the mistake


def place_of(mistake: Mistake) -> Place:
    ((file, start, stop),) = places(mistake, PACKAGE)
    text = file.read_text()
    first, last = (text.count("\n", 0, end) + 1 for end in (start, stop))
    return Place(file, first, last, text[:start] + mistake.wrong + text[stop:])


# reach


class Reach:
    """Records which lines of the package each test runs, and how long it takes."""

    def __init__(self, worker: str) -> None:
        import coverage

        self._coverage = coverage.Coverage(
            data_file=str(DATA / f"coverage.{worker}"), include=[f"{PACKAGE}/*"], config_file=False
        )
        self._coverage.start()
        self._times = (DATA / f"times.{worker}").open("w")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        start = time.perf_counter()
        result = yield
        print(json.dumps([item.nodeid, time.perf_counter() - start]), file=self._times, flush=True)
        self._coverage.switch_context("")
        return result

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()


def reached() -> tuple[dict[str, float], dict[str, list[str]]]:
    """Seconds of each test, and the tests that run the place of each mistake."""
    import coverage

    times = dict(json.loads(line) for path in sorted(DATA.glob("times.*")) for line in path.read_text().splitlines())
    lines = defaultdict[str, dict[int, set[str]]](lambda: defaultdict(set))
    for path in sorted(DATA.glob("coverage.*")):
        data = coverage.CoverageData(basename=str(path))
        data.read()
        for file in data.measured_files():
            for line, tests in data.contexts_by_lineno(file).items():
                lines[file][line].update(tests)
    found = {}
    for mistake in FUZZED + OTHERS:
        place = place_of(mistake)
        of_file = lines.get(str(place.file), {})
        # A statement of several lines is recorded by lines that differ by what is evaluated first.
        near = [line for line in range(place.first - 3, place.last + 2) if line in of_file]
        within = [line for line in near if place.first <= line <= place.last] or near
        found[mistake.name] = sorted({test for line in within for test in of_file[line]} - {""})
    return times, found


# run


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def same(a: CodeType, b: CodeType) -> bool:
    """Whether two functions do the same, on other lines perhaps."""
    consts = [[each for each in code.co_consts if not isinstance(each, CodeType)] for code in (a, b)]
    inner = [[each for each in code.co_consts if isinstance(each, CodeType)] for code in (a, b)]
    alike = a.co_code == b.co_code and a.co_names == b.co_names and repr(consts[0]) == repr(consts[1])
    return alike and len(inner[0]) == len(inner[1]) and all(map(same, *inner))


def plant(place: Place, live: dict[tuple[str, str], list[FunctionType]]) -> int:
    """Put the code of the mistake into the functions of this process. Returns their number."""
    file, planted = str(place.file), 0
    wrong = list(codes(compile(place.source, file, "exec", dont_inherit=True)))
    right = list(codes(compile(place.file.read_text(), file, "exec", dont_inherit=True)))
    for name in {code.co_qualname for code in right}:
        pairs = zip(*([code for code in each if code.co_qualname == name] for each in (right, wrong)), strict=False)
        changed = {old.co_firstlineno: new for old, new in pairs if not same(old, new)}
        for function in live.get((file, name), ()):
            new = changed.get(function.__code__.co_firstlineno)
            if new is not None and len(new.co_freevars) == len(function.__code__.co_freevars):
                function.__code__ = new
                planted += 1
    return planted


class Run:
    """Plants mistakes in forks of a process that has collected the tests, and records which files notice them."""

    def __init__(self, part: int, parts: int, words: list[str], most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._mistakes = [x for x in FUZZED + OTHERS if not words or any(word in x.name for word in words)]
        self._part, self._parts = part, parts
        self._results = DATA / f"results.{part}"

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.config.option.collectonly:
            return False
        items = {item.nodeid: item for item in session.items}
        times, found = reached()
        live = defaultdict[tuple[str, str], list[FunctionType]](list)
        for each in gc.get_objects():
            if isinstance(each, FunctionType) and each.__code__.co_filename.startswith(str(PACKAGE)):
                live[each.__code__.co_filename, each.__code__.co_qualname].append(each)
        gc.collect()
        gc.freeze()
        done = {each["name"] for each in results()}
        # First those that few tests reach: what they need is what the files differ in.
        left = sorted(self._mistakes, key=lambda mistake: len(found[mistake.name]))[self._part :: self._parts]
        for mistake in [each for each in left if each.name not in done]:
            start = time.perf_counter()
            tests = [test for test in found[mistake.name] if test in items]
            noticed, ran = {}, Counter[str]()
            most = self._most if len(set(map(file_of, tests))) <= MANY else 1
            chosen = choose(tests, times, most, skip=())
            self._try(place_of(mistake), [items[test] for test in chosen], live, times, noticed, ran, len(items))
            if len(noticed) < ENOUGH:
                others = [test for test in choose(tests, times, len(tests), skip=noticed) if test not in chosen]
                ends = [*accumulate(times.get(test, 0.0) for test in others)]
                others = others[: bisect_right(ends, self._seconds)]
                self._try(place_of(mistake), [items[test] for test in others], live, times, noticed, ran, ENOUGH)
            record = {
                "name": mistake.name,
                "noticed": noticed,
                "passed": {file: count for file, count in sorted(ran.items()) if file not in noticed},
                "seconds": round(time.perf_counter() - start, 1),
            }
            with self._results.open("a") as file:
                print(json.dumps(record), file=file)
        return True

    def _try(
        self,
        place: Place,
        items: list[pytest.Item],
        live: dict[tuple[str, str], list[FunctionType]],
        times: dict[str, float],
        noticed: dict[str, str],
        ran: Counter[str],
        enough: int,
    ) -> None:
        while items and len(noticed) < enough:
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reader)
                run_planted(place, items, live, noticed, writer, enough)
            os.close(writer)
            running, rest = None, b""
            while True:
                own = times.get(running.nodeid, 0.0) if running else 0.0
                ready, _, _ = select.select([reader], [], [], max(HUNG, 15 * own))
                chunk = os.read(reader, 1 << 16) if ready else b""
                if not chunk:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    place_of_item, failed = json.loads(line)
                    running = items[place_of_item]
                    if failed is not None:
                        ran[file_of(running.nodeid)] += 1
                        if failed:
                            noticed[file_of(running.nodeid)] = running.nodeid
                        running = None
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reader)
            if running is None:
                return
            noticed[file_of(running.nodeid)] = f"{running.nodeid} (no end)"
            items = [item for item in items[items.index(running) + 1 :] if file_of(item.nodeid) not in noticed]


def run_planted(
    place: Place,
    items: list[pytest.Item],
    live: dict[tuple[str, str], list[FunctionType]],
    noticed: dict[str, str],
    writer: int,
    enough: int,
) -> None:
    """In the fork: run the tests with the mistake. No test of a file runs after one that has failed, and none at all
    where ``enough`` files have."""
    try:
        from _pytest.runner import runtestprotocol

        if plant(place, live):
            files = set(noticed)
            for index, item in enumerate(items):
                if len(files) >= enough:
                    break
                if file_of(item.nodeid) in files:
                    continue
                os.write(writer, json.dumps([index, None]).encode() + b"\n")
                reports = runtestprotocol(item, nextitem=None, log=False)
                failed = any(report.failed for report in reports)
                if failed:
                    files.add(file_of(item.nodeid))
                os.write(writer, json.dumps([index, failed]).encode() + b"\n")
    finally:
        os._exit(0)


def file_of(test: str) -> str:
    return test.partition("::")[0].removeprefix("tests/")


def choose(tests: Iterable[str], times: dict[str, float], most: int, skip: Iterable[str]) -> list[str]:
    """Of each file the tests that take the shortest, first one of each function."""
    ranked, of_function = defaultdict[str, list[tuple[int, float, str]]](list), Counter[str]()
    for seconds, test in sorted((times.get(test, 0.0), test) for test in tests):
        function = test.partition("[")[0]
        of_function[function] += 1
        ranked[file_of(test)].append((of_function[function], seconds, test))
    of_files = [each for file, of_file in ranked.items() if file not in skip for each in sorted(of_file)[:most]]
    return [test for _, _, test in sorted(of_files, key=lambda each: each[1])]


# table


def results() -> list[dict[str, Any]]:
    """What has been run of the mistakes that there are now."""
    names = {mistake.name for mistake in FUZZED + OTHERS}
    lines = [line for path in sorted(DATA.glob("results.*")) for line in path.read_text().splitlines()]
    return [each for each in map(json.loads, lines) if each["name"] in names]


def table(records: list[dict[str, Any]]) -> Iterator[str]:
    """The files by number, with what each notices; the mistakes, with the numbers of the files that notice them."""
    noticed = {each["name"]: sorted(each["noticed"]) for each in records}
    by_file = defaultdict[str, list[str]](list)
    for name, files in noticed.items():
        for file in files:
            by_file[file].append(name)
    ran = {file for each in records for file in each["passed"]}
    kept = cover(noticed)
    numbers = {file: number for number, file in enumerate(sorted(ran | by_file.keys()), 1)}
    counts = Counter(min(len(files), ENOUGH) for files in noticed.values())
    yield (
        f"{len(records)} of {len(FUZZED + OTHERS)} mistakes, {len(numbers)} files. {counts[ENOUGH]} are noticed by "
        f"{ENOUGH} files or more, {counts[1]} by one, {counts[0]} by none. +: {len(kept)} files that notice as much."
    )
    for file, number in numbers.items():
        names = by_file[file]
        few = sum(len(noticed[name]) <= ENOUGH for name in names)
        yield f"{number:3} {'+' if file in kept else ' '} {file}: {len(names)} noticed, {few} by at most {ENOUGH} files"
    for name, files in sorted(noticed.items(), key=lambda each: (len(each[1]), each[0])):
        yield f"{len(files):3} {name}: {' '.join(str(numbers[file]) for file in files)}"


def cover(noticed: dict[str, list[str]]) -> set[str]:
    """Few files that notice each mistake ``ENOUGH`` times, or as often as all files do."""
    missing = {name: min(ENOUGH, len(files)) for name, files in noticed.items()}
    kept = set[str]()
    while any(missing.values()):
        gains = Counter(file for name, files in noticed.items() if missing[name] for file in files if file not in kept)
        best = min(gains, key=lambda file: (-gains[file], file))
        kept.add(best)
        for name, files in noticed.items():
            missing[name] -= missing[name] > 0 and best in files
    return kept


# pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix-reach", action="store_true")
    parser.addoption("--matrix-run", help="part,parts,tests,seconds,words")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.matrix_reach and hasattr(config, "workerinput"):
        config.pluginmanager.register(Reach(config.workerinput["workerid"]))
    if config.option.matrix_run:
        part, parts, most, seconds, *words = config.option.matrix_run.split(",")
        config.pluginmanager.register(Run(int(part), int(parts), words, int(most), float(seconds)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["reach", "run", "table"])
    parser.add_argument("words", nargs="*", help="run: only mistakes with one of these in their names")
    parser.add_argument("--tests", type=int, default=2, help="of each file, where enough files notice a mistake")
    parser.add_argument("--seconds", type=float, default=60, help="of further tests, where few files notice a mistake")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    DATA.mkdir(parents=True, exist_ok=True)
    pytest_command = [sys.executable, "-m", "pytest", "-p", "tests.matrix", "-p", "no:cacheprovider"]
    if options.what == "reach":
        return subprocess.run([*pytest_command, "--matrix-reach", "-n", str(options.processes)], cwd=ROOT).returncode
    if options.what == "run":
        parts = [
            ",".join(map(str, [part, options.processes, options.tests, options.seconds, *options.words]))
            for part in range(options.processes)
        ]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # threads do not outlive a fork
        running = [
            subprocess.Popen([*pytest_command, "-n", "0", "--matrix-run", part], cwd=ROOT, env=one_thread)
            for part in parts
        ]
        return max(process.wait() for process in running)
    lines = [*table(results())]
    RECORD.write_text("\n".join(lines) + "\n")
    none = [each["name"] for each in results() if not each["noticed"]]
    print("\n".join([lines[0], *(f"noticed by none of these: {name}; see mutations.py" for name in none)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
