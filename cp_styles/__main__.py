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
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m cp_styles", epilog="COMMAND --help says more.")
    parser.add_argument("command", choices=COMMANDS)
    command = COMMANDS[parser.parse_args(arguments[:1]).command]
    try:
        command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has stopped, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when Python ends
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
