"""The lab's rollout returns the log-probs that the same weights give when they read its tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.closeness import close
from verl_ext.lab.engine import score
from verl_ext.lab.model import (
    ModelSettings,
    RolloutEngine,
    init_weights,
    rollout_log_probs,
    sample_responses,
    truncate_logits,
)
from verl_ext.lab.tasks import END, VOCABULARY, TaskSettings, draw

MODEL, LENGTH = ModelSettings(hidden=16, expert_hidden=8), 7


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def weights():
    return init_weights(MODEL, VOCABULARY, 20, generator())


@pytest.fixture(scope="module")
def prompts():
    return draw(TaskSettings(digits=5), 64, generator(1))[0]


def sampled(engine, prompts, seed=2):
    return sample_responses(engine, MODEL, prompts, LENGTH, generator(seed))


@pytest.mark.parametrize("engine", [{}, {"dtype": torch.bfloat16}, {"temperature": 1.3}, {"top_p": 0.8}])
def test_an_engine_says_of_its_own_tokens_what_it_sampled_them_with(weights, prompts, engine):
    engine = RolloutEngine((weights,), **engine)
    found = sampled(engine, prompts)
    assert torch.equal(rollout_log_probs(engine, MODEL, prompts, found.responses), found.l_infer)


def test_an_exact_engine_says_what_training_says(weights, prompts):
    found = sampled(RolloutEngine((weights,)), prompts)
    read = score(weights, MODEL, prompts, found.responses)
    close(found.l_infer, read.log_probs * found.mask, 1e-5)
    steps = prompts.shape[1] + found.mask.sum(1) - 1  # tokens of a row that were forwarded
    for row, until in enumerate(steps.tolist()):
        assert torch.equal(found.experts[row, :until], read.routing.stacked()[row, :until])


def test_a_response_ends_with_its_end(weights, prompts):
    found = sampled(RolloutEngine((weights,)), prompts)
    for tokens, mask in zip(found.responses.tolist(), found.mask.tolist(), strict=True):
        length = sum(mask)
        assert mask == [True] * length + [False] * (LENGTH - length)
        assert END not in tokens[: length - 1] and set(tokens[length:]) <= {END}
        assert length == LENGTH or tokens[length - 1] == END
    assert 0 < found.mask.sum() < found.mask.numel()
    assert not found.l_infer[~found.mask].any()


def test_the_same_noise_gives_the_same_tokens(weights, prompts):
    engine = RolloutEngine((weights,))
    assert torch.equal(sampled(engine, prompts).responses, sampled(engine, prompts).responses)
    assert not torch.equal(sampled(engine, prompts).responses, sampled(engine, prompts, 3).responses)


def test_tokens_come_with_the_shares_that_their_log_probs_say(weights):
    prompt = draw(TaskSettings(digits=5), 1, generator(1))[0].expand(20_000, -1)
    first = sample_responses(RolloutEngine((weights,), temperature=1.5), MODEL, prompt, 1, generator(3))
    said = {}
    for token, log_prob in zip(first.responses[:, 0].tolist(), first.l_infer[:, 0].tolist(), strict=True):
        said[token] = log_prob
    for token, log_prob in said.items():
        p = math.exp(log_prob)
        share = (first.responses[:, 0] == token).double().mean().item()
        assert abs(share - p) < 6 * math.sqrt(p * (1 - p) / 20_000)


def test_parts_share_a_response_between_them(weights, prompts):
    other = {name: value * 1.5 for name, value in weights.items()}
    found = sampled(RolloutEngine((weights, other)), prompts)
    alone = sampled(RolloutEngine((weights,)), prompts)
    half = math.ceil(LENGTH / 2)
    assert torch.equal(found.l_infer[:, :half], alone.l_infer[:, :half])
    later = found.mask[:, half:] & (found.responses == alone.responses)[:, half:]
    assert (found.l_infer[:, half:] != alone.l_infer[:, half:])[later].float().mean() > 0.9


def test_bfloat16_is_near_and_not_the_same(weights, prompts):
    found = sampled(RolloutEngine((weights,), dtype=torch.bfloat16), prompts)
    read = score(weights, MODEL, prompts, found.responses)
    gap = (found.l_infer - read.log_probs)[found.mask].abs()
    assert 1e-4 < gap.mean() < 0.1


@given(st.integers(0, 2**31), st.integers(0, 9), st.floats(0.05, 1))
def test_truncation_keeps_the_top(seed, top_k, top_p):
    logits = torch.randn(4, 8, generator=generator(seed))
    kept = truncate_logits(logits, top_k, top_p).isfinite()
    for row in range(4):
        order = sorted(range(8), key=lambda token: -logits[row, token].item())[: top_k or 8]
        share = logits[row, order].double().softmax(0).tolist()
        expected, mass = set(), 0.0
        for token, p in zip(order, share, strict=True):
            if mass >= top_p - 1e-6 and top_p < 1:
                break
            expected.add(token)
            mass += p
        found = set(kept[row].nonzero().flatten().tolist())
        # Within rounding of top_p, one token more or less.
        assert found == expected or (abs(mass - top_p) < 1e-5 and len(found ^ expected) == 1)


def test_what_is_truncated_is_normalised_over_what_is_kept(weights, prompts):
    found = sampled(RolloutEngine((weights,), top_k=2), prompts)
    read = score(weights, MODEL, prompts, found.responses)
    assert (found.l_infer > read.log_probs)[found.mask].all()
    assert (found.l_infer[found.mask] <= 0).all()


@pytest.mark.parametrize("engine", [{}, {"top_p": 0.8}, {"top_k": 4}])
def test_the_top_tokens_are_of_the_distribution_that_was_sampled_from(weights, prompts, engine):
    found = sample_responses(RolloutEngine((weights,), **engine), MODEL, prompts, LENGTH, generator(2), top_tokens=128)
    mask = found.mask.flatten()
    top = found.top_tokens
    log_q = torch.empty_like(top.log_q).scatter(1, top.ids, top.log_q)  # by token
    assert torch.equal(top.present, mask)
    close(log_q[mask].exp().sum(1), torch.ones(int(mask.sum())))
    close(log_q.gather(1, found.responses.flatten()[:, None])[mask, 0], found.l_infer.flatten()[mask])
    few = sample_responses(
        RolloutEngine((weights,), **engine), MODEL, prompts, LENGTH, generator(2), top_tokens=3
    ).top_tokens
    close(few.log_q[mask], log_q[mask].topk(3, 1).values)


def test_told_of_the_kept_tokens_training_says_what_an_exact_engine_says(weights, prompts):
    found = sample_responses(RolloutEngine((weights,), top_p=0.8), MODEL, prompts, LENGTH, generator(2), top_tokens=128)
    read = score(weights, MODEL, prompts, found.responses, top=found.top_tokens, truncated=True)
    close(found.l_infer, read.log_probs * found.mask, 1e-5)
