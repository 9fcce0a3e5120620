"""Findings, the registry of the checks that return them, and their fixes."""

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import UserError
from verl_ext.doctor.context import Context

LEVELS = ("error", "warning", "note", "ok")  # worst first
ABSENT = object()


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table.

    Attributes:
        level: `error`, the run cannot work; `warning`, it can go wrong in silence; `note`, worth knowing; `ok`.
        found: the setting or version, and its value.
        why: why it matters, one sentence.
        fix: Hydra overrides that make the finding go away; of errors and warnings alone, and not of all.
        check: the name of the check, set by `run_checks`.
    """

    level: str
    found: str
    why: str = ""
    fix: tuple[str, ...] = ()
    check: str = ""


Check = Callable[[Context], Iterable[Finding]]
CHECKS: dict[str, Check] = {}


def check(name: str, needs: str = "") -> Callable[[Check], Check]:
    """Register a check: a pure function of the context. Its docstring names where its claim was read.

    Args:
        needs: what the context must have, by the name of its attribute; else the check finds nothing.
    """

    def register(function: Check) -> Check:
        assert name not in CHECKS, name

        @functools.wraps(function)
        def checked(context: Context) -> Iterable[Finding]:
            return function(context) if not needs or getattr(context, needs) else ()

        CHECKS[name] = checked
        return checked

    return register


def run_checks(context: Context, names: Iterable[str] = ()) -> list[Finding]:
    """All findings of these checks, in their order; of all, in the order of registration, where none is named."""
    return [
        Finding(found.level, found.found, found.why, found.fix, name)
        for name in names or CHECKS
        for found in _findings_of(CHECKS[name], context)
    ]


def fixes(findings: Iterable[Finding]) -> list[str]:
    """The overrides of all findings, worst first, each key once."""
    chosen: dict[str, str] = {}
    for finding in sorted(findings, key=lambda found: LEVELS.index(found.level)):
        for override in finding.fix:
            chosen.setdefault(override.lstrip("+").partition("=")[0], override)
    return list(chosen.values())


def apply_fix(
    config: DictConfig, error: UserError, found: Callable[[DictConfig], UserError | None]
) -> tuple[DictConfig, tuple[str, ...]]:
    """Applies the fix that an error carries, to see whether the error goes away.

    Returns the config with the fix, and the overrides in it that were not set already; the config as it was, and (),
    where that does not help.

    Args:
        found: the error that a config has; None where it has none.
    """
    fixed, fix = copy.deepcopy(config), list[str]()
    for override in error.fix:
        key, _, _ = override.partition("=")
        value = OmegaConf.select(OmegaConf.from_dotlist([override]), key)
        if OmegaConf.select(config, key, default=ABSENT) in (ABSENT, value):  # what is not there is off already
            continue
        OmegaConf.update(fixed, key, value)
        fix.append(override)
    if not fix or str(found(fixed)) == str(error):
        return config, ()
    return fixed, tuple(fix)


def _findings_of(function: Check, context: Context) -> list[Finding]:
    try:
        return list(function(context))
    except Exception as error:  # of a value that the check did not expect: the others go on
        said = " ".join(str(error).split()) or "no more is known"
        why = "a setting that it reads has a value of the wrong type; the run may stop there too"
        return [Finding("error", f"the check itself ended with {type(error).__name__}: {said}", why)]
