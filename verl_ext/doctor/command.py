"""`verl-ext doctor`: its options and its output. The checks are imported only when it runs, so that --help is fast."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_ext.base.arguments import add_command
from verl_ext.base.errors import errors_of
from verl_ext.base.names import needs_our_module
from verl_ext.base.printable import print_text, printable, wide_console, wrapped
from verl_ext.features.verl_config import key_of
from verl_ext.launch.command_line import add_arguments, given_arguments
from verl_ext.launch.gpus import GPUS, Gpu, named

if TYPE_CHECKING:
    from verl_ext.base.errors import Problem

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}
BESIDE, LEAST_ROOM = 17, 36  # columns of the table beside its checks and its text, and the least for the text
COLUMNS = ("level", "check", "found", "why", "fix", "cause")  # of the JSON

DOCTOR = """\
Check this installation and, with overrides, the run that they describe, before anything starts: versions, plugins, the
hooks of verl_ext, and settings that are known to make rollout and training disagree. The command starts neither Ray nor
vLLM. It reads the model's config and tokenizer if they are on this machine, and runs code that the config names only
with --trust.
"""
DOCTOR_EXAMPLES = """\
levels:
  error    the run would stop, or the installation cannot work
  warning  the run would start, but may go wrong silently
  note     information; nothing to do
  ok       checked, nothing wrong

With --fix, errors and warnings that remain go to stderr.

examples:
  verl-ext doctor                                     only the installation
  verl-ext doctor stability=moe actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B ...
                                                      with the overrides of `python -m verl_ext.main_ppo`
  verl-ext doctor --gpu A100 stability=moe ...        for a GPU that this machine does not have
  verl-ext doctor --fix stability=moe ...             print the overrides to add, one per line
  verl-ext doctor run.sh                              the launch in a script, which is read and not run
  verl-ext doctor run.sh stability=moe                with more overrides; words without = are the script's arguments
  verl-ext doctor -- python3 -m verl.trainer.main_ppo ...
                                                      a command as it stands in a script; also ray job submit, srun
  verl-ext doctor overrides.yaml                      a YAML list of overrides, or settings as a mapping
  verl-ext doctor --trust stability=moe ...           run plugins and other code that the config names
"""


def add_doctor_parser(commands: Any) -> None:
    brief = "check the installation, and the settings of a run"
    codes = "0; 1 if there are errors (with --strict also for warnings)"
    parser = add_command(commands, "doctor", brief, DOCTOR, DOCTOR_EXAMPLES, codes=codes)
    add_arguments(parser)
    parser.add_argument("--gpu", type=_gpu, metavar="NAME", help="GPU of the rollout, such as A100, H100, H200 or L20")
    parser.add_argument("--strict", action="store_true", help="exit with 1 also for warnings")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--fix", action="store_true", help="print only the overrides that fix findings, one per line")
    output.add_argument("--json", action="store_true", help="print the findings as a JSON list")
    parser.set_defaults(run=run_doctor)


def _gpu(name: str) -> Gpu:
    if (gpu := named(name)) is None:
        raise argparse.ArgumentTypeError(f"{name} is not known; choose one of: {', '.join(sorted(GPUS))}")
    return gpu


def run_doctor(arguments: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if there is an error, or with --strict a warning."""
    from verl_ext.doctor.checks import installed_versions
    from verl_ext.doctor.diagnose import diagnose, mend

    given, versions = given_arguments(arguments), installed_versions()

    def look(overrides: Sequence[str]) -> "list[Problem]":
        return diagnose(
            [*given, *overrides], arguments.gpu, trust=arguments.trust, versions=versions, launch=arguments.launch
        )

    findings = look(())
    if arguments.fix:
        overrides, left = mend(findings, look)
        for said in how_to_apply(list(overrides), given):
            print(f"verl-ext doctor: {said}", file=sys.stderr)
        for override in overrides:
            print(override)
        for finding in left:
            if finding.level in ("error", "warning"):
                said = "; ".join(filter(None, (printable(finding.found, most=None), finding.why)))
                print(f"verl-ext doctor: {finding.level}, {finding.check}: {said}", file=sys.stderr)
    elif arguments.json:
        print(json.dumps([_as_row(finding) for finding in findings], indent=2))
    else:
        print_findings(findings)
        print_mended(*mend(findings, look), findings, given)
    bad = ("error", "warning") if arguments.strict else ("error",)
    return int(any(finding.level in bad for finding in findings))


