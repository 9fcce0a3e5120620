"""The verdict for machines, `verl-ext report RUN --json`. docs/report.md describes the form, which is stable: entries
may be added, and none changes its meaning."""

from typing import Any

import numpy as np

from verl_ext.report.run import Run
from verl_ext.report.signals import FEWEST, K3, REWARD, beginning_of, broken_reward, fall_of, gap_of, growth_of, now_of
from verl_ext.report.sources.ends import ENDED
from verl_ext.report.verdict import RunVerdict

APART, BROKEN = 0.01, 1.0  # k3 past which rounding does not explain a gap, and past which the models cannot be the same


def as_json(run: Run, verdict: RunVerdict) -> dict[str, Any]:
    """Returns the verdict as dicts, lists, numbers and texts."""
    texts = dict.fromkeys((*verdict.why, *verdict.evidence))  # each once
    return {
        "run": run.name,
        "steps": {"first": int(run.steps[0]), "last": int(run.steps[-1]), "logged": len(run.steps)},
        "state": verdict.state,
        "sentence": verdict.sentence,
        "learning": {"state": _learning(run)},
        "engines": {"state": _engines(run)},
        "findings": [
            *({"id": "", "step": None, "text": text} for text in texts),
            *({"id": ENDED, "step": e.step, "text": e.reason} for e in run.events if e.rule == ENDED),
        ],
        "causes": [
            {
                "id": suspect.cause.name,
                "title": suspect.cause.title,
                "harmless": suspect.harmless,
                "for": list(suspect.speaks_for),
                "against": list(suspect.speaks_against),
            }
            for suspect in verdict.suspects
        ],
        "next": [{"do": override.text, "why": override.why} for override in verdict.overrides],
        "notes": [*run.notes_on_names(), *run.notes],
    }


def _learning(run: Run) -> str:
    reward = run.get(REWARD)
    if reward is None or len(reward.steps) < FEWEST:
        return "too short"
    if fall_of(run) is not None:
        return "collapsed"
    if broken_reward(run) is not None:
        return "falling"
    rose = now_of(reward) - beginning_of(reward)
    return "learns" if rose > float(np.std(reward.values)) else "flat"


def _engines(run: Run) -> str:
    gap = gap_of(run)
    if gap is None:
        logged = run.logged(K3)
        return "unmeasured" if logged is None else "broken"  # logged, and never a number
    now = now_of(gap.series)
    if now > BROKEN:
        return "broken"
    growth = growth_of(run)
    if growth is not None and growth[1].low > 0 and now > APART:
        return "growing"
    return "apart" if now > APART else "close"
