"""The sampler's most likely tokens, against sums over the whole vocabulary in float64."""

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from tests.support.closeness import close
from verl_ext.core import top_tokens as under_test
from verl_ext.core.top_tokens import (
    Call,
    Divergence,
    Reading,
    TopTokens,
    centering,
    divergence,
    log_probs_at,
    read,
    top_token_metrics,
    top_token_sums,
    top_tokens_of,
    weights_of,
)

V = 11
WEIGHTS = {
    "none": {},
    "tis": {"tis": {"cap": 1.5}},
    "icepop": {"icepop": {"alpha": 0.6, "beta": 1.5}},
    "kpop": {"kpop": {"phi": 0.05}},
    "ipo": {"ipo": {"eps": 0.05}},
}


def logits_of(seed, n=6, v=V, dtype=torch.float32, scale=2.0):
    made = torch.randn(n, v, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return made.to(dtype)


def top_of(log_q_NV, k):
    """The k most likely, as vLLM returns them."""
    values, ids = log_q_NV.topk(k, dim=1)
    return TopTokens(ids, values.float())


def truncated_log_probs(logits, top_k):
    kept = logits >= logits.topk(top_k, dim=1).values[:, -1:]
    return logits.masked_fill(~kept, -torch.inf).log_softmax(1)


def exact_weight(name, k, p, q):
    """Computes the weight of one token by the formulas of the papers."""
    if name == "none":
        return 1.0
    if name == "tis":
        return min(k, 1.5)
    if name == "icepop":
        return k if 0.6 <= k <= 1.5 else 0.0
    if name == "ipo":
        return k if abs(p - q) <= 0.05 else 0.0
    p, q = (min(max(x, 1e-6), 1 - 1e-6) for x in (p, q))
    far = max(a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in ((p, q), (q, p)))
    return k if far <= 0.05 else 0.0


@given(seed=st.integers(0, 1000), n=st.integers(0, 5), k=st.integers(1, V), rows=st.sampled_from([1, 2, 100]))
def test_log_probs_at_and_their_gradient_are_those_of_log_softmax(seed, n, k, rows):
    logits = logits_of(seed, n, scale=8.0).requires_grad_()
    ids = torch.randint(0, V, (n, k), generator=torch.Generator().manual_seed(seed))  # some twice
    factors = torch.randn(n, k, generator=torch.Generator().manual_seed(seed + 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(under_test, "LOGITS_AT_ONCE", rows * V)
        found = log_probs_at(logits, ids)
        (found * factors).sum().backward()
    wanted = logits.detach().double().requires_grad_()
    expected = wanted.log_softmax(1).gather(1, ids)
    (expected * factors).sum().backward()
    close(found, expected, scale=20.0)
    close(logits.grad, wanted.grad, scale=max(1.0, float(factors.abs().sum())))


def test_half_precision_logits_are_read_in_float32():
    logits = logits_of(0, dtype=torch.bfloat16).requires_grad_()
    ids = torch.arange(6)[:, None]
    found = log_probs_at(logits, ids)
    found.sum().backward()
    assert found.dtype == torch.float32 and logits.grad.dtype == torch.bfloat16
    close(found, logits.detach().double().log_softmax(1).gather(1, ids))


@given(seed=st.integers(0, 1000), top_k=st.integers(1, V))
def test_over_the_kept_tokens_ratios_average_1_where_over_all_they_average_the_mass(seed, top_k):
    """TRL issue 7269: with p over the whole vocabulary, the mean of p / q over kept tokens is their mass under p."""
    logits = logits_of(seed)
    log_q = truncated_log_probs(logits.double(), top_k)
    top = top_of(log_q, top_k)
    for token in range(V):
        sampled = torch.full((len(logits),), token)
        can = log_q.gather(1, sampled[:, None])[:, 0] > -torch.inf
        found = read(logits, sampled, top, truncated=True)
        close(found.l_own[can], log_q[can, token], scale=10.0)
    whole = read(logits, top.ids[:, 0], top, truncated=False)
    close(whole.l_top, logits.double().log_softmax(1).gather(1, top.ids), scale=10.0)
    mass = logits.double().softmax(1).gather(1, top.ids).sum(1)
    for reading, mean in ((read(logits, top.ids[:, 0], top, truncated=True), 1), (whole, mass)):
        ratios = (reading.l_top - top.log_q).double().exp()
        close((top.log_q.double().exp() * ratios).sum(1), mean * torch.ones(len(logits)))
    entropy = -(log_q.exp() * log_q.masked_fill(log_q == -torch.inf, 0)).sum(1)
    close(found.entropy[can], entropy[can], scale=3.0)


def test_the_gradient_over_the_kept_tokens_is_that_of_their_own_softmax():
    logits = logits_of(3).requires_grad_()
    top = top_of(truncated_log_probs(logits.detach().double(), 4), 4)
    sampled = top.ids[:, 2]
    read(logits, sampled, top, truncated=True).l_own.sum().backward()
    wanted = logits.detach().double().requires_grad_()
    truncated_log_probs(wanted, 4).gather(1, sampled[:, None]).sum().backward()
    close(logits.grad, wanted.grad)


def test_a_sampled_token_that_ties_with_the_last_top_token_counts_to_them():
    logits = torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    top = TopTokens(torch.tensor([[0, 1]]), torch.tensor([[3.0, 1.0]]).log_softmax(1))
    found = read(logits, torch.tensor([2]), top, truncated=True)
    close(found.l_own, torch.tensor([3.0, 1.0, 1.0]).double().log_softmax(0)[2:])


def test_without_top_tokens_a_token_is_read_over_the_whole_vocabulary():
    logits = logits_of(1, 2).requires_grad_()
    top = TopTokens(torch.zeros(2, 3, dtype=torch.long), torch.full((2, 3), -torch.inf))
    for truncated in (True, False):
        found = read(logits, torch.tensor([4, 0]), top, truncated=truncated)
        close(found.l_own, logits.detach().double().log_softmax(1)[[0, 1], [4, 0]])
        assert found.entropy is None or found.entropy.isnan().all()  # the vocabulary's, which is not read here
        apart = divergence(found, top, truncated=truncated)
        assert apart.kl.tolist() == apart.mass.tolist() == apart.differs.tolist() == [0, 0]
        term = centering(found, top, weights_of({}), truncated=truncated)
        assert term.tolist() == [0, 0]
        (found.l_own.sum() + term.sum()).backward()
        assert logits.grad.isfinite().all()


@given(seed=st.integers(0, 1000), k=st.integers(1, V), gap=st.sampled_from([0.01, 0.3, 5.0]))
def test_the_top_tokens_kl_is_a_lower_bound_that_is_tight_where_they_are_all(seed, k, gap):
    logits = logits_of(seed)
    other = logits.double() + gap * logits_of(seed + 1).double()
    log_q, log_p = other.log_softmax(1), logits.double().log_softmax(1)
    top = top_of(log_q, k)
    found = divergence(read(logits, top.ids[:, 0], top, truncated=False), top, truncated=False)
    q, p = (x.exp().gather(1, top.ids) for x in (log_q, log_p))
    expected = (q * (q / p).log()).sum(1)
    rest_q, rest_p = ((1 - x.sum(1)).clamp(min=1e-6) for x in (q, p))
    close(found.kl, expected + rest_q * (rest_q / rest_p).log(), rtol=1e-4, scale=max(1.0, float(expected.max())))
    whole = (log_q.exp() * (log_q - log_p)).sum(1)
    assert (found.kl <= whole + 1e-4).all() and (found.kl >= -1e-4).all()
    if k == V:
        close(found.kl, whole, rtol=1e-4, scale=max(1.0, float(whole.max())))
    close(found.mass, q.sum(1), scale=1.0)
    most = log_p.gather(1, top.ids).argmax(1) != 0
    assert found.differs.bool().tolist() == most.tolist()


def test_a_kl_of_a_millionth_keeps_its_digits():
    logits = logits_of(7, n=200)
    log_q = (logits.double() + 1e-3 * logits_of(8, n=200).double()).log_softmax(1)
    top = top_of(log_q, V)
    expected = (log_q.exp() * (log_q - logits.double().log_softmax(1))).sum(1).mean()
    found = divergence(read(logits, top.ids[:, 0], top, truncated=False), top, truncated=False).kl.mean()
    assert 1e-7 < expected < 5e-6
    close(found, expected, rtol=0.05)


@pytest.mark.parametrize("name", WEIGHTS)
@given(seed=st.integers(0, 1000), truncated=st.booleans(), top_k=st.integers(2, V))
def test_a_centered_score_has_no_mean_under_the_sampler(name, seed, truncated, top_k):
    """Over all tokens that the sampler can take: sum of q(y) [w(y) grad log p(y) - grad of the term] is 0."""
    logits = logits_of(seed).requires_grad_()
    other = logits_of(seed).double() + 0.4 * logits_of(seed + 1).double()
    log_q = truncated_log_probs(other, top_k) if truncated else other.log_softmax(1)
    top = top_of(log_q, top_k if truncated else V)
    found = read(logits, top.ids[:, 0], top, truncated=truncated)
    (mean,) = torch.autograd.grad(
        centering(found, top, weights_of(WEIGHTS[name]), truncated=truncated).sum(), logits, retain_graph=True
    )
    whole = logits.detach().double().requires_grad_()
    log_p = whole.masked_fill(log_q == -torch.inf, -torch.inf).log_softmax(1)
    expected = 0
    for n in range(len(logits)):
        for v in (log_q[n] > -torch.inf).nonzero()[:, 0].tolist():
            q, p = log_q[n, v].exp().item(), log_p[n, v].exp().item()
            w = exact_weight(name, p / q, p, q)
            expected = expected + q * w * log_p[n, v]
    (wanted,) = torch.autograd.grad(expected, whole)
    near = torch.tensor([abs(k - bound) for k in (log_p - log_q).exp().flatten().tolist() for bound in (0.6, 1.5)])
    if name in ("none", "tis") or near.nan_to_num(1).min() > 1e-5:  # a token on a bound falls on either side of it
        close(mean, wanted, rtol=1e-4, scale=1.0)


@pytest.mark.parametrize("name", ["none", "tis", "icepop"])
def test_of_a_tail_in_proportion_the_top_tokens_alone_give_the_whole_mean(name):
    """In the tail q is 1.25 p; the top tokens show only the tail's mass."""
    logits = logits_of(5).requires_grad_()
    log_p = logits.detach().double().log_softmax(1)
    order = log_p.argsort(1, descending=True)
    ids, rest = order[:, :4], order[:, 4:]
    p = log_p.exp()
    q = torch.zeros_like(p).scatter(1, rest, p.gather(1, rest) * 1.25)
    left = 1 - q.sum(1, keepdim=True)
    tilted = p.gather(1, ids) * torch.tensor([1.1, 0.9, 1.0, 0.8])
    q = q.scatter(1, ids, tilted / tilted.sum(1, keepdim=True) * left)
    top = TopTokens(ids, q.gather(1, ids).log().float())
    found = read(logits, ids[:, 0], top, truncated=False)
    (mean,) = torch.autograd.grad(centering(found, top, weights_of(WEIGHTS[name]), truncated=False).sum(), logits)
    w = torch.tensor(
        [
            [exact_weight(name, a / b, a, b) for a, b in zip(*rows, strict=True)]
            for rows in zip(p.tolist(), q.tolist(), strict=True)
        ]
    )
    whole = logits.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad((q * w * whole.log_softmax(1)).sum(), whole)
    close(mean, wanted, rtol=1e-3, scale=1.0)


def test_an_importance_weight_without_a_cap_leaves_nothing_to_center():
    """sum of q (p / q) grad log p = sum of p grad log p = 0."""
    logits = logits_of(2).requires_grad_()
    top = top_of((logits.detach().double() + logits_of(4).double()).log_softmax(1), 5)
    term = centering(
        read(logits, top.ids[:, 0], top, truncated=False), top, weights_of({"tis": {"cap": 1e9}}), truncated=False
    )
    (mean,) = torch.autograd.grad(term.sum(), logits)
    assert mean.abs().max() < 1e-5


def test_weights_and_masses_are_constants():
    logits = logits_of(2)
    l_top = logits.log_softmax(1)[:, :4].requires_grad_()
    top = TopTokens(torch.arange(4).expand(6, 4), logits_of(3).log_softmax(1)[:, :4])
    term = centering(Reading(l_top[:, 0], l_top), top, weights_of(WEIGHTS["tis"]), truncated=True)
    (found,) = torch.autograd.grad(term.sum(), l_top)
    q, p = top.log_q.double().exp(), l_top.detach().double().exp()
    close(found, q * (p / q).clamp(max=1.5))


class TwoRanks:
    """Two threads, each with one half of the vocabulary; the functions of torch.distributed that they call."""

    def __init__(self):
        self.barrier, self.rank, self.given = Barrier(2, timeout=60), local(), [None, None]

    def run(self, work):
        """Returns work(rank) of both."""

        def begin(rank):
            self.rank.value = rank
            return work(rank)

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(begin, range(2)))

    def get_rank(self, group):
        return self.rank.value

    def all_reduce(self, tensor, op=ReduceOp.SUM, group=None):
        self.given[self.rank.value] = tensor.clone()
        self.barrier.wait()
        tensor.copy_(torch.maximum(*self.given) if op == ReduceOp.MAX else sum(self.given))
        self.barrier.wait()


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_a_vocabulary_that_two_ranks_share_is_read_as_one(monkeypatch, scale):
    ranks, half = TwoRanks(), 5
    monkeypatch.setattr(under_test, "get_rank", ranks.get_rank)
    monkeypatch.setattr(under_test, "all_reduce", ranks.all_reduce)
    whole = logits_of(9, v=2 * half, scale=scale)
    ids = torch.tensor([0, half - 1, half, 2 * half - 1, half]).expand(len(whole), -1)  # the ends of both halves

    def work(rank):
        part = whole[:, rank * half : (rank + 1) * half].clone().requires_grad_()
        found = log_probs_at(part, ids, group="of both")
        (found * torch.arange(1.0, 6.0)).sum().backward()
        return found.detach(), part.grad

    (one, grad_one), (other, grad_other) = ranks.run(work)
    wanted = whole.double().requires_grad_()
    expected = wanted.log_softmax(1).gather(1, ids)
    (expected * torch.arange(1.0, 6.0)).sum().backward()
    close(one, expected, scale=scale)
    assert torch.equal(one, other)
    close(torch.cat([grad_one, grad_other], 1), wanted.grad, scale=15.0)


SEQUENCE = st.lists(st.integers(1, 3), min_size=1, max_size=8)
CALL = st.tuples(st.integers(0, 8), st.integers(0, 5), st.none() | st.integers(0, 8))


@given(sequence=SEQUENCE, cut=st.integers(0, 7), given_calls=st.lists(CALL, max_size=3))
@example(sequence=[1, 2, 3, 1, 2], cut=2, given_calls=[(2, 3, None), (4, 1, None)])
@example(sequence=[1, 2, 3, 1, 2], cut=2, given_calls=[(1, 4, None), (3, 2, 4)])
def test_a_place_has_the_top_tokens_of_the_last_call_that_generated_its_token_after_the_same_ones(
    sequence, cut, given_calls
):
    """A call continues the sequence from a place on; some have another token at one place of prompt and answer."""
    prompt, response, calls = sequence[:cut], sequence[cut:], []
    for number, (start, length, changed) in enumerate(given_calls, 1):
        whole = [9 if place == changed else token for place, token in enumerate([*sequence, 9, 9][: start + length])]
        tokens = whole[start:]
        rows = np.arange(len(tokens))[:, None] + 10.0 * number
        calls.append(Call(whole[:start], tokens, rows.astype(np.int32), -rows.astype(np.float32)))
    expected = [None] * len(response)
    for call in calls:
        for n in range(1, len(call.tokens) + 1):
            place = len(call.prompt) + n - 1 - len(prompt)
            together = [*call.prompt, *call.tokens[:n]]
            if place >= 0 and sequence[: len(together)] == together:
                expected[place] = int(call.ids[n - 1, 0])
    ids, log_q = top_tokens_of(calls, prompt, response, 1)
    assert (ids.dtype, log_q.dtype) == (torch.int32, torch.float32) and ids.shape == log_q.shape == (len(response), 1)
    assert ids[:, 0].tolist() == [found or 0 for found in expected]
    assert log_q[:, 0].tolist() == [-math.inf if found is None else -found for found in expected]


PLACE = st.tuples(st.booleans(), st.booleans(), st.floats(0, 9), st.floats(0, 1), st.sampled_from([0.0, 1.0]))


@given(st.lists(st.lists(PLACE, max_size=4), min_size=1, max_size=4))
def test_the_metrics_are_means_over_the_generated_tokens_that_have_top_tokens(trajectories):
    """A place: whether the model generated its token, whether it has top tokens, and its divergence."""
    places = [place for trajectory in trajectories for place in trajectory]
    mask, known, kl, mass, differs = (torch.tensor([place[i] for place in places]) for i in range(5))
    offsets = torch.tensor([0, *map(len, trajectories)]).cumsum(0)
    sums = top_token_sums(Divergence(kl, mass, differs), known.bool(), mask.bool(), offsets)
    generated = [place for place in places if place[0]]
    counted = [place for place in generated if place[1]]
    expected = {"vllm_kl/head_missing": 1 - len(counted) / len(generated)} if generated else {}
    for name, index in (("head", 2), ("head_mass", 3), ("head_differs", 4)):
        if counted:
            expected[f"vllm_kl/{name}"] = math.fsum(place[index] for place in counted) / len(counted)
    assert top_token_metrics(sums) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert sums.shape == (len(trajectories), 5)
    assert sums[:, 0].tolist() == [sum(place[0] for place in trajectory) for trajectory in trajectories]
