"""The readings of a probe against oracles, its verdicts, and hidden states with a cause planted at a known place."""

import copy
import itertools
import math
import operator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from verl_ext.base.errors import HookError
from verl_ext.base.names import HEAD
from verl_ext.core.fake_quant import fake_quantized
from verl_ext.diagnosis.findings import probe
from verl_ext.diagnosis.findings.registry import find_all
from verl_ext.diagnosis.probed import (
    BASE,
    DECODE,
    PACKED,
    PREFILL,
    REPLAYED,
    SYNC,
    TRAIN,
    UPDATE,
    Pair,
    Place,
    Probe,
    Stage,
)
from verl_ext.diagnosis.series import Readings
from verl_ext.probe.readings import (
    SIGN_FLIPS,
    chance_of,
    compare_readings,
    compare_stage,
    compare_states,
    head_dtypes,
)
from verl_ext.probe.verdict import ProbeResult
from verl_ext.routing.recorder import Recorder, joined_passes, named_points, order_of


def result(pairs, places=(), stages=(), dtype="float32", **more):
    return ProbeResult(pairs, list(places), list(stages), dtype, tokens=193, **more)


def levels(pairs, places=(), **more):
    """Returns name of a finding of the probe, without its prefix -> its level."""
    found = result(pairs, places, **more).found.items()
    return {name.removeprefix("probe_"): each.level for name, each in found if name.startswith("probe_")}


def oracle(log_q, log_p):
    """Computes in float64, token by token: mean of r - log r - 1, the log-ratio clamped to +-20; largest; share of
    equals."""
    pairs = [(float(q), float(p)) for q, p in zip(log_q, log_p, strict=True) if math.isfinite(p) and math.isfinite(q)]
    if not pairs:
        return None, None, None
    x = [min(max(p - q, -20.0), 20.0) for q, p in pairs]
    k3 = math.fsum(math.expm1(v) - v for v in x) / len(x)
    return k3, max(abs(p - q) for q, p in pairs), sum(p == q for q, p in pairs) / len(pairs)


log_probs = arrays.arrays(np.float32, 12, elements=st.floats(-40, 0, width=32) | st.just(-math.inf))


@given(log_probs, log_probs)
def test_a_pair_against_the_oracle(log_q, log_p):
    positions = torch.arange(12) * 200
    (pair,) = compare_readings({DECODE: torch.from_numpy(log_q), TRAIN: torch.from_numpy(log_p)}, positions)
    for number, other in zip((pair.k3, pair.largest, pair.equal), oracle(log_q, log_p), strict=True):
        assert number == (None if other is None else pytest.approx(other, rel=1e-9, abs=1e-15))
    assert (pair.tokens, pair.chance) == (12, 1)  # the pair that the others are compared with
    assert pair.one_not_finite == np.isinf(log_q).sum() and pair.other_not_finite == np.isinf(log_p).sum()
    assert pair.not_finite == sum(not math.isfinite(float(p) - float(q)) for q, p in zip(log_q, log_p, strict=True))
    inside = [i for i in range(12) if math.isfinite(float(log_p[i]) - float(log_q[i]))]
    for bounds, found in (((0, 256), "0-256"), ((256, 1024), "256-1024"), ((1024, 4096), "1024-4096")):
        rows = [i for i in inside if bounds[0] <= 200 * i < bounds[1]]
        assert (found in pair.by_position) == bool(rows)
        if rows:
            assert pair.by_position[found] == pytest.approx(oracle(log_q[rows], log_p[rows])[0], rel=1e-9, abs=1e-15)


def test_buckets_of_probability_are_those_of_what_is_sampled_from():
    log_q, log_p = torch.tensor([-0.05, -5.0]), torch.tensor([-0.06, -5.5])
    (pair,) = compare_readings({DECODE: log_q, TRAIN: log_p}, torch.tensor([0, 1]))
    assert list(pair.by_probability) == ["0-0.01", "0.9-"]
    assert pair.by_probability["0-0.01"] > pair.by_probability["0.9-"] > 0


