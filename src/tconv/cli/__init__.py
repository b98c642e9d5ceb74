"""The command line: `tconv` or `python -m tconv`. One file for each command."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from tconv import settings
from tconv.cli import bench, cache, demo, explain, export, info, precompile, report, verify
from tconv.cli.shared import UsageError
from tconv.errors import TconvError
from tconv.messages import one_line

COMMANDS = (demo, info, explain, verify, bench, report, export, precompile, cache)

EXIT_CODES = (
    "Exit codes: 0 well; 1 a check failed, or the command could not do its work; 2 bad usage; "
    "130 interrupted."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; `EXIT_CODES` says what it means."""
    parsed = parser().parse_args(arguments)
    name = f"tconv {parsed.command}"
    try:
        if parsed.command != "info":  # which shows a bad setting rather than stops at it
            settings.check()
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # What read our output has enough (`| head`): nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UsageError as error:
        return _failed(parsed, 2, f"{name}: {one_line(error)} (see {name} --help)")
    except (TconvError, OSError, ValueError) as error:
        return _failed(parsed, 1, f"{name}: {one_line(error)}")
    except Exception as error:
        kind = type(error).__name__
        way_out = "" if parsed.debug else "; --debug shows where, for a bug report"
        return _failed(parsed, 1, f"{name}: internal error, {kind}: {one_line(error)}{way_out}")
    return code


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    whole = argparse.ArgumentParser(
        prog="tconv",
        description="Transposed convolution on CUDA kernels compiled for each layer.",
        epilog=f"`tconv COMMAND --help` has examples. {EXIT_CODES}",
    )
    commands = whole.add_subparsers(
        title="commands", metavar="COMMAND", required=True, dest="command"
    )
    for command in COMMANDS:
        of_command = command.add(commands)
        of_command.add_argument(
            "--debug", action="store_true", help="show the traceback of an error"
        )
        of_command.set_defaults(run=command.run)
    return whole


def _failed(parsed: argparse.Namespace, code: int, message: str) -> int:
    if parsed.debug:
        traceback.print_exc()
    print(message, file=sys.stderr)
    return code
