"""Each feature in a real run. One to three minutes a run, most of it the start of Ray and vLLM."""

import math
import re

import pytest

from tests.stack.running import (
    ASYNC_BUFFER,
    FLOAT32_HEADS,
    SEPARATE_ASYNC,
    assert_documented,
    assert_k1_is_verls,
    assert_load_is_of,
    assert_top_tokens,
    error_of,
    left_out,
    shares_by_lag,
    suspected_causes,
)
from verl_ext import cli
from verl_ext.base.metrics import OURS
from verl_ext.report.trajectories import read_trajectories
from verl_ext.trainer.trajectories import DIGITS
from verl_ext.upstream.agent_loop import MANAGER

pytestmark = pytest.mark.e2e

ROUTING = "stability.router_agreement=true"
BF16 = "precision=bf16"  # in both engines
VERLS_WEIGHTS = (
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_is_threshold=1e6",
)


def keys(run):
    """The names of what each step logged."""
    return [set(step) for step in run.steps]


def ours(names):
    return {name for name in names if name.startswith(OURS)}


def test_icepop_router_agreement_cascade_attention_and_the_report(train):
    """The score is centered too, with IcePop's weights and 8 top tokens; half of the trajectories carry
    routing."""
    dump = "stability.trajectories.per_step=2"
    centered = ("stability.score_centering=true", "stability.top_tokens.k=8")
    routing = (ROUTING, "stability.router_agreement_share=0.5")
    check = "stability.sync_check={every:1,action:stop}"
    run = train("stability=icepop", *routing, "stability.cascade_attention=off", dump, check, *centered, BF16)
    assert run.code == 0, run.tail
    assert [step["sync/wrong_tensors"] for step in run.steps] == [0, 0]
    assert re.search(r"router agreement +│ compute_log_prob, share 0.5 +│", run.console)
    assert re.search(r"score centering +│ weights of icepop +│ worker_loss on 1 rank", run.console)
    assert "confirmed by 1 vLLM worker(s)" in run.console
    assert "4 x Qwen3MoeTopKRouter" in run.console
    assert "routed_experts is sent as torch.uint8" in run.console
    assert "should not exceed total physical CPU cores" not in run.console, "TransferQueue, at every call"
    assert len(run.steps) == 2
    assert_documented(run)
    for step in run.steps:
        assert 0 < step["vllm_kl/k3"] < 0.01
        assert 0 < step["vllm_kl/prob_diff_mean"] <= step["vllm_kl/prob_diff_max"] < 0.1
        assert_k1_is_verls(step)
        assert step["correction/dropped"] == 0  # k stays near 1 at this size
        assert step["correction/weight_mean"] == pytest.approx(1, abs=0.01)
        assert 0.9 < step["router/own_agreement"] < 1
        layers = [step[f"router/agreement/layer_{layer:02d}"] for layer in range(4)]
        assert sum(layers) / 4 == pytest.approx(step["router/agreement"])
        assert 0 < step["router/any_layer_differs"] < 0.5
        assert_load_is_of(step, 8)
        assert_half_is_compared(step)
        assert step["guard/skipped"] == 0
        assert step["actor/grad_norm"] > 0
        assert_top_tokens(step)
        assert step["vllm_kl/head_mass"] < 1 and step["actor/score_centering"] != 0
    assert_the_report_shows(run)


def assert_half_is_compared(step):
    """Checks that exactly half of the 32 trajectories of one agent loop's process are compared, and that the others do
    not count as unknown."""
    assert step["router/sampled"] == 0.5
    assert 0.25 < step["router/tokens"] / (32 * step["response_length/mean"]) < 0.75
    assert step["router/unknown"] == step["router/invalid"] == 0
    assert 0 < step["router/agreement/error"] < 0.02


