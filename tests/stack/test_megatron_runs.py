"""Whole runs that train with Megatron, through Megatron-Bridge: Ray, vLLM, our trainers and workers."""

import re

import pytest
import torch

from recipes.cpu_smoke.make_assets import build_tokenizer
from recipes.cpu_tool.make_assets import build_model
from tests.stack.running import SMALL, assert_documented, run

pytestmark = pytest.mark.e2e

MEGATRON = "actor_rollout_ref.actor.megatron"
RECIPE = ("recipe=cpu_megatron", *SMALL[1:])
FLOAT32 = (f"{MEGATRON}.dtype=float32", "actor_rollout_ref.rollout.dtype=float32")
TWO_RANKS = ("trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=2")
TP2_EP2 = tuple(
    f"{MEGATRON}.{size}"
    for size in ("tensor_model_parallel_size=2", "expert_model_parallel_size=2", "expert_tensor_parallel_size=1")
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The recipe's, with an even vocabulary, which tensor parallelism halves, and experts that matter to a token."""
    folder = tmp_path_factory.mktemp("megatron_model")
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<spare>"])
    model = build_model(tokenizer)
    with torch.no_grad():
        # transformers starts the padding's row at 0 and gives it no gradient. Megatron does, and where <pad> is
        # sampled, the norm of a row of zeros makes that gradient a hundred times as large as all others.
        model.model.embed_tokens.weight[tokenizer.pad_token_id].normal_(0, 0.02)
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.mul_(8)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return f"actor_rollout_ref.model.path={folder}"


def test_in_float32_the_engines_agree_on_every_token_and_every_expert(assets, model, stack, tmp_path):
    """Split by tensor and by expert over two ranks, before and after updates."""
    steps = "trainer.total_training_steps=3"
    features = ("stability=icepop", "stability.router_agreement=true", "stability.sync_canary.trajectories=8")
    arguments = (*RECIPE, f"assets={assets}", model, steps, *features, *FLOAT32, *TWO_RANKS, *TP2_EP2)
    finished = run(["-m", "verl_ext.main_ppo", *arguments], tmp_path, stack)
    assert finished.code == 0, finished.tail
    assert re.search(r"router agreement +│ compute_log_prob +│ 4 x TopKRouter on 2 rank\(s\)", finished.console)
    assert len(finished.steps) == 3
    assert_documented(finished)
    for step in finished.steps:
        assert step["vllm_kl/k3"] < 1e-11
        assert step["vllm_kl/log_ratio_abs_max"] < 1e-4
        assert step["router/agreement"] == step["router/exact_match"] == 1
        assert step["guard/skipped"] == 0 and 0 < step["actor/grad_norm"] < 10
        assert step["sync/moved"] > 0, "the update changed what the rollout makes of the canary's trajectories"


def test_r3_replays_the_rollouts_experts_and_a_wrong_replay_is_refused(assets, model, stack, tmp_path):
    """In step 2 every expert id is one too high: the gap jumps, and the batch is skipped."""
    replay = (f"{MEGATRON}.router_replay.mode=R3", "stability=icepop", "stability.batch_skip.threshold=1.0e-3")
    arguments = (*RECIPE, f"assets={assets}", model, "trainer.total_training_steps=3", *replay)
    finished = run(["-m", "tests.stack.faults", "shifted experts", *arguments], tmp_path, stack)
    assert finished.code == 0, finished.tail
    right, wrong, after = finished.steps
    assert wrong["guard/skipped"] == 1 and right["guard/skipped"] == after["guard/skipped"] == 0
    assert wrong["vllm_kl/k3"] > 10 * max(right["vllm_kl/k3"], after["vllm_kl/k3"])
