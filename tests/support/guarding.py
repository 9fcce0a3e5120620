"""A step of the guard, as the trainer takes it."""


def guarded_step(guard, step, early, late):
    """Takes a step with these signals before and with its update; returns the forecast's metrics, and all events."""
    guard.begin(step)
    foreseen, warned = guard.foresee(early)
    before = guard.judge(early | foreseen)
    guard.count(before.refusal is not None)
    after = guard.judge_late(early | foreseen | late)
    return foreseen, [event for decided in (warned, before, after, guard.close()) for event in decided.events]
