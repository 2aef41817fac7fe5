"""``python -m cp_styles doctor``, ``explain`` and ``verify``: see ``command.py`` of each."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "doctor": "check a machine or cluster: groups, messages, kernels, attention and a model on all ranks",
    "explain": "predict times, bytes and memory of an attention on many ranks, for each strategy and layout",
    "verify": "run your training step on several ranks, as threads on CPU, and compare it with one rank",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the first argument names."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m cp_styles",
        usage="%(prog)s COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="\n".join(f"{name:8} {what}" for name, what in COMMANDS.items()),
    )
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="COMMAND --help lists its options")
    command = import_module(f"cp_styles.{parser.parse_args(arguments[:1]).command}.command")  # not the other command
    try:
        command.main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as head, has stopped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at its end
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
