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
    _add_doctor(commands)
    plan.add_plan_parser(commands)
    probe.add_probe_parser(commands)
    submit.add_submit_parser(commands)
    report.add_report_parsers(commands)
    lab.add_parser(commands)
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


DOCTOR = """\
Check this installation and, with overrides, the run that they describe, before anything starts: versions, plugins,
hooks of verl_ext that attach or fail, and settings that are known to make rollout and training disagree. It starts
neither Ray nor vLLM, and reads the model's config and tokenizer if they are on this machine. It runs code that the
config names only with --trust.
"""
DOCTOR_EXAMPLES = """\
levels:
  error    the run would stop, or the installation cannot work
  warning  the run would start, and may go wrong silently
  note     information; nothing to do
  ok       checked, nothing wrong

exit code: 0; 1 if there are errors (with --strict also for warnings); 2 for wrong usage. With --fix, errors that
remain go to stderr.

examples:
  verl-ext doctor                                     only the installation
  verl-ext doctor stability=icepop actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B ...
                                                      with the overrides of `python -m verl_ext.main_ppo`
  verl-ext doctor --gpu A100 stability=icepop ...     for a GPU that this machine does not have
  verl-ext doctor --fix stability=icepop ...          print the overrides to add, one per line
  verl-ext doctor --trust stability=icepop ...        run plugins and other code that the config names
"""


def _add_doctor(commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check the installation, and the settings of a run",
        description=DOCTOR,
        epilog=DOCTOR_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_line.add_arguments(parser)
    parser.add_argument("--gpu", type=_gpu, metavar="NAME", help="GPU of the rollout, such as A100, H100, H200 or L20")
    parser.add_argument("--strict", action="store_true", help="exit with 1 on warnings, too")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--fix", action="store_true", help="print only the overrides that fix findings, one per line")
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
