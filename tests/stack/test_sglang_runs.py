"""Whole runs that generate with SGLang: verl's trainers, Ray, our workers, FSDP2 or Megatron."""

import re
import uuid

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.stack.faults import CANARY
from tests.stack.run_files import SAVES, events, has_saved, last_saved
from tests.stack.running import (
    ASYNC_BUFFER,
    RETRACTS,
    SEPARATE_ASYNC,
    SMALL,
    assert_documented,
    engine_processes,
    forked_command,
    kill_all,
    run,
    shares_by_lag,
    start,
    suspected_causes,
    wait_for,
)
from verl_ext.report.trajectories import load_trajectories

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RECIPE = ("recipe=cpu_sglang", *SMALL[1:])
ROUTING = "stability.router_agreement=true"
OF_SGLANG = "actor_rollout_ref.rollout.engine_kwargs.sglang"
FLOAT32 = 1e-11  # a k3 below this is rounding
MEGATRON_RECIPE = ("recipe=cpu_megatron_sglang", *SMALL[1:])
MEGATRON_FLOAT32 = ("actor_rollout_ref.actor.megatron.dtype=float32", "actor_rollout_ref.rollout.dtype=float32")


@pytest.fixture
def train(assets, sglang_stack, tmp_path):
    """train(overrides..., steps=3) -> the finished Run."""

    def train(*overrides, steps=3, entry=("verl_ext.main_ppo",), recipe=RECIPE):
        settings = (*recipe, f"assets={assets}", f"trainer.total_training_steps={steps}", *overrides)
        return run(["-m", *entry, *settings], tmp_path, sglang_stack)

    return train


KEPT = ("actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_k=32")


def test_in_float32_the_engines_agree_on_every_token_and_every_expert(train):
    """Tokens are sampled only from the likely ones, and both engines count only those; the score is centered. Routing
    of half of the trajectories is compared."""
    finished = train(
        "stability=zero_mismatch",
        "stability.correction=icepop",
        "stability.router_agreement_share=0.5",
        CANARY,
        "precision=fp32",
        "stability.trajectories.per_step=2",
        "stability.score_centering=true",
        *KEPT,
    )
    assert finished.code == 0, finished.tail
    assert re.search(
        r"router agreement +│ compute_log_prob, share 0\.5 +│ 4 x Qwen3MoeTopKRouter on 1 rank", finished.console
    )
    assert re.search(r"sampler's top tokens +│ 32 tokens; l_old", finished.console)
    assert len(finished.steps) == 3
    assert_documented(finished)
    assert re.search(r"zero_mismatch: warn at vllm_kl/k3 >", finished.console)
    assert "zero_mismatch" not in {event["rule"] for event in events(finished.folder)}, "it held in every step"
    for step in finished.steps:
        assert step["vllm_kl/k3"] < FLOAT32
        assert step["vllm_kl/head_missing"] == 0 and abs(step["vllm_kl/head"]) < 1e-7, "first order in the rounding"
        assert step["vllm_kl/head_mass"] == pytest.approx(1, abs=1e-5) and step["actor/score_centering"] != 0
        assert step["router/agreement"] == step["router/exact_match"] == 1
        assert (
            step["router/sampled"] == step["router/checked"] == 0.5
            and step["router/unknown"] == step["router/invalid"] == 0
        )
        assert step["guard/skipped"] == 0 < step["actor/grad_norm"]
    for step in finished.steps[1:]:  # of the first, the rollout's log-probs are of what was kept
        assert step["sync/moved"] > 0, "the update changed what the rollout makes of the canary's trajectories"


SPLIT = (  # a sequence over two training ranks
    "actor_rollout_ref.actor.megatron.context_parallel_size=2",
    "trainer.n_gpus_per_node=2",
    "ray_kwargs.ray_init.num_gpus=2",
)


