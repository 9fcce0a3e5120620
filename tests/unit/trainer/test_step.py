"""What is decided about a batch, from tensors and scalars alone."""

import pytest
import torch

from verl_ext.core.tokens import Tokens
from verl_ext.features.stability import stability_config
from verl_ext.trainer.guarding import build_guard
from verl_ext.trainer.step import Whole, judge, loss_weights

SIGNALS = {"critic/score/mean": 1.0}


@pytest.fixture
def judged():
    """judged(settings, log_k, due=...) -> what is decided in step 7 about a response whose tokens have these log k."""

    def run(settings, log_k, **due):
        stability = stability_config(settings)
        guard = build_guard(stability)
        guard.begin(7)
        l_infer = torch.full((len(log_k),), -2.0)
        mask, offsets = torch.ones(len(log_k), dtype=torch.bool), torch.tensor([0, len(log_k)])
        tokens = Tokens(l_infer, l_infer + torch.tensor(log_k), mask, offsets)
        return judge(Whole(tokens), SIGNALS, stability, guard, **due)

    return run


def test_what_is_passed_in_is_left_alone_and_comes_back_with_what_was_measured(judged):
    before = dict(SIGNALS)
    result = judged({"metrics": True}, [0.0, 0.1])
    assert before == SIGNALS and result.metrics.items() >= SIGNALS.items()
    assert "vllm_kl/k3" in result.metrics
    assert result.decision.refusal is None


def test_what_is_due_refuses_a_batch_that_nothing_else_speaks_against(judged):
    refused = judged({"metrics": True}, [0.0], due="the reward fell").decision.refusal
    assert (refused.step, refused.rule, refused.action) == (7, "due", "skip")
    assert refused.reason == "a rollback or stop is due: the reward fell"


def test_the_guards_own_reason_stands_before_what_is_due(judged):
    refused = judged({"batch_skip": {"threshold": 0.1}}, [1.0], due="the reward fell").decision.refusal
    assert refused.rule == "batch_skip"


def test_a_rule_that_fires_narrows_the_band_of_the_batch_that_it_fires_at(judged):
    rule = {"signal": "vllm_kl/k3", "above": 0.01, "action": "tighten"}
    band = {"correction": "icepop", "icepop": {"alpha": 0.5, "beta": 1.44}}
    log_k = [0.3, 0.1]  # k = 1.35 lies in the band, and outside of its square root
    assert judged(band, log_k).measured.kept == 2
    result = judged(band | {"guard": {"rules": {"gap": rule}}}, log_k)
    assert result.measured.kept == 1 and result.metrics["correction/dropped"] == 0.5
    assert result.metrics["guard/tightened"] == 1


def test_the_loss_icepop_weighs_by_the_ratio_and_any_other_by_the_corrections():
    tokens = Tokens(torch.tensor([-2.0, -2.0]), torch.tensor([0.0, -2.0]), torch.ones(2).bool(), torch.tensor([0, 2]))
    weight = torch.tensor([0.0, 1.0])
    assert loss_weights(tokens, weight, loss_reads_k=False) is weight
    assert loss_weights(tokens, None, loss_reads_k=True).tolist() == pytest.approx([7.389, 1.0], rel=1e-3)
    assert loss_weights(tokens, None, loss_reads_k=False) is None
