"""What the routers of both engines chose, and what of an update arrives: a small run for every level."""

import math

import numpy as np
import pytest

from tests.support.findings import levels_of, run_of
from verl_ext.base.names import BUCKETS
from verl_ext.diagnosis.findings import routers, sync
from verl_ext.diagnosis.findings.registry import find_all
from verl_ext.diagnosis.findings.routers import (
    AGREEMENT,
    EFFECTIVE,
    IDLE,
    LARGEST,
    LAYERS,
    OWN,
    by_layer,
    differ,
    is_moe,
    per_choice,
    replayed,
)
from verl_ext.diagnosis.findings.sync import HIGH, LOW, REMAINDER, ROUNDING, WRONG
from verl_ext.diagnosis.judge import judge
from verl_ext.diagnosis.names import K3, LOG_RATIO, REWARD

COUNT = 30
DIFFERS, EQUAL = "router/any_layer_differs", "router/gap_equal"
MIDDLE, SPREAD, MOVED, FOLLOWED = "sync/arrived_median", "sync/arrived_spread", "sync/moved", "sync/followed"


def steady(metrics):
    """Returns a run from one value of each metric, or a list of them; steps start at 1."""
    return run_of({name: each if isinstance(each, list) else [each] * COUNT for name, each in metrics.items()})


def differing(*shares, k3=0.01, own=True):
    """The agreement of routers of which these shares differ, layer by layer, and their mean."""
    found = {f"{LAYERS}{layer:02d}": 1 - share for layer, share in enumerate(shares)}
    mean = 1 - sum(shares) / len(shares)
    return found | {AGREEMENT: mean, K3: k3} | ({OWN: mean} if own else {})


def alike(share, differs=0.1, size=0.1):
    """Routers of which one in ten differs, and a gap of which this share is of tokens that are routed alike."""
    return differing(0.1) | {DIFFERS: differs, LOG_RATIO: size, EQUAL: share * size / (1 - differs)}


def of_routed(ratio):
    return differing(0.1) | {EQUAL: 0.01, "router/gap_differs": 0.01 * ratio}


def used(early, late):
    """The share of experts in effective use: `early`, or a list of readings, and `late` in the second half."""
    return {EFFECTIVE: early if isinstance(early, list) else [early] * 15 + [late] * 15, IDLE: 0.0}


def arrived(low, high, spread=0.1, **more):
    """The canary's metrics; `spread` is of the tokens' shares around the middle of the interval."""
    return {LOW: low, HIGH: high, MIDDLE: (low + high) / 2, SPREAD: spread} | more


def missing(share, rounding):
    """What is missing of all updates: this share of them, and the rounding of engines, whose share falls."""
    fallen = rounding / np.arange(1, COUNT + 1)
    return {ROUNDING: fallen.tolist(), REMAINDER: (np.array(share) + 2 * fallen).tolist()}


def middles(share, *, moved=1.0, noise=0.05, gap=0.01):
    """What the middle token gets of each update, through updates that move tokens this far; the gap is of all steps."""
    shares = share + noise * np.random.default_rng(0).standard_normal(COUNT)
    return {MIDDLE: shares.tolist(), MOVED: moved, LOG_RATIO: gap}


