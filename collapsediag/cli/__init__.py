"""The command line: parses, calls, prints. The only room that prints.

Exit codes: 0 fine; 1 a finding at or above --fail-on; 2 a usage or input error, told in one message.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import io
import itertools
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from collapsediag import __version__
from collapsediag.errors import CollapsediagError
from collapsediag.plain_text import printable

EXIT_FINE, EXIT_FINDING, EXIT_INPUT_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130
# Of a stream that is open; where a file of ours cannot be written, the error names it.
LOST_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

# Command -> one line of help. Each has a module of its name here (- as _) with add_arguments(parser) and
# run(args) -> exit code.
COMMANDS = {
    "demo": "a real small training run that collapses, watched live (about two minutes on a laptop)",
    "score": "saved rollouts and a policy in, collapse metrics out",
    "preflight": "one batch of rollouts before training: what would go wrong",
    "report": "one self-contained page that explains a run, or several",
    "dashboard": "the same page, following a run while it is written",
    "compare": "several runs: which diagnostics go with success across them",
    "doctor": "what this installation can do: versions, extras, device, a self-test of the scorer",
    "wandb-workspace": "a saved W&B workspace with the charts in the order in which they are read",
}


class _Parser(argparse.ArgumentParser):
    """Tells a usage error in one line and where the help is; the usage of `score` alone would be 25 lines."""

    given: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required"):
            # One that is there under a wrong name is not missing.
            options = [arg for arg in itertools.takewhile("--".__ne__, self.given) if arg.startswith("--")]
            unknown = [option for option in options if not self._is_known(option)]
            message = self._unrecognized(unknown) if unknown else message
        if message.startswith("argument COMMAND: invalid choice"):
            message = _unknown_command(message.partition("choice: ")[2].rpartition(" (choose from")[0])
        self.exit(EXIT_INPUT_ERROR, f"error: {printable(message)}\nsee {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self.given = sys.argv[1:] if args is None else args
        # Here, not in parse_args, which only the parser above the commands runs: it does not know their options.
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unrecognized(unknown))
        return found, unknown

    def _is_known(self, option: str) -> bool:
        name = option.partition("=")[0]
        return any(known.startswith(name) for known in self._option_string_actions)

    def _unrecognized(self, unknown: Sequence[str]) -> str:
        near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
        return f"unrecognized arguments: {' '.join(unknown)}{f' (did you mean {near[0]}?)' if near else ''}"


def _unknown_command(quoted: str) -> str:
    near = difflib.get_close_matches(quoted.strip("'"), COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    return f"{quoted} is no command ({hint})"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog="collapsediag",
        description="Diagnostics for template collapse and its relatives in LLM reinforcement learning.",
    )
    parser.add_argument("--version", action="version", version=f"collapsediag {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"collapsediag.cli.{name.replace('-', '_')}")
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


class _PrintableFormatter(logging.Formatter):
    """Log lines quote files and models, whose control characters are not for the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a character must not end a run.
            stream.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    try:
        args = build_parser().parse_args(argv)  # its imports take a second, in which a user may interrupt it
        code = int(args.run(args))
        for stream in _streams():
            stream.flush()
        return code
    except CollapsediagError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return EXIT_INPUT_ERROR
    except KeyboardInterrupt:
        print("interrupted; what was recorded so far is intact", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `| head`
        _forget_output()
        return EXIT_FINE
    except OSError as error:
        if error.filename is not None or error.errno not in LOST_OUTPUT:
            raise
        _forget_output()
        print(f"error: what is printed cannot be written ({error.strerror})", file=sys.stderr)
        return EXIT_INPUT_ERROR


def _streams() -> list[TextIO]:
    return [stream for stream in (sys.stdout, sys.stderr) if stream is not None]  # None where it was closed


def _forget_output() -> None:
    """Send to nowhere what nobody takes, so that the interpreter does not complain about it at exit."""
    for stream in _streams():
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
