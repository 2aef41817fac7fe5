"""The mistakes of mutations.py against every file of tests: who notices what, and which files notice nothing new.

    python tests/matrix.py reach      the tests by day, once, with coverage: which test runs the place of a mistake
    python tests/matrix.py run WORDS  each mistake against each file that reaches it; goes on where it ended: a night
    python tests/matrix.py table      writes tests/records/matrix.txt, and says what no file notices

A mistake is planted in the functions of a running process: a fork of one that has collected all tests. So tests that
start processes of their own do not see it, and a mistake in what an import runs is not seen at all: mutations.py puts
those into files. From a file of tests, ``--tests`` tests that reach a mistake are run until one fails: those that take
the shortest, of as many functions as there are. A mistake that fewer than two files notice has others that reach it,
of ``--seconds`` together, and the tests that mutations.py names if none notices it. A test that fails in a fork without
the mistake too has noticed nothing.

``reach`` needs ``pip install -e ".[mutations]"``. Its data, and those of ``run``, are in runs/matrix: delete them to
begin anew.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest
from _pytest.mark.expression import Expression

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


Change = tuple[FunctionType, CodeType]


def changes(place: Place, live: dict[tuple[str, str], list[FunctionType]]) -> list[Change]:
    """The functions of this process that a mistake changes, and their code with it."""
    file, found = str(place.file), list[Change]()
    wrong = list(codes(compile(place.source, file, "exec", dont_inherit=True)))
    right = list(codes(compile(place.file.read_text(), file, "exec", dont_inherit=True)))
    for name in {code.co_qualname for code in right}:
        pairs = zip(*([code for code in each if code.co_qualname == name] for each in (right, wrong)), strict=False)
        changed = {old.co_firstlineno: new for old, new in pairs if not same(old, new)}
        for function in live.get((file, name), ()):
            new = changed.get(function.__code__.co_firstlineno)
            if new is not None and len(new.co_freevars) == len(function.__code__.co_freevars):
                found.append((function, new))
    return found


class Run:
    """Plants mistakes in forks of a process that has collected the tests, and records which files notice them."""

    def __init__(self, part: int, parts: int, words: list[str], most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._mistakes = [x for x in FUZZED + OTHERS if not words or any(word in x.name for word in words)]
        self._part, self._parts = part, parts
        self._results, self._unsound = DATA / f"results.{part}", DATA / f"unsound.{part}"
        self._sound: dict[str, bool] = {}  # whether a test passes in a fork without a mistake

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.config.option.collectonly:
            return False
        self._items = {item.nodeid: item for item in session.items}
        self._times, found = reached()
        live = defaultdict[tuple[str, str], list[FunctionType]](list)
        for each in gc.get_objects():
            if isinstance(each, FunctionType) and each.__code__.co_filename.startswith(str(PACKAGE)):
                live[each.__code__.co_filename, each.__code__.co_qualname].append(each)
        gc.collect()
        gc.freeze()
        records = results()
        self._control({test for each in records[self._part :: self._parts] for test in each["noticed"].values()})
        done = {each["name"] for each in records}
        # First those that few tests reach: what they need is what the files differ in.
        left = sorted(self._mistakes, key=lambda mistake: len(found[mistake.name]))[self._part :: self._parts]
        for mistake in [each for each in left if each.name not in done]:
            start = time.perf_counter()
            tests = [test for test in found[mistake.name] if test in self._items]
            planted = changes(place_of(mistake), live)
            noticed, ran = dict[str, str](), Counter[str]()
            if planted:
                most = self._most if len(set(map(file_of, tests))) <= MANY else 1
                chosen = choose(tests, self._times, most, skip=())
                self._try(planted, chosen, noticed, ran, len(chosen))
            if planted and len(noticed) < ENOUGH:
                others = choose(tests, self._times, len(tests), skip=noticed)
                self._try(planted, self._of_seconds(set(others) - set(chosen)), noticed, ran, ENOUGH)
            if planted and not noticed:
                self._try(planted, self._of_seconds(named_for(mistake, self._items)), noticed, ran, 1)
            record = {
                "name": mistake.name,
                "functions": len(planted),
                "noticed": noticed,
                "passed": {file: count for file, count in sorted(ran.items()) if file not in noticed},
                "seconds": round(time.perf_counter() - start, 1),
            }
            with self._results.open("a") as file:
                print(json.dumps(record), file=file)
        return True

    def _of_seconds(self, tests: Iterable[str]) -> list[str]:
        """Choose the tests that take the shortest, of so many seconds together."""
        ordered = sorted(tests, key=lambda test: (self._times.get(test, 0.0), test))
        ends = [*accumulate(self._times.get(test, 0.0) for test in ordered)]
        return ordered[: bisect_right(ends, self._seconds)]

    def _try(
        self, planted: list[Change], tests: list[str], noticed: dict[str, str], ran: Counter[str], enough: int
    ) -> None:
        """Run tests of files that have noticed nothing, and add those that fail with the mistake alone."""
        tests = [test for test in tests if file_of(test) not in noticed]
        failed = self._run(planted, tests, file_of, ran, enough - len(noticed))
        self._control(failed)
        noticed.update({file_of(test): test for test in failed if self._sound[test]})

    def _control(self, tests: Iterable[str]) -> None:
        """Run tests that have failed without a mistake, once each."""
        new = [test for test in dict.fromkeys(tests) if test not in self._sound and test in self._items]
        failed = self._run([], new, str, Counter(), len(new))
        self._sound |= {test: test not in failed for test in new}
        with self._unsound.open("a") as file:
            file.writelines(f"{test}\n" for test in failed)

    def _run(
        self, planted: list[Change], tests: list[str], key: Callable[[str], str], ran: Counter[str], enough: int
    ) -> list[str]:
        """The tests that fail or do not end, at most one for each key, and ``enough`` of them."""
        failed = list[str]()
        while tests and len(failed) < enough:
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reader)
                run_planted(planted, [self._items[test] for test in tests], key, writer, enough - len(failed))
            os.close(writer)
            running, rest = None, b""
            while True:
                own = self._times.get(running, 0.0) if running else 0.0
                ready, _, _ = select.select([reader], [], [], max(HUNG, 15 * own))
                chunk = os.read(reader, 1 << 16) if ready else b""
                if not chunk:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    number, ended = json.loads(line)
                    running = tests[number]
                    if ended is not None:
                        ran[key(running)] += 1
                        failed += [running] * ended
                        running = None
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reader)
            if running is None:
                break
            failed.append(running)  # it waits for a rank, or has ended the process
            keys = set(map(key, failed))
            tests = [test for test in tests[tests.index(running) + 1 :] if key(test) not in keys]
        return failed


def run_planted(
    planted: list[Change], items: list[pytest.Item], key: Callable[[str], str], writer: int, enough: int
) -> None:
    """In the fork: run the tests with the mistake. No test of a key runs after one that has failed, and none at all
    after ``enough`` have."""
    try:
        from _pytest.runner import runtestprotocol

        for function, code in planted:
            function.__code__ = code
        failed = set[str]()
        for number, item in enumerate(items):
            if len(failed) >= enough:
                break
            if key(item.nodeid) in failed:
                continue
            os.write(writer, json.dumps([number, None]).encode() + b"\n")
            ended = any(report.failed for report in runtestprotocol(item, nextitem=None, log=False))
            failed |= {key(item.nodeid)} if ended else set()
            os.write(writer, json.dumps([number, ended]).encode() + b"\n")
    finally:
        os._exit(0)


def file_of(test: str) -> str:
    return test.partition("::")[0].removeprefix("tests/")


def named_for(mistake: Mistake, items: dict[str, pytest.Item]) -> list[str]:
    """The tests that mutations.py names."""
    words = shlex.split(mistake.tests)
    files = {word for word in words if word.endswith(".py")}
    wanted = Expression.compile(words[words.index("-k") + 1] if "-k" in words else "test")
    found = [test for test in items if file_of(test) in files]
    return [test for test in found if wanted.evaluate(lambda word, test=test: word.lower() in test.lower())]


def choose(tests: Iterable[str], times: dict[str, float], most: int, skip: Iterable[str]) -> list[str]:
    """Choose the tests of each file that take the shortest, first one of each function."""
    ranked, of_function = defaultdict[str, list[tuple[int, float, str]]](list), Counter[str]()
    for seconds, test in sorted((times.get(test, 0.0), test) for test in tests):
        function = test.partition("[")[0]
        of_function[function] += 1
        ranked[file_of(test)].append((of_function[function], seconds, test))
    of_files = [each for file, of_file in ranked.items() if file not in skip for each in sorted(of_file)[:most]]
    return [test for _, _, test in sorted(of_files, key=lambda each: each[1])]


# table


def results() -> list[dict[str, Any]]:
    """Results of the mistakes that there are now, but for tests that fail without a mistake too."""
    names = {mistake.name for mistake in FUZZED + OTHERS}
    unsound = {test for path in DATA.glob("unsound.*") for test in path.read_text().splitlines()}
    lines = [line for path in sorted(DATA.glob("results.*")) for line in path.read_text().splitlines()]
    records = [each for each in map(json.loads, lines) if each["name"] in names]
    for each in records:
        each["noticed"] = {file: test for file, test in each["noticed"].items() if test not in unsound}
    return records


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
        f"{ENOUGH} files or more, {counts[1]} by one, {counts[0]} by none. +: {len(kept)} files that notice as much. "
        f"Further ones have {sum(map(lines_of, numbers.keys() - kept)):,} lines."
    )
    for file, number in numbers.items():
        names = by_file[file]
        few = sum(len(noticed[name]) <= ENOUGH for name in names)
        yield f"{number:3} {'+' if file in kept else ' '} {file}: {len(names)} noticed, {few} by at most {ENOUGH} files"
    for name, files in sorted(noticed.items(), key=lambda each: (len(each[1]), each[0])):
        yield f"{len(files):3} {name}: {' '.join(str(numbers[file]) for file in files)}"


def lines_of(file: str) -> int:
    return (ROOT / "tests" / file).read_text().count("\n")


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
    options = parser.parse_intermixed_args()
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
    print(lines[0])
    for each in results():
        if not each["noticed"]:
            problem = "noticed by none of these" if each["functions"] else "in no function of a running process"
            print(f"{problem}: {each['name']}; see mutations.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
