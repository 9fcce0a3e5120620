"""`verl-ext`: the command line of the plugin."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from verl_ext import __version__, submit
from verl_ext.lab import command as lab
from verl_ext.launch import command_line
from verl_ext.plan import command as plan
from verl_ext.probe import command as probe
from verl_ext.report import command as report


class Parser(argparse.ArgumentParser):
    """Wrong usage is one line, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; 0 when it worked, 2 with one line on stderr when the user has to act."""
    parser = Parser(prog="verl-ext", description="Tools around a verl run that uses the verl_ext plugin.")
    parser.add_argument("--version", action="version", version=f"verl-ext {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_doctor(commands)
    plan.add_plan_parser(commands)
    probe.add_probe_parser(commands)
    submit.add_submit_parser(commands)
    report.add_report_parsers(commands)
    lab.add_parser(commands)
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    arguments, rest = parser.parse_known_args(words[:end])
    passed = words[end + 1 :]  # as it stands, to Hydra
    # argparse ends a list of positionals at the first flag; overrides may stand on both sides of one.
    if flags := [word for word in rest if word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    if rest + passed and not hasattr(arguments, "overrides"):
        parser.error(f"unrecognized arguments: {' '.join(rest + passed)}")
    if rest + passed:
        arguments.overrides += rest + passed
    return arguments.run(arguments)


DOCTOR = """\
Check this installation and, with overrides, the run that they describe, before anything starts: versions, plugins,
which hooks of verl_ext attach, and settings that are known to make rollout and training disagree. It starts neither
Ray nor vLLM, reads the model's config and tokenizer if they are on this machine, and runs no code that the config names
without --trust.
"""
DOCTOR_EXAMPLES = """\
levels:
  error    the run would stop, or the installation cannot work
  warning  the run would go on, and can go wrong without a word
  note     worth knowing; nothing to do
  ok       looked at, and as it should be

exit code: 0, or 1 with an error (with --strict also with a warning); 2 for wrong usage. With --fix, errors that no
override fixes go to stderr.

examples:
  verl-ext doctor                                     the installation alone
  verl-ext doctor stability=icepop actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B ...
                                                      with the overrides of `python -m verl_ext.main_ppo`
  verl-ext doctor --gpu A100 stability=icepop ...     for another GPU than this machine's
  verl-ext doctor --fix stability=icepop ...          the overrides to add, one a line
  verl-ext doctor --trust stability=icepop ...        running plugins and other code that the config names
"""


def _add_doctor(commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what is wrong with the installation and with a run's settings",
        description=DOCTOR,
        epilog=DOCTOR_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_line.add_arguments(parser)
    parser.add_argument("--gpu", type=_gpu, metavar="NAME", help="of the rollout, such as A100, H100, H200 or L20")
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings too")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--fix", action="store_true", help="print only the overrides that fix findings, one a line")
    output.add_argument("--json", action="store_true", help="print the findings as a JSON list")
    parser.set_defaults(run=_doctor)


def _gpu(name: str):
    from verl_ext.launch.gpus import GPUS, named

    if (gpu := named(name)) is None:
        raise argparse.ArgumentTypeError(f"{name} is not known; choose one of: {', '.join(sorted(GPUS))}")
    return gpu


def _doctor(arguments: argparse.Namespace) -> int:
    from verl_ext.doctor.command import run_doctor

    return run_doctor(arguments)


if __name__ == "__main__":
    sys.exit(main())
