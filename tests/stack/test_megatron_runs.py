"""Whole runs that train with Megatron, through Megatron-Bridge: Ray, vLLM, our trainers and workers."""

import re

import pytest
import torch

from tests.stack.faults import CANARY, DECIDED_RESTORED, RESTORING, rules
from tests.stack.run_files import (
    SAVES,
    equal_tensors,
    events,
    last_saved,
    logged_events,
    megatron_optimizer,
    megatron_weights,
)
from tests.stack.running import (
    ASYNC_BUFFER,
    FLOAT32_HEADS,
    SMALL,
    assert_documented,
    assert_engines_agree,
    assert_load_is_of,
    forked_command,
    live,
    run,
    suspected_causes,
)
from tests.stack.small_models import save_model

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
    """The recipe's model, with an even vocabulary for tensor parallelism and experts that matter to a token."""

    def change(model, tokenizer):
        # transformers starts the padding's row at 0 and gives it no gradient. Megatron does, and where <pad> is
        # sampled, the norm of a row of zeros makes that gradient a hundred times as large as all others.
        model.model.embed_tokens.weight[tokenizer.pad_token_id].normal_(0, 0.02)
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.mul_(8)

    folder = save_model(tmp_path_factory.mktemp("megatron_model"), even=True, change=change)
    return f"actor_rollout_ref.model.path={folder}"


def test_in_float32_the_engines_agree_on_every_token_and_every_expert(assets, model, stack, tmp_path):
    """Split by tensor and by expert over two ranks, before and after updates. From step 4 on the weight syncs are lost:
    the report names that, and the guard the first step with rollouts of weights that did not arrive."""
    steps = "trainer.total_training_steps=8"
    features = ("stability=zero_mismatch", "stability.correction=icepop", "stability.sync_canary.trajectories=8")
    features = (*features, "stability.sync_check={every:4}")
    arguments = (*RECIPE, f"assets={assets}", model, steps, *features, *FLOAT32, *TWO_RANKS, *TP2_EP2)
    finished = run(["-m", "tests.stack.faults", "lost syncs", *arguments], tmp_path, stack)
    assert finished.code == 0, finished.tail
    assert re.search(r"router agreement +│ update_actor +│ 4 x TopKRouter on 2 rank\(s\)", finished.console)
    assert len(finished.steps) == 8
    assert_documented(finished)
    assert suspected_causes(finished)[0] == "lost_sync"
    told = (event for event in events(finished.folder) if event["rule"] == "zero_mismatch")
    first, *_ = (event for event in told if event["step"] > 4)  # a near tie of a router may be told before
    assert (first["step"], first["action"]) == (5, "warn") and finished.steps[4]["vllm_kl/k3"] == first["value"]
    layers = [finished.steps[4][f"router/agreement/layer_{layer:02d}"] for layer in range(4)]
    differing = next((layer for layer, agreement in enumerate(layers) if agreement < 1), None)
    place = "agree in all layers" if differing is None else f"disagree from layer {differing} on"
    assert f"(routers {place}) passes stability.guard.rules.zero_mismatch.above=1e-10" in first["reason"]
    for step in finished.steps[:4]:
        if assert_engines_agree(step, 1e-12):
            assert step["vllm_kl/log_ratio_abs_max"] < 2e-5
        assert step["router/checked"] == 1
        assert step["guard/skipped"] == 0 and 0 < step["actor/grad_norm"] < 10
    for step in finished.steps[:3]:  # the update changed what both make of the canary's trajectories, by the same
        assert step["sync/moved"] > 1e-3 and 0.99 < step["sync/arrived_low"] < 1.01
    checked = [step["sync/wrong_tensors"] > 0 for step in finished.steps if "sync/wrong_tensors" in step]
    assert checked == [False, True, True], "the first sync, and those of steps 4 and 8"
    wrong, _ = (event for event in events(finished.folder) if event["rule"] == "sync_check")
    assert wrong["step"] == 4 and "not received" in wrong["reason"]
    assert finished.steps[3]["sync/arrived_high"] < 0.1, "the canary sees the lost sync a step before the gap shows it"


FLOAT16 = (  # Transformer Engine has the optimizer that verl takes
    "precision=fp16_megatron",
    "+actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer=false",
)


