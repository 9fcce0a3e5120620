"""The lab's step: the plugin's own functions on the lab's batch, tested by their effect on gradients and weights."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.support import quick_compose
from tests.support.closeness import close
from verl_ext.base.errors import ConfigError, MethodError
from verl_ext.core.corrections import CORRECTIONS, Weights, register_correction
from verl_ext.core.expert_load import ExpertLoad
from verl_ext.core.loss_batch import LossChange
from verl_ext.features.verl_config import BYPASS
from verl_ext.lab import arms
from verl_ext.lab.learner import compare_routing
from verl_ext.lab.model import init_weights
from verl_ext.lab.training import Training
from verl_ext.lab.warm_up import warm_up
from verl_ext.launch import compose as ours

SMALL = (
    "lab.model.hidden=16",
    "lab.model.expert_hidden=8",
    "lab.task.digits=4",
    "lab.warm_up.reward=0.15",
    "data.max_response_length=6",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
)


@pytest.fixture(autouse=True)
def composed_quickly(monkeypatch):
    monkeypatch.setattr(arms, "compose", quick_compose.compose)
    monkeypatch.setattr(ours, "_groups_in_defaults", quick_compose.groups_in_defaults)


@pytest.fixture(scope="module")
def warm_ups(tmp_path_factory):
    return tmp_path_factory.mktemp("warm-ups")


@pytest.fixture
def training(tmp_path, warm_ups):
    """Builds a run of a variant."""

    def build(regime="stale", variant="none", *overrides, steps=0):
        given = (*SMALL, "lab.stale.lag=2", *overrides)
        arm = arms.arms_of(regime, [variant], {}, given)[-1]
        setup = arms.setup_of(arm, 0, tmp_path)
        run = Training(setup, warm_up(setup.lab, 6, 0, warm_ups))
        run.metrics = [run.step(step + 1) for step in range(steps)]
        return run

    return build


def of_a_step(run, number=1):
    """A batch of this run and its reading."""
    batch = run.rollout(number)
    batch.scored = run.learner.score_old(batch)
    return batch, batch.scored


def all_tokens(batch, scored):
    """Returns the fields that the loss reads, where every token has advantage 1."""
    l_old = scored.log_probs.detach()
    fields = {"old_log_probs": l_old, "advantages": torch.ones_like(l_old), "entropy": scored.entropy}
    return fields | {"response_mask": batch.sampled.mask.clone()}


def weights_of(run):
    return {name: value.detach().clone() for name, value in run.policy.weights.items()}


def has_weights(run, weights):
    return all(torch.equal(run.policy.weights[name], value) for name, value in weights.items())


def gradient(run, batch, scored, fields):
    """Returns the gradient of the workers' loss with respect to the log-probabilities [B, T]."""
    batch.scored, batch.fields = scored, fields
    l_theta = scored.log_probs.detach().requires_grad_()
    run.policy._kept = batch.sampled.responses, replace(scored, log_probs=l_theta)
    run.policy.forward_backward_batch(run.learner.update_data(batch, {}), run.learner.loss_fn)
    return l_theta.grad


def test_the_gradient_is_that_of_the_weighted_clipped_objective(training):
    """-w A / N at each token where the old policy is the current one: GRPO's token mean (DAPO, eq. 8), corrected."""
    run = training("stale", "tis", steps=3)
    batch, scored = of_a_step(run, 4)
    batch = replace(batch, rewards=torch.rand(64))  # no group of one reward, whose advantages are rounding
    l_old, mask = scored.log_probs.detach(), batch.sampled.mask
    weights = torch.rand(mask.shape)
    advantages = run.advantages(batch, refused=False)
    fields = all_tokens(batch, scored) | {"advantages": advantages, "rollout_is_weights": weights}
    rewards = batch.rewards.double().view(8, 8)
    A = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    expected = -(weights * A * mask) / mask.sum()
    close(gradient(run, batch, scored, fields), expected, 1e-5)
    off = l_old - 1.0  # all ratios are e: clipped where the advantage is positive, and free where it is not
    clipped = gradient(run, batch, scored, fields | {"old_log_probs": off})
    close(clipped, torch.where(A < 0, expected * torch.e, 0.0), 1e-5)


def test_the_weights_of_a_step_are_the_corrections(training):
    run = training("stale", "tis", steps=4)
    batch, scored = of_a_step(run, 5)
    k = (scored.log_probs.detach().double() - batch.sampled.l_infer).exp()
    fields = {}

    def update(batch, asked):
        fields["seen"] = batch.fields
        return {}

    run.rollout, run.learner.score_old, run.learner.update = lambda number: batch, lambda batch: scored, update
    run.step(5)
    close(fields["seen"]["rollout_is_weights"], k.clamp(max=2) * batch.sampled.mask, 1e-5)


