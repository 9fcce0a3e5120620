"""`verl-ext`: the command line of the plugin, and what it does when a command cannot go on."""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from verl_ext import __version__
from verl_ext.base.arguments import CLOSED, INTERRUPTED, similar_names
from verl_ext.base.errors import UserError, missing_package, print_error

# Command -> the function that adds its parser. Only the command that is asked for is imported.
PARSERS = {
    "doctor": "verl_ext.doctor.command:add_doctor_parser",
    "plan": "verl_ext.plan.command:add_plan_parser",
    "probe": "verl_ext.probe.command:add_probe_parser",
    "submit": "verl_ext.submit:add_submit_parser",
    **dict.fromkeys(("report", "compare"), "verl_ext.report.command:add_report_parsers"),
    "lab": "verl_ext.lab.command:add_lab_parser",
}
CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)")  # argparse's error


class Parser(argparse.ArgumentParser):
    """Prints wrong usage as one line, with similar names and without the list of all options."""

    def error(self, message: str) -> NoReturn:
        if choice := CHOICE.search(message):
            message += similar_names(choice[1], re.findall(r"'(.*?)'", choice[2]))
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def options(self) -> Iterator[str]:
        """Yields the options of this command and of its subcommands."""
        for action in self._actions:
            yield from action.option_strings
            for inner in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
                yield from inner.options()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code, as its --help lists them.

    Everything that can end any command is handled here, with one line on stderr or none: Ctrl-C, an output that is
    closed (`| head`) or on a full disk, a file that cannot be read or written, an error that the user can fix.
    """
    arguments = argparse.Namespace(command="", again="")
    try:
        try:
            arguments = _parse(argv)
            return arguments.run(arguments)
        finally:
            sys.stdout.flush()  # at the interpreter's end, a failure would be a traceback
    except KeyboardInterrupt:
        if again := arguments.again:
            print(f"verl-ext {arguments.command}: interrupted; {again}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return CLOSED
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # which rich turns into an exit code of 1
            raise
        return CLOSED
    except (UserError, OSError, ModuleNotFoundError) as error:
        if isinstance(error, OSError) and not error.filename:
            _discard_output()
        return print_error(arguments.command, _as_user_error(error))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    parser = Parser(
        prog="verl-ext", description="Commands to check, plan, probe, submit and analyse verl runs that use verl_ext."
    )
    parser.add_argument("--version", action="version", version=f"verl-ext {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    asked = PARSERS.get(words[0]) if words else None
    for place in [asked] if asked else dict.fromkeys(PARSERS.values()):
        # Imported here, so that Ctrl-C while a command loads ends like any other.
        module, _, function = place.partition(":")
        getattr(import_module(module), function)(commands)
    end = words.index("--") if "--" in words else len(words)
    arguments, rest = parser.parse_known_args(words[:end], argparse.Namespace(again=""))
    passed = words[end + 1 :]  # unchanged, for Hydra
    command = commands.choices[arguments.command] if arguments.command else parser
    # argparse ends a list of positionals at the first flag; overrides may stand on both sides of one.
    flags = [word for word in rest if word.startswith("-")]
    if flags and (command is parser or hasattr(arguments, "run")):
        command.error(f"unrecognized arguments: {' '.join(flags)}{similar_names(flags[0], command.options())}")
    if rest + passed and hasattr(arguments, "run") and not hasattr(arguments, "overrides"):
        command.error(f"unrecognized arguments: {' '.join(rest + passed)}")
    if not hasattr(arguments, "run"):  # the command or its verb is missing
        command.print_help()
        command.exit(2)
    if rest + passed:
        arguments.overrides += rest + passed
    return arguments


def _as_user_error(error: Exception) -> Exception:
    return UserError(missing_package(error)) if isinstance(error, ModuleNotFoundError) else error


def _discard_output() -> None:
    """Drops what the standard output still holds: the interpreter would try to write it again at its end."""
    with suppress(OSError):  # a test's output has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