def test_r3_replays_the_rollouts_experts_and_a_wrong_replay_is_refused_as_fp16s_overflow_is(with_faults, model):
    """In step 2 every expert id is one too high: the gap jumps, and the batch is skipped. In step 3 the gradient
    overflows fp16."""
    replay = ("stability=moe", "stability.batch_skip.threshold=1.0e-3", "stability.cascade_attention=off")
    settings = (*FLOAT16, *SAVES, model, "stability.float32_head=true")
    finished = with_faults("shifted experts and an overflow", *replay, *settings, recipe=RECIPE[0], steps=4)
    assert finished.code == 0, finished.tail
    right, wrong, overflow, after = finished.steps
    assert wrong["guard/skipped"] == 1
    assert re.search(r"routing replay +│ R3: update_actor as the rollout +│ verl's training engine", finished.console)
    assert re.search(rf"float32 logits +{FLOAT32_HEADS.format(1)}", finished.console)
    assert all(step["router/agreement"] == 1 for step in finished.steps), "of the experts in use"
    own = [step["router/own_agreement"] for step in finished.steps]
    assert own.pop(1) < 0.9 < min(own), "of those that the training router would have chosen"
    assert all(step["guard/skipped"] == 0 for step in (right, overflow, after))
    assert wrong["vllm_kl/k3"] > 10 * max(step["vllm_kl/k3"] for step in (right, overflow, after))
    assert overflow["actor/grad_norm"] is None, "as the file logger writes what is not finite"
    assert (3, "non_finite", "warn") in logged_events(finished.folder)
    for step, moves in ((2, False), (3, False), (4, True)):
        before, now = megatron_weights(finished.folder, step - 1), megatron_weights(finished.folder, step)
        assert equal_tensors(before, now) is not moves
    assert 0 < after["actor/grad_norm"] < 100, "without the loss scale, 32768 at first"


def test_the_guard_restores_weights_optimizer_and_rollout(with_faults):
    """SGLang generates: it gets the weights of a rollback and of an undo as vLLM does in test_guard_runs.py, which has
    the other actions."""
    limit = "mini_batch={grad_norm:1.0e+30}"  # which only measures
    guard = ("after_update.trajectories=8", "rollback_cooldown=1", limit)
    saves = (*SAVES, f"{MEGATRON}.dist_ckpt_optim_fully_reshardable=true")
    bf16 = f"{MEGATRON}.dtype=bfloat16"
    settings = ("stability=icepop", "stability.router_agreement=true", bf16, CANARY, *saves, rules(*RESTORING))
    settings += ("stability.fake_quantization.format=int8",)  # rounds no more than bf16
    settings += ("stability.float32_head=true",)
    settings += tuple(f"stability.guard.{setting}" for setting in guard)
    recipe = {"recipe": "recipe=cpu_megatron_sglang", "forked_from": "sglang_stack"}
    finished = with_faults("restored", *settings, steps=9, **recipe)
    assert finished.code == 3, finished.tail
    folder, steps = finished.folder, finished.steps
    assert re.search(r"fake quantization +│ int8, group 32 +│ [1-9]\d* linear weights in 1 worker", finished.console)
    assert re.search(rf"float32 logits +{FLOAT32_HEADS.format(1)}", finished.console)
    assert logged_events(folder) == DECIDED_RESTORED
    reasons = {event["step"]: event["reason"] for event in events(folder)}
    assert "name an expert twice" in reasons[5] and "They are not compared." in reasons[5]
    assert "the guard stopped the run: critic/score/mean=100 passes" in finished.console
    assert [step["guard/skipped"] for step in steps] == [0, 0, 0, 1, 0, 1, 0, 1]
    assert [step["guard/undos"] for step in steps] == [0, 0, 1, 1, 1, 2, 3, 3]

    # A step with a NaN gradient leaves the weights and the optimizer as they were; step 4 went back to a checkpoint.
    assert_same(folder, 2, 3)
    assert not equal_tensors(megatron_weights(folder, 1), megatron_weights(folder, 2))
    assert_same(folder, 1, 4)
    wrong = steps[4]
    assert wrong["vllm_kl/k3"] < 1e-3, "the rollout got the weights back as well"
    assert wrong["router/agreement"] > 0.9
    assert 0 < wrong["router/unknown"] < 0.1 and 0 < wrong["router/invalid"] < 0.1
    assert wrong["actor/grad_norm"] > 0, "and the run goes on from there"
    assert not equal_tensors(megatron_weights(folder, 5), megatron_weights(folder, 4))
    # Step 6 took back the update of step 5, which the rollout had had; step 7 its own.
    for after in (6, 7):
        assert_same(folder, 4, after)
    assert steps[6]["vllm_kl/k3"] < 1e-3
    for step in steps:
        if step.get("actor/grad_norm") is not None:
            assert step["actor/gate/grad_norm"] == pytest.approx(step["actor/grad_norm"], rel=1e-6)


