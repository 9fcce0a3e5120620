"""Whole runs that generate with SGLang: verl's trainers, Ray, our workers, FSDP2 or Megatron."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.stack.faults import CANARY
from tests.stack.run_files import events, logged_events
from tests.stack.running import (
    ASYNC_BUFFER,
    FLOAT32_HEADS,
    NEAR_TIES_K3,
    RETRACTS,
    SEPARATE_ASYNC,
    SMALL,
    Run,
    assert_documented,
    assert_engines_agree,
    assert_one_error,
    engine_processes,
    error_of,
    forked_command,
    live,
    run,
    shares_by_lag,
    suspected_causes,
)
from verl_ext.report.trajectories import read_trajectories

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
        steps=2,
    )
    assert finished.code == 0, finished.tail
    assert re.search(
        r"router agreement +│ compute_log_prob, share 0\.5 +│ 4 x Qwen3MoeTopKRouter on 1 rank", finished.console
    )
    assert re.search(r"sampler's top tokens +│ 32 tokens; l_old", finished.console)
    assert len(finished.steps) == 2
    assert_documented(finished)
    assert re.search(r"zero_mismatch: warn at vllm_kl/k3 >", finished.console)
    agree = [assert_engines_agree(step, FLOAT32) for step in finished.steps]
    warned = {step for step, *what in logged_events(finished.folder) if what == ["zero_mismatch", "warn"]}
    assert warned <= {number for number, held in enumerate(agree, 1) if not held}, "it held in every step"
    for step, held in zip(finished.steps, agree, strict=True):
        assert step["vllm_kl/head_missing"] == 0
        assert abs(step["vllm_kl/head"]) < (1e-7 if held else 1e-4), "first order in the rounding"
        assert step["vllm_kl/head_mass"] == pytest.approx(1, abs=1e-5) and step["actor/score_centering"] != 0
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


@pytest.mark.parametrize(("trained_by", "steps"), [("fsdp2", 9), ("megatron", 3)])
def test_r3_in_colocate_async_and_a_wrong_replay_is_refused(train, trained_by, steps, monkeypatch):
    """Every expert id is one too high in step 1: the gap is large, and the batch is skipped. With FSDP2 the ids are
    shifted again from step 4 on, which the report names. SGLang takes on more requests than its cache has room for, and
    retracts one every third pass anyway. It routes the tokens of a retracted trajectory again, and two experts that are
    as good as equal may then change places: a right replay can differ in one trajectory, by a k3 of at most 1e-6."""
    monkeypatch.setenv(*RETRACTS)
    layout = {"fsdp2": ("precision=fp32",), "megatron": (*MEGATRON_FLOAT32, *SPLIT)}
    finished = train(
        "stability=r3",
        *layout[trained_by],
        "stability.batch_skip.threshold=1.0e-5",
        "trainer.v1.trainer_mode=colocate_async",
        ASYNC_BUFFER,
        f"{OF_SGLANG}.max_total_tokens=160",
        f"++{OF_SGLANG}.schedule_conservativeness=0.01",
        "actor_rollout_ref.actor.optim.lr=1e-9",  # the policy's own movement stays below the threshold
        entry=("tests.stack.faults", "wrong replay"),
        recipe=RECIPE if trained_by == "fsdp2" else MEGATRON_RECIPE,
        steps=steps,
    )
    assert finished.code == 0, finished.tail
    assert "of the update's own pass" in finished.console, "which measures, compares and refuses"
    wrong, right, after = finished.steps[:3]
    assert wrong["guard/skipped"] == 1 and right["guard/skipped"] == after["guard/skipped"] == 0
    assert wrong["router/checked"] == 0 and right["router/checked"] == after["router/checked"] == 1
    assert 0 < max(step["router/retracted"] for step in finished.steps) < 1
    assert finished.console.count("warn: SGLang ran out of KV cache and read the tokens of") == 1
    assert wrong["vllm_kl/k3"] > 1e-5 > max(right["vllm_kl/k3"], after["vllm_kl/k3"])
    assert min(right["vllm_kl/k3"], after["vllm_kl/k3"]) < 1e-9
    for step in finished.steps:
        assert step["router/agreement"] == 1, "of the experts in use"
    assert wrong["router/own_agreement"] < 0.9 < right["router/own_agreement"]
    if steps > 3:
        assert suspected_causes(finished)[0] == "wrong_routes"


def test_megatron_and_sglang_in_separate_async_with_truncated_sampling_and_score_centering(train, tmp_path):
    """Runs in float32. The third batch is two versions old when it is trained on; its old trajectories are dropped, and
    they agree with the weights that sampled them. Routing of half of the trajectories is compared."""
    finished = train(
        "stability=icepop",
        ROUTING,
        "stability.router_agreement_share=0.5",
        "stability.score_centering=true",
        *KEPT,
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
    assert re.search(r"sampler's top tokens +│ 32 tokens; l_old", finished.console)
    assert re.search(r"score centering +│ weights of icepop +│ worker_loss on 1 rank", finished.console)
    assert re.search(r"router agreement +│ compute_log_prob, share 0.5 +│ 4 x TopKRouter on 1 rank", finished.console)
    assert_documented(finished)
    first, second, third = finished.steps
    assert shares_by_lag(first) == {"0": 1} and "vllm_kl/rescored" not in first
    assert_engines_agree(first, FLOAT32)
    for step in (first, second):  # the third may have nothing left to train on
        assert step["guard/skipped"] == 0 < step["actor/grad_norm"] and step["actor/score_centering"] != 0
    assert third["guard/skipped"] == 1 or third["actor/grad_norm"] > 0
    for step in finished.steps:
        assert step["vllm_kl/head_missing"] == 0
        # The loop leaves out every second one; a batch of prompts in flight has some more or fewer of them.
        assert 0.25 < step["router/sampled"] < 0.75
        assert step["router/unknown"] == step["router/invalid"] == 0
        if (k3 := step.get("vllm_kl/k3/lag/0")) is not None:
            assert k3 < NEAR_TIES_K3, "of the weights that sampled them"
    assert first["vllm_kl/head_mass"] == pytest.approx(1, abs=1e-5)
    by_lag, dropped = shares_by_lag(third), third["filter/too_stale/dropped_tokens"]
    assert 0 < by_lag.get("2", 0) <= dropped + 1e-6, "and of answers that span versions, the newer tokens too"
    assert dropped <= by_lag["2"] + 1e-6 or "span" in by_lag
    assert third["vllm_kl/k3"] > NEAR_TIES_K3, "the policy has moved away from old rollouts"
    assert 1 <= third["vllm_kl/rescored"] <= 32
    assert third["vllm_kl/engine/k3"] < NEAR_TIES_K3 < third["vllm_kl/stale/k3"]
    lines = read_trajectories(tmp_path / "verl_ext" / "cpu_megatron_sglang.trajectories.jsonl")[0]
    assert [(line.step, line.why) for line in lines] == [
        (step, why) for step in (1, 2, 3) for why in ("largest gap", "at random")
    ]
    for line in lines:
        assert set(line.agreement) == {None} or all(0 <= share <= 1 for share in line.agreement)


def test_a_lora_reaches_sglang_merged(train, dense_lora):
    """verl 0.9.1 sends an adapter in a form that SGLang 0.5.12 does not take; the doctor refuses it."""
    merged, check = "++actor_rollout_ref.model.lora.merge=true", "stability.sync_check={every:1}"
    finished = train("stability.metrics=true", *dense_lora, merged, check, steps=2)
    assert finished.code == 0, finished.tail
    assert [step["sync/wrong_tensors"] for step in finished.steps] == [0, 0]
    assert re.search(r"sync canary +│ 8 trajectories, each sync", finished.console), "on by default for a LoRA"
    assert events(finished.folder) == []
    for step in finished.steps:
        assert 0 < step["vllm_kl/k3"] < 1e-3 and step["actor/grad_norm"] > 0
        assert step["sync/moved"] > 1e-3 and 0.5 < step["sync/arrived_low"] < step["sync/arrived_high"] < 2


@pytest.mark.no_step
def test_a_scheduler_that_cannot_start_ends_the_run_with_its_reason(train):
    finished = train("stability=icepop", f"++{OF_SGLANG}.mem_fraction_static=-1", f"{OF_SGLANG}.max_total_tokens=null")
    assert finished.code == 1, finished.tail
    assert "SGLang's scheduler failed: RuntimeError: Not enough memory." in error_of(finished.console)


def test_a_scheduler_that_is_killed_ends_the_run(assets, sglang_stack, tmp_path):
    """Every update is skipped. The training engine divides its logits by 1.2, which the report names, by the
    probabilities of a model that is surer than the recipe's."""
    model = AutoModelForCausalLM.from_pretrained(assets / "model")
    with torch.no_grad():
        model.lm_head.weight.mul_(12)
    for part in (model, AutoTokenizer.from_pretrained(assets / "model")):
        part.save_pretrained(tmp_path / "surer")
    settings = (
        f"actor_rollout_ref.model.path={tmp_path}/surer",
        "stability=quantized",
        "stability.fake_quantization.format=fp8",
        "stability.float32_head=true",
        "stability.batch_skip.threshold=0",
        "stability.guard.stop_after=null",
    )
    entry = ("tests.stack.faults", "another temperature")
    arguments = ["-m", *entry, *RECIPE, f"assets={assets}", "trainer.total_training_steps=500", *settings]
    metrics = tmp_path / "verl_ext" / "cpu_sglang.jsonl"
    with live(forked_command(arguments, sglang_stack), tmp_path, sglang_stack.environment) as killed:
        killed.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 9)
        scheduler, _detokenizer = engine_processes(killed.mark)
        scheduler.kill()
        killed.wait_for_end(1)
    finished = Run(1, killed.console, tmp_path)
    assert_one_error(finished.console, r"an SGLang process .*exit code -9")
    assert re.search(r"fake quantization +│ fp8, group 32 +│ [1-9]\d* linear weights in 1 worker", finished.console)
    assert re.search(rf"float32 logits +{FLOAT32_HEADS.format(1)}", finished.console)
    assert all(step["guard/skips"] == step["training/global_step"] for step in finished.steps)
    assert suspected_causes(finished)[0] == "temperature"
