"""The marks that the metrics of a run show: what `guard.diagnosis` judges the causes by.

Some compare the beginning of a run with its end, some one metric with another. Their levels were chosen on runs of the
lab in which one cause was planted (tools/diagnosis.py, before its FIRST).
"""

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from verl_ext.base.names import BUCKETS, PROMPT_EFFECT
from verl_ext.guard.collapse import ENTROPY, GRADIENT, K3, LENGTH, REWARD, Readings
from verl_ext.guard.forecast import FEWEST
from verl_ext.guard.levels import LEVELS

FIRST, WINDOW = 3, 20  # readings: of the first updates, of a run's beginning and of its end
READ = (  # beginnings of the canonical names of all metrics that a mark is made of
    *("vllm_kl/", "router/", "sync/", "training/off_policy/"),
    *(
        "critic/score/",
        PROMPT_EFFECT,
        "critic/advantages/max",
        "actor/ppo_kl",
        ENTROPY,
        GRADIENT,
        "response_length/",
        "prompt_length/mean",
        "perf/total_num_tokens",
        "filter/retokenization_drift/",
        "guard/level",
    ),
)
ROUTER = "router/"  # begins the name of every metric of a mixture of experts' routers
STALENESS = "training/off_policy/trajectory_staleness/mean"
APART = 1e-7  # k3 that float32 does not leave by itself
SIGMAS = 4.0
FROZEN, MOVED = 0.2, 0.05  # share of the gap in the first steps: static from FROZEN on, by updates up to MOVED
ALIKE = 1.5  # k1 / sqrt(2 k3) of a step, at most; a temperature of 1.5 leaves up to 1.5 for unlikely tokens
OFTEN = 0.1  # share of the looks that find more than a whole update; one can, if many tokens change their experts
SAME = 0.05  # spread of the tokens' shares over their median: up to 0.05 of multiplied updates, 0.054 and more of parts
HIDDEN = 2.0  # spread of the tokens' shares in nats, over the engines' gap: below it, the gap explains the spread
STILL = 0.01  # movement of the rollout's scores over training's: 0 in the lab after a lost sync, 0.1 or so for a part
ROUNDED = 0.012  # disagreement of the routers: 16 bits leave up to 0.0105 in the lab, 8 bits and fewer 0.0138 and more


