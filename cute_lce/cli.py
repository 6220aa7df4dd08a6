"""The command `cute-lce`: what is installed and what it would do."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from cute_lce import environment
from cute_lce.commands import bench, compile, doctor, info, plan, report
from cute_lce.commands.terminal import Refused

COMMANDS = (info, doctor, bench, report, plan, compile)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cute-lce",
        description="Fused linear cross entropy: check the installation, measure, predict, compile.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    if sys.stdout is None:
        # It was closed, as by `>&-`.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        try:
            args = _parser().parse_args(argv)
            if environment.REFUSED:
                raise Refused("; ".join(environment.REFUSED))
            return args.run(args)
        finally:
            sys.stdout.flush()
    except Refused as error:
        print(f"cute-lce: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # Python flushes again at exit: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            # The reader closed the pipe, as `head` does.
            return 128 + signal.SIGPIPE
        print(f"cute-lce: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