def test_pairs_are_of_the_readings_that_there_are():
    readings = {name: torch.zeros(2) for name in (DECODE, PREFILL, TRAIN)}
    pairs = compare_readings(readings, torch.arange(2))
    assert [(pair.one, pair.other) for pair in pairs] == [(DECODE, TRAIN), (DECODE, PREFILL), (PREFILL, TRAIN)]
    assert all(pair.equal == 1 and pair.k3 == 0 for pair in pairs)


@pytest.mark.parametrize(
    ("ours", "others"), [([3, 2, 4, 1, 5], [1, 1, 1, 1, 1]), ([3, 0, 4, 1, 2, 2], [1, 2, 0, 1, 3, 0]), ([1, 2], [1, 2])]
)
def test_the_chance_of_a_difference_is_the_share_of_all_signs_that_make_one_as_large(ours, others):
    """The exact test, over every choice of the signs."""
    terms = [math.sqrt(a) - math.sqrt(b) for a, b in zip(ours, others, strict=True)]
    sums = [sum(map(operator.mul, signs, terms)) for signs in itertools.product((1, -1), repeat=len(terms))]
    exact = sum(abs(each) >= abs(sum(terms)) - 1e-9 for each in sums) / len(sums)
    found = chance_of(*(torch.tensor(each).double() for each in (ours, others)))
    assert found == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / SIGN_FLIPS) + 1 / SIGN_FLIPS)


def test_the_chance_of_a_difference_that_every_token_shows_is_the_least_there_is():
    assert chance_of(torch.ones(5000).double(), torch.zeros(5000).double()) == 1 / (SIGN_FLIPS + 1)


def test_a_token_that_is_not_finite_has_no_part_in_the_chance():
    ours, others = torch.linspace(1, 2, 300).double(), torch.linspace(1, 2, 300).flip(0).double() * 0.9
    whole = chance_of(ours[10:], others[10:])
    ours[:5], others[5:10] = math.nan, math.nan
    assert chance_of(ours, others) == whole < 0.5


def simulated(seed, effect):
    """The result for 200 tokens with heavy-tailed noise: Student's t with 1.5 degrees of freedom.

    Args:
        effect: "none": a replay draws the training engine's noise again. "routing": a replay leaves a tenth of the gap.
            "sampling": only the rollout's sampling is noisy; the others have a hundredth of the gap. "equal noise":
            three readings have the same noise.
    """
    one, two, three = np.random.default_rng(seed).standard_t(1.5, (3, 200)) * 0.05
    exact = np.zeros(200)
    readings = {
        "none": {DECODE: exact, PREFILL: exact, TRAIN: one, REPLAYED: two},
        "routing": {DECODE: exact, PREFILL: exact, TRAIN: one, REPLAYED: one * 0.1**0.5},
        "sampling": {DECODE: one, PREFILL: two / 10, TRAIN: three / 10},
        "equal noise": {DECODE: one, PREFILL: two, TRAIN: three},
    }[effect]
    pairs = compare_readings(
        {name: torch.from_numpy(each - 3).float() for name, each in readings.items()}, torch.arange(200)
    )
    return result(pairs)


ROUTED = ("probe_replay.closes", "probe_replay.halves")


@pytest.mark.parametrize(
    ("effect", "marks", "least", "most"),
    [  # at 5 %, more than 10 of 100 is one case in 90; the two k3 alone named the cause 32, 97, 100 and 88 times
        ("none", ROUTED, 0, 10),
        ("routing", ROUTED, 95, 100),
        ("sampling", ("probe_decode.apart",), 90, 100),
        ("equal noise", ("probe_decode.apart",), 0, 10),
    ],
)
def test_a_finding_is_there_where_it_was_planted_and_not_for_noise(effect, marks, least, most):
    assert least <= sum(simulated(seed, effect).has(*marks) for seed in range(100)) <= most


