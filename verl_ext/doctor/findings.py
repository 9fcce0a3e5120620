"""What a check returns, and the registry of checks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from verl_ext.doctor.context import Context

LEVELS = ("error", "warning", "note", "ok")  # worst first


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


def check(name: str) -> Callable[[Check], Check]:
    """Register a check: a pure function of the context, its docstring naming where its claim was read."""

    def register(function: Check) -> Check:
        assert name not in CHECKS, name
        CHECKS[name] = function
        return function

    return register


def run_checks(context: Context) -> list[Finding]:
    """All findings, in the order of registration."""
    return [
        Finding(found.level, found.found, found.why, found.fix, name)
        for name, function in CHECKS.items()
        for found in function(context)
    ]


def fixes(findings: Iterable[Finding]) -> list[str]:
    """The overrides of all findings, worst first, each key once."""
    chosen: dict[str, str] = {}
    for finding in sorted(findings, key=lambda found: LEVELS.index(found.level)):
        for override in finding.fix:
            chosen.setdefault(override.lstrip("+").partition("=")[0], override)
    return list(chosen.values())
