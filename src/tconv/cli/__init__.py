"""The command line: `tconv` or `python -m tconv`. One file for each command."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import NoReturn

from tconv import __version__, settings
from tconv.cli import bench, cache, demo, explain, export, info, precompile, report, verify
from tconv.cli.shared import EXIT_INTERRUPTED, UsageError
from tconv.errors import TconvError
from tconv.messages import one_line

COMMANDS = (demo, info, explain, verify, bench, report, export, precompile, cache)

EXIT_CODES = (
    "Exit codes: 0 well; 1 a check failed, or the command could not do its work; 2 bad usage; "
    f"{EXIT_INTERRUPTED} interrupted."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; `EXIT_CODES` says what it means."""
    whole = parser()
    parsed, unknown = whole.parse_known_args(arguments)
    if unknown:  # said by the command, whose options and help are nearer than those of `tconv`
        parsed.parser.unknown(unknown)
    if parsed.command is None:
        whole.print_help()
        return 0
    name = f"tconv {parsed.command}"
    try:
        if parsed.command != "info":  # which shows a bad setting rather than stops at it
            settings.check()
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
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


class Parser(argparse.ArgumentParser):
    """Suggests the right name for a misspelled one, and leads to the help of its command.

    argparse suggests by itself from Python 3.14 on, and then for choices alone.
    """

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message; exit code 2."""
        command = re.match("argument COMMAND: invalid choice: '([^']*)'", message)
        if command:
            names = [module.__name__.rpartition(".")[2] for module in COMMANDS]
            message = f"no command is named {command[1]!r}{_meant(command[1], names)}"
        super().error(f"{message} (see {self.prog} --help)")

    def unknown(self, words: Sequence[str]) -> NoReturn:
        """The error of words that no option and no argument takes."""
        message = f"unrecognized arguments: {' '.join(words)}"
        options = [word.partition("=")[0] for word in words if word.startswith("-")]
        for option in options[:1]:
            message += _meant(option, self._option_string_actions)
        self.error(message)


def _meant(word: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(names), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def parser() -> Parser:
    """The parser of the whole command line."""
    whole = Parser(
        prog="tconv",
        description="Transposed convolution on CUDA kernels compiled for each layer.",
        epilog=f"`tconv COMMAND --help` has examples. {EXIT_CODES}",
    )
    whole.add_argument("--version", action="version", version=f"tconv {__version__}")
    whole.set_defaults(parser=whole)
    commands = whole.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for command in COMMANDS:
        of_command = command.add(commands)
        of_command.add_argument(
            "--debug", action="store_true", help="show the traceback of an error"
        )
        of_command.set_defaults(run=command.run, parser=of_command)
    return whole


def _failed(parsed: argparse.Namespace, code: int, message: str) -> int:
    if parsed.debug:
        traceback.print_exc()
    print(message, file=sys.stderr)
    return code
