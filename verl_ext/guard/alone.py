"""Which part of the gap is that of the engines alone, where rollouts are older than the policy.

`vllm_kl/*` compares the rollout's log-probabilities with those of the policy before the update. Where the weights are
the same, that is the engines' doing; where the rollout's are older, what the policy has moved since is in it too. The
engines' part is seen on trajectories of lag 0, or on those that were rescored with the weights that sampled them.
"""

from collections.abc import Mapping

GAP = "vllm_kl/"
BY_LAG = "vllm_kl/share/lag/"  # how much of the batch is how old: logged where rollouts can be older than the policy
FORECAST = ("guard/steps_to_boundary", "guard/growth_rate")
MIXED = "guard/growth_mixed"
AGE_IN_IT = " (the age of the rollouts is in it)"
PARTS = ("/lag/", "/engine/", "/stale/", "/share/")  # of names that say themselves whose gap they are


def names_alone(signal: str) -> tuple[str, ...]:
    """What the engines' part of a metric of the gap is logged as: at lag 0, and of rescored trajectories."""
    return (f"{signal}/lag/0", signal.replace(GAP, f"{GAP}engine/", 1)) if signal.startswith(GAP) else ()


def alone(signal: str, signals: Mapping[str, float]) -> tuple[str, float] | None:
    """The engines' part of a metric, by its name; None where no trajectory shows it."""
    return next(((name, signals[name]) for name in names_alone(signal) if name in signals), None)


def has_age(signal: str, signals: Mapping[str, float]) -> bool:
    """Whether what the policy has moved since the rollouts is in a metric: of all of a gap, some of it older."""
    of_all = signal.startswith(GAP) and not any(part in signal for part in PARTS)
    return of_all and any(name.startswith(BY_LAG) and name != f"{BY_LAG}0" for name in signals)


def whose(signal: str, signals: Mapping[str, float]) -> str:
    """A clause for a reason that rests on `signal`: whose gap that is; "" where there can be no doubt."""
    if signal.startswith(FORECAST) and MIXED in signals:
        return AGE_IN_IT if signals[MIXED] else " (of the engines alone)"
    if not has_age(signal, signals):
        return ""
    if part := alone(signal, signals):
        return f" (of the engines alone: {part[0]}={part[1]:.3g})"
    return AGE_IN_IT
