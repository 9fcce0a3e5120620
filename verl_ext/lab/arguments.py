"""The options that `verl-ext lab` and `verl-ext lab search` have in common, and how both of them end."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from verl_ext.errors import ConfigError, UserError
from verl_ext.launch.arguments import INTERRUPTED, REFUSED, names
from verl_ext.printable import printable


def add_common(parser: argparse.ArgumentParser, out: str) -> None:
    parser.add_argument("--steps", type=count, metavar="N", help="of a run (default: 300)")
    parser.add_argument("--jobs", type=count, metavar="N", help="runs at a time (default: one a core)")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"default: {out}")
    parser.add_argument(
        "--plugins",
        type=names,
        default=(),
        metavar="MODULE,...",
        help="modules to import first, which register methods of your own",
    )
    parser.add_argument("--no-page", action="store_true", help="the table and results.json alone")
    parser.add_argument("--json", action="store_true", help="print results.json in place of the table")


def answered(command: str, work: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Its exit code; what the user has to act on becomes one line."""
    try:
        _import(arguments.plugins)
        return work(arguments)
    except UserError as error:
        print(f"verl-ext {command}: {printable(' '.join(str(error).split()), 4000)}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:  # before the first run, or while the page is drawn
        print(f"verl-ext {command}: interrupted; the same command goes on", file=sys.stderr)
        return INTERRUPTED


def plugin_overrides(arguments: argparse.Namespace) -> tuple[str, ...]:
    return (f"stability.plugins=[{','.join(arguments.plugins)}]",) if arguments.plugins else ()


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise ConfigError(f"--plugins: {module} cannot be imported ({error})") from error


def seeds(text: str) -> tuple[int, ...]:
    """`5` is 0 to 4; `3-7` and `0,2` are seeds by themselves, and can stand together."""
    if re.fullmatch(r"[1-9]\d{0,5}", text):
        return tuple(range(int(text)))
    seeds: dict[int, None] = {}
    for part in text.split(","):
        if not (found := re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)):
            raise argparse.ArgumentTypeError(f"{printable(text)} is neither a number of seeds, nor 3-7, nor 0,2")
        seeds |= dict.fromkeys(range(int(found[1]), int(found[2] or found[1]) + 1))
    if not seeds:
        raise argparse.ArgumentTypeError(f"{printable(text)} holds no seed")
    return tuple(seeds)


def count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise argparse.ArgumentTypeError(f"{printable(text)} is not a whole number above 0, and below a billion")
    return int(text)