@pytest.mark.parametrize("trained_by", ["fsdp2", "megatron"])
def test_r3_in_colocate_async_and_a_wrong_replay_is_refused(train, trained_by, monkeypatch):
    """Every expert id is one too high in step 1: the gap is large, and the batch is skipped. The ids are shifted again
    from step 4 on, which the report names. SGLang takes on more requests than its cache has room for, and retracts one
    every third pass anyway."""
    monkeypatch.setenv(*RETRACTS)
    layout = {"fsdp2": ("precision=fp32",), "megatron": (*MEGATRON_FLOAT32, *SPLIT)}
    finished = train(
        "stability=r3",
        *layout[trained_by],
        "stability.batch_skip.threshold=1.0e-9",
        "trainer.v1.trainer_mode=colocate_async",
        ASYNC_BUFFER,
        f"{OF_SGLANG}.max_total_tokens=160",
        f"++{OF_SGLANG}.schedule_conservativeness=0.01",
        "actor_rollout_ref.actor.optim.lr=1e-9",  # the policy's own movement stays below the threshold
        entry=("tests.stack.faults", "wrong replay"),
        recipe=RECIPE if trained_by == "fsdp2" else MEGATRON_RECIPE,
        steps=9,
    )
    assert finished.code == 0, finished.tail
    assert "PPOTrainerColocateAsync._update_actor" in finished.console
    wrong, right, after = finished.steps[:3]
    assert wrong["guard/skipped"] == 1 and right["guard/skipped"] == after["guard/skipped"] == 0
    assert wrong["router/checked"] == 0 and right["router/checked"] == after["router/checked"] == 1
    assert 0 < max(step["router/retracted"] for step in finished.steps) < 1
    assert finished.console.count("warn: SGLang ran out of KV cache and read the tokens of") == 1
    assert wrong["vllm_kl/k3"] > 1e-7 > 1e-9 > max(right["vllm_kl/k3"], after["vllm_kl/k3"])
    for step in finished.steps:
        assert step["router/agreement"] == 1, "of the experts in use"
    assert wrong["router/own_agreement"] < 0.9 < right["router/own_agreement"]
    assert suspected_causes(finished)[0] == "wrong_routes"


def test_megatron_and_sglang_in_separate_async(train, tmp_path):
    """Runs in float32. The third batch is two versions old when it is trained on; its old trajectories are dropped, and
    they agree with the weights that sampled them."""
    finished = train(
        "stability=guard",
        ROUTING,
        "stability.top_tokens.k=8",
        "stability.filters={too_stale:{versions:1}}",
        "stability.rescoring={every:1,trajectories:32,versions:2}",
        "stability.trajectories.per_step=2",
        *MEGATRON_FLOAT32,
        *SEPARATE_ASYNC,
        "actor_rollout_ref.actor.optim.lr=3e-5",
        recipe=MEGATRON_RECIPE,
    )
    assert finished.code == 0, finished.tail
    assert "PPOTrainerSeparateAsync." in finished.console
    assert_documented(finished)
    first, second, third = finished.steps
    assert shares_by_lag(first) == {"0": 1}
    assert first["vllm_kl/k3"] < FLOAT32 and first["router/agreement"] == first["router/exact_match"] == 1
    for step in (first, second):  # the third may have nothing left to train on
        assert step["guard/skipped"] == 0 < step["actor/grad_norm"]
    assert third["guard/skipped"] == 1 or third["actor/grad_norm"] > 0
    for step in finished.steps:
        assert step["vllm_kl/head_missing"] == 0 and step["vllm_kl/head_mass"] < 1
        if (k3 := step.get("vllm_kl/k3/lag/0")) is not None:
            assert k3 < FLOAT32, "of the weights that sampled them"
    by_lag, dropped = shares_by_lag(third), third["filter/too_stale/dropped_tokens"]
    assert 0 < by_lag["2"] <= dropped <= by_lag["2"] + by_lag.get("span", 0) + 1e-6
    assert third["vllm_kl/k3"] > 100 * FLOAT32, "the policy has moved away from old rollouts"
    assert 1 <= third["vllm_kl/rescored"] <= 32
    assert third["vllm_kl/engine/k3"] < FLOAT32 < third["vllm_kl/stale/k3"]
    lines = load_trajectories(tmp_path / "verl_ext" / "cpu_megatron_sglang.trajectories.jsonl")
    assert [line.step for line in lines] == [1, 1, 2, 2, 3, 3]


