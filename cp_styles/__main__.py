"""``python -m cp_styles explain ...`` and ``python -m cp_styles verify ...``: see ``command.py`` of each."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from cp_styles.explain import command as explain
from cp_styles.verify import command as verify

COMMANDS = {"explain": explain.main, "verify": verify.main}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the first argument names."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    made = argparse.ArgumentParser(prog="python -m cp_styles", epilog="COMMAND --help says more.")
    made.add_argument("command", choices=COMMANDS)
    run = COMMANDS[made.parse_args(given[:1]).command]
    try:
        run(given)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has stopped, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when Python ends
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
