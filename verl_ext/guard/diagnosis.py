"""Names the likeliest causes of a run's gap, or of the fall of its reward, with the evidence for and against each.

Causes leave marks of their own in the metrics. The most telling ones:

- **Is the mean of k 1?** If l_infer is the log-probability with which a token was sampled, the mean of
  k = exp(l_old - l_infer) over the sampled tokens is 1, whatever else is wrong: old weights, rounding, another router.
  The metrics hold it as 1 + k3 - k1. A mean that is not 1 says that the rollout returned log-probabilities of another
  distribution than it sampled from, or that training reads other tokens than were sampled.
- **Was the gap there before the first update?** Then the engines compute differently from the same weights. If it
  came with the updates, the weights of the updates did not arrive.
- **How large is the gap for the disagreement of the routers?** Rounding moves both a little. Another function
  (another layer's weights, positions, a mask) moves probabilities much further than it moves routers. If the routers
  agree, the difference lies behind the last of them: the head, the temperature, a cut of the distribution.
- **Which tokens have the gap?** A few tokens, the tokens of a few trajectories, or all of them.

A cause gains points for a mark that it explains and loses points for one that it does not. It is named if it has at
least LEAST points, or SECOND points as the alternative to the first. Causes are ranked by their points. The points were
chosen on runs of the lab in which one cause was planted (tools/diagnosis.py, before its FIRST). docs/diagnosis.md shows
how often the right cause comes first in runs that no rule was chosen on.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from verl_ext.base.causes import CAUSES, Cause
from verl_ext.base.names import BUCKETS
from verl_ext.diagnosis.names import by_quantity
from verl_ext.guard.collapse import ENTROPY, GRADIENT, LENGTH, REWARD, Readings
from verl_ext.guard.marks import READ, ROUNDED, ROUTER, SIGMAS, WINDOW, Marks
from verl_ext.guard.state import Event

LEAST, SECOND = 3.0, 1.5  # points from which a cause is named, and from which one is shown as the alternative
LARGE = 0.01  # k3 that rounding stays below in most sound runs; `sound_level` knows the models that have more
LOOK_EVERY, LOOKS = 5, 3  # steps between looks in a run; looks in a row that find the same cause before it is reported
REMEMBERED = 512  # readings of a metric that a run keeps, in addition to its first ones
FAR = 0.05  # KL within a step; sound runs of the lab stay below 0.01
LEANING = 0.07  # share of the gap to one side; raw log-probs leave 0.09 to 0.57 in the lab
DECIDED = 2.0  # points by which the levels of a metric have to move two causes against each other
SHIFTED = 4.0  # k3 over the share of other experts: up to 3.5 where only choices differ, at least 4.4 for positions
TIES = 0.14  # disagreement in the first layer, whose routers see nearly the same states: rounding leaves 0.01 to 0.11
ONE_WAY = 0.1  # k3 below which rounding is to both sides; above it, it also makes sampled tokens less likely


@dataclass(frozen=True)
class Sign:
    """One mark as evidence for a cause, or against it if the points are negative."""

    points: float
    text: str


Judge = Callable[[Marks], Iterator[Sign]]


@dataclass(frozen=True)
class OpenQuestion:
    """Two causes that the metrics of a run leave open.

    Attributes:
        setting: switches on a metric that the run does not log and that would decide between them.
    """

    first: Cause
    second: Cause
    setting: str

    @property
    def sentence(self) -> str:
        return f'{self.setting} would tell whether it is "{self.first.title}" or "{self.second.title}"'


@dataclass(frozen=True)
class Suspect:
    """A cause that the marks of a run point to.

    Attributes:
        harmless: it is rounding, and no larger than in published runs that were sound.
        moe: the run's model is a mixture of experts, by its metrics.
        question: for the first suspect, if a metric that is not logged would tell it from the next cause.
    """

    cause: Cause
    signs: tuple[Sign, ...]
    harmless: bool = False
    moe: bool = False
    question: OpenQuestion | None = None

    @property
    def points(self) -> float:
        return sum(sign.points for sign in self.signs)

    @property
    def speaks_for(self) -> tuple[str, ...]:
        return tuple(sign.text for sign in self.signs if sign.points > 0)

    @property
    def speaks_against(self) -> tuple[str, ...]:
        return tuple(sign.text for sign in self.signs if sign.points < 0)

    @property
    def reasons(self) -> str:
        """The evidence for the cause, as one text, the strongest first."""
        return "; ".join(sign.text for sign in sorted(self.signs, key=lambda sign: -sign.points) if sign.points > 0)

    @property
    def sentence(self) -> str:
        """The cause, the evidence for it, and what to do, on one line."""
        return f"likely cause: {self.cause.title} ({self.reasons}); {self.advice}"

    @property
    def advice(self) -> str:
        """The things to check, to try and to measure."""
        advice = self.cause.moe_advice if self.moe else self.cause.advice
        return advice + (f"; {self.question.sentence}" if self.question else "")


JUDGES: dict[str, Judge] = {}
ROUNDING = ("two_precisions", "quantized")


def find_suspects(series: Mapping[str, Readings | np.ndarray]) -> list[Suspect]:
    """Returns the causes with at least LEAST points, the likeliest first; none if no mark is clear enough.

    The second one needs only SECOND points: it is shown as the alternative. Nothing comes after harmless rounding: a
    cause behind an explanation that is not a fault would accuse a sound run.

    Args:
        series: name of a metric -> its finite readings (step, value), in ascending steps.
    """
    marks = Marks(series)
    if not marks.enough:
        return []
    ranked = _ranked(marks)
    if ranked[0].points < LEAST:
        return []
    found = [
        suspect
        for place, suspect in enumerate(ranked)
        if suspect.points >= (SECOND if place == 1 and not suspect.harmless else LEAST)
    ]
    harmless = next((place for place, suspect in enumerate(found) if suspect.harmless), len(found))
    found = found[: harmless + 1]
    if not found[0].harmless:
        found[0] = replace(found[0], question=_question_of(marks, ranked))
    return found


def find_question(series: Mapping[str, Readings | np.ndarray]) -> OpenQuestion | None:
    """Returns the question that would decide between the two likeliest causes, also below LEAST points; None if no
    metric would."""
    marks = Marks(series)
    return _question_of(marks, _ranked(marks)) if marks.enough else None


def sound_level(marks: Marks) -> float:
    """Returns the k3 that rounding stays below in sound runs: LARGE, or a higher level published for the model."""
    return max(LARGE, marks.published_level)


def _ranked(marks: Marks) -> list[Suspect]:
    """Returns all causes, the one with the most points first.

    Rounding of a harmless size explains a gap, and no reward that falls. If it is the likeliest cause of the gap, the
    causes in the learning that are named come first.
    """
    small = marks.k3 is not None and marks.k3 < sound_level(marks)
    moe = marks.logs(ROUTER)
    judged = [
        Suspect(CAUSES[name], tuple(judge(marks)), harmless=small and name in ROUNDING, moe=moe)
        for name, judge in JUDGES.items()
    ]
    ranked = sorted(judged, key=lambda suspect: -suspect.points)
    if next(suspect for suspect in ranked if suspect.cause.of_gap).harmless:
        ranked.sort(key=lambda suspect: suspect.cause.of_gap or suspect.points < LEAST)
    return ranked


def _question_of(marks: Marks, ranked: Sequence[Suspect]) -> OpenQuestion | None:
    """Returns the question for the metric whose possible levels move the first two causes furthest apart.

    A metric counts only if one of its levels would turn the order of the two and another one confirm it.
    """
    first, second = (suspect.cause for suspect in ranked[:2])
    if min(suspect.points for suspect in ranked[:2]) <= 0:
        return None
    furthest, chosen = DECIDED, ""
    for setting, levels in levels_not_logged(marks).items():
        leads = [_points(judged, first) - _points(judged, second) for judged in map(marks.also, levels)]
        if max(leads) > 0 > min(leads) and max(leads) - min(leads) >= furthest:
            furthest, chosen = max(leads) - min(leads) + 1e-9, setting
    return OpenQuestion(first, second, chosen) if chosen else None


def _points(marks: Marks, cause: Cause) -> float:
    return sum(sign.points for sign in JUDGES[cause.name](marks))


def levels_not_logged(marks: Marks) -> dict[str, list[dict[str, float]]]:
    """Returns possible levels of the metrics that the run does not log: setting -> levels, the cheapest first.

    The levels are those of causes that were planted in the lab, scaled to this run's k3.
    """
    if not marks.apart or marks.k3 is None:
        return {}
    found: dict[str, list[dict[str, float]]] = {}
    size, spread = marks.k3**0.5, (2 * marks.k3) ** 0.5
    by_probability = [
        {"vllm_kl/k1/prob/" + bucket: share * spread for bucket, share in zip(BUCKETS["prob"], shares, strict=True)}
        | {"vllm_kl/k3/prob/" + bucket: marks.k3 for bucket in BUCKETS["prob"]}
        for shares in ((1.0, 0.8, 0.0, -0.8, -0.8), (0.9, 0.9, 0.9, 0.8, 0.7), (0.2, 0.2, 0.1, 0.1, 0.0))
    ]
    if not marks.logs("vllm_kl/log_ratio_abs_mean"):
        many = {
            "vllm_kl/log_ratio_abs_mean": size,
            "vllm_kl/sequence_gap_mean": size / 4,
            "vllm_kl/sequence_gap_max": 3 * size / 4,
        }
        few = {"vllm_kl/sequence_gap_max": 12 * size / 4}
        found["stability.metrics=true"] = [
            *(many | levels for levels in by_probability),
            *(many | few | {"vllm_kl/log_ratio_abs_mean": size / share} for share in (1.0, 3.0)),
        ]
    elif not marks.logs("vllm_kl/k3/prob/"):
        found["stability.breakdown=true"] = by_probability
    if not marks.logs("router/agreement"):
        found["stability.router_agreement=true"] = [
            _routed_levels(shallow, deep, alike, marks.late("vllm_kl/log_ratio_abs_mean") or size)
            for shallow, deep in ((1.0, 1.0), (0.997, 0.994), (0.93, 0.88), (0.83, 0.84), (1.0, 0.45), (0.5, 0.45))
            for alike in (0.05, 0.6)
        ]
    if not marks.logs("sync/"):
        found["stability.sync_canary.trajectories=8"] = [
            {
                "sync/arrived_low": low,
                "sync/arrived_high": high,
                "sync/arrived_median": (low + high) / 2,
                "sync/arrived_spread": spread,
                "sync/followed": (low + high) / 2 if high > 0.1 else 0.0,
            }
            for low, high, spread in ((0.0, 0.02, 0.0), (0.2, 0.6, 0.2), (0.48, 0.52, 0.01), (0.97, 1.03, 0.01))
        ]
    return found


def _routed_levels(shallow: float, deep: float, alike: float, size: float) -> dict[str, float]:
    """Returns levels of `router/*` for a gap of this size.

    Args:
        shallow, deep: the agreement in the first layer and in the last.
        alike: the share of the gap that belongs to tokens with the same experts in all layers.
    """
    agreement = (shallow + deep) / 2
    differs = min(4 * (1 - agreement), 0.9)
    return {
        "router/agreement/layer_00": shallow,
        "router/agreement/layer_01": deep,
        "router/agreement": agreement,
        "router/own_agreement": agreement,
        "router/any_layer_differs": differs,
        "router/gap_equal": alike * size / (1 - differs),
    } | ({"router/gap_differs": (1 - alike) * size / differs} if differs else {})


class Diagnosis:
    """The diagnosis of a run while it runs. It reports each time that the likeliest cause changes.

    Attributes:
        reported: the name of the cause that was reported last; "" for none.
    """

    def __init__(self) -> None:
        self._first: dict[str, list[tuple[int, float]]] = {}
        self._last: dict[str, deque[tuple[int, float]]] = {}
        self._seen: list[str] = []
        self.reported = ""

    def add(self, step: int, metrics: Mapping[str, float]) -> Event | None:
        """Takes the metrics of a step, and returns an event if the likeliest cause is not the one reported last.

        The cause has to come first in LOOKS looks in a row, one every LOOK_EVERY steps, so that one odd batch reports
        nothing. Rounding of a harmless size is not reported.
        """
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        for name, logged in by_quantity(finite).items():
            if not name.startswith(READ):
                continue
            preferred, alias = next(iter(logged.items()))
            value = float(alias.convert(finite[preferred]))
            first = self._first.setdefault(name, [])
            if len(first) < WINDOW:
                first.append((step, value))
            else:
                self._last.setdefault(name, deque(maxlen=REMEMBERED)).append((step, value))
        if step % LOOK_EVERY:
            return None
        found = self.look()
        named = found.cause.name if found is not None else ""
        self._seen = [*self._seen, named][-LOOKS:]
        if found is None or named == self.reported or self._seen != [named] * LOOKS:
            return None
        self.reported = named
        return Event(step, "diagnosis", "", None, None, "warn", found.sentence)

    def look(self) -> Suspect | None:
        """Returns the cause that all readings so far point to; None if there is none, or it is harmless rounding."""
        found = find_suspects({name: [*first, *self._last.get(name, ())] for name, first in self._first.items()})
        return found[0] if found and not found[0].harmless else None


def judges(name: str) -> Callable[[Judge], Judge]:
    """Registers the function that judges a cause of the table in base/causes.py."""
    assert name in CAUSES, name

    def register(judge: Judge) -> Judge:
        JUDGES[name] = judge
        return judge

    return register


# Weights that did not arrive.

STANDS_STILL = "the rollout's scores of the same tokens have not changed since the check before"
SOME_ARRIVE = "little of the updates arrives, and tokens get different shares of it"


def _came(marks: Marks) -> Iterator[Sign]:
    if not marks.apart:
        yield Sign(-9, f"k3 is {_number(marks.k3)}: the engines agree")
    elif marks.static:
        yield Sign(-4, _at_once_sentence(marks))
    elif marks.at_once is not None:
        yield Sign(2 if marks.came_with_updates and marks.sudden else 1, _with_updates_sentence(marks))


@judges("old_weights")
def _old_weights(marks: Marks) -> Iterator[Sign]:
    """Lab, `stale`: k3 grows with the movement of the policy over the lag, and stops growing with it."""
    yield from _came(marks)
    if marks.staleness is None:
        yield Sign(-1, "no trajectory says that it is older than the policy")
    else:
        # Rollouts that were old from the first step on do not show how large the gap is without their age.
        points = -3 if marks.staleness < 1 else 2 if marks.always_stale else 3
        yield Sign(points, f"rollouts are {marks.staleness:.1f} versions behind the policy")


def _unsynced(marks: Marks) -> Iterator[Sign]:
    yield from _came(marks)
    if marks.staleness is not None and marks.staleness >= 1:
        yield Sign(-3, f"rollouts are known to be {marks.staleness:.1f} versions behind")
    if marks.arrived is not None and marks.arrived[0] > 0.75 and marks.arrived[1] < 1.3:
        yield Sign(-4, _arrived_sentence(marks.arrived))


@judges("lost_sync")
def _lost_sync(marks: Marks) -> Iterator[Sign]:
    """Lab, `missed_sync`: 0 of an update arrives; the gap grows for as long as the policy moves."""
    yield from _unsynced(marks)
    if marks.arrived is not None:
        yield Sign(3 if marks.arrived[1] < 0.1 else -2, _arrived_sentence(marks.arrived))
        if marks.still:
            yield Sign(1, STANDS_STILL)
        elif marks.some_arrive:
            yield Sign(-2, SOME_ARRIVE)
    elif marks.apart and marks.k3 is not None and marks.k3 > sound_level(marks):
        yield Sign(1, f"k3 is {_number(marks.k3)}, more than rounding leaves")


@judges("partial_sync")
def _partial_sync(marks: Marks) -> Iterator[Sign]:
    """Lab, `partial_sync`: a part of an update arrives, another one each time; routers before the stale layer agree."""
    yield from _unsynced(marks)
    if marks.scaled is not None:
        yield Sign(-1, f"updates arrive multiplied, by {marks.scaled:.2f}")
    if marks.still:
        yield Sign(-2, STANDS_STILL)
    elif marks.arrived is not None:
        if marks.arrived[1] < 0.1 and marks.some_arrive:
            yield Sign(2, SOME_ARRIVE)
        elif marks.arrived[1] < 0.1:
            moves = len(marks.values("sync/followed")) > 0  # it does not stand still, but that may be noise
            yield Sign(-0.5 if moves else -2, _arrived_sentence(marks.arrived))
        elif marks.arrived[0] < 0.75:
            yield Sign(2, _arrived_sentence(marks.arrived))
    if marks.starts_in_layer is not None:
        yield Sign(1.5, _start_sentence(marks.starts_in_layer))


@judges("scaled_update")
def _scaled_update(marks: Marks) -> Iterator[Sign]:
    """Lab, `scaled_update`: every token gets the same share of the first updates, and it is not 1."""
    yield from _unsynced(marks)
    if marks.scaled is not None:
        yield Sign(3, f"updates arrive multiplied, by {marks.scaled:.2f}")
    elif marks.still:
        yield Sign(-2, STANDS_STILL)
    elif marks.arrived is not None:
        if marks.spread_hidden:
            yield Sign(0.5, "the engines' own gap hides whether all tokens got the same share of the first updates")
        else:
            yield Sign(-1, "tokens got different shares of the first updates")


# Two computations from the same weights.


def _static(marks: Marks) -> Iterator[Sign]:
    if not marks.apart:
        yield Sign(-9, f"k3 is {_number(marks.k3)}: the engines agree")
    elif marks.static:
        yield Sign(1, _at_once_sentence(marks))
    elif marks.at_once is not None:
        yield Sign(-4 if marks.came_with_updates else -2, _with_updates_sentence(marks))
    elif marks.staleness is not None and marks.staleness >= 1:
        yield Sign(-1.5, f"rollouts are {marks.staleness:.1f} versions behind, which is a gap of its own")


def _sampled_as_said(marks: Marks, points: float = 0.5) -> Iterator[Sign]:
    if marks.gains_mass:
        yield Sign(-2, _gain_sentence(marks))
    elif marks.excess is not None and marks.one_sided is not None:
        if abs(marks.excess) < SIGMAS or 0.6 < marks.one_sided < 1.6:
            yield Sign(
                points, f"k averages 1 (k3 / k1 is {marks.one_sided:.2f}), as where tokens are sampled by l_infer"
            )
        else:
            yield Sign(-2, f"k does not average 1: k3 / k1 is {marks.one_sided:.2f}")


@judges("two_precisions")
def _two_precisions(marks: Marks) -> Iterator[Sign]:
    """Lab, `bf16` and `router_dtype`: the gap is small, and routers differ only in near ties."""
    yield from _static(marks)
    yield from _sampled_as_said(marks)
    if marks.differ is not None:
        if marks.differ > ROUNDED:
            yield Sign(-2, _choices_sentence(marks.differ))
        elif marks.differ > 0:
            yield Sign(1.5, f"routers choose {marks.differ:.2%} of the experts differently, as near ties do")
        else:
            yield Sign(-1, "routers agree exactly, which rounding does not leave")
    yield from _rounds(marks)


@judges("quantized")
def _quantized(marks: Marks) -> Iterator[Sign]:
    """Lab, `quantized`: routers differ more the deeper the layer, and the gap is small for that difference."""
    yield from _static(marks)
    yield from _sampled_as_said(marks)
    if marks.differ is not None:
        if marks.replayed and marks.differ > 0.3:
            yield Sign(-2, f"{marks.differ:.0%} of the replayed experts are not the training router's own")
        elif marks.differ > ROUNDED:
            yield Sign(1.5, f"routers choose {marks.differ:.1%} of the experts differently, more than 16 bits leave")
        else:
            yield Sign(-2, f"routers choose {marks.differ:.2%} of the experts differently")
    if len(marks.by_layer) > 1 and marks.by_layer[-1] > ROUNDED:
        if marks.by_layer[0] < 0.85 * marks.by_layer[-1]:
            yield Sign(0.5, f"they differ more in the last layer ({marks.by_layer[-1]:.1%}) than in the first")
        else:
            yield Sign(-1, f"they differ as much in the first layer ({marks.by_layer[0]:.1%}) as in the last")
        if marks.by_layer[0] > TIES:
            yield Sign(-1.5, f"more of them in the first layer ({marks.by_layer[0]:.1%}) than near ties make")
    if marks.routed is not None and marks.routed > 40 and (marks.differ or 0) > 0.03:
        yield Sign(-1.5, f"tokens with other experts have {marks.routed:.0f} times the gap of the others")
    yield from _rounds(marks)


def _rounds(marks: Marks) -> Iterator[Sign]:
    if marks.gap_per_choice is not None:
        if marks.gap_per_choice < 1.5:
            yield Sign(1, f"k3 is {marks.gap_per_choice:.2g} times the share of other experts, as rounding leaves it")
        elif marks.gap_per_choice > 3:
            yield Sign(-3, _far_sentence(marks.gap_per_choice))
    if marks.by_probability is not None:
        if marks.tilted:
            yield Sign(-2, "the gap depends on the probability alone")
        elif max(map(abs, list(marks.by_probability.values())[-2:])) < 0.7:
            yield Sign(0.5, "tokens of one probability move to either side")
    if marks.leaning is not None and marks.leaning > 0.88 and (marks.k3 or 0) < ONE_WAY:
        yield Sign(-1.5, f"{_side(marks.leaning)}, and rounding goes to both")
    if marks.starts_in_layer is not None:
        yield Sign(-2, _start_sentence(marks.starts_in_layer))


@judges("router_bias")
def _router_bias(marks: Marks) -> Iterator[Sign]:
    """Lab, `router_bias`: routers differ as much in the first layer as in the last, and tokens with other experts have
    the gap."""
    yield from _static(marks)
    yield from _sampled_as_said(marks)
    if marks.differ is None or marks.replayed:
        return
    if marks.differ < 0.05:
        yield Sign(-2, f"routers choose {marks.differ:.2%} of the experts differently")
        return
    yield Sign(1, _choices_sentence(marks.differ))
    if len(marks.by_layer) > 1:
        if marks.by_layer[0] >= 0.85 * marks.by_layer[-1]:
            yield Sign(1.5, f"as many in the first layer ({marks.by_layer[0]:.1%}) as in the last")
        elif marks.by_layer[0] > TIES:
            yield Sign(1, f"more of them in the first layer ({marks.by_layer[0]:.1%}) than near ties make")
        elif marks.by_layer[0] < 0.3 * marks.by_layer[-1]:
            yield Sign(-2, f"far fewer in the first layer ({marks.by_layer[0]:.1%}) than in the last")
    if marks.gap_alike is not None and marks.gap_alike > 0.1:
        yield Sign(
            -2.5, f"{marks.gap_alike:.0%} of the gap is of tokens with the same experts, which a bias leaves equal"
        )
    if marks.routed is not None and marks.routed > 6 and marks.differ > 0.1:
        yield Sign(1, f"tokens with other experts have {marks.routed:.0f} times the gap of the others")
    if marks.gap_per_choice is not None:
        if marks.gap_per_choice < SHIFTED:
            yield Sign(0.5, f"k3 is {marks.gap_per_choice:.2g} times the share of other experts")
        else:
            yield Sign(-2, f"k3 is {marks.gap_per_choice:.2g} times the share of other experts: more than choices make")


@judges("wrong_weights")
def _wrong_weights(marks: Marks) -> Iterator[Sign]:
    """Lab, `wrong_weights`: routers agree up to the layer and not behind it; if it is the last one, all of them do, up
    to rounding."""
    yield from _static(marks)
    yield from _sampled_as_said(marks)
    if marks.starts_in_layer is not None:
        yield Sign(3, _start_sentence(marks.starts_in_layer))
    elif marks.values("router/own_agreement").size and not marks.replayed and marks.differ is not None:
        far = marks.gap_per_choice is None or marks.gap_per_choice > SHIFTED
        most_move = marks.moves_in_bulk is not False and not marks.tilted
        if marks.differ < ROUNDED and far and most_move and (marks.k3 or 0) > sound_level(marks):
            yield Sign(
                2.5,
                f"routers agree on {1 - marks.differ:.2%} of the experts, and k3 is {_number(marks.k3)}: the "
                "difference is behind the last router",
            )
        else:
            yield Sign(-2, "the routers' disagreement does not begin behind a layer")
    if marks.gap_per_choice is not None and marks.gap_per_choice > 2:
        yield Sign(0.5, _far_sentence(marks.gap_per_choice))


@judges("positions")
def _shifted_positions(marks: Marks) -> Iterator[Sign]:
    """Lab, `positions_off`: every token and every router is far off, from the first layer on."""
    yield from _static(marks)
    if marks.differ is not None and not marks.replayed:
        if marks.differ > 0.2:
            yield Sign(2, f"routers choose {marks.differ:.0%} of the experts differently")
        else:
            yield Sign(-2, f"routers choose only {marks.differ:.1%} of the experts differently")
    if marks.by_layer and marks.by_layer[0] > 0.15:
        yield Sign(1, f"{marks.by_layer[0]:.0%} in the first layer already")
    elif marks.by_layer and marks.by_layer[0] < 0.05:
        yield Sign(-2, f"only {marks.by_layer[0]:.1%} in the first layer, whose routers see positions, too")
    if marks.gap_per_choice is not None:
        if marks.gap_per_choice > SHIFTED:
            yield Sign(1, _far_sentence(marks.gap_per_choice))
        else:
            yield Sign(-3, _only_sentence(marks.gap_per_choice))
    if marks.few_trajectories is not None and marks.few_trajectories < 2.5:
        yield Sign(1, f"every trajectory is off: the largest gap is {marks.few_trajectories:.1f} times the mean")


@judges("leak")
def _leak(marks: Marks) -> Iterator[Sign]:
    """Lab, `packed_leak`: probabilities move much further than routers, in some trajectories, over many tokens, which
    have other experts too."""
    yield from _static(marks)
    yield from _far_but_few(marks)
    if marks.loses_mass:
        yield Sign(-1.5, _mass_sentence(marks))
    if (alike := marks.gap_alike) is not None and not 0.1 < alike < 0.3:
        yield Sign(-2 if alike > 0.2 else 2, f"{alike:.0%} of the gap is of tokens that both engines route alike")
    elif marks.differ is not None and not marks.replayed:
        yield Sign(1 if marks.differ > 0.02 else -1, _choices_sentence(marks.differ))
    if marks.few_tokens is not None:
        yield Sign(0.5 if marks.few_tokens < 5 else -1.5, _tokens_sentence(marks.few_tokens))


@judges("respelled")
def _respelled(marks: Marks) -> Iterator[Sign]:
    """Lab, `respelled`: a few tokens, in a few trajectories, with a very large gap, which both engines route alike."""
    yield from _static(marks)
    if (drifted := marks.late("filter/retokenization_drift/drifted")) is not None:
        text = f"{drifted:.1%} of the trajectories encode otherwise than they were sampled"
        yield Sign(4 if drifted > 0 else -4, text)
    yield from _far_but_few(marks)
    if marks.loses_mass and (marks.one_sided or 0.0) > 0.6:
        yield Sign(1.5, _mass_sentence(marks))
    elif marks.loses_mass:
        yield Sign(
            -2, f"k3 / k1 is {marks.one_sided or 0:.2f}: many tokens are a little likelier, not few much likelier"
        )
    if (alike := marks.gap_alike) is not None and not 0.1 < alike < 0.3:
        yield Sign(2 if alike > 0.2 else -2, f"{alike:.0%} of the gap is of tokens that both engines route alike")
    elif marks.differ is not None and not marks.replayed:
        yield Sign(1 if marks.differ < 0.02 else -2, _choices_sentence(marks.differ))
    if marks.few_tokens is not None:
        yield Sign(1.5 if marks.few_tokens >= 5 else -0.5, _tokens_sentence(marks.few_tokens))
    if marks.moves_in_bulk:
        yield Sign(-2.5, "most tokens of some probability move to the same side, not just a few")


def _far_but_few(marks: Marks) -> Iterator[Sign]:
    if marks.gap_per_choice is not None:
        if marks.gap_per_choice > 4:
            yield Sign(1.5, _far_sentence(marks.gap_per_choice))
        else:
            yield Sign(-2 if marks.gap_per_choice > 1.5 else -3, _only_sentence(marks.gap_per_choice))
    if (few := marks.few_trajectories) is not None:
        if few > 7:
            yield Sign(1.5, f"few trajectories make it: the largest gap is {few:.0f} times the mean")
        elif few < 5:
            yield Sign(-1.5, f"most trajectories have it: the largest gap is {few:.1f} times the mean")
    if marks.tilted:
        yield Sign(-2, "the gap depends on the probability alone")
    if marks.leaning is not None and marks.leaning < 0.8:
        yield Sign(-2, f"{_side(marks.leaning)}; other tokens, or another context, leave at least 90% there")


def _gain_sentence(marks: Marks) -> str:
    return f"k averages more than 1, by {marks.excess or 0:.0f} standard errors: l_infer did not sample these tokens"


def _mass_sentence(marks: Marks) -> str:
    return f"k averages less than 1, by {-(marks.excess or 0):.0f} standard errors: some tokens were never sampled"


def _tokens_sentence(few_tokens: float) -> str:
    return (
        f"{'few' if few_tokens >= 5 else 'many'} tokens make it: k3 is {few_tokens:.2g} times the squared mean |log k|"
    )


@judges("wrong_routes")
def _wrong_routes(marks: Marks) -> Iterator[Sign]:
    """Lab, `misrouted`: under replay, the training router would have chosen nearly other experts throughout."""
    yield from _static(marks)
    if not marks.replayed or marks.differ is None:
        yield Sign(-9, "no experts are replayed")
        return
    if marks.differ > 0.3:
        yield Sign(3, f"{marks.differ:.0%} of the replayed experts are not those that the training router would choose")
    else:
        yield Sign(-2, f"{1 - marks.differ:.0%} of the replayed experts are those of the training router")


# The sampled distribution, and the log-probabilities that the rollout returns.

TILT = "unlikely tokens move one way and likely ones the other, all tokens of a probability alike"


@judges("temperature")
def _temperature(marks: Marks) -> Iterator[Sign]:
    """Lab, `wrong_temperature`: the log-ratio is a function of the probability, of either sign; k averages 1."""
    yield from _static(marks)
    if marks.by_probability is not None:
        if marks.tilted:
            yield Sign(3, TILT)
        else:
            yield Sign(-2, "tokens of one probability do not move alike")
    yield from _sampled_as_said(marks, 1)
    if marks.k1_sign is not None and marks.k1_sign < -SIGMAS:
        yield Sign(-3, _negative_sentence(marks.k1_sign))
    if marks.differ is not None:
        if marks.differ < ROUNDED:
            yield Sign(0.5, f"routers agree on {1 - marks.differ:.2%} of the experts")
        elif marks.differ > 2 * ROUNDED:
            yield Sign(-2, _choices_sentence(marks.differ))


@judges("truncated")
def _truncated(marks: Marks) -> Iterator[Sign]:
    """Lab, `truncated`: every token is likelier by the mass that was cut, so k1 is large and k3 small."""
    yield from _static(marks)
    if marks.one_sided is not None and marks.excess is not None:
        if marks.one_sided < 0.4 and marks.excess < -SIGMAS:
            yield Sign(
                3, f"k averages less than 1, by {-marks.excess:.0f} standard errors: k3 / k1 is {marks.one_sided:.2f}"
            )
        else:
            yield Sign(-3, f"k3 / k1 is {marks.one_sided:.2f}")
    if marks.leaning is not None:
        if marks.leaning > 0.9:
            yield Sign(1.5, f"{_side(marks.leaning)}: nearly every sampled token is likelier in the rollout")
        else:
            points = -1 if marks.leaning < 0.5 else 0  # a gap of rounding besides is to both sides
            yield Sign(points, _side(marks.leaning))


@judges("raw_log_probs")
def _raw_log_probs(marks: Marks) -> Iterator[Sign]:
    """Lab, `raw_log_probs`: k1 is negative and k averages more than 1, which are both impossible if l_infer is of the
    sampled distribution. Beside a gap of rounding, k1 may be 0."""
    yield from _static(marks)
    if marks.gains_mass:
        yield Sign(2.5, _gain_sentence(marks))
    if marks.k1_sign is not None:
        if marks.k1_sign < -SIGMAS and marks.leaning is not None and marks.leaning > -LEANING:
            points = 0 if marks.gains_mass else -1
            yield Sign(points, f"k1 is negative, but {_side(marks.leaning)}")
        elif marks.k1_sign < -SIGMAS:
            yield Sign(3, _negative_sentence(marks.k1_sign))
        elif marks.k1_sign > SIGMAS or not marks.gains_mass:
            yield Sign(-2, "k1 is not negative")
    if marks.tilted:
        yield Sign(1, TILT)


# The learning itself.


def _gap_is_small(marks: Marks) -> Iterator[Sign]:
    if marks.k3 is not None:
        if marks.k3 < sound_level(marks):
            yield Sign(0.5, f"the engines are not far apart: k3 is {_number(marks.k3)}")
        elif marks.rounding_like:
            yield Sign(0.5, f"k3 is {_number(marks.k3)}, but routers disagree by no more than 16 bits leave")
        else:
            yield Sign(-3, f"k3 is {_number(marks.k3)}, a gap that has to be explained first")


@judges("learning_rate")
def _learning_rate(marks: Marks) -> Iterator[Sign]:
    """Lab, a learning rate ten times too high: the reward dies, at once or slowly, while the engines agree. If a step
    has several updates, the policy moves ten times as far in a step as in a sound run."""
    yield from _gap_is_small(marks)
    if marks.reward_kept is None:
        return
    strides = marks.strides
    far = strides is not None and strides > FAR
    if marks.reward_kept >= 0.5 and marks.reward_fell < 0.5 and far:
        yield Sign(3, f"the reward fell to {marks.reward_fell:.0%} of its best level, and came back in part")
    else:
        yield Sign(3.5 if marks.reward_kept < 0.5 else -3, f"the reward is {marks.reward_kept:.0%} of its best level")
    if far:
        yield Sign(1, f"the policy moved by a KL of {strides:.2g} within a step (actor/ppo_kl)")
    if marks.entropy_at_fall is not None and marks.entropy_at_fall < 0.35:
        yield Sign(-2, f"the entropy had come down to {marks.entropy_at_fall:.0%} before the reward fell")


@judges("entropy_collapse")
def _entropy_collapse(marks: Marks) -> Iterator[Sign]:
    """Lab, a negative entropy bonus: the entropy falls to a fraction; the reward gains nothing, or falls later."""
    yield from _gap_is_small(marks)
    entropy, reward = marks.change(ENTROPY), marks.change(REWARD)
    if entropy is None or reward is None:
        return
    if entropy > 0.35:
        yield Sign(-3, f"the entropy is {entropy:.0%} of what it was")
        return
    yield Sign(1.5, f"the entropy is {entropy:.0%} of what it was")
    gained = marks.gained
    if gained is None:
        yield Sign(2 if reward < 1.15 else -2, _reward_sentence(reward))
    elif gained < 0.1:
        yield Sign(2, f"the reward has gained {max(gained, 0):.0%} of what was to be had")
    elif marks.stands_low is not None:
        yield Sign(1.5, f"the reward rises no more, at {marks.stands_low:.0%} of what the best answers get")
    elif gained < 0.35 and entropy < 0.2:
        yield Sign(1.5, f"the reward has gained only {gained:.0%} of what was to be had")
    else:
        yield Sign(
            -2, f"the reward has gained {gained:.0%} of what was to be had: a task that is learnt needs less entropy"
        )
    if marks.without_signal is not None and marks.without_signal < 0.1:
        yield Sign(-1, "answers to a prompt still get different rewards")
    if marks.entropy_at_fall is not None and marks.reward_kept is not None and marks.reward_kept < 2 / 3:
        if marks.entropy_at_fall < 0.35:
            yield Sign(0.5, f"it had come down to {marks.entropy_at_fall:.0%} before the reward fell")
        else:
            points = -3 if marks.reward_kept < 0.5 else -0.5  # a smaller loss may begin with the fall of the entropy
            yield Sign(points, f"it was {marks.entropy_at_fall:.0%} when the reward fell")


@judges("hacked_reward")
def _hacked_reward(marks: Marks) -> Iterator[Sign]:
    """Lab, a bonus for each token: answers grow to the limit while the reward rises."""
    yield from _gap_is_small(marks)
    length, reward, cut = marks.change(LENGTH), marks.change(REWARD), marks.late("response_length/clip_ratio")
    if length is None or reward is None:
        return
    yield Sign(2 if length > 1.5 else -3, f"answers are {length:.2g} times as long as at the start")
    if cut is not None and cut > 0.5 and length > 1.2:
        yield Sign(1, f"{cut:.0%} of them are as long as the longest")
    yield Sign(1 if reward > 1.1 else -2, _reward_sentence(reward))


@judges("noisy_reward")
def _noisy_reward(marks: Marks) -> Iterator[Sign]:
    """Lab, rewards drawn at random: the reward does not rise and does not depend on the prompts. The policy does not
    become surer; at large learning rates its entropy grows."""
    yield from _gap_is_small(marks)
    entropy, reward = marks.change(ENTROPY), marks.change(REWARD)
    if entropy is None or reward is None or marks.reward_kept is None:
        return
    flat = reward < 1.1 and marks.reward_kept > 0.5 and len(marks.values(REWARD)) >= 4 * WINDOW
    yield Sign(1.5 if flat else -3, _reward_sentence(reward))
    effect, scatter = marks.prompt_effect, marks.reward_scatter
    stands_still = effect is None and scatter is None and 0.93 < reward < 1.07 and 0.93 < entropy < 1.07
    text = f"the entropy is {entropy:.0%} of what it was: the policy"
    if entropy > 0.8:
        yield Sign(1.5 if entropy > 1.2 else 1 if stands_still else 0, f"{text} does not become surer")
    else:
        yield Sign(-1.5 if effect is None else -0.5, f"{text} becomes surer")  # the effect itself says more
    if effect is not None:
        text = f"rewards differ between prompts {effect:.2g} times as much as within them (F)"
        yield from _if_prompts_matter(text, effect, none=1.15, some=1.3, points=2.5)
    elif scatter is not None:
        text = f"batches differ in their mean reward {scatter:.2g} times as much as by tossing coins"
        yield from _if_prompts_matter(text, scatter, none=0.5, some=1.2, points=1.5)


def _if_prompts_matter(text: str, value: float, *, none: float, some: float, points: float) -> Iterator[Sign]:
    if value < none:
        yield Sign(points, f"{text}: the prompts make no difference")
    elif value > some:
        yield Sign(-points, f"{text}: the prompts make a difference")


@judges("no_signal")
def _no_signal(marks: Marks) -> Iterator[Sign]:
    """Lab, a constant reward: the advantages are 0, and so is the gradient."""
    most, norm = marks.late("critic/advantages/max"), marks.late(GRADIENT)
    if most is not None:
        yield Sign(4 if most < 1e-6 else -4, f"the largest advantage is {_number(most)}")
    if marks.reward_kept is not None and marks.reward_kept < 0.7:
        yield Sign(-3, f"the reward is {marks.reward_kept:.0%} of its best level: the answers became alike as it fell")
    if norm is not None:
        yield Sign(1 if norm < 1e-6 else -2, f"the gradient's norm is {_number(norm)}")


def _at_once_sentence(marks: Marks) -> str:
    size, share = marks.beginning or ("the gap", 0.0)
    return f"{size} was there before the weights moved, {'as large as now' if share == 1 else f'{share:.0%} of it'}"


def _with_updates_sentence(marks: Marks) -> str:
    size, share = marks.beginning or ("the gap", 0.0)
    return f"{size} came with the updates: in the first steps it was {share:.1%} of what it is"


def _side(leaning: float) -> str:
    return f"{(1 + abs(leaning)) / 2:.0%} of the gap is to one side"


def _arrived_sentence(share: tuple[float, float]) -> str:
    return f"{share[0]:.0%} to {share[1]:.0%} of the last updates arrived"


def _far_sentence(gap_per_choice: float) -> str:
    return f"k3 is {gap_per_choice:.2g} times the share of other experts: more than rounding"


def _only_sentence(gap_per_choice: float) -> str:
    return f"k3 is only {gap_per_choice:.2g} times the share of other experts"


def _negative_sentence(k1_sign: float) -> str:
    return f"k1 is negative by {-k1_sign:.0f} standard errors, which no KL is"


def _start_sentence(layer: int) -> str:
    return f"routers agree up to layer {layer}, and not behind it"


def _choices_sentence(share: float) -> str:
    return f"routers choose {share:.1%} of the experts differently"


def _reward_sentence(share: float) -> str:
    return f"the reward is {share:.0%} of what it was"


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2g}"
