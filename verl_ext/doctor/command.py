"""The subcommand: composes the run's config, runs the checks, prints what they found."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from verl_ext.doctor import installation  # noqa: F401 (registers checks: first in the table)

# isort: split
from verl_ext.base.printable import printable, wide_console
from verl_ext.diagnosis.causes import CAUSES
from verl_ext.doctor import (  # noqa: F401 (as above)
    engine,
    hooks,
    precision,
    sampling,
    sizes,
    training,
    weight_sync,
    zero_mismatch,
)
from verl_ext.doctor.checks import (
    LEVELS,
    CheckResult,
    Context,
    fixes,
    installed_plugins,
    installed_versions,
    run_checks,
)
from verl_ext.launch.command_line import compose, given_arguments
from verl_ext.launch.gpus import Gpu, present

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}
COLUMNS = ("level", "check", "found", "why", "fix", "cause")  # of the JSON


def diagnose(arguments: Sequence[str], gpu: Gpu | None, *, trust: bool = False) -> list[CheckResult]:
    """Returns the findings on this installation, and on the run that these arguments of `verl_ext.main_ppo` describe.

    Code that the config names is run only with `trust`.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read as transformers is imported; nothing is fetched
    versions = installed_versions()  # before verl is imported
    config, failure, other_machine = None, "", gpu is not None
    with contextlib.redirect_stdout(sys.stderr):  # verl and what it imports print; stdout is the findings'
        if arguments:
            config, failure = compose(arguments, trust=trust)
            gpu = gpu or present()
        context = Context(
            versions, installed_plugins(), os.environ, config, failure, gpu, trust, other_machine=other_machine
        )
        return run_checks(context)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if there is an error, or with --strict a warning."""
    findings = diagnose(given_arguments(arguments), arguments.gpu, trust=arguments.trust)
    if arguments.fix:
        for override in fixes(findings):
            print(override)
        for finding in findings:
            if finding.level == "error" and not finding.fix:
                found = printable(finding.found, most=None)
                print(f"verl-ext doctor: {finding.check}: {found}; {finding.why}", file=sys.stderr)
    elif arguments.json:
        print(json.dumps([{name: getattr(finding, name) for name in COLUMNS} for finding in findings], indent=2))
    else:
        print_findings(findings)
    bad = ("error", "warning") if arguments.strict else ("error",)
    return int(any(finding.level in bad for finding in findings))


def print_findings(findings: Sequence[CheckResult]) -> None:
    """Prints the table, worst first, and below it the overrides that fix findings."""
    table = Table("level", "check", title="verl-ext doctor", title_justify="left")
    table.add_column("found, and why it matters", overflow="fold")
    for finding in sorted(findings, key=lambda found: LEVELS.index(found.level)):
        level = Text(finding.level, style=STYLES[finding.level])
        said = Text(printable(finding.found, most=None))  # Text: brackets are no markup
        if finding.why:
            said.append(f"\n{printable(finding.why, most=None)}", style="dim")
        if finding.cause:
            said.append(f"\ncause: {CAUSES[finding.cause].title}", style="dim")
        table.add_row(level, finding.check, said)
    wide_console().print(table)
    count = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    print(" " + ", ".join(f"{level}: {number}" for level, number in count.items()))
    if overrides := fixes(findings):
        print(" these overrides fix what can be fixed by one:")
        for override in overrides:
            print(f"   {override}")