def assert_same(folder, one, other):
    for left in (megatron_weights, megatron_optimizer):
        before, after = left(folder, one), left(folder, other)
        assert before.keys() == after.keys()
        assert equal_tensors(before, after), (one, other, left.__name__)


R2 = ("stability=r2", "stability.correction=icepop")
COLOCATE_ASYNC = ("trainer.v1.trainer_mode=colocate_async", ASYNC_BUFFER)
WARM_UP = 5  # updates
UPDATES = (
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.optim.lr=1e-4",
    f"actor_rollout_ref.actor.optim.lr_warmup_steps={WARM_UP}",
)


def test_killed_in_colocate_async_and_resumed_with_the_guards_state_and_the_schedule(
    fault_arguments, model, stack, tmp_path
):
    """Two updates a step that replay the experts of compute_log_prob, R2; step 2 is skipped, step 4 never begins."""
    gate = "stability.guard.mini_batch={policy_kl:2.0e-3}"
    bf16 = f"{MEGATRON}.dtype=bfloat16"
    settings = (*R2, bf16, "algorithm.use_kl_in_reward=true", *COLOCATE_ASYNC, *SAVES, *UPDATES, gate, model)
    options = {"recipe": RECIPE[0], "steps": 6}
    logged = tmp_path / "verl_ext" / "cpu_megatron.jsonl"
    command = forked_command(fault_arguments("killed", *settings, **options), stack)
    with live(command, tmp_path, stack.environment) as killed:
        killed.wait_for(lambda: logged.exists() and logged.read_text().count("\n") == 3)
    assert last_saved(tmp_path) == 3

    finished = run(fault_arguments("resumed", *settings, **options), tmp_path, stack)
    assert finished.code == 0, finished.tail
    assert "PPOTrainerColocateAsync._update_actor" in finished.console
    assert re.search(r'guard state of step 3: {"skips": 1,', finished.console)
    assert_documented(finished)
    steps = finished.steps
    assert [step["guard/skips"] for step in steps] == [0, 1, 1, 2, 2, 2]
    rates = [step["actor/lr"] for step in steps if "actor/lr" in step]
    assert rates == pytest.approx([1e-4 * updates / WARM_UP for updates in (1, 2, 3, 4)])
    for step in steps:
        assert step["vllm_kl/k3"] < 0.05
        assert 0.8 < step["router/agreement"] < 1
        assert_load_is_of(step, 8)
        assert "actor/reward_kl_penalty" in step
    moved = [step["router/load_moved"] for step in steps]
    assert moved[0] == 0 < min(moved[1:]), "step 4, the first after the restart, compares with step 1"
    for step in (steps[2], steps[4]):
        assert step["actor/gate/refused"] == 0 < step["actor/grad_norm"]

    # Step 4 has no update: what it saved is what was loaded.
    assert equal_tensors(megatron_weights(tmp_path, 4), megatron_weights(tmp_path, 3))
    size = sum(weight.numel() for weight in megatron_weights(tmp_path, 3).values())
    before, after = megatron_optimizer(tmp_path, 3), megatron_optimizer(tmp_path, 4)
    assert len(before) == 3 and before.keys() == after.keys(), "the weights in float32 and two moments"
    assert all(torch.eq(before[name], after[name]).sum() >= size for name in before), "but for padding"
    assert not equal_tensors(megatron_weights(tmp_path, 5), megatron_weights(tmp_path, 4))

    # In step 6 the experts that compute_log_prob recorded are changed before the update, which replays them.
    assert (
        steps[5]["actor/gate/refused"] == 1 and steps[5]["actor/gate/policy_kl"] > 50 * steps[4]["actor/gate/policy_kl"]
    )
    assert equal_tensors(megatron_weights(tmp_path, 6), megatron_weights(tmp_path, 5))