def test_exact_has_no_gap_and_stale_has_one(training):
    exact = training("exact", "none", steps=4).metrics
    assert max(metrics["vllm_kl/k3"] for metrics in exact) < 1e-9
    assert min(metrics["router/agreement"] for metrics in exact) == 1
    stale = training("stale", "none", steps=4).metrics
    assert stale[0]["vllm_kl/k3"] < 1e-9 < 1e-6 < stale[-1]["vllm_kl/k3"]


def test_stale_rollouts_say_so_as_tags_do_and_too_stale_drops_them(training, warm_ups, tmp_path):
    fresh = {"fresh": "stability=opsm stability.filters={too_stale:{versions:1}}"}  # of the variant: exact has no lag
    setup = arms.setup_of(arms.arms_of("stale", [], fresh, (*SMALL, "lab.stale.lag=2"))[-1], 0, tmp_path)
    run = Training(setup, warm_up(setup.lab, 6, 0, warm_ups))
    run.metrics = [run.step(step) for step in (1, 2, 3)]
    assert [metrics["filter/too_stale/dropped_tokens"] for metrics in run.metrics] == [0, 0, 1]
    for step, (metrics, bucket) in enumerate(zip(run.metrics, "012", strict=True), 1):
        assert metrics[f"vllm_kl/share/lag/{bucket}"] == 1 and metrics["guard/skipped"] == int(step == 3)
    assert run.metrics[1]["actor/opsm/mismatch/lag/1"] == run.metrics[1]["actor/opsm/mismatch"]
    assert not any("/lag/" in name for name in training("bf16", "opsm", steps=1).metrics[0])


def test_runs_of_one_seed_are_the_same_and_of_another_are_not(training):
    first, second = (training("stale", "icepop", steps=3).metrics for _ in range(2))
    timed = "timing_s/step"
    assert [{**m, timed: 0} for m in first] == [{**m, timed: 0} for m in second]
    run = training("stale", "icepop")
    other = Training(replace(run.setup, seed=1), run.policy.weights)
    assert other.step(1)["critic/score/mean"] != first[0]["critic/score/mean"]


def test_replay_uses_the_rollouts_experts(training):
    run = training("stale", "r3", steps=5)
    metrics = run.metrics[-1]
    assert metrics["router/agreement"] == 1 > metrics["router/own_agreement"]
    batch, scored = of_a_step(run, 6)
    rows = batch.sampled.mask.sum(1) + batch.prompts.shape[1] - 1
    for row, until in enumerate(rows.tolist()):
        assert torch.equal(scored.routing.stacked()[row, :until], batch.sampled.experts[row, :until])


def test_agreement_is_counted_on_the_passes_that_predict_the_response(training):
    run = training("stale", "none", steps=5)
    batch, scored = of_a_step(run, 6)
    per_token, _ = compare_routing(batch, load := ExpertLoad(run.setup.lab.model.layers, 8))
    assert load.take()["router/load_max"] > 1
    first, found = batch.prompts.shape[1] - 1, iter(per_token.tolist())
    for row in range(len(batch.keys)):
        for t in range(int(batch.sampled.mask[row].sum())):
            both = zip(scored.routing.stacked()[row, first + t], batch.sampled.experts[row, first + t], strict=True)
            shares = [len(set(used.tolist()) & set(infer.tolist())) / 2 for used, infer in both]
            assert next(found) == pytest.approx(sum(shares) / len(shares))
    assert next(found, None) is None


def test_r2_replays_the_first_pass_in_every_update_and_after_it(training):
    updates = "actor_rollout_ref.actor.ppo_mini_batch_size=2"
    run = training("stale", "r2", updates, "stability.guard.after_update.trajectories=8", steps=2)
    batch, scored = of_a_step(run, 3)
    run.policy.weights["0.router"].data.neg_()
    passes, score = [], run.policy._score
    run.policy._score = lambda *given: passes.append(score(*given)) or passes[-1]
    batch.fields = all_tokens(batch, scored)
    run.learner.update(batch, {})
    for start, now in zip((0, 16, 32, 48, 0), passes, strict=True):  # the last after the update
        rows = slice(start, start + len(now.log_probs))
        assert torch.equal(now.routing.stacked(), scored.routing.stacked()[rows])
        assert not torch.equal(now.routing.own[0], scored.routing.own[0][rows])


