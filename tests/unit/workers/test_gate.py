"""The gate leaves out the optimizer step of a mini-batch whose loss drops every token, and of no other.

tests/stack/gate_ranks.py has the same on two ranks of verl's FSDP2 engine.
"""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.support.micro_batches import Micro
from verl_ext.workers.gate import Gate
from verl_ext.workers.worker_loss import LossSettings, build_worker_loss

LENGTHS = (4, 6)


class Engine:
    """The log-probabilities are its parameters, which AdamW trains."""

    engine_config = SimpleNamespace(strategy="fsdp2")

    def __init__(self, batch):
        self.module = torch.nn.ParameterList(batch.leaves)
        batch.leaves = [*self.module]
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1, weight_decay=0.1)

    def is_mp_src_rank_with_outputs(self):
        return True

    def train_batch(self, data, loss_function):
        self.optimizer.zero_grad()
        loss_function(data=data)[0].backward()
        return {"metrics": {"grad_norm": self.optimizer_step()}}

    def optimizer_step(self):
        self.optimizer.step()
        return 1.0

    def lr_scheduler_step(self):
        return self.optimizer.param_groups[0]["lr"]


def batch_of(advantage, gap):
    """l_infer is above l_old by `gap` on every token."""
    old = [torch.full((n,), -2.0) for n in LENGTHS]
    rows = {
        "log_prob": old,
        "old_log_probs": old,
        "rollout_log_probs": [row + gap for row in old],
        "ref_log_prob": [row - 0.3 for row in old],
        "advantages": [torch.full((n,), advantage) for n in LENGTHS],
        "response_mask": [torch.ones(n, dtype=torch.long) for n in LENGTHS],
    }
    return Micro(rows, prompts=[1, 2])


@pytest.fixture
def moved(actor_config):
    """moved(corrections, advantage, gap, **ActorConfig) -> how far the second step moves the weights, and its metrics.

    The first step, of a batch that keeps all tokens, gives AdamW its moments.
    """

    def run(corrections, advantage, gap, **settings):
        batches = [batch_of(1.0, gap=0.0), batch_of(advantage, gap)]
        engine = Engine(batches[0])
        batches[1].leaves = batches[0].leaves
        gate = Gate(SimpleNamespace(engine=engine, train_mini_batch=lambda data: None))
        wanted = LossSettings.from_dict({"corrections": corrections})
        loss, _ = build_worker_loss(actor_config(**settings), wanted, gate)
        before = []
        for batch in batches:
            before.append(torch.cat([*engine.module]).detach().clone())
            model_output, data = batch.whole()
            outputs = engine.train_batch(data, partial(loss, model_output))
        return (torch.cat([*engine.module]) - before[-1]).abs().max().item(), outputs["metrics"]

    return run


OPSM, M2PO = {"opsm": {"delta": 0.1}}, {"m2po": {"threshold": 1e-6}}
KL = {"use_kl_loss": True, "kl_loss_type": "k1"}


@pytest.mark.parametrize(
    ("corrections", "advantage", "gap"),
    [(OPSM, -1.0, 0.5), (M2PO, -1.0, 0.5), (M2PO, 1.0, -0.5), (OPSM | M2PO, -1.0, 0.5)],
)
def test_a_step_whose_loss_drops_every_token_is_left_out(moved, corrections, advantage, gap):
    distance, metrics = moved(corrections, advantage, gap)
    assert distance == 0 and metrics == {"gate/refused": [1.0]}


@pytest.mark.parametrize(
    ("corrections", "advantage", "gap", "settings"),
    [
        (OPSM, -1.0, 0.05, {}),  # kept
        (OPSM, -1.0, 0.5, KL),  # dropped, and the KL has a gradient
        (OPSM, 0.0, 0.5, {}),  # verl's own step, by the moments alone
        ({}, 1e-25, 0.0, {}),  # a gradient whose square is 0 in float32
    ],
)
def test_every_other_step_is_taken(moved, corrections, advantage, gap, settings):
    distance, metrics = moved(corrections, advantage, gap, **settings)
    assert distance > 0 and metrics == {"grad_norm": 1.0, "gate/refused": [0.0]}


def test_the_first_mini_batch_of_an_update_measures_l_old_against_l_theta(actor_config):
    """k3 of l_theta - l_old, by the definition; later mini-batches have other weights."""
    batch = batch_of(1.0, gap=0.0)
    engine = Engine(batch)
    gate = Gate(SimpleNamespace(engine=engine, train_mini_batch=lambda data: None))
    loss, _ = build_worker_loss(actor_config(), LossSettings(), gate)
    apart = 0.25
    batch.rows["old_log_probs"] = [row + apart for row in batch.rows["old_log_probs"]]
    del batch.rows["rollout_log_probs"]  # the rollout need not return them
    found = []
    for has_l_old in (True, False):
        gate.begin_update(step=1, lr_scale=1.0, has_l_old=has_l_old)
        for _ in range(2):
            model_output, data = batch.whole()
            found.append(engine.train_batch(data, partial(loss, model_output))["metrics"])
    assert found[0]["self_gap"] == [pytest.approx(math.exp(-apart) + apart - 1, rel=1e-5)]
    assert not any("self_gap" in each for each in found[1:])