def assert_the_report_shows(run):
    """Checks that the trajectories' numbers agree with the metrics, and that the pages exist."""
    assert re.search(r"trajectories +│ 2 per step +│ cpu_smoke\.trajectories\.jsonl", run.console)
    lines = read_trajectories(run.folder / "verl_ext" / "cpu_smoke.trajectories.jsonl")[0]
    assert [(line.step, line.why) for line in lines] == [
        (step, why) for step in (1, 2) for why in ("largest gap", "at random")
    ]
    for line in lines:
        step = run.steps[line.step - 1]
        assert len(line.text) == line.tokens <= 16 and all(line.generated) and all(line.kept)
        rounded = 10**-DIGITS  # each of the two log-probs by up to half of it
        assert 0 < max(line.log_k_sizes()) <= step["vllm_kl/log_ratio_abs_max"] * (1 + 1e-5) + rounded
        assert set(line.agreement) == {None} or all(0 <= share <= 1 for share in line.agreement)
        k = [math.exp(a - b) for a, b in zip(line.l_old, line.l_infer, strict=True)]
        assert line.weight == pytest.approx(k, rel=1e-5)
        assert line.prompt.startswith("<user>") and line.skipped == ""
    out = run.folder / "report"
    assert cli.main(["report", str(run.folder / "verl_ext"), "--pictures", "--out", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "not enough data" in page and 'href="trajectories.html"' in page
    assert (out / "trajectories.html").stat().st_size > 10_000
    assert {file.stem for file in (out / "figures").iterdir()} > {"vllm_kl", "router_agreement", "step_time"}


def test_log_probs_and_routes_of_an_agent_loop_manager_of_ones_own(train):
    """What only verl's agent loop workers write is left out with a line, and the run needs none of it."""
    run = train("stability=icepop", ROUTING, f"++{MANAGER}=tests.stack.own_manager.OwnManager", steps=1)
    assert run.code == 0, run.tail
    assert "not watched: agent loop worker ('OwnManager' object has no attribute" in run.console
    assert f"{MANAGER}=tests.stack.own_manager.OwnManager does not run verl's AgentLoopWorker: without" in run.console
    (step,) = run.steps
    assert 0 < step["vllm_kl/k3"] < 0.01 and step["actor/grad_norm"] > 0
    assert 0.9 < step["router/own_agreement"] < 1 and step["router/unknown"] == step["router/invalid"] == 0
    assert {"router/checked", "answers/cut"}.isdisjoint(step)
    assert_documented(run)


def assert_near_the_policy(run):
    """Checks that the engines mostly agree, because every rollout's weights are near the policy's."""
    assert_documented(run)
    for step in run.steps:
        assert 0 < step["vllm_kl/k3"] < 0.01
        assert 0.9 < step["router/own_agreement"] < 1


def test_separate_async_with_the_guard_routing_and_rollouts_of_old_weights(train):
    """Three batches are handed out before the first update: the third is two versions old when its turn comes.

    Tokens are sampled only from the likely ones, which both engines know. The loss is weighted by verl's own weights,
    so the preset leaves out its own.
    """
    run = train(
        "stability=moe",
        *VERLS_WEIGHTS,
        "actor_rollout_ref.rollout.top_p=0.9",
        "actor_rollout_ref.rollout.top_k=32",
        *SEPARATE_ASYNC,
        "actor_rollout_ref.actor.optim.lr=3e-5",  # so small that old rollouts stay near the policy
        "stability.filters={too_stale:{versions:1}}",
        "stability.rescoring={every:1,trajectories:32,versions:2}",
        "stability.sync_check={every:1}",
        steps=3,
    )
    assert run.code == 0, run.tail
    assert "PPOTrainerSeparateAsync." in run.console
    assert [step["sync/wrong_tensors"] for step in run.steps] == [0, 0, 0]
    assert left_out(run) == ["stability.correction=opsm"]
    assert re.search(r"rescoring +│ 32 trajectories per step", run.console)
    assert re.search(r"sync canary +│ 8 trajectories, each sync", run.console), "on by default in separate_async"
    assert re.search(r"sampler's top tokens +│ 32 tokens; l_old", run.console)
    assert_near_the_policy(run)
    for step in run.steps:
        assert_top_tokens(step)
        assert 0.9 < step["rollout_corr/rollout_is_mean"] < 1.1 and "correction/weight_mean" not in step
        assert step["vllm_kl/head_mass"] == pytest.approx(1, abs=1e-5)
        assert abs(step["vllm_kl/k1"]) < 0.02, "-log of the mass that is kept, 0.1, where one engine counts all tokens"
    first, second, third = run.steps
    # The canary begins with the first sync, for the first log-probs are of what was kept; step 3 has no update.
    assert second["sync/moved"] > 0 and second["timing_s/sync_canary"] > 0
    assert second.get("sync/arrived_high", math.inf) > 0.75, "8 short trajectories may give no upper bound"
    assert shares_by_lag(first) == {"0": 1} and "vllm_kl/rescored" not in first
    assert first["vllm_kl/k3/lag/0"] == pytest.approx(first["vllm_kl/k3"])
    for step in (first, second):
        assert step["actor/grad_norm"] > 0 and step["filter/too_stale/dropped_tokens"] == 0
        assert step["actor/opsm/sequences_dropped/lag/0"] == 0, "of what is older alone"
    by_lag = shares_by_lag(third)
    dropped = third["filter/too_stale/dropped_tokens"]
    assert 0 < by_lag.get("2", 0) <= dropped + 1e-6, "and of answers that span versions, the newer tokens too"
    assert dropped <= by_lag["2"] + 1e-6 or "span" in by_lag
    for step in (second, third):
        assert 1 <= step["vllm_kl/rescored"] <= 32 and step["timing_s/rescore"] > 0
        # Near the weights that sampled them, as all were in the first step, and nearer than to the policy.
        gap = "vllm_kl/log_ratio_abs_mean"
        assert step["vllm_kl/engine/log_ratio_abs_mean"] < min(3 * first[gap], step[gap])
        if step["vllm_kl/rescored"] == 32 and "span" not in shares_by_lag(step):  # all tokens
            parts = step["vllm_kl/engine/k3"] + step["vllm_kl/stale/k3"]
            assert parts == pytest.approx(step["vllm_kl/k3"], rel=1e-3)
        assert step["guard/growth_mixed"] == 1, "two readings of the engines alone are too few for a forecast"


def test_deepseeks_preset_in_colocate_async_with_padding_removal_and_kl_in_the_reward_too(train):
    run = train(
        "stability=deepseek_v32",
        "stability.correction=[icepop,opsm]",
        "stability.replay=R3",  # its kept routing
        "algorithm.use_kl_in_reward=true",
        "trainer.v1.trainer_mode=colocate_async",
        ASYNC_BUFFER,
        "actor_rollout_ref.model.use_remove_padding=true",
        "actor_rollout_ref.actor.optim.lr=1e-6",
    )
    assert run.code == 0, run.tail
    assert "PPOTrainerColocateAsync._update_actor" in run.console
    assert_near_the_policy(run)
    assert "unbiased, over l_infer" in run.console
    for step in run.steps:
        assert step["actor/kl_loss"] >= 0
        assert step["router/agreement"] == 1 > step["router/own_agreement"]
        assert step["actor/grad_norm"] > 0
        assert 0 <= step["actor/opsm/dropped"] <= 1
        parts = [value for name, value in step.items() if name.startswith("actor/opsm/mismatch/lag/")]
        assert sum(parts) == pytest.approx(step["actor/opsm/mismatch"])
        assert sum(shares_by_lag(step).values()) == pytest.approx(1)
        assert "actor/reward_kl_penalty" in step


def test_dapo_on_two_ranks_with_dynamic_batches_padding_rows_and_a_planted_gap(train):
    # 7 prompts of 4 responses on mini-batches of 16: verl adds four synthetic rows to make two.
    run = train(
        "data.train_batch_size=7",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "stability=dapo",
        BF16,
        "stability.correction=icepop",
        "data.max_response_length=48",  # in each step some responses end before it, and some do not
        "reward.reward_kwargs.overlong_buffer_cfg.len=8",
        "stability.fake_quantization.format=fp4",
        "stability.float32_head=true",
        ROUTING,
        "trainer.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=2",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=128",
        "actor_rollout_ref.actor.optim.lr=1e-5",  # the policy stays what it is, as do its routers' near ties
        steps=8,
    )
    assert run.code == 0, run.tail
    assert "4 x Qwen3MoeTopKRouter on 2 rank(s)" in run.console
    assert re.search(r"fake quantization +│ fp4, group 32 +│ [1-9]\d* linear weights in 2 worker", run.console)
    assert re.search(rf"float32 logits +{FLOAT32_HEADS.format(2)}", run.console)
    assert_documented(run)
    assert run.steps[0]["vllm_kl/k3"] > 5e-4, "bf16 alone has some 5e-5 here"
    for step in run.steps:
        assert 0.6 < step["router/own_agreement"] < 1
        # Both ranks' tokens, and each once: the same tokens that verl counts.
        assert step["router/tokens"] == pytest.approx(28 * step["response_length/mean"])
        # A response that hit the limit is out of the loss, and punished in its reward.
        assert 0 < step["filter/overlong/dropped_trajectories"] < 1
        assert step["critic/score/min"] < 0
        assert_k1_is_verls(step)
        assert step["actor/grad_norm"] > 0
    assert suspected_causes(run)[0] == "quantized"


@pytest.fixture(scope="module")
def plain_verl(train_in, tmp_path_factory):
    """A run of verl's own entry point, with only our loss."""
    return train_in(
        tmp_path_factory.mktemp("plain_verl"),
        "actor_rollout_ref.actor.policy_loss._target_=verl_ext.workers.loss_config.build_loss_config",
        "actor_rollout_ref.actor.policy_loss.loss_mode=icepop",
        "+actor_rollout_ref.actor.policy_loss.alpha=0.999",
        "+actor_rollout_ref.actor.policy_loss.beta=1.001",
        *VERLS_WEIGHTS,
        plain_verl=True,
    )


def test_icepop_loss_under_plain_verl(plain_verl):
    assert plain_verl.code == 0, plain_verl.tail
    assert_documented(plain_verl)
    for step in plain_verl.steps:
        assert 0 < step["actor/icepop/dropped_low"] < 1
        assert 0 < step["actor/icepop/dropped_high"] < 1
        assert step["actor/grad_norm"] > 0


def test_none_logs_what_plain_verl_logs(train, plain_verl):
    """Tokens are sampled from the likely ones, which training does not know: the report finds it by these metrics."""
    none = train("stability=none", *VERLS_WEIGHTS, "actor_rollout_ref.rollout.top_p=0.8", steps=8)
    assert none.code == 0, none.tail
    assert "running verl unchanged" in none.console
    assert keys(none)[:2] == [{name for name in names if "/icepop/" not in name} for names in keys(plain_verl)]
    assert not any(ours(names) for names in keys(none))
    assert {"actor/grad_norm", "critic/score/mean", "rollout_corr/kl"} <= keys(none)[0]
    assert suspected_causes(none) == ["truncated"]


@pytest.mark.no_step
def test_cascade_attention_that_the_engine_does_not_run_stops_the_run(train):
    # vLLM's CPU model runner accepts the argument and never uses cascade attention.
    run = train("stability=icepop_loss", "stability.cascade_attention=on")
    assert run.code != 0
    assert "cascade attention is off in vLLM" in error_of(run.console)
    assert not (run.folder / "verl_ext" / "cpu_smoke.jsonl").exists(), "the run must stop before training"