def test_noise_that_looks_like_a_cause_is_told_as_noise():
    found = (simulated(seed, "none") for seed in range(50))
    undecided = next(each for each in found if each.has("probe_replay.undecided"))
    assert "(p = " in undecided.found["probe_replay"].text and "--prompts" in undecided.advice


SIDE = {DECODE: "rollout", PREFILL: "rollout", TRAIN: "training", REPLAYED: "training"}


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("count", [1, 3, 100])
@pytest.mark.parametrize("name", SIDE)
def test_a_reading_that_is_not_finite_is_no_agreement(name, count, value):
    readings = {each: torch.linspace(-3, -0.1, 100) for each in SIDE}
    readings[name][:count] = value
    pairs = compare_readings(readings, torch.arange(100))
    found = result(pairs, PLACES[:1])
    said = found.found["probe_values"].text
    assert found.found["probe_values"].level == ("rollout" if name == DECODE else "training")
    assert "probe_gap" not in found.found and not found.agrees(1e9)
    assert f"{count} of 100 tokens" in said and f"{SIDE[name]} side ({name})" in said
    left = {(pair.one, pair.other): (pair.k3, pair.not_finite) for pair in pairs}
    for names, (k3, not_finite) in left.items():
        assert not_finite == (count if name in names else 0)
        assert (k3 is None) == (not_finite == 100) and k3 in (None, 0)
    assert ("over the 97 other tokens only" in said) == (count == 3 and name in (DECODE, TRAIN))


def test_infinities_of_both_sides_at_the_same_token_are_counted_on_both():
    both = torch.tensor([-1.0, -math.inf, -2.0])
    said = result(compare_readings({DECODE: both, TRAIN: both}, torch.arange(3))).found["probe_values"].text
    assert all(f"{side} side ({name})" in said for name, side in ((DECODE, "rollout"), (TRAIN, "training")))


def test_states_that_are_not_finite_are_no_agreement():
    places = [PLACES[0], replace(PLACES[1], rollout_not_finite=2), replace(PLACES[2], error=None, train_not_finite=9)]
    found = result(pairs_of(1e-14, 1e-15, 1e-14), places)
    assert found.has("probe_values.states") and found.start == "0.attention" and "probe_gap" not in found.found
    assert "2 tokens on the rollout side" in found.found["probe_values"].text


def test_no_token_at_all_is_no_agreement():
    found = compare_readings({DECODE: torch.zeros(0), TRAIN: torch.zeros(0)}, torch.arange(0))
    assert levels(found) == {"values": "no_token"}


def pairs_of(whole, sampling, rest, replayed=None, chance=1e-3):
    found = {(DECODE, TRAIN): whole, (DECODE, PREFILL): sampling, (PREFILL, TRAIN): rest}
    if replayed is not None:
        found[DECODE, REPLAYED] = replayed
    return [
        Pair(one, other, k3, k3 / 10, 0.1, 0.0, {}, {}, tokens=193, chance=chance) for (one, other), k3 in found.items()
    ]


