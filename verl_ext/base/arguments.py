"""Argument types and options that the parsers of the `verl-ext` commands share."""

import argparse
import re
import textwrap
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from verl_ext.base.printable import printable

INTERRUPTED, CLOSED = 130, 141  # exit codes: a shell reports the signals SIGINT and SIGPIPE by these numbers
HELP_WIDTH = 78  # columns of the text that argparse prints as it is
NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


def add_command(
    commands: Any,
    name: str,
    brief: str,
    description: str,
    examples: str,
    formatter: type[argparse.HelpFormatter] = argparse.RawDescriptionHelpFormatter,
    *,
    codes: str = "0",
    again: str = "",
) -> argparse.ArgumentParser:
    """Adds a command. The usual formatter prints its description and examples as they are.

    Args:
        codes: the meaning of its exit codes below 2, and of those that only it has.
        again: what is printed after Ctrl-C.
    """
    every = f"2 for wrong usage and other errors; {INTERRUPTED} after Ctrl-C; {CLOSED} if the output was closed"
    epilog = textwrap.fill(f"exit code: {codes}; {every}", HELP_WIDTH) + f"\n\n{examples}"
    made = commands.add_parser(name, help=brief, description=description, epilog=epilog, formatter_class=formatter)
    made.set_defaults(again=again)
    return made


def similar_names(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error's text with the known names that are similar to a wrong one; "" without any."""
    near = get_close_matches(name.partition("=")[0], [*dict.fromkeys(known)])
    return f"; similar: {', '.join(near)}" if near else ""


def positive(text: str) -> int:
    """Parses a whole number above 0."""
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{printable(text)} must be a whole number above 0 and below a billion")
    return int(text)


def run_of(text: str) -> int | str:
    """Parses the number of a run, or its name."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text


def names(text: str) -> tuple[str, ...]:
    """Parses names separated by commas."""
    names = tuple(dict.fromkeys(text.split(",")))
    if wrong := [name for name in names if not NAME.fullmatch(name)]:
        raise argparse.ArgumentTypeError(f"{printable(wrong[0])!r} is not a name; separate names by commas")
    return names


def named_overrides(text: str) -> tuple[str, str]:
    """Parses NAME='OVERRIDES'."""
    name, equals, overrides = text.partition("=")
    if not equals or not NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{printable(text)} must have the form NAME='OVERRIDES'")
    return name, overrides


def add_own(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds the option `--add`, which may be repeated; `what` is the thing that it names."""
    parser.add_argument(
        "--add",
        type=named_overrides,
        action="append",
        default=[],
        metavar="NAME='OVERRIDES'",
        help=f"define {what} of your own; may be repeated",
    )