EVEN = {f"vllm_kl/{k}/prob/{name}": 0.01 for k in ("k1", "k3") for name in BUCKETS["prob"]}
RISING = np.linspace(0.02, 1.0, COUNT).tolist()
NOISE = {SPREAD: [1e-3 / moved for moved in RISING], MOVED: RISING}  # the same in nats
ENDED = [0.98] * 10 + [0.0] * 10 + [0.98] * 10  # a loss that has ended, by the middle token
CASES = [
    ("routers_differ.not_at_all", differing(0.0)),
    ("routers_differ.in_ties", differing(0.005)),
    ("routers_differ.a_little", differing(0.03)),
    ("routers_differ.in_part", differing(0.1)),
    ("routers_differ.much", differing(0.5)),
    ("routers_differ.much", differing(0.0) | {OWN: 0.75}),  # replay: its own choices count
    ("routers_depth.as_many_at_first", differing(0.05, 0.05)),
    ("routers_depth.many_at_first", differing(0.2, 0.5)),
    ("routers_depth.deeper", differing(0.05, 0.1)),
    ("routers_depth.much_deeper", differing(0.01, 0.1)),
    ("routers_start.behind_a_layer", differing(0.0, 0.0, 0.3)),
    ("routers_start.behind_a_layer", differing(0.001, 0.03)),
    ("routers_start.everywhere", differing(0.05, 0.3)),  # more, and not a multiple of rounding
    ("routers_start.everywhere", differing(0.0, 0.01)),  # as rounding leaves
    ("routers_start.behind_all", differing(0.001, k3=0.05)),
    ("routers_start.everywhere", differing(0.03, 0.05)),
    ("routers_start.everywhere", differing(0.001, k3=0.05, own=False)),  # they may be replayed
    ("routers_start.everywhere", differing(0.001, k3=0.05) | EVEN),
    ("routers_start.everywhere", differing(0.001, k3=0.005)),  # rounding
    ("routers_agree.everywhere", differing(0.0, 0.0, k3=0.03)),
    ("routers_agree.everywhere", differing(0.0, 0.0, k3=0.003)),  # more than a head in bfloat16 leaves
    ("routers_agree.not_everywhere", differing(0.0, 0.001, k3=0.03)),
    ("routers_agree.not_everywhere", differing(0.0, 0.0, k3=0.03) | {OWN: 0.97}),  # replay: its own choices count
    ("gap_per_choice.small", differing(0.1, k3=0.01)),
    ("gap_per_choice.usual", differing(0.01, k3=0.02)),
    ("gap_per_choice.large", differing(0.01, k3=0.1)),
    ("gap_alike.little", alike(0.05)),
    ("gap_alike.some", alike(0.2)),
    ("gap_alike.much", alike(0.6)),
    ("gap_of_routed.far_larger", of_routed(50)),
    ("gap_of_routed.larger", of_routed(20)),
    ("gap_of_routed.alike", of_routed(2)),
    ("replay.other_experts", differing(0.0) | {OWN: 0.4}),
    ("replay.own_experts", differing(0.0) | {OWN: 0.95}),
    ("replay.none", differing(0.05)),
    ("experts_used.all", used(0.9, 0.89)),
    ("experts_used.all", used([0.9] * 29 + [0.5], 0.9)),  # one odd batch
    ("experts_used.all", used(0.4, 0.4)),  # uneven from the start, as pretrained models are
    ("experts_used.gathered", used(0.9, 0.6)),
    ("experts_used.dead", used(0.9, 0.4) | {IDLE: [0.0] * 15 + [0.2] * 15}),
    ("expert_overload.steady", {LARGEST: [1.5] * 15 + [3.0] * 15}),
    ("expert_overload.steady", {LARGEST: 6.0}),
    ("expert_overload.overloaded", {LARGEST: [1.5] * 15 + [9.0] * 15}),
    ("updates_arrived.multiplied", arrived(1.2, 2.0)),
    ("updates_arrived.multiplied", arrived(0.45, 0.55, spread=0.01)),
    ("updates_arrived.multiplied", arrived(0.0, 0.6, spread=0.004)),  # one token has made the interval wide
    ("updates_arrived.multiplied", arrived(0.29, 0.31, spread=[0.002] + [0.3] * (COUNT - 1))),  # by the first update
    ("updates_arrived.multiplied", arrived(1.5, 1.5, spread=0.0)),
    ("updates_arrived.all", arrived(1.05, 1.05, spread=0.0)),
    ("updates_arrived.part", arrived(0.4, 0.6, spread=0.1)),
    ("updates_arrived.part", arrived(0.1, 0.6)),
    ("updates_arrived.part", arrived(0.29, 0.31)),  # a narrow interval, other shares at other tokens
    ("updates_arrived.part", arrived(0.3, 0.5) | {HIGH: [0.9] * 15 + [0.5] * 15}),
    ("updates_arrived.scattered", arrived(0.0, 0.06, spread=0.05) | {MOVED: RISING}),
    ("updates_arrived.none", arrived(0.0, 0.0, spread=0.0)),
    ("updates_arrived.none", arrived(0.0, 0.06) | NOISE),
    ("updates_arrived.nothing_moves", arrived(0.0, 0.06) | NOISE | {FOLLOWED: 0.0}),
    ("updates_arrived.none", arrived(0.0, 0.06) | NOISE | {FOLLOWED: 0.5}),
    ("updates_arrived.all", arrived(0.9, 1.1)),
    # More than an update in one look of many.
    ("updates_arrived.all", arrived(0.9, 1.1) | {LOW: [0.9] * 20 + [1.2] + [0.9] * 9}),
    ("updates_arrived.unclear", arrived(0.5, 2.5)),
    ("updates_arrived.unclear", arrived(0.5, 1.2)),
    ("updates_missing.stays", missing(0.07, rounding=0.5)),
    ("updates_missing.stays", missing(0.02, rounding=0.0)),
    ("updates_missing.fades", missing(0.02, rounding=0.5)),
    ("updates_arrived.part", arrived(0.9, 1.1) | missing(0.07, rounding=0.5)),
    ("updates_missing.fades", missing(0.0, rounding=0.5)),
    ("updates_missing.fades", missing(0.0, rounding=0.0)),
    ("updates_missing.fades", missing([0.0] * 10 + [0.5] * 10 + [0.0] * 10, rounding=0.5)),  # a loss that has ended
    ("updates_missing.each_update", middles(0.86)),
    # It is the first gap that counts.
    ("updates_missing.each_update", middles(0.86) | {LOG_RATIO: [0.01] * 3 + [0.5] * 27}),
    ("updates_missing.each_update", middles(0.86) | {MIDDLE: [0.0] * 10 + [0.86] * 20}),
    ("updates_missing.each_update", middles(0.86) | missing(0.0, rounding=0.5)),  # too small for the sum of all updates
    ("updates_missing.fades", middles(0.98) | missing(0.0, rounding=0.5)),
    ("updates_missing.fades", middles(0.86, noise=0.4) | missing(0.0, rounding=0.5)),
    ("updates_missing.fades", missing(0.0, rounding=0.5) | middles(0.98) | {MIDDLE: ENDED}),
    ("tensors_wrong.some", {WRONG: [0.0] * 10 + [2.0] * 20}),
    ("tensors_wrong.none", {WRONG: 0.0}),
    ("shares_alike.alike", arrived(0.45, 0.55, spread=0.01)),
    ("shares_alike.hidden", arrived(0.3, 0.7, spread=0.3) | {MOVED: 0.02, LOG_RATIO: 0.01}),
    ("shares_alike.different", arrived(0.3, 0.7, spread=0.3) | {MOVED: 1.0, LOG_RATIO: 0.01}),
    ("shares_alike.different", arrived(0.3, 0.7, spread=0.3)),
]