@pytest.mark.parametrize(
    ("pairs", "gap", "decode", "replay", "said"),
    [
        (pairs_of(1e-14, 1e-15, 1e-14), "none", "agrees", None, "agree"),
        (pairs_of(1e-3, 9e-4, 1e-4), "apart", "apart", None, "1.0e-03 while sampling, and 1.0e-04 at once"),
        (pairs_of(1e-13, 1e-3, 1e-3), "apart", "apart", None, "does not agree with itself"),
        (pairs_of(1e-3, 1e-6, 1e-3, 1e-4), "apart", "agrees", "halves", "90% of the gap is routing"),
        (pairs_of(1e-3, 1e-6, 1e-3, 9e-5), "apart", "agrees", "closes", "91% of the gap is routing"),
        (pairs_of(1e-3, 1e-6, 1e-3, 1e-4, chance=0.06), "apart", "agrees", "undecided", "1.0e-04 (p = 0.06)"),
        (pairs_of(1e-3, 9e-4, 1e-4, chance=0.06), "apart", "undecided", None, "1.0e-04 at once (p = 0.06)"),
        (pairs_of(1e-3, 1e-3, 1e-3, chance=0.06), "apart", "agrees", None, "within the rollout engine 1.0e-03"),
        (pairs_of(1e-3, 2e-3, 1e-3), "apart", "apart", None, "does not agree with itself"),
        (pairs_of(1e-3, 2e-3, 1e-3, chance=0.06), "apart", "undecided", None, "2.0e-03"),
        (pairs_of(0.0, 1e-3, 1e-3, 0.0, chance=0.06), "apart", "undecided", "no_change", "1.0e-03"),
        (pairs_of(1e-3, 1e-6, 1e-3, 9e-4), "apart", "agrees", "no_change", "experts replayed 9.0e-04"),
        (pairs_of(1e-3, 1e-6, 1e-3), "apart", "agrees", None, "the two engines differ"),
    ],
)
def test_the_findings_say_which_pair_holds_the_gap(pairs, gap, decode, replay, said):
    found = levels(pairs)
    assert (found["gap"], found["decode"], found.get("replay")) == (gap, decode, replay)
    assert said in " ".join(each.text for each in result(pairs).found.values())
    assert (result(pairs).advice == "stability=r3") == (replay in ("halves", "closes"))


@pytest.mark.parametrize(
    ("reading", "k3", "level", "within_noise"),
    [
        (PACKED, 1e-2, "harms", "no_change"),
        (PACKED, 1.5e-3, "no_change", "no_change"),
        (PACKED, 1e-4, "no_change", "no_change"),  # nothing that a pass of one sequence has
        (REPLAYED, 1e-2, "harms", "no_change"),
        (BASE, 4e-4, "halves", "undecided"),
        (BASE, 1e-5, "closes", "undecided"),
        (BASE, 9e-4, "no_change", "no_change"),
        (BASE, 1e-1, "no_change", "no_change"),
    ],
)
def test_a_reading_that_is_further_away_or_a_lora_that_is_not_there(reading, k3, level, within_noise):
    name = {PACKED: "probe_packing", REPLAYED: "probe_replay", BASE: "probe_adapter"}[reading]
    for chance, expected in ((1e-3, level), (0.06, within_noise)):
        pairs = [*pairs_of(1e-3, 1e-6, 1e-3), replace(pairs_of(k3, 0, 0, k3, chance)[3], other=reading)]
        found = result(pairs, PLACES).found
        assert found[name].level == expected and f"from 1.0e-03 to {k3:.1e}" in found[name].text
        assert found["probe_start"].level == ("head" if expected == "no_change" else "not_judged")


@pytest.mark.parametrize(
    ("k3", "level", "said"),
    [
        ([1e-4, 1.1e-4, 3e-4, 4e-4], "grows", "k3 is 1.1e-04 over the first 2 of 4"),
        ([1e-4, 1.1e-4, 9e-4, 3e-4, 4e-4], "grows", "and 3.5e-04 over the last 2"),
        ([1e-4, 3.5e-4, 3e-4, 9e-4], "steady", ""),  # the second is above the third
        ([1e-4, 1.1e-4, 1.2e-4, 1.3e-4], "steady", ""),  # not twice as large
        ([1e-14, 1e-13, 1e-12, 1e-11], "steady", ""),  # rounding
        ([1e-4, 1e-2], "steady", ""),  # one case in two by chance
        ([1e-4, None, 1e-4, 1e-4], "not_finite", "1 of 4 batches"),
    ],
)
def test_a_gap_that_grows_from_batch_to_batch(k3, level, said):
    pairs = pairs_of(1e-3, 0, 0)
    found = result(pairs, batches=[replace(pairs[0], k3=each) for each in k3]).found["probe_batches"]
    assert found.level == level and said in found.text


PLACES = [Place("embedding", 0.0), Place("0.attention", 1e-7), Place("0.layer", 2e-7), Place("norm", 2e-7)]


