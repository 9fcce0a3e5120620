"""`verl-ext`: the command line of the plugin."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from verl_ext import __version__, submit
from verl_ext.doctor import command as doctor
from verl_ext.lab import command as lab
from verl_ext.plan import command as plan
from verl_ext.probe import command as probe
from verl_ext.report import command as report


class Parser(argparse.ArgumentParser):
    """Prints wrong usage as one line, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand. Returns 0 if it worked, 2 (with one line on stderr) if the user has to act."""
    parser = Parser(
        prog="verl-ext", description="Commands to check, plan, probe, submit and analyse verl runs that use verl_ext."
    )
    parser.add_argument("--version", action="version", version=f"verl-ext {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    doctor.add_doctor_parser(commands)
    plan.add_plan_parser(commands)
    probe.add_probe_parser(commands)
    submit.add_submit_parser(commands)
    report.add_report_parsers(commands)
    lab.add_lab_parser(commands)
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    arguments, rest = parser.parse_known_args(words[:end])
    passed = words[end + 1 :]  # unchanged, for Hydra
    # argparse ends a list of positionals at the first flag; overrides may stand on both sides of one.
    if flags := [word for word in rest if word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    if rest + passed and not hasattr(arguments, "overrides"):
        parser.error(f"unrecognized arguments: {' '.join(rest + passed)}")
    if rest + passed:
        arguments.overrides += rest + passed
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