def _as_row(finding: "Problem") -> dict[str, Any]:
    from verl_ext.doctor.checks import cause_of

    return {name: cause_of(finding) if name == "cause" else getattr(finding, name) for name in COLUMNS}


def print_findings(findings: "Sequence[Problem]") -> None:
    """Prints the findings, worst first: as a table, or one below the other where a terminal is too narrow for it."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from verl_ext.base.errors import LEVELS
    from verl_ext.diagnosis.causes import CAUSES
    from verl_ext.doctor.checks import cause_of

    console = wide_console()
    room = console.width - BESIDE - max((len(finding.check) for finding in findings), default=0)
    table = Table("level", "check", "found, and why it matters", title="verl-ext doctor", title_justify="left")
    narrow = room < LEAST_ROOM
    for finding in sorted(findings, key=lambda found: LEVELS.index(found.level)):
        level = Text(finding.level, style=STYLES[finding.level])
        cause = f"cause: {CAUSES[of].title}" if (of := cause_of(finding)) else ""
        texts = [printable(text, most=None) for text in (finding.found, finding.why, cause) if text]
        first, *rest = (wrapped(text, console.width - 2 if narrow else room) for text in texts)
        said = Text(first)  # Text: brackets are no markup
        said.append("".join(f"\n{text}" for text in rest), style="dim")
        if narrow:
            console.print(level, finding.check, markup=False)
            console.print(Padding(said, (0, 0, 0, 2)))
        else:
            table.add_row(level, finding.check, said)
    if not narrow:
        console.print(table)
    count = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    print(" " + ", ".join(f"{level}: {number}" for level, number in count.items()))


def how_to_apply(overrides: Sequence[str], given: Sequence[str]) -> Iterator[str]:
    """Yields a line on what verl.trainer.main_ppo does not take, unless the launch starts verl_ext.main_ppo already."""
    if any(map(needs_our_module, given)):
        return
    plain = {key_of(one) for one in given if not one.startswith(("+", "~"))}
    if any(map(needs_our_module, overrides)):
        yield "those of stability need python -m verl_ext.main_ppo instead of verl.trainer.main_ppo"
    elif wrong := [key_of(one) for one in overrides if one.startswith("~") and key_of(one) in plain]:
        yield f"with verl.trainer.main_ppo, delete these from the launch instead of adding ~: {', '.join(wrong)}"


def print_mended(
    overrides: "Mapping[str, Problem]", left: "Sequence[Problem]", shown: "Sequence[Problem]", given: Sequence[str]
) -> None:
    """Prints the overrides that fix findings, how to apply them to a launch, and the errors that they leave.

    Args:
        overrides: override -> its finding. One that is not among those `shown` came to light when errors were mended.
        given: the launch's own overrides.
    """
    if not overrides:
        return
    console, errors = wide_console(), errors_of(left)
    deleted = {one for one in overrides if one.startswith("~") and key_of(one) in map(key_of, given)}
    print_text(console, " this fixes findings (--fix prints only the overrides):")
    for override, finding in overrides.items():
        print(f"   delete from the launch: {key_of(override)}" if override in deleted else f"   {override}")
        if finding not in shown:
            print_text(console, f"     for {finding.check}: {printable(finding.found, most=None)}")
    for said in how_to_apply([one for one in overrides if one not in deleted], given):
        print_text(console, f" {said}")
    warnings = sum(finding.level == "warning" for finding in left)
    said = f"errors that are left: {len(errors)}" if errors else "the launch has no error"
    if warnings and not errors:
        said += f"; warnings that are left: {warnings}"
    print_text(console, f" with them, {said}")
    for error in errors:
        print_text(console, f"   {error.check}: {printable(error.found, most=None)}")