class Marks:
    """The marks that the metrics of a run show. A mark is None if no metric measures it.

    Args:
        series: name -> its finite readings, in ascending steps; verl's own name of the same metric is accepted too.
    """

    def __init__(self, series: Mapping[str, Readings | np.ndarray]):
        self._series = {
            name: np.array(found, dtype=float).reshape(-1, 2) for name, found in series.items() if len(found)
        }

    def values(self, *names: str) -> np.ndarray:
        """Returns the readings of the first of these metrics that was logged; empty if none was."""
        for name in names:
            if name in self._series:
                return self._series[name][:, 1]
        return np.empty(0)

    def late(self, *names: str) -> float | None:
        """Returns the mean of the last readings."""
        found = self.values(*names)[-WINDOW:]
        return float(found.mean()) if found.size else None

    def early(self, *names: str) -> float | None:
        """Returns the mean of the first readings."""
        found = self.values(*names)[:WINDOW]
        return float(found.mean()) if found.size else None

    # The gap.

    def logs(self, start: str) -> bool:
        """Returns True if the name of any metric begins with `start`."""
        return any(name.startswith(start) for name in self._series)

    def also(self, levels: Mapping[str, float]) -> "Marks":
        """Returns the marks of the same run with more metrics logged, each constant at its level."""
        steps = self._series[K3][:, 0]
        constant = {name: np.stack([steps, np.full(len(steps), level)], 1) for name, level in levels.items()}
        found = Marks({**self._series, **constant})
        found.beginning = self.beginning  # the assumed levels are constant, so they say nothing of the first steps
        return found

    @property
    def enough(self) -> bool:
        """True if there are enough readings to judge."""
        return max(len(self.values(K3)), len(self.values(REWARD))) >= FEWEST

    @cached_property
    def k3(self) -> float | None:
        return self.late(K3)

    @cached_property
    def published_level(self) -> float:
        """The k3 that published runs of this model and rollout format stay below; 0 if no level is published.

        The guard logs its level. A level that is not in the table is the user's, or made from this run's own first
        steps, and shows nothing about other runs. Some logs keep values in float32.
        """
        logged = self.values("guard/level")[-1:]
        return max((level.k3 for level in LEVELS if np.isclose(logged, level.k3, rtol=1e-6, atol=0).any()), default=0.0)

    @cached_property
    def apart(self) -> bool:
        """True if the engines differ by more than float32 explains."""
        return self.k3 is not None and self.k3 > APART

    @cached_property
    def _k1s(self) -> np.ndarray:
        return self.values("vllm_kl/k1")[-4 * WINDOW :]

    @cached_property
    def _estimates(self) -> tuple[np.ndarray, np.ndarray]:
        """The last readings of k1 and of k3, as many of either."""
        k3s = self.values(K3)[-4 * WINDOW :]
        count = min(len(self._k1s), len(k3s))
        return self._k1s[len(self._k1s) - count :], k3s[len(k3s) - count :]

    @cached_property
    def one_sided(self) -> float | None:
        """k3 / k1: 1 if k averages 1, near 0 if every k is a little below 1."""
        k1, k3 = self._estimates
        return float(k3.mean() / k1.mean()) if k1.size and k1.mean() > 0 else None

    @cached_property
    def excess(self) -> float | None:
        """The mean of k - 1, in its standard errors."""
        k1, k3 = self._estimates
        return _in_errors(k3 - k1)

    @cached_property
    def k1_sign(self) -> float | None:
        """k1 in its standard errors: a KL is not negative."""
        return _in_errors(self._k1s)

    @cached_property
    def leaning(self) -> float | None:
        """k1 over the mean of |log k|: 1 or -1 if every token's gap is to the same side, near 0 for noise."""
        size = self.values("vllm_kl/log_ratio_abs_mean")[-4 * WINDOW :]
        if not self._k1s.size or not size.any():
            return None
        return float(np.clip(self._k1s.mean() / size.mean(), -1, 1))

    @cached_property
    def loses_mass(self) -> bool:
        """True if the mean of k is far below 1: some tokens were not sampled from the distribution of l_infer.

        The margin is twice the usual one. In a large gap the few largest k bring the mean up to 1, and the batches
        with them may be missing from the window.
        """
        return self.excess is not None and self.excess < -2 * SIGMAS and (self.one_sided or 1.0) < 0.97

    @cached_property
    def gains_mass(self) -> bool:
        """True if the mean of k is far above 1: tokens were sampled from another distribution than that of l_infer.

        If they are sampled from p, the mean of p/q is 1 only for q = p, and else above 1 (Jensen). Rounding leaves it
        at 1, so a gap of rounding does not hide it.
        """
        return self.excess is not None and self.excess > 2 * SIGMAS and (self.one_sided or 2.0) > 1.6

    @property
    def at_once(self) -> float | None:
        """What was there in the first steps, as a share of what is there now, at most 1; None in a resumed run."""
        return None if self.beginning is None else self.beginning[1]

    @cached_property
    def beginning(self) -> tuple[str, float] | None:
        """The size that shows best how a run began, and its first readings as a share of the last ones.

        A policy that becomes certain closes its gap, or opens it, with equal weights. The routers' disagreement does
        not depend on that. It counts if it is now more than rounding leaves. If it began at the level of rounding, the
        smaller of the two shares counts.
        """
        gap = self._gap_at_first
        own = "router/own_agreement" if "router/own_agreement" in self._series else "router/agreement"
        if self.differ is not None and self.differ > ROUNDED:
            disagreement = self._series[own] * (1, -1) + (0, 1)
            share = self._share_at_first(disagreement)
            if share is not None and (gap is None or gap >= share or disagreement[0, 1] > ROUNDED):
                return "the routers' disagreement", share
        return None if gap is None else ("the gap", gap)

    @cached_property
    def _gap_at_first(self) -> float | None:
        for name in ("vllm_kl/log_ratio_abs_mean", "vllm_kl/prob_diff_mean", K3):
            if name in self._series:
                return self._share_at_first(self._series[name], 0.5 if name.endswith(("k3", "k3_kl")) else 1.0)
        return None

    def _share_at_first(self, readings: np.ndarray, power: float = 1.0) -> float | None:
        """Returns the first of these readings, [steps, 2], as a share of the last ones; None if it is not known.

        Steps whose rollouts are older than the policy are left out, because their gap includes the policy's own
        movement. If all first steps are such steps, it is None unless even their gap was small. If the second reading
        is far larger than the first, the update of the first step made the gap, and only the first reading counts.

        Args:
            power: of the share, so that it is one of a mean |log k|.
        """
        first = readings[:FIRST][readings[:FIRST, 0] <= FIRST]
        if not len(first):
            return None
        fresh = first[[step not in self._stale_steps for step in first[:, 0]]]
        early = (fresh if len(fresh) else first)[:, 1]
        if len(early) > 1 and early[0] < MOVED * early[1:].min():
            early = early[:1]
        start, now = early.mean(), np.median(readings[-WINDOW:, 1])
        share = max(float(start / now), 0.0) ** power if start < now else 1.0
        return share if len(fresh) or share < FROZEN else None

    @property
    def static(self) -> bool:
        return self.at_once is not None and self.at_once >= FROZEN

    @cached_property
    def came_with_updates(self) -> bool:
        return self.at_once is not None and self.at_once <= MOVED

    @cached_property
    def sudden(self) -> bool:
        """True if k3 once rose a hundredfold within a few readings; a run that comes apart takes longer."""
        found = np.maximum(self.values(K3), 1e-12)
        if len(found) < 2 * FIRST:
            return False
        medians = np.median(np.lib.stride_tricks.sliding_window_view(found, FIRST), axis=1)
        return bool((medians[FIRST:] > 100 * medians[:-FIRST]).any())

    @cached_property
    def by_probability(self) -> dict[str, float] | None:
        """Bucket of probability -> k1 / sqrt(2 k3): 1 or -1 if all its tokens move alike, 0 for noise.

        Each is the mean of the last steps, whose ratios count as ALIKE at most: one token with other experts would
        decide a batch, and a bucket with one token has a ratio of 1 or -1 whatever moves it.
        """
        found = {}
        for bucket in BUCKETS["prob"]:
            _, k1, k3 = self._joined("vllm_kl/k1/prob/" + bucket, "vllm_kl/k3/prob/" + bucket)[-4 * WINDOW :].T
            if (k3 > 0).any():
                ratios = k1[k3 > 0] / (2 * k3[k3 > 0]) ** 0.5
                found[bucket] = float(ratios.clip(-ALIKE, ALIKE).mean())
        return found if len(found) >= 3 else None

    @cached_property
    def tilted(self) -> bool:
        """True if unlikely tokens move one way and likely ones the other, all tokens of a bucket alike.

        Another layer's weights may also move nearly certain tokens the other way. But they move all others alike.
        """
        if self.by_probability is None:
            return False
        ratios = list(self.by_probability.values())
        unlikely, likely = ratios[0], sum(ratios[-2:]) / 2 if len(ratios) > 3 else ratios[-1]
        most_move_up = min(unlikely, self.by_probability.get("0.1-0.5", 0.0)) > 0.8
        return unlikely * likely < 0 and min(abs(unlikely), abs(likely)) > 0.4 and not most_move_up

    @cached_property
    def moves_in_bulk(self) -> bool | None:
        """True if in some bucket of probability most tokens move to the same side: not just a few, and not by noise."""
        return None if self.by_probability is None else max(map(abs, self.by_probability.values())) > 0.6

    @cached_property
    def few_tokens(self) -> float | None:
        """k3 over the square of the mean |log k|: 0.5 to 5 if many tokens make the gap, large if few do."""
        size = self.late("vllm_kl/log_ratio_abs_mean")
        return None if not size or self.k3 is None else self.k3 / size / size  # the square may be out of range

    @cached_property
    def few_trajectories(self) -> float | None:
        """The largest gap of a trajectory over the mean one."""
        most, mean = (self.late(f"vllm_kl/sequence_gap_{kind}") for kind in ("max", "mean"))
        return None if not mean or most is None else most / mean

    # The routers.

    @cached_property
    def replayed(self) -> bool:
        """True if training uses the rollout's experts, so that only its own choices show what its routers do."""
        agreement, own = self.late("router/agreement"), self.late("router/own_agreement")
        return agreement is not None and own is not None and agreement > 0.9999 and own < 0.999

    @cached_property
    def differ(self) -> float | None:
        """The share of experts that the engines' routers choose differently."""
        agreement = self.late("router/own_agreement", "router/agreement")
        return None if agreement is None else 1 - agreement

    @cached_property
    def by_layer(self) -> tuple[float, ...]:
        """The share of experts that differ in each layer, among the experts that were used; empty under replay."""
        names = [name for name in self._series if name.startswith("router/agreement/layer_")]
        return () if self.replayed else tuple(1 - (self.late(name) or 0.0) for name in sorted(names))

    @cached_property
    def gap_per_choice(self) -> float | None:
        """k3 over the share of experts chosen differently; None if no choice differs."""
        return None if not self.differ or self.differ < 1e-5 or self.k3 is None else self.k3 / self.differ

    @cached_property
    def rounding_like(self) -> bool:
        """True if the routers disagree by no more than 16 bits leave, and the gap is no larger than goes with that."""
        small = self.differ is not None and self.differ < ROUNDED
        return small and self.gap_per_choice is not None and self.gap_per_choice < 2

    @cached_property
    def routed(self) -> float | None:
        """The mean gap of tokens with other experts over that of tokens with the same experts."""
        differs, equal = self.late("router/gap_differs"), self.late("router/gap_equal")
        return None if not equal or differs is None else differs / equal

    @cached_property
    def gap_alike(self) -> float | None:
        """The share of the gap that belongs to tokens with the same experts in all layers.

        A token that replaces the sampled one is predicted from the same states, by the same experts. A cause that
        changes the states also changes some experts.
        """
        differs, equal = self.late("router/any_layer_differs"), self.late("router/gap_equal")
        size = self.late("vllm_kl/log_ratio_abs_mean")
        if not differs or equal is None or not size or self.replayed:
            return None
        return min((1 - differs) * equal / size, 1.0) if differs > 1e-4 else None  # without other experts, all of it

    @cached_property
    def starts_in_layer(self) -> int | None:
        """The layer up to which the routers agree, if they disagree in the next one."""
        for layer, (before, after) in enumerate(zip(self.by_layer, self.by_layer[1:], strict=False)):
            if after > 0.02 and before <= 0.1 * after:
                return layer
        return None

    # The weight syncs.

    @cached_property
    def staleness(self) -> float | None:
        return self.late(STALENESS)

    @cached_property
    def always_stale(self) -> bool:
        return self.at_once is None and bool(self._stale_steps.intersection(range(FIRST + 1)))

    @cached_property
    def _stale_steps(self) -> set[float]:
        return {step for step, versions in self._series.get(STALENESS, np.empty((0, 2))).tolist() if versions >= 0.5}

    @cached_property
    def arrivals(self) -> np.ndarray:
        """[looks, 2] intervals of the share of an update that arrived, one for each look that could measure it."""
        return self._joined("sync/arrived_low", "sync/arrived_high")[:, 1:]

    @cached_property
    def arrived(self) -> tuple[float, float] | None:
        """The interval of the share of the last updates that arrived: the median of the last three looks."""
        if not len(self.arrivals):
            return None
        last = self.arrivals[-3:]
        return float(np.median(last[:, 0])), float(np.median(last[:, 1]))

    @cached_property
    def shares(self) -> np.ndarray:
        """[looks, 2] the share of an update that the median token got, and the spread of the tokens around it.

        Looks before which training had not moved are left out.
        """
        return self._joined("sync/arrived_median", "sync/arrived_spread")[:, 1:]

    @cached_property
    def scaled(self) -> float | None:
        """The share of an update that arrived for every token alike, if that is not 1.

        Only multiplied updates arrive by more than 1. A share below 1 is judged by the first looks, when updates are
        small: a multiplied update then moves each token by the same share, whereas a part of an update moves some
        tokens and not others.
        """
        more = self.arrivals[self.arrivals[:, 0] > 1.1]
        if len(more) > OFTEN * len(self.arrivals) and (len(more) > 1 or len(self.arrivals) <= FIRST):
            return float(np.median(more.mean(1)))
        for median, spread in self.shares[:2].tolist():
            if spread < SAME * median and abs(median - 1) > 0.1:
                return median
        return None

    @cached_property
    def some_arrive(self) -> bool:
        """True if tokens get different shares of the updates since one last arrived, and ever more so.

        If the rollout's weights stay the same, the spread in nats is noise, and noise does not grow.
        """
        looks = self._joined("sync/arrived_spread", "sync/moved")
        nats = looks[:, 1] * looks[:, 2]
        lows = self._joined("sync/arrived_low")
        if (arrived := lows[lows[:, 1] > 0.5, 0]).size:
            nats = nats[looks[:, 0] > arrived[-1]]
        return bool(len(nats) > FIRST and nats[-FIRST:].min() > 3 * nats[0] and nats[-1] > 0.01)

    @cached_property
    def spread_hidden(self) -> bool:
        """True if the tokens' shares of the first updates scatter no more than the engines' own gap makes them."""
        looks = self._joined("sync/arrived_spread", "sync/moved")[:FIRST]
        gap = self._series.get("vllm_kl/log_ratio_abs_mean", np.empty((0, 2)))
        if not len(looks) or not len(gap) or gap[0, 0] > 1:
            return False
        return bool((looks[:, 1] * looks[:, 2]).min() < HIDDEN * gap[0, 1])

    @cached_property
    def still(self) -> bool:
        """True if the rollout gives the same tokens the same scores as at the check before.

        Only looks at which the updates had moved more than the gap may hide are counted.
        """
        followed = self._joined("sync/followed", "sync/arrived_high")[-FIRST:, 1]
        return bool(len(followed)) and float(np.median(followed)) < STILL

    def _joined(self, *names: str) -> np.ndarray:
        """Returns [steps, 1 + names] the steps that logged all these metrics, and their readings."""
        found = [dict(self._series.get(name, np.empty((0, 2))).tolist()) for name in names]
        steps = [step for step in found[0] if all(step in readings for readings in found)]
        return np.array([[step, *(readings[step] for readings in found)] for step in steps]).reshape(-1, 1 + len(names))

    # The learning.

    def change(self, name: str) -> float | None:
        """Returns the mean of the last readings over the mean of the first ones."""
        early, late = self.early(name), self.late(name)
        return None if early is None or late is None or early <= 0 else late / early

    @cached_property
    def reward_fell(self) -> float:
        """The lowest level of the reward over the best level before it."""
        levels = np.convolve(self.values(REWARD), np.full(5, 1 / 5), mode="valid")
        best = np.maximum.accumulate(levels)
        return float((levels / best).min()) if len(levels) and levels.min() >= 0 and best[0] > 0 else 1.0

    @cached_property
    def strides(self) -> float | None:
        """The movement of the policy within a step, as the KL that verl logs: the largest mean over a few steps.

        None if each step has one update, because its policy has not moved yet.
        """
        found = np.abs(self.values("actor/ppo_kl"))
        return (
            float(np.convolve(found, np.full(5, 1 / 5), mode="valid").max())
            if len(found) >= 5 and found.any()
            else None
        )

    @cached_property
    def gained(self) -> float | None:
        """The gain of the reward, as a share of the distance from the first rewards to those of the best answers."""
        early, late, best = self.early(REWARD), self.late(REWARD), self.late("critic/score/max")
        if early is None or late is None or best is None or best <= early:
            return None
        return (late - early) / (best - early) if late < 0.9 * best else 1.0

    @cached_property
    def without_signal(self) -> float | None:
        """The share of the last tokens with an advantage of 0: all answers to their prompt got the same reward."""
        shares = [self.late(f"vllm_kl/share/advantage/{sign}") for sign in ("positive", "negative")]
        return None if shares[0] is None or shares[1] is None else 1 - shares[0] - shares[1]

    @cached_property
    def reward_kept(self) -> float | None:
        """The last reward over the best level; 1 if noise can explain the difference; None for rewards below 0."""
        found = self.values(REWARD)
        if len(found) < 2 * WINDOW or found.min() < 0:
            return None
        best = np.convolve(found, np.full(5, 1 / 5), mode="valid").max()  # short: a run can die within ten steps
        last, noise = found[-WINDOW:].mean(), np.diff(found).std() / 2**0.5 / 5**0.5
        if best <= 0:
            return None
        return float(last / best) if best - last > 1.5 * SIGMAS * noise else 1.0  # of many levels

    @cached_property
    def stands_low(self) -> float | None:
        """The reward over that of the best answers, in a run that has stopped gaining; None in other runs.

        Such a run has gained nothing in the last third of its steps and is below 0.7 of the best answers.
        """
        found, best = self.values(REWARD), self.late("critic/score/max")
        if len(found) < 4 * WINDOW or not best or best <= 0:
            return None
        last, before = found[-len(found) // 6 :].mean(), found[-len(found) // 3 : -len(found) // 6].mean()
        return float(last / best) if last < 0.7 * best and last < 1.03 * before else None

    @cached_property
    def reward_scatter(self) -> float | None:
        """The variance of the batches' mean reward, as a share of that of coin tosses.

        The coin decides for each answer between the lowest and the highest reward. Prompts are not equally hard, so the
        mean of a batch depends on its prompts and scatters more than the rewards of single answers explain: 1.3 to 3 in
        the lab. Rewards that do not depend on the answer leave 1 if they are coin tosses, and a third if all values are
        equally likely.
        """
        rewards, tokens = self.values(REWARD), self.values("router/tokens")
        most, least, length = (self.values(n) for n in ("critic/score/max", "critic/score/min", LENGTH))
        if len({len(found) for found in (rewards, tokens, most, least, length)}) > 1 or len(rewards) < 4 * WINDOW:
            return None
        # Rewards are of the whole step, and so is verl's total. router/tokens is the mean of the step's local updates,
        # over the trajectories that were compared; in the lab, which logs no total, these are all of the step.
        _, total, prompt, response = self._joined("perf/total_num_tokens", "prompt_length/mean", LENGTH).T
        answers = (total / (prompt + response)).mean() if total.size else (tokens / length).mean()
        span = ((rewards - least) * (most - rewards)).mean()
        scatter = np.square(np.diff(rewards)).mean() / 2
        return float(scatter * answers / span) if span > 0 else None

    @cached_property
    def prompt_effect(self) -> float | None:
        """The mean F of the rewards by prompt: 1 if the reward does not depend on the prompt."""
        found = self.values(PROMPT_EFFECT)
        return float(found.mean()) if len(found) >= 2 * WINDOW else None

    @cached_property
    def entropy_at_fall(self) -> float | None:
        """The entropy at the step where the reward first lost a third of its best level, over the first entropy."""
        reward, entropy = self.values(REWARD), self.values(ENTROPY)
        if self.reward_kept is None or len(entropy) != len(reward):
            return None
        levels = np.convolve(reward, np.full(8, 1 / 8), mode="valid")
        low = np.flatnonzero(levels < 2 / 3 * np.maximum.accumulate(levels))
        at = int(low[0]) + 7 if low.size else len(entropy) - 1
        return float(entropy[max(at - 3, 0) : at + 1].mean() / entropy[:5].mean())


def _in_errors(values: np.ndarray) -> float | None:
    if len(values) < FEWEST:
        return None
    error = float(values.std(ddof=1)) / len(values) ** 0.5
    scatters = error > 1e-12 * float(np.abs(values).max())  # by more than the rounding of equal readings
    return float(values.mean()) / error if scatters else 0.0
