"""The subcommand: composes the run's config, runs the checks, prints what they found."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from verl_ext.doctor import installation  # noqa: F401 (registers checks: first in the table)

# isort: split
from verl_ext.base.printable import printable, wide_console
from verl_ext.diagnosis.causes import CAUSES
from verl_ext.doctor import (  # noqa: F401 (as above)
    engine,
    hooks,
    objective,
    precision,
    reloads,
    sampling,
    sizes,
    training,
    updates,
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
from verl_ext.features.verl_config import key_of
from verl_ext.launch.command_line import compose, given_arguments
from verl_ext.launch.gpus import Gpu, present

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}
MOST_ROUNDS = 6  # of fixes; in each, all findings are fixed that have one
COLUMNS = ("level", "check", "found", "why", "fix", "cause")  # of the JSON


def diagnose(
    arguments: Sequence[str], gpu: Gpu | None, *, trust: bool = False, versions: Mapping[str, str] | None = None
) -> list[CheckResult]:
    """Returns the findings on this installation, and on the run that these arguments of `verl_ext.main_ppo` describe.

    Code that the config names is run only with `trust`. `versions` are `installed_versions` from before verl was
    imported, if it was.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read as transformers is imported; nothing is fetched
    versions = versions or installed_versions()
    config, failure, other_machine = None, "", gpu is not None
    with contextlib.redirect_stdout(sys.stderr):  # verl and what it imports print; stdout is the findings'
        if arguments:
            config, failure = compose(arguments, trust=trust)
            gpu = gpu or present()
        context = Context(
            versions,
            installed_plugins(),
            os.environ,
            config,
            failure,
            overrides=arguments,
            gpu=gpu,
            trust=trust,
            other_machine=other_machine,
        )
        hooks.fit_presets(context)
        return run_checks(context)


def mend(
    findings: Sequence[CheckResult], again: Callable[[Sequence[str]], list[CheckResult]]
) -> tuple[list[str], list[CheckResult]]:
    """Returns the overrides that fix what overrides can, and the findings on the launch with them.

    A fix may show what an error hid, so the launch is looked at again until nothing new can be fixed.

    Args:
        again: returns the findings on the launch with further overrides.
    """
    chosen, left = dict[str, str](), list(findings)
    for _ in range(MOST_ROUNDS):
        new = [one for one in fixes(left) if key_of(one) not in chosen]
        if not new:
            break
        chosen |= {key_of(one): one for one in new}
        left = again(list(chosen.values()))
    return list(chosen.values()), left


def run_doctor(arguments: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if there is an error, or with --strict a warning."""
    given, versions = given_arguments(arguments), installed_versions()

    def look(overrides: Sequence[str]) -> list[CheckResult]:
        return diagnose([*given, *overrides], arguments.gpu, trust=arguments.trust, versions=versions)

    findings = look(())
    if arguments.fix:
        overrides, left = mend(findings, look)
        for override in overrides:
            print(override)
        for finding in left:
            if finding.level == "error":
                found = printable(finding.found, most=None)
                print(f"verl-ext doctor: {finding.check}: {found}; {finding.why}", file=sys.stderr)
    elif arguments.json:
        print(json.dumps([{name: getattr(finding, name) for name in COLUMNS} for finding in findings], indent=2))
    else:
        print_findings(findings)
        print_mended(*mend(findings, look))
    bad = ("error", "warning") if arguments.strict else ("error",)
    return int(any(finding.level in bad for finding in findings))


def print_findings(findings: Sequence[CheckResult]) -> None:
    """Prints the table, worst first."""
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


def print_mended(overrides: Sequence[str], left: Sequence[CheckResult]) -> None:
    """Prints the overrides that fix findings, and how many errors they leave."""
    if not overrides:
        return
    errors = sum(finding.level == "error" for finding in left)
    after = f"{errors} error(s) are left" if errors else "the launch has no error"
    print(f" with these overrides (--fix prints them alone) {after}:")
    for override in overrides:
        print(f"   {override}")
