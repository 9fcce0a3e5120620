"""Regimes in which the rollout computes another function, returns other numbers, or gets part of an update."""

from itertools import pairwise

import pytest
import torch

from tests.unit.lab.test_regimes import planted
from verl_ext.lab.model import (
    FLOAT32_BITS,
    ModelSettings,
    RolloutEngine,
    _seen_in_blocks,
    _with_bits,
    init_weights,
    rollout_log_probs,
    sample_responses,
)
from verl_ext.lab.regimes import History
from verl_ext.lab.tasks import END, VOCABULARY, GraderSettings

MODEL = ModelSettings(layers=3)
PROMPT, LENGTH, ROWS = 5, 12, 64


def weights_of(seed):
    return init_weights(MODEL, VOCABULARY, PROMPT + LENGTH + 2, torch.Generator().manual_seed(seed))


def history(*versions):
    found = History(lambda update, now: False)
    for weights in versions:
        found.add(weights)
    return found


FIRST, LAST = weights_of(0), weights_of(1)
PROMPTS = torch.randint(0, 10, (ROWS, PROMPT), generator=torch.Generator().manual_seed(2))


def sampled(engine):
    return sample_responses(engine, MODEL, PROMPTS, LENGTH, torch.Generator().manual_seed(3))


def under(regimes):
    return regimes.engine(history(LAST))


EXACT = RolloutEngine((LAST,))
SAMPLES = sampled(EXACT)


def scored(engine):
    return rollout_log_probs(engine, MODEL, PROMPTS, SAMPLES.responses)


@pytest.mark.parametrize(
    ("regime", "stays"),
    [
        (planted(partial_sync={}), lambda name: name.startswith("0.")),
        (planted(partial_sync=dict(layers=2)), lambda name: name[:2] in ("0.", "1.")),
        (planted(partial_sync=dict(layers=-1, names="up+down")), lambda name: name.endswith((".up", ".down"))),
    ],
)
def test_a_partial_sync_leaves_its_weights_as_they_were(regime, stays):
    (part,) = regime.engine(history(FIRST, LAST)).parts
    for name, value in part.items():
        assert torch.equal(value, (FIRST if stays(name) else LAST)[name]), name


def test_a_scaled_update_goes_so_far_from_the_first_weights():
    (part,) = planted(scaled_update=dict(scale=0.3)).engine(history(FIRST, LAST)).parts
    for name, value in part.items():
        torch.testing.assert_close(value, 0.7 * FIRST[name] + 0.3 * LAST[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["permuted", "neighbour"])
def test_wrong_weights_are_those_of_one_layers_experts(kind):
    (part,) = under(planted(wrong_weights=dict(layer=1, kind=kind))).parts
    changed = {name for name, value in part.items() if not torch.equal(value, LAST[name])}
    assert changed == {"1.up", "1.down"}
    assert torch.equal(part["1.up"], LAST["1.up"].roll(1, 0) if kind == "permuted" else LAST["0.up"])


def test_raw_log_probs_are_of_another_temperature_than_the_tokens():
    found = sampled(under(planted(raw_log_probs=dict(temperature=2.0))))
    assert torch.equal(found.responses, SAMPLES.responses)
    expected = scored(RolloutEngine((LAST,), temperature=2.0))
    torch.testing.assert_close(found.l_infer, expected)


def test_a_routers_dtype_changes_near_ties_alone_and_a_bias_any_choice():
    kept = SAMPLES.mask[:, 1:]

    def same(regime):
        mine, theirs = (run.experts[:, PROMPT : PROMPT + LENGTH - 1].sort(-1).values for run in (regime, SAMPLES))
        together = (regime.responses == SAMPLES.responses).cumprod(1).bool()[:, :-1] & kept  # as long as they agree
        return (mine == theirs).all(-1).float()[together].mean().item()

    near, biased = (
        same(sampled(under(planted(router_dtype={})))),
        same(sampled(under(planted(router_bias=dict(scale=1.0))))),
    )
    assert biased < 0.9 < 0.98 < near <= 1


@pytest.mark.parametrize("bits", [1, 3, 8, 11, 23])
def test_kernels_keep_so_many_significant_bits(bits):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(4)) * torch.logspace(-6, 6, 1000)
    fraction, exponent = x.double().frexp()
    expected = torch.ldexp((fraction * 2**bits).round() / 2**bits, exponent)  # ties to even, as in hardware
    assert torch.equal(_with_bits(x, bits).double(), expected)


def test_attention_in_blocks_is_attention():
    q, k, v = (torch.randn(2, 3, n, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 150, 151))
    expected = ((q @ k.mT).double() / 8**0.5).softmax(-1) @ v[:, :, 1:].double()
    torch.testing.assert_close(
        _seen_in_blocks(q, k, v[:, :, 1:], FLOAT32_BITS).double(), expected, rtol=1e-4, atol=1e-6
    )


def test_the_gap_of_kernels_grows_with_what_they_round_away():
    gaps = [
        ((scored(under(planted(kernels=dict(bits=bits)))) - scored(EXACT)).abs() * SAMPLES.mask).sum().item()
        for bits in (FLOAT32_BITS, 14, 11, 8, 5)
    ]
    assert gaps[0] == 0 and all(2 * fewer < more for fewer, more in pairwise(gaps))


@pytest.mark.parametrize("regime", [planted(positions_off={}), planted(packed_leak={})])
def test_positions_and_a_leak_act_behind_the_prompt(regime):
    gap = (scored(under(regime)) - scored(EXACT)).abs() * SAMPLES.mask
    assert gap[:, 0].max() < 1e-5, "the first token is the prompt's to predict"
    assert gap[:, 1:].max() > 0.1


def test_a_share_of_the_tokens_is_respelled_and_never_the_end():
    found = sampled(under(planted(respelled=dict(share=0.2))))
    other = (found.responses != SAMPLES.responses) & SAMPLES.mask
    digits = SAMPLES.mask & (SAMPLES.responses != END)
    assert not (other & ~digits).any() and (found.responses[other] != END).all()
    assert 0.15 < other.sum() / digits.sum() < 0.25
    assert torch.equal(found.l_infer, SAMPLES.l_infer), "they are of the tokens that were sampled"


def test_misrouted_trajectories_bring_the_experts_of_others():
    found = sampled(under(planted(misrouted={})))
    assert torch.equal(found.responses, SAMPLES.responses)
    assert torch.equal(found.experts, SAMPLES.experts.roll(ROWS // 2, 0))


def test_a_grader_that_is_wrong():
    right, lengths = torch.linspace(0, 1, 1000), torch.full((1000,), 0.5)

    def graded(**settings):
        return GraderSettings(**settings).grade(right, lengths, torch.Generator().manual_seed(0))

    assert torch.equal(graded(), right)
    assert torch.equal(graded(constant=True), torch.full_like(right, 0.5))
    torch.testing.assert_close(graded(length=2.0), right + 1)
    noisy = graded(noise=0.3)
    assert 0.25 < (noisy != right).float().mean() < 0.35 and noisy.min() >= 0 and noisy.max() <= 1
