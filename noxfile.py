"""The fast tests on every torch this package is for: nox

Each version gets a virtual environment of its own (a gigabyte or more, minutes the first time; nox -r reuses them).
The last session prints the table for tutorials/support.md. One version: nox -s "tests(torch='2.11.0')".
Some tests only: nox -- tests/unit. What they leave to the night: nox -s nightly.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nox

TORCH = ("2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.15.0")

nox.needs_version = ">=2024.3"
nox.options.stop_on_first_error = False


def report(session: nox.Session, torch: str) -> Path:
    return Path(session.cache_dir) / f"torch-{torch}.xml"


@nox.session
@nox.parametrize("torch", TORCH)
def tests(session: nox.Session, torch: str) -> None:
    """Everything but what is marked as starting processes; a crash of torch's costs the test it happens in."""
    # The versions in the constraint as well: an extra must not bring another torch.
    constraint = report(session, torch).with_suffix(".txt")
    constraint.parent.mkdir(parents=True, exist_ok=True)
    constraint.write_text(f"torch=={torch}\n")
    session.install(f"torch=={torch}")
    session.install("-c", str(constraint), "-e", ".[test]")
    xml = report(session, torch)
    xml.unlink(missing_ok=True)
    options = ["-m", "not process and not gpu and not nightly", f"--junitxml={xml.resolve()}"]
    session.run("pytest", *options, *session.posargs)


@nox.session(default=False)
def nightly(session: nox.Session) -> None:
    """The whole of what the tests sample by default."""
    session.install("-e", ".[test,trainers]")
    session.run("pytest", "-m", "nightly", *session.posargs)


@nox.session(python=False)
def table(session: nox.Session) -> None:
    """What the last runs of ``tests`` came to, as tutorials/support.md shows it."""
    lines = ["| torch | passed | skipped | failed | minutes |", "|---|---|---|---|---|"]
    for torch in TORCH:
        xml = report(session, torch)
        if not xml.exists():
            lines.append(f"| {torch} | not run | | | |")
            continue
        suites = list(ElementTree.parse(xml).getroot().iter("testsuite"))
        total, failed, errors, skipped = (
            sum(int(suite.get(what, "0")) for suite in suites) for what in ("tests", "failures", "errors", "skipped")
        )
        minutes = sum(float(suite.get("time", "0")) for suite in suites) / 60
        passed = total - failed - errors - skipped
        lines.append(f"| {torch} | {passed} | {skipped} | {failed + errors} | {minutes:.1f} |")
    print("\n".join(lines))