@pytest.mark.parametrize(("mark", "metrics"), CASES, ids=[mark for mark, _ in CASES])
def test_level(mark, metrics):
    assert find_all(steady(metrics))[mark.partition(".")[0]].mark == mark


def test_a_tensor_that_never_arrives_is_not_called_rounding():
    """Engines that round differently from the start, and 4 % of all updates that never arrive."""
    for share, harmless in ((0.0, True), (0.04, False)):
        found = differing(0.005) | {LOG_RATIO: 1e-3} | arrived(0.9, 1.1) | missing(share, rounding=0.1)
        suspects = judge(steady(found | {K3: 1e-5})).suspects
        assert any(suspect.harmless for suspect in suspects) == harmless
        assert ("partial_sync" in [suspect.cause.name for suspect in suspects]) == (not harmless)


def test_tensors_that_arrive_wrong_name_the_sync():
    gap = {K3: [1e-5] * 10 + [0.05] * 20, LOG_RATIO: [1e-3] * 10 + [0.2] * 20, WRONG: [0.0] * 10 + [2.0] * 20}
    (first, *_) = judge(steady(gap)).suspects
    assert first.cause.name in ("partial_sync", "lost_sync")
    seen = find_all(steady(gap))["tensors_wrong"]
    assert (seen.step, seen.notable) == (11, True)


def test_every_level_has_a_case():
    assert {mark for mark, _ in CASES} == levels_of(routers, sync)


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("routers_differ", {AGREEMENT: 0.9}),  # without a gap
        ("routers_differ", differing(0.9, k3=1e-9)),  # engines that agree anyway
        ("routers_differ", differing(0.0) | {OWN: 0.4}),  # replay of other experts, not rounding
        ("routers_depth", differing(0.1)),  # one layer
        ("routers_depth", differing(0.001, 0.002)),
        ("routers_depth", differing(0.0, 0.0) | {OWN: 0.9}),  # replay
        ("routers_start", differing(0.0, 0.0) | {OWN: 0.9}),
        ("routers_start", differing(0.0, 0.0, k3=0.03)),  # no layer explains it
        ("routers_agree", differing(0.0, 0.0, k3=0.03, own=False)),  # they may be replayed
        ("routers_agree", differing(0.0, 0.0, k3=1e-4)),  # rounding in the head
        ("gap_per_choice", differing(0.0)),
        ("gap_alike", alike(0.2) | {AGREEMENT: 1.0}),
        ("gap_of_routed", of_routed(50) | {AGREEMENT: 0.99, OWN: 0.99}),
        ("replay", {REWARD: 0.5}),
        ("updates_arrived", {LOW: 0.5}),
        ("updates_missing", {REMAINDER: 0.5}),
        ("updates_missing", {ROUNDING: 0.5, REMAINDER: 0.6}),  # updates did not add up
        ("updates_missing", middles(0.5, moved=0.1)),  # the first gap may hide it
        ("updates_missing", middles(0.98)),  # a part may still be too small for it
        ("updates_missing", middles(0.5) | {LOG_RATIO: math.nan}),
        ("shares_alike", {LOW: 0.5, HIGH: 0.6}),
    ],
)
def test_what_is_not_logged_shows_nothing(name, metrics):
    assert name not in find_all(steady(metrics))


@pytest.mark.parametrize(("metrics", "moe"), [({REWARD: 0.5}, False), ({"router/tokens": 900.0}, True), ({}, False)])
def test_only_a_mixture_of_experts_logs_routers(metrics, moe):
    assert is_moe(steady(metrics)) is moe


def test_shares_are_of_the_last_twenty_readings():
    """The routers' shares, against means that are computed here."""
    dice = np.random.default_rng(0)
    layers = dice.uniform(0.8, 1.0, (COUNT, 3))
    k3, agreement = dice.uniform(0.01, 0.1, COUNT), layers.mean(1)
    metrics = {f"{LAYERS}{layer:02d}": layers[:, layer].tolist() for layer in range(3)}
    run = steady(metrics | {K3: k3.tolist(), AGREEMENT: agreement.tolist()})
    assert by_layer(run) == pytest.approx((1 - layers[-20:].mean(0)).tolist())
    assert differ(run) == pytest.approx(1 - agreement[-20:].mean())
    assert per_choice(run) == pytest.approx(k3[-20:].mean() / (1 - agreement[-20:].mean()))
    assert not replayed(run)