def test_bypass_takes_the_ratio_against_the_rollout(training):
    run = training("stale", "bypass", steps=4)
    metrics = run.step(5)
    seen = {}
    run.learner.update = lambda batch, asked: (
        seen.update(l_old=batch.fields["old_log_probs"], l_infer=batch.sampled.l_infer) or {}
    )
    run.step(6)
    assert torch.equal(seen["l_old"], seen["l_infer"])
    assert metrics["actor/ppo_kl"] != 0 and metrics["vllm_kl/k3"] > 0


def test_bypass_measures_and_masks_in_the_update_what_the_trainer_would_have(training):
    given = ("stability.correction=icepop", "stability.icepop.alpha=0.97", "stability.icepop.beta=1.03")
    masked, decoupled = (training("stale", name, *given, steps=3) for name in ("bypass", "none"))
    names = [name for name in decoupled.metrics[0] if name.startswith(("vllm_kl/", "correction/"))]
    # The lab's updates compute no entropy, and no worker knows how old a rollout is.
    names = [name for name in names if "entropy" not in name and "/lag/" not in name]
    # The first step starts from the same weights; what is dropped is the same, and weighs otherwise.
    same = {name: value for name in names if name != "correction/weight_mean" for value in [decoupled.metrics[0][name]]}
    assert {name: masked.metrics[0][name] for name in same} == pytest.approx(same, rel=1e-6)
    assert any(metrics["correction/dropped"] > 0 for metrics in masked.metrics)
    for metrics in masked.metrics:
        assert metrics["correction/weight_mean"] == pytest.approx(1 - metrics["correction/dropped"])
        assert metrics["guard/skipped"] == 0 and "actor/grad_norm" in metrics


def test_a_batch_that_bypass_refuses_leaves_the_weights(training):
    run = training("stale", "bypass", "stability.batch_skip.threshold=1e-7", steps=1)
    before = weights_of(run)
    metrics = run.step(2)
    assert metrics["vllm_kl/k3"] > 1e-7 and metrics["guard/skipped"] == 1 and metrics["guard/skips"] > 0
    assert "actor/grad_norm" not in metrics and "actor/pg_loss" in metrics
    assert has_weights(run, before)


@pytest.mark.parametrize("name", [name for name in arms.variants() if name not in ("dapo",)])
def test_every_variant_of_the_plugin_runs(training, name):
    updates = () if name == "score_centering" else ("actor_rollout_ref.actor.ppo_mini_batch_size=4",)
    run = training("stale+quantized", name, "lab.quantized.group=8", *updates, steps=3)
    assert all(0 <= metrics["critic/score/mean"] <= 1 for metrics in run.metrics)
    assert run.metrics[-1]["vllm_kl/k3"] > 0


def syncs_told(run, steps):
    """Returns the sync canary's events as (step, action)."""
    events = []
    run.actions.record_decision = lambda decision: events.extend(decision.events)
    for step in range(1, steps + 1):
        run.metrics = run.step(step)
    return [(event.step, event.action) for event in events if event.signal == "sync/arrived_high"]


def test_the_sync_canary_sees_the_first_sync_that_is_missed_and_the_first_that_arrives(training):
    canary, missed = "stability.sync_canary.trajectories=8", ("lab.missed_sync.update=3", "lab.missed_sync.count=2")
    assert syncs_told(training("missed_sync", "none", canary, *missed), 8) == [(4, "warn"), (6, "recover")]


@pytest.mark.parametrize("regime", ["exact", "bf16"])
def test_the_sync_canary_is_silent_where_syncs_arrive(training, regime):
    run = training(regime, "none", "stability.sync_canary.trajectories=8")
    assert syncs_told(run, 12) == []
    assert regime != "exact" or 0.99 < run.metrics["sync/arrived_low"] <= run.metrics["sync/arrived_high"] < 1.01


def test_a_rollback_brings_weights_and_optimizer_back(training):
    rule = "stability.guard.rules.it={signal: vllm_kl/k3, above: 1e-6, action: rollback}"
    overrides = ("trainer.save_freq=1", "lab.missed_sync.update=4", rule)
    run = training("missed_sync", "none", *overrides)
    weights, moments = {}, {}
    for step in range(1, 8):
        if run.step(step)["guard/rollbacks"]:
            break
        weights[step] = weights_of(run)
        moments[step] = [value["exp_avg"].clone() for value in run.policy.optimizer.state.values()]
    back = step - 2  # the last whose weights were measured, and found good
    assert back >= 3
    assert has_weights(run, weights[back])
    now = [value["exp_avg"] for value in run.policy.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(now, moments[back], strict=True))


