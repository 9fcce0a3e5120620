"""What the parsers of the `verl-ext` commands share."""

import argparse
import re
from typing import Any

from verl_ext.base.printable import printable

REFUSED, INTERRUPTED = 2, 130  # exit codes


def add_command(commands: Any, name: str, brief: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Adds a command whose description and examples are printed as they are."""
    return commands.add_parser(
        name, help=brief, description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def positive(text: str) -> int:
    """Parses a whole number above 0."""
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{printable(text)} must be a whole number above 0 and below a billion")
    return int(text)
