"""All checks on a run, and the overrides that fix what they find. Every file with checks is imported here."""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from verl_ext.doctor import installation  # noqa: F401 (registers checks: first in the table)

# isort: split
from verl_ext.doctor import (  # noqa: F401 (as above)
    engine,
    experts,
    hooks,
    objective,
    precision,
    sampling,
    sizes,
    training,
    weight_sync,
    zero_mismatch,
)
from verl_ext.doctor.checks import (
    CheckResult,
    Context,
    fixes,
    installed_plugins,
    installed_versions,
    run_checks,
)
from verl_ext.features.verl_config import key_of
from verl_ext.launch.command_line import compose
from verl_ext.launch.gpus import Gpu, present

MOST_ROUNDS = 6  # of fixes; in each, all findings are fixed that have one


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