@pytest.mark.parametrize(
    ("regime", "variant", "overrides", "said"),
    [
        ("stael", "none", (), "the regime stael is not known"),
        ("stale", "icepo", (), "--variants=icepo is not known.*icepop"),
        ("stale", "dapo", (), "algorithm.filter_groups.enable=True is not supported in the lab"),
        ("stale", "none", ("lab.model.top_k=9",), "lab.model.top_k=9 must be from 1 to experts=8"),
        ("stale", "none", ("lab.model.router=tanh",), "lab.model.router=tanh is not known"),
        ("stale", "none", ("lab.stale.lagg=1",), "lagg"),
        ("stale", "none", ("actor_rollout_ref.rollout.top_p=0.9",), "rollout.top_p=0.9"),
        ("stale", "tis", ("stability.reuse_log_probs=on",), "stability.reuse_log_probs=on is not supported in the lab"),
        ("stale", "none", ("lab.task.name=chess",), "lab.task.name=chess is not known"),
        ("stale", "none", ("lab.task.answer=-1",), "lab.task.answer=-1 must be at least 0"),
        ("stale", "none", ("lab.grader.noise=2",), "lab.grader.noise=2"),
    ],
)
def test_bad_input_is_one_line(regime, variant, overrides, said):
    with pytest.raises(ConfigError, match=said):
        arms.arms_of(regime, [variant], {}, overrides)


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("in_update", [False, True])
@mock.patch.dict(CORRECTIONS)
def test_a_correction_with_weights_that_cannot_be_used_ends_the_run(training, in_update, value, bypass):
    if in_update:
        register_correction("mine", in_update=True)(lambda batch: LossChange(torch.full_like(batch.l_old, value)))
    else:
        zero = torch.zeros_like
        register_correction("mine", reads=("k",))(lambda k: Weights(torch.full_like(k, value), zero(k), zero(k)))
    with pytest.raises(MethodError, match=r"stability\.correction=mine"):
        training("stale", "mine", f"{BYPASS}={bypass}", steps=1)


def test_a_warm_up_that_does_not_arrive_says_so(tmp_path):
    arm = arms.arms_of("stale", [], {}, (*SMALL, "lab.warm_up.most_steps=10", "lab.warm_up.reward=0.9"))[0]
    with pytest.raises(ConfigError, match=r"lab\.warm_up\.reward=0\.9 was not reached in 10 steps"):
        arms.run_arm(arm, 0, tmp_path / "exact" / "seed0", lambda step: None)


def test_what_is_added_and_composed():
    found = arms.arms_of("stale", ["icepop+geo_mask"], {"mine": "stability=tis stability.tis.cap=3"}, ())
    assert [arm.name for arm in found] == ["exact", "icepop+geo_mask", "mine"]
    assert arms.setup_of(found[1], 0).features.stability.correction_names == ("icepop", "geo_mask")
    assert arms.setup_of(found[2], 0).features.stability.corrections() == {"tis": {"cap": 3.0, "floor": 0.0}}


@pytest.mark.parametrize("knows", [True, False])
def test_truncated_sampling_is_no_gap_if_the_training_engine_knows_what_was_kept(training, knows):
    run = training("truncated", "none", f"lab.truncated.known={knows}", steps=1)
    (metrics,) = run.metrics
    assert (metrics["vllm_kl/k3"] < 1e-9) == knows
    assert ("vllm_kl/head" in metrics) == knows
    if knows:
        # Of q (log q - log p) a rounding of float32 is left, of first order where that of k3 is of second.
        assert abs(metrics["vllm_kl/head"]) < 1e-6 and metrics["vllm_kl/head_missing"] == 0


@pytest.mark.parametrize("k", [0, 4])
def test_the_head_kl_is_what_k3_estimates(training, k):
    """Both have the same size, with old weights and a large step, over some 60 tokens."""
    run = training(
        "stale", "none", f"stability.top_tokens.k={k or 128}", "actor_rollout_ref.actor.optim.lr=1e-2", steps=4
    )
    metrics = run.metrics[-1]
    assert metrics["vllm_kl/head_mass"] < 1 - 1e-3 if k else metrics["vllm_kl/head_mass"] > 1 - 1e-5
    assert 0.2 < metrics["vllm_kl/head"] / metrics["vllm_kl/k3"] < 5


