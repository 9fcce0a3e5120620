"""Runs all checks, and finds the overrides that fix their findings. Every file with checks is imported here."""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from verl_ext.doctor import installation  # noqa: F401 (registers checks, in the order of the table)

# isort: split
from verl_ext.doctor import engine, experts, hooks, precision, sampling  # noqa: F401 (as above)

# isort: split
from verl_ext.base.errors import Problem, errors_of
from verl_ext.doctor import machines, objective, outcome, sizes, training, unread, weight_sync, zero_mismatch  # noqa: F401

# isort: split
from verl_ext.doctor import refusals  # noqa: F401 (last: it repeats nothing that another check has said)

# isort: split
from verl_ext.doctor.checks import (
    Context,
    fixes,
    installed_plugins,
    installed_versions,
    run_checks,
)
from verl_ext.features.verl_config import key_of, mark_unknown
from verl_ext.launch.command_line import Composed, Launch, compose
from verl_ext.launch.gpus import Gpu, present

MOST_ROUNDS = 8  # each round applies all known fixes


def diagnose(
    arguments: Sequence[str],
    gpu: Gpu | None,
    *,
    trust: bool = False,
    versions: Mapping[str, str] | None = None,
    launch: Launch | None = None,
) -> list[Problem]:
    """Returns the findings on this installation, and on the run that these arguments of `verl_ext.main_ppo` describe.

    Code that the config names runs only with `trust`. If verl is already imported, `versions` must be
    `installed_versions` from before.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when it is imported; nothing is downloaded
    versions, launch = versions or installed_versions(), launch or Launch()
    composed, other_machine = Composed(None), gpu is not None
    with contextlib.redirect_stdout(sys.stderr):  # verl and its imports print; stdout is for the findings
        if arguments:
            composed = compose(arguments, trust=trust, entry=launch.entry)
            gpu = gpu or present()
            for setting in launch.left_out if composed.config is not None else ():
                mark_unknown(composed.config, setting)
        context = Context(
            versions,
            installed_plugins(),
            os.environ,
            composed.config,
            composed.problems,
            overrides=arguments,
            launch=launch,
            gpu=gpu,
            trust=trust,
            other_machine=other_machine,
        )
        hooks.fit_presets(context)
        return run_checks(context)


def mend(
    findings: Sequence[Problem], again: Callable[[Sequence[str]], list[Problem]]
) -> tuple[dict[str, Problem], list[Problem]]:
    """Returns override -> the finding that it fixes, and the findings on the launch with these overrides.

    An error can hide other findings, so the launch is checked again after each fix, until nothing new can be fixed.
    Errors come first: a warning on a launch with errors may be of a setting that their fixes change.

    Args:
        again: returns the findings on the launch with these additional overrides.
    """
    chosen, left = dict[str, Problem](), list(findings)
    for _ in range(MOST_ROUNDS):
        keys = set(map(key_of, chosen))
        ways = (
            {one: of for one, of in fixes(some).items() if key_of(one) not in keys} for some in (errors_of(left), left)
        )
        if not (new := next(filter(None, ways), {})):
            break
        chosen |= new
        left = again(list(chosen))
    return chosen, left