def test_a_lora_reaches_sglang_merged(train, dense_lora):
    """verl 0.9.1 sends an adapter in a form that SGLang 0.5.12 does not take; the doctor refuses it."""
    finished = train("stability.metrics=true", *dense_lora, "++actor_rollout_ref.model.lora.merge=true")
    assert finished.code == 0, finished.tail
    assert re.search(r"sync canary +│ 8 trajectories, each sync", finished.console), "on by default for a LoRA"
    assert events(finished.folder) == []
    for step in finished.steps:
        assert 0 < step["vllm_kl/k3"] < 1e-3 and step["actor/grad_norm"] > 0
        assert step["sync/moved"] > 1e-3 and 0.5 < step["sync/arrived_low"] < step["sync/arrived_high"] < 2


@pytest.mark.no_step
def test_a_scheduler_that_cannot_start_ends_the_run_with_its_reason(train):
    finished = train("stability=icepop", f"++{OF_SGLANG}.mem_fraction_static=-1", f"{OF_SGLANG}.max_total_tokens=null")
    assert finished.code == 1, finished.tail
    errors = [line for line in finished.console.splitlines() if line.startswith("verl_ext: error:")]
    assert len(errors) == 1, finished.tail
    assert "SGLang's scheduler failed: RuntimeError: Not enough memory." in errors[0]


def test_a_scheduler_that_is_killed_ends_the_run_which_goes_on_from_its_checkpoint(
    assets, train, sglang_stack, tmp_path
):
    """Every update is skipped: the counts continue. The training engine divides its logits by 1.2, which the report
    names, by the probabilities of a model that is surer than the recipe's."""
    model = AutoModelForCausalLM.from_pretrained(assets / "model")
    with torch.no_grad():
        model.lm_head.weight.mul_(12)
    for part in (model, AutoTokenizer.from_pretrained(assets / "model")):
        part.save_pretrained(tmp_path / "surer")
    settings = (
        f"actor_rollout_ref.model.path={tmp_path}/surer",
        "stability=quantized",
        "stability.fake_quantization.format=fp8",
        "stability.batch_skip.threshold=0",
        "stability.guard.stop_after=9",
        *SAVES,
    )
    entry = ("tests.stack.faults", "another temperature")
    arguments = ["-m", *entry, *RECIPE, f"assets={assets}", "trainer.total_training_steps=500", *settings]
    mark = uuid.uuid4().hex
    console, started = start(forked_command(arguments, sglang_stack), tmp_path, mark, sglang_stack.environment)
    try:
        wait_for(lambda: has_saved(tmp_path, 2), started, console)
        scheduler, _detokenizer = engine_processes(mark)
        scheduler.kill()
        assert started.wait(150) == 1
    finally:
        kill_all(mark)
    errors = [line for line in console.read_text().splitlines() if line.startswith("verl_ext: error:")]
    assert len(errors) == 1, console.read_text()[-3000:]
    assert "an SGLang process" in errors[0] and "exit code -9" in errors[0]
    assert "trainer.resume_mode=auto" in errors[0]

    last = last_saved(tmp_path)
    resumed = train(*settings, steps=500, entry=entry)
    assert resumed.code == 3, resumed.tail
    assert re.search(r"fake quantization +│ fp8, group 32 +│ [1-9]\d* linear weights in 1 worker", resumed.console)
    assert f"guard state of step {last}" in resumed.console
    # A kill between the checkpoint and the metrics of its step leaves a step without metrics.
    assert all(step["guard/skips"] == step["training/global_step"] for step in resumed.steps)
    assert resumed.steps[-1]["guard/skips"] == 9
    assert [event["step"] for event in events(tmp_path) if event["action"] == "stop"] == [9]
    assert suspected_causes(resumed)[0] == "temperature"
