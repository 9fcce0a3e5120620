"""What several commands take as arguments, and how they end."""

import argparse
import re

from verl_ext.base.printable import printable

REFUSED, INTERRUPTED = 2, 130  # exit codes
NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


def names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if wrong := [name for name in names if not NAME.fullmatch(name)]:
        raise argparse.ArgumentTypeError(f"{printable(wrong[0])!r} is no name; names are parted by commas")
    return names


def added(text: str) -> tuple[str, str]:
    name, equals, overrides = text.partition("=")
    if not equals or not NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{printable(text)} is not NAME='OVERRIDES'")
    return name, overrides


def add_own(parser: argparse.ArgumentParser, what: str) -> None:
    """`--add`, which may be repeated; what it names."""
    parser.add_argument(
        "--add",
        type=added,
        action="append",
        default=[],
        metavar="NAME='OVERRIDES'",
        help=f"{what} of your own; may be repeated",
    )
