"""Each correction against its formula in plain Python, against verl's own, and in `measure`."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.closeness import close
from tests.support.measure_oracle import CHOICES, OF_SEQUENCES, OF_TOKENS, ratio
from verl_ext.base.errors import MethodError
from verl_ext.core.corrections import CORRECTIONS, Weights, register_correction
from verl_ext.core.measure import measure
from verl_ext.core.tokens import Tokens

# Log-probabilities of both engines: anywhere, and near each other.
LOG_PROB = st.floats(-100, 0) | st.floats(-2, 0)
LOG_PROBS = st.lists(st.tuples(LOG_PROB, LOG_PROB), min_size=1, max_size=50)
# Each correction, with settings: those that the oracle of `measure` has alone.
ALONE = [(name, settings) for choice in CHOICES if choice and len(choice) == 1 for name, settings in choice.items()]
alone = pytest.mark.parametrize(("name", "settings"), ALONE)


def weigh(name, *quantities, **settings):
    found = CORRECTIONS[name].function(*(torch.tensor(q, dtype=torch.float64) for q in quantities), **settings)
    return found.weight.tolist(), found.low.tolist(), found.high.tolist()


@alone
@given(LOG_PROBS)
def test_a_weight_is_its_formula(name, settings, log_probs):
    gaps = [old - infer for infer, old in log_probs]
    quantities = {
        "k": [ratio(gap) for gap in gaps],
        "p_infer": [math.exp(infer) for infer, _ in log_probs],
        "p_old": [math.exp(old) for _, old in log_probs],
        "log_rho": gaps,
        "log_g": gaps,
    }
    if name in OF_TOKENS:
        expected = [OF_TOKENS[name](gap, *pair, **settings) for gap, pair in zip(gaps, log_probs, strict=True)]
    else:
        expected = [OF_SEQUENCES[name](gap, gap, **settings) for gap in gaps]
    weight, low, high = weigh(name, *(quantities[read] for read in CORRECTIONS[name].reads), **settings)
    weights, is_low, is_high = zip(*expected, strict=True)
    assert weight == pytest.approx(weights, rel=1e-14)
    assert (low, high) == ([*is_low], [*is_high])


@alone
def test_what_weighs_by_the_ratio_says_so(name, settings):
    """Two such corrections would count the ratio twice, and are refused together."""
    correction, small = CORRECTIONS[name], 1e-4  # inside all bounds
    values = {"k": math.exp(small), "p_infer": 0.5, "p_old": 0.5 * math.exp(small), "log_rho": small, "log_g": small}
    (weight,), _, _ = weigh(name, *([values[quantity]] for quantity in correction.reads), **settings)
    kind = correction.settings(**settings)
    assert correction.weighs_by_ratio(kind) == (weight != 1), "register_correction(..., by_ratio=True)"


def test_bounds_are_inclusive():
    assert weigh("icepop", [0.5, 5.0], alpha=0.5, beta=5.0)[0] == [0.5, 5.0]
    assert weigh("tis", [2.0], cap=2.0) == ([2.0], [0.0], [0.0])
    assert weigh("tis_sequence", [0.0], cap=1.0) == ([1.0], [0.0], [0.0])
    assert weigh("mis", [0.0], cap=1.0, weight="ratio") == ([1.0], [0.0], [0.0])
    assert weigh("geo_mask", [0.0], low=1.0, high=1.0) == ([1.0], [0.0], [0.0])
    assert weigh("kpop", [1.0], [0.25], [0.25], phi=0.0) == ([1.0], [0.0], [0.0])
    assert weigh("ipo", [1.5, 0.5], [0.5, 0.5], [0.75, 0.25], eps=0.25)[0] == [1.5, 0.5]


def test_kpop_is_wide_in_ratio_for_rare_tokens_and_tight_for_confident_ones():
    infer, old = [0.0001, 0.99], [0.001, 0.8]
    weight, _, _ = weigh("kpop", [10.0, 0.8 / 0.99], infer, old, phi=0.1)
    assert weight == [10.0, 0.0]


def test_ipo_keeps_rare_tokens_whatever_their_ratio():
    weight, low, _ = weigh("ipo", [10.0, 0.6 / 0.99], [0.0001, 0.99], [0.001, 0.6], eps=0.3)
    assert (weight, low) == ([10.0, 0.0], [0.0, 1.0])


@alone
def test_nan_weighs_0_and_is_on_neither_side(name, settings):
    quantities = [[math.nan] for _ in CORRECTIONS[name].reads]
    assert weigh(name, *quantities, **settings) == ([0.0], [0.0], [0.0])


def test_an_infinite_ratio_is_high():
    assert weigh("icepop", [math.inf], alpha=0.5, beta=5.0) == ([0.0], [0.0], [1.0])
    assert weigh("tis", [math.inf], cap=2.0) == ([2.0], [0.0], [1.0])
    assert weigh("kpop", [math.nan], [0.5], [0.5], phi=0.1) == ([0.0], [0.0], [0.0])
    assert weigh("ipo", [math.inf], [0.0], [0.5], eps=0.3) == ([0.0], [0.0], [1.0])


@alone
def test_weights_carry_no_gradient(name, settings):
    ones = [torch.ones(2, requires_grad=True) for _ in CORRECTIONS[name].reads]
    assert not CORRECTIONS[name].function(*ones, **settings).weight.requires_grad
    l_old = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = Tokens(torch.tensor([-1.5, -2.0]), l_old, torch.tensor([True, True]), torch.tensor([0, 2]))
    assert not measure(tokens, {name: settings}).weight.requires_grad


def padded_batch(seed, scale=1.5):
    """Returns l_infer and l_old [8, 16], and a mask with holes and at least one token in each row."""
    generator = torch.Generator().manual_seed(seed)
    infer = -torch.rand(8, 16, generator=generator) * 5
    old = infer + torch.randn(8, 16, generator=generator) * scale
    mask = torch.rand(8, 16, generator=generator) < 0.8
    mask[:, 0] = True
    return infer, old, mask


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("level", "threshold", "name", "settings"),
    [
        ("token", "0.5_5.0", "icepop", {"alpha": 0.5, "beta": 5.0}),
        ("token", 2.0, "tis", {"cap": 2.0}),
        ("sequence", 2.0, "tis_sequence", {"cap": 2.0}),
    ],
)
def test_weights_equal_verls(seed, level, threshold, name, settings):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    infer, old, mask = padded_batch(seed)
    theirs, metrics = compute_rollout_correction_weights(old - infer, mask.float(), level, threshold)
    ours = measure(Tokens.from_padded(infer, old, mask), {name: settings})
    close(ours.weight.view_as(theirs), theirs)
    assert torch.equal(ours.weight.view_as(theirs) == 0, theirs == 0)
    assert ours.metrics["correction/weight_mean"] == pytest.approx(metrics["rollout_is_mean"], rel=1e-5)
    assert ours.metrics[f"correction/{name}/high"] == pytest.approx(metrics["rollout_is_ratio_fraction_high"], rel=1e-5)
    if name == "icepop":
        assert ours.metrics["correction/icepop/low"] == pytest.approx(
            metrics["rollout_is_ratio_fraction_low"], rel=1e-5
        )
        assert ours.metrics["correction/dropped"] == pytest.approx(metrics["rollout_is_oob_ratio"], rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_geo_mask_equals_verls_rejection_by_the_mean_of_k1(seed):
    """verl's k1 is -log k: its bounds are on 1 / g, and its low side is our high one."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    infer, old, mask = padded_batch(seed, scale=0.5)
    kept, metrics = compute_rollout_rejection_mask(old - infer, mask.float(), "seq_mean_k1", "0.95_1.2")
    ours = measure(Tokens.from_padded(infer, old, mask), {"geo_mask": {"low": 1 / 1.2, "high": 1 / 0.95}})
    assert torch.equal(ours.weight.view_as(kept), kept)
    assert 0 < ours.metrics["correction/dropped"] < 1
    for our_name, their_name in {
        "dropped": "rollout_rs_masked_fraction",
        "sequences_dropped": "rollout_rs_seq_masked_fraction",
        "geo_mask/low": "rollout_rs_seq_mean_k1_fraction_high",
        "geo_mask/high": "rollout_rs_seq_mean_k1_fraction_low",
    }.items():
        assert ours.metrics[f"correction/{our_name}"] == pytest.approx(metrics[their_name], rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_metrics_equal_verls(seed):
    """verl computes in float32. Its ESS is that of the truncated weights: with a cap out of reach, that of k."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    infer, old, mask = padded_batch(seed)
    _, _, metrics = compute_rollout_correction_and_rejection_mask(old, infer, mask.float(), "token", 1e9)
    ours = measure(Tokens.from_padded(infer, old, mask)).metrics
    for our_name, their_name in {
        "k1": "kl",
        "k3": "k3_kl",
        "chi2": "chi2_token",
        "ess": "rollout_is_eff_sample_size",
        "sequence_gap_mean": "log_ppl_abs_diff",
    }.items():
        theirs = metrics[f"rollout_corr/{their_name}"]
        close(ours[f"vllm_kl/{our_name}"], theirs, scale=max(1.0, abs(theirs)), name=our_name)


@pytest.fixture
def own_correction():
    """Flags sequences below a floor and leaves their weight at 1."""

    @register_correction("flag_low", reads=("log_g", "log_rho"))
    def flag_low(log_g, log_rho, floor):
        low = (torch.minimum(log_g, log_rho) < floor).double()
        return Weights(torch.ones_like(log_g), low, torch.zeros_like(log_g))

    yield
    del CORRECTIONS["flag_low"]


@pytest.mark.parametrize("block", [None, 2])
def test_a_users_own_correction_works_in_measure(own_correction, block):
    log_k = torch.tensor([-1.0, -3.0, 0.0, 3.0, -9.0, 2.0])  # mean of the first three -4/3, of the others -4/3 too
    tokens = Tokens(torch.full((6,), -10.0), log_k - 10, torch.ones(6, dtype=torch.bool), torch.tensor([0, 3, 6]))
    found = measure(tokens, {"icepop": {"alpha": 0.5, "beta": 5.0}, "flag_low": {"floor": -1.0}}, block=block)
    assert found.weight.tolist() == [0, 0, 1, 0, 0, 0]
    assert found.metrics["correction/flag_low/low"] == 1
    # The two that are high for icepop are in a sequence that is low: "below the bounds of a correction".
    assert found.metrics["correction/dropped_low"] == pytest.approx(5 / 6)


def _weights(weight):
    return lambda value: Weights(weight(value), torch.zeros_like(value), torch.zeros_like(value))


BROKEN = {
    "nan": _weights(lambda value: torch.where(value == value.max(), torch.nan, 1.0)),
    "infinite": _weights(lambda value: value / 0),
    "negative": _weights(lambda value: value - 5),
    "a mean": _weights(lambda value: value.mean()),
    "too few": _weights(lambda value: value[:1]),
    "low of another shape": lambda value: Weights(value, value.mean(), torch.zeros_like(value)),
    "no Weights": lambda value: value,
}


@pytest.mark.parametrize("quantity", ["k", "log_g"])
@pytest.mark.parametrize("broken", BROKEN)
@mock.patch.dict(CORRECTIONS)
def test_weights_that_cannot_be_used_are_refused_by_the_corrections_name(broken, quantity):
    register_correction("mine", reads=(quantity,))(BROKEN[broken])
    l_infer, l_old = torch.full((4,), -3.0), torch.tensor([-2.5, -2.0, -2.5, -1.5])
    tokens = Tokens(l_infer, l_old, torch.ones(4, dtype=torch.bool), torch.tensor([0, 2, 4]))
    with pytest.raises(MethodError, match=r"^stability\.correction=mine returned [^\n]*$"):
        measure(tokens, {"icepop": {"alpha": 0.5, "beta": 5.0}, "mine": {}})


@pytest.mark.parametrize(
    ("name", "reads", "message"),
    [
        ("icepop", ("k",), "icepop is registered already"),
        ("mine", ("k", "log_rho"), "not from both"),
        ("mine", ("entropy",), "reads .'entropy',.; choose from"),
        ("mine", (), "choose from"),
    ],
)
def test_register_refuses(name, reads, message):
    with pytest.raises(ValueError, match=message):
        register_correction(name, reads=reads)(lambda *quantities: None)
    assert "mine" not in CORRECTIONS