@pytest.mark.parametrize(
    ("changed", "dtype", "start", "level", "advice"),
    [
        ({}, "float32", HEAD, "head", "temperature"),  # k3 of 1e-3 cannot come from such states
        ({2: 0.3, 3: 0.3}, "float32", "0.layer", "layer", "0.layer"),
        ({1: 1e-2, 2: 1e-2, 3: 1e-2}, "bfloat16", "", "nowhere", "precision=fp16"),  # rounding
        ({1: 1e-2, 2: 0.5, 3: 0.5}, "bfloat16", "0.layer", "layer", "0.layer"),
    ],
)
def test_where_it_starts_is_more_than_the_rounding_of_a_dtype(changed, dtype, start, level, advice):
    places = [replace(place, error=changed.get(index, place.error)) for index, place in enumerate(PLACES)]
    found = result(pairs_of(1e-3, 0.0, 1e-3), places, dtype=dtype)
    assert (found.start, found.found["probe_start"].level) == (start, level) and advice in found.advice


def stage_oracle(before, after):
    """Computes in float64, token by token: k3 before and after, and how far each side has moved."""

    def mean(values):
        kept = [value for value in values if math.isfinite(value)]
        return math.fsum(kept) / len(kept) if kept else None

    moved = [
        mean([abs(float(b) - float(a)) for a, b in zip(*each, strict=True)]) for each in zip(before, after, strict=True)
    ]
    return [oracle(*before)[0], oracle(*after)[0], *moved]


@given(st.tuples(log_probs, log_probs), st.tuples(log_probs, log_probs))
def test_a_stage_against_the_oracle(before, after):
    found = compare_stage(SYNC, *(tuple(torch.from_numpy(one) for one in each) for each in (before, after)))
    numbers = [found.before, found.after, found.rollout_moved, found.train_moved]
    for number, other in zip(numbers, stage_oracle(before, after), strict=True):
        assert number == (None if other is None else pytest.approx(other, rel=1e-9, abs=1e-15))
    assert (found.tokens, found.rollout_not_finite, found.train_not_finite) == (
        12,
        *(np.isinf(one).sum() for one in after),
    )


@pytest.mark.parametrize(
    ("one", "mark", "said"),
    [
        (Stage(SYNC, 1e-4, 1e-4, 0.0, 0.0), "sync.same", "does not widen the gap"),
        (Stage(SYNC, 1e-4, 1e-2, 0.1, 0.0), "sync.widens", "sends weights other than"),
        (Stage(SYNC, 1e-4, 1e-4, 0.1, 0.0), "sync.moves", "moves the rollout by 1.0e-01"),
        (Stage(UPDATE, 1e-4, 1e-4, 0.0, 0.0), "update.nothing", "its learning rate is 0"),
        (Stage(UPDATE, 1e-4, 1e-2, 0.0, 0.1), "update.lost", "training moved by 1.0e-01"),
        (Stage(UPDATE, 1e-4, 1e-2, 0.1, 0.1), "update.widens", "k3 was 1.0e-04 and is 1.0e-02"),
        (Stage(UPDATE, 1e-4, 1e-2, 0.07, 0.1), "update.part", "k3 was 1.0e-04 and is 1.0e-02"),
        (Stage(UPDATE, 1e-4, 1.1e-4, 0.1, 0.1), "update.arrives", "training moved by 1.0e-01"),
        (Stage(SYNC, 1e-4, None, None, 0.0, 9, rollout_not_finite=9), "sync.not_finite", "9 of 9 tokens"),
        (Stage(UPDATE, 1e-4, 1e-4, 0.1, 0.1, 9, train_not_finite=1), "update.not_finite", "1 of 9 tokens"),
        (Stage(SYNC, None, 1e-4, None, 0.0, 9), "sync.not_known", "so the change is not known"),
        (Stage(UPDATE, 1e-2, 1e-2, 1e-6, 1e-5), "update.arrives", "1.0e-05"),  # less than the gap can show
    ],
)
def test_what_a_stage_shows(one, mark, said):
    found = result(pairs_of(1e-14, 0, 0), stages=[one]).found[f"probe_{one.name}"]
    assert found.mark == f"probe_{mark}" and said in found.text