def test_a_centered_score_has_no_drift(training):
    """A constant advantage makes E_q[A grad log p] pure drift: after it is subtracted, only noise is left."""
    large = ("actor_rollout_ref.actor.optim.lr=1e-2", "data.train_batch_size=256")
    large += ("actor_rollout_ref.actor.ppo_mini_batch_size=256",)
    run = training("stale", "score_centering", *large, steps=4)
    batch, scored = of_a_step(run, 5)
    batch.fields = all_tokens(batch, scored)
    data, found = run.learner.update_data(batch, {}), {}
    for centered in (True, False):
        run.learner.loss_fn.keywords["centers"] = centered
        run.policy.optimizer.zero_grad()
        run.policy.forward_backward_batch(data, run.learner.loss_fn)
        found[centered] = torch.cat([weight.grad.flatten() for weight in run.policy.weights.values()]).norm()
    assert found[True] < found[False] / 2


UPDATES = "actor_rollout_ref.actor.ppo_mini_batch_size=4"  # two a step
LIMITS = "stability.guard.mini_batch"


@pytest.mark.parametrize(
    ("limit", "refused"), [("policy_kl=1e-9", 0.5), ("vllm_kl=1e-30", 1), ("grad_norm=1e-9", 1), ("grad_norm=1e9", 0)]
)
def test_mini_batches_past_a_limit_are_refused(training, limit, refused):
    run = training("stale+bf16", "none", UPDATES, f"{LIMITS}.{limit}")
    before = weights_of(run)
    metrics = run.step(1)
    assert metrics["actor/gate/refused"] == refused
    assert ("actor/grad_norm" in metrics) == (refused < 1)
    assert has_weights(run, before) == (refused == 1)


def test_a_mini_batch_without_a_token_takes_no_step(training):
    run = training("stale", "none", UPDATES)
    batch, scored = of_a_step(run)
    fields = batch.fields = all_tokens(batch, scored)
    fields["response_mask"][:32] = False
    steps, step = [], run.policy.optimizer.step
    run.policy.optimizer.step = lambda: steps.append(step())
    metrics = run.learner.update(batch, {})
    assert len(steps) == 1 and metrics["actor/grad_norm"] > 0
    fields["response_mask"][:] = False
    assert "actor/grad_norm" not in run.learner.update(batch, {}) and len(steps) == 1


def test_the_engines_module_holds_the_weights_under_their_names(training):
    run = training()
    named = dict(run.policy.module.named_parameters())
    assert list(named) == list(init_weights(run.setup.lab.model, 12, 11, torch.Generator()))
    assert all(named[name] is value for name, value in run.policy.weights.items())


def test_the_guard_takes_an_update_back_and_lowers_the_learning_rate(training):
    rules = (
        "{moved:{signal:actor/after_update/policy_kl,above:0,action:undo},"
        "late:{signal:response_length/mean,above:0,action:lower_lr}}"
    )
    again = "stability.guard.after_update.trajectories=8"
    run = training("stale", "none", f"stability.guard.rules={rules}", again)
    before = weights_of(run)
    run.metrics = [run.step(number) for number in range(1, 4)]
    assert [step["guard/undos"] for step in run.metrics] == [1, 2, 3], "no step leaves the policy as it was"
    assert [step["guard/lr_scale"] for step in run.metrics] == [0.5] * 3
    moved = [step["actor/after_update/policy_kl"] for step in run.metrics]
    assert all(0 < value < 1 for value in moved)
    assert has_weights(run, before)


@pytest.mark.parametrize(("threshold", "taken"), [("null", 1), ("1e-7", 0)])
def test_in_bypass_mode_an_undo_has_nothing_to_take_back_of_a_batch_that_is_refused(training, threshold, taken):
    rules = "stability.guard.rules={late:{signal:actor/pg_loss,above:-1e9,action:undo}}"
    run = training("quantized", "bypass", rules, "lab.quantized.group=8", f"stability.batch_skip.threshold={threshold}")
    metrics = [run.step(step) for step in (1, 2, 3)]
    assert ["actor/grad_norm" in step for step in metrics] == [bool(taken)] * 3
    assert [step["guard/undos"] for step in metrics] == [taken, 2 * taken, 3 * taken]


def test_the_gap_is_told_by_the_sign_of_the_advantage_and_can_be_judged_by_it(training):
    rule = "{skew:{signal:vllm_kl/k3/advantage/positive,above:-1,action:skip}}"
    run = training("stale", "none", f"stability.guard.rules={rule}", "stability.breakdown=true", steps=2)
    for step in run.metrics:
        shares = [step[f"vllm_kl/share/advantage/{sign}"] for sign in ("positive", "negative")]
        assert 0 < sum(shares) <= 1 and step["guard/skipped"] == 1
        parts = [step[f"vllm_kl/k1/advantage/{sign}"] for sign in ("positive", "negative")]
        assert step["vllm_kl/advantage_skew"] == parts[0] - parts[1]
