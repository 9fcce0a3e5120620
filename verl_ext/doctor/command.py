"""The subcommand: composes the run's config, runs the checks, prints what they found."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext.doctor import context as read
from verl_ext.doctor import installation  # noqa: F401 (registers checks: first in the table)

# isort: split
from verl_ext.doctor import engine, hooks, model_files, precision, sampling  # noqa: F401 (as above)
from verl_ext.doctor.findings import LEVELS, Finding, fixes, run_checks
from verl_ext.doctor.gpus import Gpu, present

if TYPE_CHECKING:
    from omegaconf import DictConfig

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}
WIDTH = 120  # of the table where the output is not a terminal


def diagnose(arguments: Sequence[str], gpu: Gpu | None) -> list[Finding]:
    """The findings on this installation, and on the run that these arguments of `verl_ext.main_ppo` describe."""
    versions = read.installed_versions()  # before verl is imported
    config, failure = None, ""
    with contextlib.redirect_stdout(sys.stderr):  # verl and what it imports print; stdout is the findings'
        if arguments:
            config, failure = compose(arguments)
            gpu = gpu or present()
        context = read.Context(versions, read.installed_plugins(), os.environ, config, failure, gpu)
        return run_checks(context)


def compose(arguments: Sequence[str]) -> tuple["DictConfig | None", str]:
    """The config of a run, or None and why there is none."""
    try:
        import hydra
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        import verl_ext.plugin  # noqa: F401 (as the entry point does)
        from verl_ext import compose as ours
        from verl_ext.errors import UserError
    except ImportError as error:
        return None, f"the run's config cannot be composed here: {error}"
    try:
        folder, name, overrides = ours.VERL_CONFIGS, ours.PRIMARY, []
        for argument in ours.prepare(arguments):
            flag, _, value = argument.partition("=")
            if flag == "--config-path":
                folder = Path(value)
            elif flag == "--config-name":
                name = value
            else:
                overrides.append(argument)
        with hydra.initialize_config_dir(str(folder.absolute()), version_base=None):
            return hydra.compose(name, overrides), ""
    except (HydraException, OmegaConfBaseException, UserError) as error:
        return None, " ".join(str(error).split())


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 where there is an error, or with --strict a warning."""
    given = [f"--{flag}={value}" for flag in ("config-path", "config-name") if (value := _flag(arguments, flag))]
    findings = diagnose([*arguments.overrides, *given], arguments.gpu)
    if arguments.fix:
        for override in fixes(findings):
            print(override)
    elif arguments.json:
        print(json.dumps([_plain(finding) for finding in findings], indent=2))
    else:
        print_table(findings)
    bad = ("error", "warning") if arguments.strict else ("error",)
    return int(any(finding.level in bad for finding in findings))


def _flag(arguments: argparse.Namespace, flag: str) -> str | None:
    return getattr(arguments, flag.replace("-", "_"))


def _plain(finding: Finding) -> dict[str, object]:
    return {
        "level": finding.level,
        "check": finding.check,
        "found": finding.found,
        "why": finding.why,
        "fix": list(finding.fix),
    }


def print_table(findings: Sequence[Finding]) -> None:
    """The table, worst first, and below it the overrides that fix."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    table = Table("level", "check", "found", "why", title="verl-ext doctor", title_justify="left")
    for finding in sorted(findings, key=lambda found: LEVELS.index(found.level)):
        level = Text(finding.level, style=STYLES[finding.level])
        table.add_row(level, finding.check, Text(finding.found), Text(finding.why))  # Text: brackets are no markup
    console.print(table)
    count = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    print(" " + ", ".join(f"{level}: {number}" for level, number in count.items()))
    if overrides := fixes(findings):
        print(" these overrides fix what can be fixed by one:")
        for override in overrides:
            print(f"   {override}")