def start_of(places):
    return probe.start_of(Probe(pairs_of(1e-14, 0, 1e-14), places))


def dtypes(places, head=("", "")):
    found = find_all(Readings({}, probe=Probe(pairs_of(1e-14, 0, 1e-14), places, head=head))).get("probe_dtypes")
    return "" if found is None else found.text


TOP_K = 2


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 8, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_bias": True}
    experts = {"num_experts": 4, "num_experts_per_tok": TOP_K}
    made = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, num_hidden_layers=3, **sizes, **heads, **experts))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return made.eval()


def states_of(model):
    recorder = Recorder(named_points(model))
    with torch.no_grad():
        model(torch.arange(1, 21).view(1, -1))
        model(torch.arange(30, 41).view(1, -1))
    return joined_passes(recorder.close())


def compared(model, plant):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        plant(changed.model)
    return compare_states(states_of(changed), states_of(model), TOP_K)


def router_in_bf16(model):
    model.layers[1].mlp.gate.register_forward_hook(lambda m, i, out: (out[0].bfloat16().float(), *out[1:]))


def permuted_expert(model):
    for name in ("gate_up_proj", "down_proj"):
        weights = getattr(model.layers[2].mlp.experts, name)
        weights[[0, 1]] = weights[[1, 0]]


def dropped_bias(model):
    model.layers[1].self_attn.v_proj.bias.zero_()


def rounded_layer(model):
    weight = model.layers[0].self_attn.o_proj.weight
    weight.copy_(fake_quantized(weight, "fp4", "tensor"))


def other_norm(model):
    model.norm.weight.mul_(1.01)


@pytest.mark.parametrize(
    ("plant", "place"),
    [
        (router_in_bf16, "1.router"),
        (permuted_expert, "2.experts"),
        (dropped_bias, "1.attention"),
        (rounded_layer, "0.attention"),
        (other_norm, "norm"),
    ],
)
def test_a_planted_cause_is_found_at_its_place(model, plant, place):
    places = compared(model, plant)
    assert start_of(places) == place
    before = [each for each in places if order_of(each.point) < order_of(place)]
    assert all(each.error == 0 for each in before)


def test_the_same_model_has_no_place_where_it_comes_apart(model):
    places = compared(model, lambda model: None)
    assert [place.point for place in places][:3] == ["embedding", "0.attention", "0.router"]
    assert [place.point for place in places][-2:] == ["2.layer", "norm"]
    assert all(place.error == 0 for place in places) and start_of(places) == ""
    routers = [place for place in places if place.point.endswith("router")]
    assert len(routers) == 3 and all(place.differs == place.weight_gap == 0 for place in routers)


def test_experts_that_differ_are_told_with_the_gap_of_their_weights():
    ours = torch.tensor([[3.0, 2.0, 0.0, -1.0], [3.0, 2.0, 0.0, -1.0]])
    theirs = torch.tensor([[3.0, 0.0, 2.0, -1.0], [3.0, 2.0, 0.0, -1.0]])
    (place,) = compare_states({"0.router": ours}, {"0.router": theirs}, top_k=2)
    share = torch.tensor([3.0, 2.0]).softmax(0)[1].item()  # what one gives to expert 1 and the other to 2
    assert place.differs == 0.5 and place.weight_gap == pytest.approx(share / 2)


def test_a_router_of_another_dtype_is_reported():
    train = {f"{layer}.{part}": torch.eye(3) for layer in range(2) for part in ("attention", "router")}
    rollout = {point: state.bfloat16() if point.endswith("router") else state for point, state in train.items()}
    places = compare_states(rollout, train, TOP_K)
    assert [(place.rollout_dtype, place.train_dtype) for place in places[:2]] == [
        ("float32", "float32"),
        ("bfloat16", "float32"),
    ]
    assert "2 x router is bfloat16 in the rollout" in dtypes(places)
    assert dtypes(compare_states(train, train, TOP_K)) == ""


