"""The tests on every torch and Python that this package is for: nox

Each row gets a virtual environment of its own (several gigabytes with CUDA's libraries, minutes the first time; nox -r
reuses them). The last session prints a table of all rows. One row, and its tests of one folder:
nox -s "tests(torch='2.11.0', python='3.11')" -- tests/unit. What the tests leave to the night: nox -s nightly.
Which of the programs that users bring broke with its newest version: nox -s newest, at night.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nox

# (torch, Python): every torch on the oldest Python, and every Python with one torch.
ROWS = (
    ("2.11.0", "3.11"),
    ("2.12.1", "3.11"),
    ("2.13.0", "3.11"),
    ("2.14.1", "3.11"),
    ("2.15.0", "3.11"),
    ("2.12.1", "3.12"),
    ("2.14.1", "3.13"),
    ("2.15.0", "3.14"),
)

nox.needs_version = ">=2024.3"
nox.options.stop_on_first_error = False


def report(session: nox.Session, torch: str, python: str) -> Path:
    return Path(session.cache_dir) / f"torch-{torch}-python-{python}.xml"


@nox.session
@nox.parametrize("torch,python", ROWS)
def tests(session: nox.Session, torch: str) -> None:
    """The default tests; a crash of torch's costs the test it happens in."""
    xml = report(session, torch, str(session.python))
    # The versions in the constraint as well: an extra must not bring another torch.
    constraint = xml.with_suffix(".txt")
    constraint.parent.mkdir(parents=True, exist_ok=True)
    constraint.write_text(f"torch=={torch}\n")
    session.install("-c", str(constraint), f"torch=={torch}", "-e", ".[test,train,clients]")
    xml.unlink(missing_ok=True)
    commit = session.run("git", "rev-parse", "--short", "HEAD", external=True, silent=True)
    name = f"junit_suite_name={str(commit).strip()}"
    session.run("pytest", f"--junitxml={xml.resolve()}", "-o", name, *session.posargs)


@nox.session(default=False)
def nightly(session: nox.Session) -> None:
    """The whole of what the tests sample by default."""
    session.install("-e", ".[test,trainers]")
    session.run("pytest", "-m", "nightly", *session.posargs)


# Clients that are tested, one by one: another's new version must not hide what this one's breaks. None: within the
# bounds of the extras.
CLIENTS = (None, "transformers", "accelerate", "trl", "peft", "lightning", "diffusers", "torchtitan")
VERSIONS = "from importlib.metadata import version as v; print(*(f'{each} {v(each)}' for each in %r), sep=', ')"


# pip takes the better part of an hour to find versions of datasets, lightning and fsspec that agree; uv takes a minute.
@nox.session(default=False, venv_backend="uv|virtualenv")
@nox.parametrize("client", CLIENTS)
def newest(session: nox.Session, client: str | None) -> None:
    """The tests of other programs with the newest version of one of them, above the bounds of the extras too."""
    versions = ("python", "-c", VERSIONS % (("torch", *CLIENTS[1:]),))
    session.install("-e", ".[test,trainers,diffusion]")
    within = session.run(*versions, silent=True)
    if client is not None:
        session.install("--upgrade", client)
        if session.run(*versions, silent=True) == within:
            session.skip(f"the extras allow the newest {client}: newest(client=None) runs it")
    session.run(*versions)
    session.run("pytest", "tests/clients", "-m", "nightly or not nightly", *session.posargs)


@nox.session(python=False)
def table(session: nox.Session) -> None:
    """What the last runs of ``tests`` came to; tutorials/support.md has the versions, dates and counts."""
    lines = ["| torch | Python | date | commit | passed | skipped | failed | minutes |", "|---" * 8 + "|"]
    for torch, python in ROWS:
        xml = report(session, torch, python)
        if not xml.exists():
            lines.append(f"| {torch} | {python} | not run | | | | | |")
            continue
        suites = list(ElementTree.parse(xml).getroot().iter("testsuite"))
        total, failed, errors, skipped = (
            sum(int(suite.get(what, "0")) for suite in suites) for what in ("tests", "failures", "errors", "skipped")
        )
        minutes = sum(float(suite.get("time", "0")) for suite in suites) / 60
        run = suites[0].get("timestamp", "")[:10], suites[0].get("name", ""), total - failed - errors - skipped
        row = torch, python, *run, skipped, failed + errors, f"{minutes:.1f}"
        lines.append(f"| {' | '.join(map(str, row))} |")
    print("\n".join(lines))
