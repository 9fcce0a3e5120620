"""Decisions about a batch, from tensors and scalars only."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from verl_ext.core.filters import FilterBatch
from verl_ext.core.mismatch import sums_by_sign
from verl_ext.core.tokens import Lag, Tokens
from verl_ext.features.feature import Demand, Need, RunFeatures
from verl_ext.features.stability import stability_config
from verl_ext.guard.state import Event
from verl_ext.trainer.guard_actions import GuardActions, build_guard
from verl_ext.trainer.step import Outcome, Step

SIGNALS = {"critic/score/mean": 1.0}


class Whole:
    """A batch of one response in memory; `put` has the fields that the step has written, in order."""

    def __init__(self, tokens):
        self.tokens, self.put_fields = tokens, []

    def blocks(self, *, by_sign):
        yield "all", self.tokens

    def put(self, block, fields):
        assert block == "all"
        self.put_fields.append(fields)

    def sums_by_sign(self):
        return sums_by_sign(self.tokens, torch.ones(len(self.tokens.mask)))

    def views(self, *, weighed):
        n = len(self.tokens.mask)
        view = FilterBatch(self.tokens, ["a_0_0"], torch.ones(1), torch.ones(n), torch.ones(n).long(), 9, frozenset())
        yield "all", view, self.put_fields[-1]["rollout_is_weights"] if weighed else None


@pytest.fixture
def decided():
    """decided(settings, log_k, due=...) -> the decision in step 7 on a response whose tokens have these log k."""

    def run(settings, log_k, *, due=None, lag=None, our_loss=True):
        stability = stability_config(settings)
        guard = build_guard(stability)
        guard.begin(7)
        actions = GuardActions(guard, "/no/such/folder")
        actions.stop = due and Event(6, "r", "", None, None, "stop", due)
        l_infer = torch.full((len(log_k),), -2.0)
        mask, offsets = torch.ones(len(log_k), dtype=torch.bool), torch.tensor([0, len(log_k)])
        batch = Whole(Tokens(l_infer, l_infer + torch.tensor(log_k), mask, offsets, lag=lag))
        masks = bool(stability.filters) or stability.denominator == "kept"
        on = {Need.LOSS_MASK: masks, Need.OUR_LOSS: our_loss}
        needs = frozenset(need for need, is_on in on.items() if is_on)
        features = RunFeatures(OmegaConf.create(), stability, (Demand("all", needs),))
        step, metrics = Step(features, guard, actions), dict(SIGNALS)
        step.measure(batch, metrics)
        outcome = step.settle(batch, metrics)
        return SimpleNamespace(outcome=outcome, metrics=metrics, batch=batch, step=step, guard=guard)

    return run


def test_what_is_measured_is_added_to_the_metrics_of_the_step(decided):
    result = decided({"metrics": True}, [0.0, 0.1])
    assert result.metrics.items() >= SIGNALS.items()
    assert "vllm_kl/k3" in result.metrics and "vllm_kl/k3/advantage/positive" in result.metrics
    assert result.outcome == result.step.outcome == Outcome()
    assert result.batch.put_fields == []
    with pytest.raises(AttributeError):
        result.outcome.refused = "frozen"


def test_what_is_due_refuses_a_batch_that_nothing_else_speaks_against(decided):
    refused = decided({"metrics": True}, [0.0], due="the reward fell").outcome.refused
    assert (refused.step, refused.rule, refused.action) == (7, "due", "skip")
    assert refused.reason == "a rollback or stop is due: the reward fell"


def test_the_guards_own_reason_stands_before_what_is_due(decided):
    refused = decided({"batch_skip": {"threshold": 0.1}}, [1.0], due="the reward fell").outcome.refused
    assert refused.rule == "batch_skip"


def test_a_rule_that_fires_narrows_the_band_of_the_batch_that_it_fires_at(decided):
    rule = {"signal": "vllm_kl/k3", "above": 0.01, "action": "tighten"}
    band = {"correction": "icepop", "icepop": {"alpha": 0.5, "beta": 1.44}}
    log_k = [0.3, 0.1]  # k = 1.35 lies in the band, and outside of its square root
    result = decided(band, log_k)
    assert result.metrics["correction/dropped"] == 0 and not result.outcome.narrowed
    result = decided(band | {"guard": {"rules": {"gap": rule}}}, log_k)
    assert result.metrics["correction/dropped"] == 0.5 and result.outcome.narrowed
    assert result.metrics["guard/tightened"] == 1
    wide, narrow = (fields["rollout_is_weights"].tolist() for fields in result.batch.put_fields)
    assert wide == pytest.approx([1.35, 1.105], rel=1e-3) and narrow == pytest.approx([0, 1.105], rel=1e-3)


def test_only_the_corrections_weights_go_to_the_loss_and_the_lag_where_it_is_read(decided):
    lag = Lag(torch.tensor([2]), torch.tensor([2]))
    (fields,) = decided({"correction": "icepop"}, [0.0, 0.0], lag=lag).batch.put_fields
    assert fields["version_lag"].tolist() == [2, 2] and fields["rollout_is_weights"].tolist() == [1, 1]
    assert decided({"metrics": True}, [0.0, 0.0], lag=lag, our_loss=False).batch.put_fields == []


def test_it_knows_nothing_of_verl_ray_or_the_queue():
    known = "import sys, verl_ext.trainer.step; print(*{'verl', 'ray', 'transfer_queue'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", known], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