@pytest.mark.parametrize("cast", ["as it is", "cast to float32", "as SGLang returns it"])
def test_the_heads_dtype_is_what_it_was_computed_in(model, cast):
    def passes(dtype):
        changed = copy.deepcopy(model)
        if dtype is not None:
            changed.lm_head.register_forward_hook(lambda module, inputs, logits: logits.to(dtype))
        if cast != "as it is":
            changed.lm_head.register_forward_hook(lambda module, inputs, logits: logits.float())
        if cast == "as SGLang returns it":
            changed.lm_head.register_forward_hook(
                lambda module, inputs, logits: SimpleNamespace(next_token_logits=logits[0])
            )
        recorder = Recorder(named_points(changed))
        with torch.no_grad():
            changed(torch.arange(1, 21).view(1, -1))
        return recorder.close()

    assert head_dtypes(passes(None), passes(torch.bfloat16)) == ["float32", "bfloat16"]
    assert head_dtypes(passes(torch.float16), {}) == ["float16", ""]
    assert "logits are float32" in dtypes([], ("float32", "bfloat16"))
    assert dtypes([], ("float32", "float32")) == dtypes([], ("float32", "")) == ""


def test_other_tokens_are_an_error():
    with pytest.raises(HookError, match=r"norm is \(3, 2\) in the rollout and \(4, 2\) in training"):
        compare_states({"norm": torch.zeros(3, 2)}, {"norm": torch.zeros(4, 2)})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_states_that_are_not_finite_are_counted_on_their_side_and_named(value):
    def states():
        return {"0.attention": torch.ones(3, 2), "0.router": torch.eye(3), "norm": torch.ones(3, 2)}

    rollout, train = states(), states()
    rollout["0.router"][1, 0] = value
    train["norm"][:] = value
    places = compare_states(rollout, train, TOP_K)
    assert [(place.rollout_not_finite, place.train_not_finite) for place in places] == [(0, 0), (1, 0), (0, 3)]
    assert [place.error for place in places] == [0, 0, None]
    assert (places[1].differs, places[1].weight_gap, places[2].differs) == (0, 0, None)
    assert start_of(places) == "0.router" and start_of(places[2:]) == "norm"


@pytest.fixture(scope="module")
def sparse_model():
    """GLM-5's architecture: an indexer chooses four positions for each token to attend to."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 8, "n_routed_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8}
    widths = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4}
    layers = {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"], "indexer_types": ["full"] * 3}
    config = GlmMoeDsaConfig(vocab_size=64, num_experts_per_tok=TOP_K, **sizes, **heads, **widths, **layers)
    return GlmMoeDsaForCausalLM(config).eval()


def indexer_in_bf16(model):
    def rounded(module, inputs):
        return (inputs[0].bfloat16().float() + 0.1, *inputs[1:])

    model.layers[1].self_attn.indexer.register_forward_pre_hook(rounded)


def test_an_indexer_that_chooses_other_positions_is_where_it_starts(sparse_model):
    places = compared(sparse_model, indexer_in_bf16)
    assert start_of(places) == "1.indexer"
    by_point = {place.point: place for place in places}
    assert by_point["0.indexer"].error == by_point["0.indexer"].differs == 0
    found = by_point["1.indexer"]
    assert 0 < found.error < found.differs <= 1, "of four positions, some are other ones"
    assert by_point["1.attention"].error > 0 and found.weight_gap is None


def test_positions_that_both_had_to_take_are_no_choice():
    ours = torch.tensor([[0, -1], [1, 0], [2, 0], [3, 1], [-1, -1]]).float()  # the last: vLLM did not score a short one
    theirs = torch.tensor([[0, -1], [0, 1], [2, 1], [3, 1], [0, 1]]).float()
    (place,) = compare_states({"0.indexer": ours}, {"0.indexer": theirs})
    assert (place.error, place.differs) == (pytest.approx(1 / 6), pytest.approx(1 / 3))
    (place,) = compare_states({"0.indexer": torch.full((2, 4), -1.0)}, {"0.indexer": theirs[:2]})
    assert (place.error, place.differs) == (0, 0)
