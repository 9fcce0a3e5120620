"""The rule that warns above the level of k3 that is normal for a model (`diagnosis.levels`).

If a family is not listed there, the level is OWN_FACTOR times the mean of the run's own first OWN_READINGS readings,
but at least LEAST.
"""

from verl_ext.diagnosis.names import K3
from verl_ext.guard.rules import Rule

NAME = "level"
SETTING = "stability.guard.level"
# There is one reading per update: one per step, or parameter_sync_step per step of separate_async.
OWN_READINGS, OWN_FACTOR = 20, 2.0  # the run's first readings, and the ratio of the level to their mean
LEAST = 0.001  # the lowest level of the table, and the least that a run's own level can be
RECOVERS = 0.75  # times the level, so that a run at its level is not reported again and again
PATIENCE = 3  # readings in a row, because single tokens move k3 by tens of times
ADVICE = "docs/guard.md#normal-levels lists the levels of published runs"


def level_rules(level: float | None) -> tuple[Rule, ...]:
    """Returns the rule that warns above a level; None takes the run's own level, 0 makes no rule."""
    if level == 0:
        return ()
    bound, baseline, least = (OWN_FACTOR, OWN_READINGS, LEAST) if level is None else (level, None, 0.0)
    judged = {"baseline": baseline, "least": least, "patience": PATIENCE, "recover": RECOVERS * bound}
    return (Rule(NAME, K3, bound, engines_only=True, advice=ADVICE, setting=SETTING, **judged),)  # type: ignore[arg-type]
