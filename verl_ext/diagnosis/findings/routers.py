"""Findings about the routers of both engines: how much they disagree, from which layer on, and which tokens it affects.

Rounding moves both routers and probabilities a little. A different function (wrong weights in a layer, positions, a
mask) moves probabilities much further than routers. If the routers agree, the difference lies behind the last router:
the head, the temperature, a truncated distribution.
"""

from itertools import pairwise

from verl_ext.diagnosis.findings.gap import AGREE, ROUNDED, gap_by_probability, sound_level
from verl_ext.diagnosis.findings.registry import Seen, finding
from verl_ext.diagnosis.names import K3, LOG_RATIO
from verl_ext.diagnosis.probed import DECODE, REPLAYED
from verl_ext.diagnosis.series import Readings, cached_per_run, require_logged
from verl_ext.diagnosis.statistics import course_of

AGREEMENT, OWN, LAYERS = "router/agreement", "router/own_agreement", "router/agreement/layer_"
TIES = 0.14  # disagreement in the first layer, whose routers see nearly the same states: rounding leaves 0.01 to 0.11
SHIFTED = 4.0  # k3 over the share of other experts: up to 3.5 if only choices differ, at least 4.4 for other positions
EFFECTIVE, IDLE, LARGEST = "router/load_effective", "router/load_idle", "router/load_max"
GATHERED, DIED = 0.75, 0.02  # of the best effective use, and a rise of the share of idle experts
OVERLOADED, UNEVEN = 4.0, 2.0  # tokens of the busiest expert over the mean, and over what it was
EXACT = 1e-6  # share of other experts; a smaller one comes from the arithmetic of the mean
HEAD = 1e-3  # k3 above what a head in bfloat16 leaves of equal states: 3e-5 to 4e-4 for logits of 25 to 45
ROUTER = "router/"  # begins the name of every metric of routers


def is_moe(run: Readings) -> bool:
    """Returns True if the run logged metrics of routers, or a probe replayed experts: a mixture of experts has both."""
    return run.has(ROUTER) or (run.probe is not None and run.probe.pair(DECODE, REPLAYED) is not None)


@cached_per_run
def replayed(run: Readings) -> bool:
    """Returns True if training uses the rollout's experts, so that only its own choices show what its routers do."""
    agreement, own = run.late(AGREEMENT), run.late(OWN)
    return agreement is not None and own is not None and agreement > 0.9999 and own < 0.999


@cached_per_run
def differ(run: Readings) -> float | None:
    """Returns the share of experts that the engines' routers choose differently; None if the engines agree anyway."""
    agreement, k3 = run.late(OWN, AGREEMENT), run.late(K3)
    return None if agreement is None or k3 is None or k3 <= AGREE else 1 - agreement


@cached_per_run
def by_layer(run: Readings) -> tuple[float, ...]:
    """Returns the share of experts that differ in each layer, among the experts that were used; empty under replay."""
    return () if replayed(run) else tuple(1 - (run.late(name) or 0.0) for name in sorted(run.names(LAYERS)))


@cached_per_run
def states_equal(run: Readings) -> bool | None:
    """Returns True if the routers of both engines choose the same experts for all tokens in all layers, although the
    gap is large; None if that is not known.

    Replayed experts are the same in any case, so only the choices that the training router would have made count.
    """
    own, k3 = run.late(OWN), run.late(K3)
    return None if own is None or k3 is None or k3 <= HEAD else 1 - own <= EXACT


@cached_per_run
def starts_in_layer(run: Readings) -> int | None:
    """Returns the layer up to which the routers agree, if they disagree in the next one."""
    layers = by_layer(run)
    for layer, (before, after) in enumerate(pairwise(layers)):
        if after > 0.02 and before <= 0.1 * after:
            return layer
    return None


@cached_per_run
def per_choice(run: Readings) -> float | None:
    """Returns k3 over the share of experts chosen differently; None if no choice differs."""
    share, k3 = differ(run), run.late(K3)
    return None if not share or share < 1e-5 or k3 is None else k3 / share


@finding("routers_differ", "| not_at_all in_ties a_little in_part much", needs=(AGREEMENT,))
def routers_differ(run: Readings) -> Seen:
    """How many experts the routers of the two engines choose differently."""
    share = differ(run)
    if share is None or (replayed(run) and share > 0.3) or (share <= 0 and run.get(OWN) is None):
        return None  # replayed experts all agree, and nothing shows what the router would have chosen
    text = f"routers choose {share:.2%} of the experts differently"
    if share > ROUNDED:
        return ("much" if share > 0.2 else "in_part" if share >= 0.05 else "a_little"), text
    return ("in_ties", f"{text}, as near ties do") if share > 0 else ("not_at_all", "routers agree exactly")


@finding("routers_depth", "| many_at_first as_many_at_first deeper much_deeper", needs=(LAYERS + "00", LAYERS + "01"))
def routers_depth(run: Readings) -> Seen:
    """Whether routers differ already in the first layer, or more in deeper layers."""
    layers = by_layer(run)
    if len(layers) < 2 or layers[-1] <= ROUNDED or differ(run) is None:
        return None
    text = f"{layers[0]:.1%} of the experts differ in the first layer, {layers[-1]:.1%} in the last"
    ratio = layers[0] / layers[-1]
    if ratio >= 0.85:
        return "as_many_at_first", text
    if layers[0] > TIES:
        return "many_at_first", text
    return ("deeper" if ratio >= 0.3 else "much_deeper"), text


