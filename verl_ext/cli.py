"""`verl-ext`: the command line of the plugin."""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import NoReturn

from verl_ext import __version__, submit
from verl_ext.doctor import command as doctor
from verl_ext.lab import command as lab
from verl_ext.plan import command as plan
from verl_ext.probe import command as probe
from verl_ext.report import command as report

CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)")  # argparse's error


class Parser(argparse.ArgumentParser):
    """Prints wrong usage as one line, with similar names and without the list of all options."""

    def error(self, message: str) -> NoReturn:
        if choice := CHOICE.search(message):
            message += _similar(choice[1], re.findall(r"'(.*?)'", choice[2]))
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def options(self) -> Iterator[str]:
        """Yields the options of this command and of its subcommands."""
        for action in self._actions:
            yield from action.option_strings
            for inner in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
                yield from inner.options()


def _similar(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name.partition("=")[0], [*dict.fromkeys(known)])
    return f"; similar: {', '.join(near)}" if near else ""


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
        command = next(commands.choices[word] for word in words if word in commands.choices)
        parser.error(f"unrecognized arguments: {' '.join(flags)}{_similar(flags[0], command.options())}")
    if rest + passed and not hasattr(arguments, "overrides"):
        parser.error(f"unrecognized arguments: {' '.join(rest + passed)}")
    if rest + passed:
        arguments.overrides += rest + passed
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
