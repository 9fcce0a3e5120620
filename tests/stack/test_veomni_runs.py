"""Whole runs that train with VeOmni, on two ranks: verl's trainer, Ray, our workers; vLLM generates."""

import importlib.util
import re

import pytest

from tests.stack.faults import CANARY
from tests.stack.run_files import events, logged_events
from tests.stack.running import FLOAT32_HEADS, SMALL, assert_documented, assert_load_is_of, run
from verl_ext.report.trajectories import read_trajectories

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("veomni") is None, reason="bash tools/setup_cpu.sh veomni"),
]

RECIPE = ("recipe=cpu_veomni", *SMALL[1:])


@pytest.fixture
def train(assets, stack, tmp_path):
    """train(overrides...) -> the finished Run of two steps."""

    def train(*overrides):
        settings = (*RECIPE, f"assets={assets}", "trainer.total_training_steps=2", *overrides)
        finished = run(["-m", "verl_ext.main_ppo", *settings], tmp_path, stack)
        assert finished.code == 0, finished.tail
        assert len(finished.steps) == 2
        assert_documented(finished)
        for step in finished.steps:
            assert 0 < step["vllm_kl/k3"] < 1e-3 and step["guard/skipped"] == 0 < step["actor/grad_norm"]
        return finished

    return train


def test_router_agreement_replay_and_the_canary(train, tmp_path):
    finished = train(
        "stability=icepop",
        "stability.router_agreement=true",
        "stability.replay=R2",
        "stability.top_tokens.k=8",
        "stability.trajectories.per_step=2",
        "stability.cascade_attention=off",
        "stability.float32_head=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",  # in the second update, the routers have moved
        "stability.sync_check={every:1}",
        CANARY,
    )
    assert events(tmp_path) == []
    assert re.search(rf"float32 logits +{FLOAT32_HEADS.format(2)}", finished.console)
    assert re.search(r"router agreement +│ compute_log_prob +│ 4 x \w+ on 2 rank\(s\)", finished.console)
    for step in finished.steps:
        assert 0.9 < step["router/agreement"] < 1 == step["router/checked"]
        assert_load_is_of(step, 8)
        assert step["sync/wrong_tensors"] == 0
        assert step["router/unknown"] == step["router/invalid"] == 0
        # verl takes VeOmni's log-probabilities in bfloat16, the model's dtype, and the top tokens are read in float32.
        assert step["vllm_kl/head_missing"] == 0 and 0 < step["vllm_kl/head"] < step["vllm_kl/k3"]
        assert step["sync/moved"] > 1e-3 and 0.5 < step["sync/arrived_low"] < step["sync/arrived_high"] < 1.5
    assert len(read_trajectories(tmp_path / "verl_ext" / "cpu_veomni.trajectories.jsonl")[0]) == 2 * 2


def test_moe_replays_the_rollouts_experts_in_the_update_alone(train):
    finished = train("stability=moe", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "data.train_batch_size=8")
    assert re.search(r"old log-probs +│ of the update's own pass", finished.console)
    assert re.search(r"router agreement +│ update_actor +│ 4 x \w+ on 2 rank\(s\)", finished.console)
    for step in finished.steps:
        assert_replayed(step)
        assert "timing_s/old_log_prob" not in step or step["timing_s/old_log_prob"] < 0.1


def assert_replayed(step):
    """The update uses the rollout's experts, of which the routers would have chosen most."""
    assert step["router/agreement"] == 1 > step["router/own_agreement"] > 0.9
    assert step["router/unknown"] == step["router/invalid"] == 0
    assert 0.9 < step["actor/router_own_agreement"] < 1


def test_moe_with_filters_and_each_update_is_undone(train, tmp_path):
    finished = train(
        "stability=moe",
        "stability.filters=[overlong,zero_variance]",
        "data.max_response_length=32",  # some responses end before it: of so many prompts, surely those of 4, which the
        "data.train_batch_size=32",  # canary needs
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "stability.guard.mini_batch={grad_norm:1.0e+30,policy_kl:1.0,vllm_kl:1.0}",  # which only measures
        "stability.guard.after_update.trajectories=8",
        "stability.guard.rules={moved:{signal:actor/after_update/policy_kl,above:0,action:undo}}",
        CANARY,
    )
    assert re.search(r"routing replay +│ R3", finished.console)
    assert [event[1:] for event in logged_events(tmp_path)].count(("moved", "undo")) == 2
    assert [step["guard/undos"] for step in finished.steps] == [1, 2]
    for step in finished.steps:
        assert_replayed(step)
        assert step["actor/after_update/policy_kl"] > 0 == step["sync/moved"], "the weights are those from before it"
        assert step["actor/gate/grad_norm"] == pytest.approx(step["actor/grad_norm"], rel=1e-4)