@finding(
    "routers_start", "| behind_a_layer behind_all everywhere", family="start", needs=(LAYERS + "00", LAYERS + "01")
)
def routers_start(run: Readings) -> Seen:
    """Whether the routers agree up to a layer and not behind it: the difference is in that layer."""
    share = differ(run)
    if share is None or replayed(run) or states_equal(run):
        return None
    layer = starts_in_layer(run)
    if layer is not None:
        return "behind_a_layer", f"routers agree up to layer {layer}, and not behind it"
    ratio, k3 = per_choice(run), run.late(K3) or 0.0
    probability = gap_by_probability(run)
    most_move = probability is None or probability[0] == "in_bulk"
    own = run.get(OWN) is not None  # without it, routers that agree exactly may be replayed
    if own and share < ROUNDED and (ratio is None or ratio > SHIFTED) and most_move and k3 > sound_level(run):
        return "behind_all", f"routers agree on {1 - share:.2%} of the experts, and k3 is {k3:.2g}"
    return "everywhere", "the routers' disagreement does not begin behind a layer"


@finding("routers_agree", "everywhere | not_everywhere", family="start", needs=(OWN, K3))
def routers_agree(run: Readings) -> Seen:
    """Whether the states are equal up to the last router, so that no layer explains the gap."""
    equal = require_logged(states_equal(run))
    if not equal:
        return "not_everywhere", "the routers do not agree on all experts"
    text = "the routers agree on all experts in every layer, so the states are equal there"
    return "everywhere", f"{text}: what differs comes after the last router (head, temperature, top-p, log-prob mode)"


@finding("gap_per_choice", "| small usual large", needs=(AGREEMENT, K3))
def gap_per_choice(run: Readings) -> Seen:
    """How large the gap is compared with the disagreement of the routers."""
    ratio = per_choice(run)
    if ratio is None or (replayed(run) and (differ(run) or 0) > 0.3):
        return None
    text = f"k3 is {ratio:.2g} times the share of other experts"
    return ("small" if ratio < 1.5 else "usual" if ratio <= SHIFTED else "large"), text


@finding(
    "gap_alike", "| little some much", family="alike", needs=("router/gap_equal", "router/any_layer_differs", LOG_RATIO)
)
def gap_alike(run: Readings) -> Seen:
    """The share of the gap that belongs to tokens with the same experts in all layers.

    If a token replaces the sampled one, it is predicted from the same states, by the same experts. A cause that changes
    the states also changes some experts.
    """
    differs, equal, size = run.late("router/any_layer_differs"), run.late("router/gap_equal"), run.late(LOG_RATIO)
    if not differs or equal is None or not size or replayed(run) or differ(run) is None or differs <= 1e-4:
        return None
    share = min((1 - differs) * equal / size, 1.0)
    text = f"{share:.0%} of the gap is of tokens that both engines route alike"
    return ("little" if share <= 0.1 else "some" if share < 0.3 else "much"), text


@finding("gap_of_routed", "| far_larger larger alike", family="alike", needs=("router/gap_differs", "router/gap_equal"))
def gap_of_routed(run: Readings) -> Seen:
    """The mean gap of tokens with other experts, over that of tokens with the same experts."""
    other, equal, share = run.late("router/gap_differs"), run.late("router/gap_equal"), differ(run)
    if not equal or other is None or share is None or share < 0.03 or replayed(run):
        return None
    ratio = other / equal
    text = f"tokens with other experts have {ratio:.0f} times the gap of the others"
    return ("far_larger" if ratio > 40 else "larger" if ratio > 6 else "alike"), text


@finding("experts_used", "dead gathered | all", family="load", needs=(EFFECTIVE, IDLE))
def experts_used(run: Readings) -> Seen:
    """Whether the routers have come to send the tokens to fewer experts than before."""
    course = require_logged(course_of(run.get(EFFECTIVE)))
    if course.now >= GATHERED * course.best or not (course.twice and course.is_lost):
        return "all", f"{course.now:.0%} of the experts are in effective use"
    text = f"the share of experts in effective use fell from {course.fell}"
    early, late = require_logged(run.early(IDLE)), require_logged(run.late(IDLE))
    if late - early <= DIED:
        return "gathered", text, course.step
    return "dead", f"{text}, and {late:.0%} get no token at all ({early:.0%} at the start)", course.step


@finding("expert_overload", "overloaded | steady", family="load", needs=(LARGEST,))
def expert_overload(run: Readings) -> Seen:
    """Whether the busiest expert has come to get a multiple of the tokens that the busiest one got at the start."""
    early, late = require_logged(run.early(LARGEST)), require_logged(run.late(LARGEST))
    text = f"the busiest expert gets {late:.2g} times the mean of its layer ({early:.2g} at the start)"
    return ("overloaded" if late >= max(OVERLOADED, UNEVEN * early) else "steady"), text


@finding("replay", "other_experts | own_experts none", needs=(OWN, AGREEMENT))
def replay(run: Readings) -> Seen:
    """Whether the replayed experts are those that the training router would choose."""
    share = require_logged(differ(run))
    if not replayed(run):
        return "none", "no experts are replayed"
    if share > 0.3:
        text = f"{share:.0%} of the replayed experts are not those that the training router would choose"
        return "other_experts", text
    return "own_experts", f"{1 - share:.0%} of the replayed experts are those of the training router"
