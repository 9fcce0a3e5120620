"""A probe names a cause as a report of the run would."""

from dataclasses import replace

import pytest

from tests.unit.probe.test_readings import PLACES, pairs_of, result
from verl_ext.diagnosis.causes import CAUSES
from verl_ext.diagnosis.probed import BASE, PACKED, SYNC, UPDATE, Place, Stage

ROUTED = [PLACES[0], Place("0.attention", 1e-7), Place("0.router", 1e-7), Place("0.experts", 1e-7)]


def at(point, error, places=ROUTED):
    """Returns the places, with this error from this point on."""
    begin = [place.point for place in places].index(point)
    return [replace(place, error=error if number >= begin else place.error) for number, place in enumerate(places)]


GAP = pairs_of(1e-3, 1e-6, 1e-3, 9e-4)
ROUTING = pairs_of(1e-3, 1e-6, 1e-3, 1e-5)
HALF = pairs_of(1e-3, 1e-6, 1e-3, 4e-4)  # as other weights leave it, which change the choice of experts too
SMALL = pairs_of(1e-14, 1e-15, 1e-14, 1e-14)
NOT_FINITE = [replace(pair, one_not_finite=3) for pair in GAP if pair.one == "decode"]
TRAINING_NOT_FINITE = [replace(pair, other_not_finite=3) for pair in GAP if pair.other == "train"]
ADAPTER, PACKING = ([*GAP[:3], replace(GAP[3], other=other, k3=k3)] for other, k3 in ((BASE, 1e-4), (PACKED, 0.1)))
ROUNDS = ("two_precisions", "quantized")
A_LAYER = ("wrong_weights", "different_models")


@pytest.mark.parametrize(
    ("found", "causes"),
    [
        (result(SMALL, ROUTED), ()),
        (result(pairs_of(1e-3, 9e-4, 1e-4)), ("decode_differs", "leak", "log_probs_missing")),
        (result(NOT_FINITE), ("rollout_not_finite",)),
        (result(TRAINING_NOT_FINITE), ()),
        (result(ADAPTER, at("0.attention", 0.3)), ("lost_sync",)),
        (result(PACKING, ROUTED), ("leak",)),
        (result(GAP), ROUNDS),
        (result(GAP, ROUTED), ("temperature",)),  # behind states that agree
        (result(GAP, at("0.attention", 1e-2), dtype="bfloat16"), ROUNDS),
        (result(GAP, at("0.attention", 2e-3)), ROUNDS),
        (result(GAP, at("0.attention", 0.3)), (*A_LAYER, "positions")),
        (result(GAP, at("0.layer", 0.3, PLACES)), A_LAYER),
        (result(GAP, at("0.experts", 0.3)), A_LAYER),
        (result(GAP, at("0.router", 2e-3)), ("two_precisions",)),
        (result(ROUTING, at("0.router", 2e-3)), ("two_precisions",)),
        (result(ROUTING, at("0.router", 0.3)), A_LAYER),
        (result(ROUTING, at("0.experts", 0.3)), ("router_bias",)),
        (result(HALF, at("0.experts", 0.34)), A_LAYER),
        (result(HALF, at("0.attention", 0.2)), (*A_LAYER, "positions")),
        (result(pairs_of(1e-14, 1e-15, 1e-14, 0.1), ROUTED), ("wrong_routes",)),
        (result(pairs_of(1e-4, 1e-15, 1e-4, 1e-2), ROUTED), ("wrong_routes",)),
        (result(SMALL, ROUTED, [Stage(SYNC, 1e-14, 1e-14, 0, 0), Stage(UPDATE, 1e-14, 1e-2, 0, 0.1)]), ("lost_sync",)),
        (result(SMALL, ROUTED, [Stage(UPDATE, 1e-14, 1e-2, 0.06, 0.1)]), ("partial_sync", "scaled_update")),
        # As the quick start's: an update so large that rounding shows more, and all of it arrived.
        (result(SMALL, ROUTED, [Stage(UPDATE, 1.8e-4, 9e-4, 0.27, 0.273)]), ()),
    ],
)
def test_the_causes_of_a_probe(found, causes):
    assert tuple(cause.name for cause in found.causes) == causes
    sentences = [sentence for sentence in found.sentences() if sentence.startswith("Likely cause")]
    assert len(sentences) == bool(causes)
    for name in causes:
        assert CAUSES[name].title in sentences[0]


@pytest.mark.parametrize(("k3", "cause"), [(1e-9, "two_precisions"), (9e-4, "quantized")])
def test_a_sweep_over_fp32_tells_kernels_from_rounded_weights(k3, cause):
    found = replace(result(GAP, at("0.attention", 1e-2), dtype="bfloat16"), swept={"fp32": k3})
    assert [each.name for each in found.causes] == [cause]


def test_a_replay_that_harms_is_no_agreement():
    harmed = result(pairs_of(1e-14, 1e-15, 1e-14, 0.1), ROUTED)
    assert harmed.has("probe_replay.harms") and not harmed.has("probe_gap.none")
    within_noise = result(pairs_of(1e-14, 1e-15, 1e-14, 0.1, chance=0.06), ROUTED)
    assert within_noise.has("probe_gap.none")
