"""The objective: rewards, advantages, the loss, and settings that verl 0.9.1 does not read.

The files of verl are those of 0.9.1; `core_algos.py` and `v1` are in verl/trainer/ppo.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping

from omegaconf import OmegaConf

from verl_ext.base.errors import Problem, errors_of
from verl_ext.core.filters import BATCH_FILTERS
from verl_ext.doctor.checks import Context, check, error, note, ok, warning
from verl_ext.doctor.precision import BFLOAT16, DTYPES, corrected, dtype_name
from verl_ext.doctor.training import updates_of_a_batch
from verl_ext.features.losses import LOSSES
from verl_ext.features.verl_config import (
    ACTOR,
    BYPASS,
    MODE,
    MODEL,
    MTP,
    REWARD_ARGUMENTS,
    ROLLOUT,
    ignores_advantages,
    needs_critic,
    needs_reference,
    refers_to_actor,
    replay_mode,
    verls_corrections,
)
from verl_ext.launch.names import MANAGER, unknown_names
from verl_ext.launch.refused import is_plain, new_place, replacement
from verl_ext.launch.rewards import reward_function_problems

WITHOUT_BASELINE = ("grpo", "grpo_vectorized", "rloo", "opo", "gpg", "grpo_positive", "qae")
ROOTS = ("custom_reward_function", "reward_manager", "reward_model", "sandbox_fusion", "ray_init")
BASELINE = (f"{ACTOR}.calculate_sum_pi_squared=True",)
# Estimator -> what the old trainer needs for it. It feeds all of them.
UNFED = {"remax": (), "gdpo": (), "optimal_token_baseline": BASELINE, "tir_optimal_token_baseline": BASELINE}
GDPO_KEYS = "algorithm.gdpo_reward_keys"
FEW = 4  # responses; verl's examples have at least as many
ESTIMATOR = "algorithm.adv_estimator"
RESPONSES = f"{ROLLOUT}.n"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
USUAL_CLIP = 0.2
AGGREGATION = f"{ACTOR}.loss_agg_mode"
UPDATES = (f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_epochs")
MANY = 16  # updates between two computations of l_old
CLIPPED = ("vanilla", "geo_mean", "clip_cov")  # losses that clip the ratio of a token
WIDE, WIDE_GSPO = 0.4, 0.01  # clips from here on; GSPO's, of the mean of a response, are 3e-4 and 4e-4 in its paper
GENERATED = "algorithm.filter_groups.max_num_gen_batches"
PLACEHOLDER = "~/models/deepseek-llm-7b-chat"
BY_SEQUENCE = "seq-mean-token-mean"
DISCOUNTED, LEFT_OF_REWARD = ("gae", "reinforce_plus_plus"), 0.1  # estimators; share of a reward at the first token
FILTERED = "algorithm.filter_groups"


@check("old reward settings", needs="config")
def old_reward_settings(context: Context) -> Iterable[Problem]:
    """`reward_model.*`, `reward_manager.*`, `custom_reward_function.*`, `sandbox_fusion.*`: verl 0.9.1 reads them only
    under `reward`, and otherwise silently uses its default reward (verl PR 7331); `ray_init.*`, which is under
    `ray_kwargs`.

    Source: verl PR 7331 (closed). `run_ppo` of verl/trainer/main_ppo.py reads ray_kwargs.ray_init. Only
    fully_async_main.py calls `migrate_legacy_reward_impl` of experimental/reward_loop/reward_loop.py, so trainer V1
    silently uses its default reward.
    """
    given = {
        leaf: value
        for root in ROOTS
        for leaf, value in _set_below(context.get(root), root)
        if not (place := new_place(leaf)) or context.get(place) != value  # else nothing is lost
    }
    given |= {key: "" for key in context.launch.left_out if key.split(".")[0] in ROOTS}
    if context.entry.removesuffix(".py").endswith("fully_async_main"):  # which moves the reward's itself
        given = {leaf: value for leaf, value in given.items() if leaf.startswith("ray_init")}
    if given:
        known = ", ".join(dict.fromkeys(filter(None, map(new_place, given)))) or "no such setting"
        default = "its default" if all(leaf.startswith("ray_init") for leaf in given) else "its default reward"
        why = f"verl 0.9.1 silently uses {default}: it reads {known}"
        known_values = ((leaf, value) for leaf, value in given.items() if leaf not in context.launch.left_out)
        moved, fix = copy.deepcopy(context.config), list[str]()
        for leaf, value in known_values:
            fix += replacement(leaf, value, context.config, context.given)
            if place := new_place(leaf):
                OmegaConf.update(moved, place, value, force_add=True)
        there = [*errors_of([*unknown_names(moved), *reward_function_problems(moved)])]
        if new := [one for one in there if one not in {*unknown_names(context.config)}]:
            why = f"{why}; there the run stops: {'; '.join(f'{one.found} ({one.why})' for one in new)}"
        yield warning(f"{', '.join(given)}: not read", why, *([] if new else fix))


@check("reward function", needs="config")
def reward_function(context: Context) -> Iterable[Problem]:
    """A reward function whose parameters are not those with which its manager calls it.

    Source: the call of `compute_score` in verl/experimental/reward_loop/reward_manager, to which `_call_with_kwargs` of
    verl/trainer/ppo/reward.py adds reward_kwargs.
    """
    yield from reward_function_problems(context.config)


def _set_below(node: object, path: str) -> Iterator[tuple[str, object]]:
    """Yields the settings below a node that are not null."""
    plain = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node
    if isinstance(plain, Mapping):
        for name, value in plain.items():
            yield from _set_below(value, f"{path}.{name}")
    elif plain is not None:
        yield path, plain


@check("estimator", needs="config")
def estimator(context: Context) -> Iterable[Problem]:
    """`remax`, `gdpo` and the token baselines, which do not get their inputs from trainer V1; `gdpo` without its keys;
    a critic without a model; PF-PPO, whose responses get the keys of other responses (verl PR 7957).

    Source: `_compute_advantage` of v1/trainer_base.py fetches no reward_baselines, prompts, reward keys or
    sum_pi_squared; those of `compute_advantage` in ray_trainer.py (trainer.use_v1=False) do. `gdpo` asserts its keys
    (core_algos.py). verl PR 7957 (open): PF-PPO resamples the batch, and V1 writes the result back under the old keys.
    """
    name = context.get(ESTIMATOR)
    if name in UNFED and context.get("trainer.use_v1"):
        why = "trainer V1 does not fetch its inputs, and the first step ends with an error; the old trainer does"
        hooked = context.features is not None and context.features.demands
        fix = (f"{ESTIMATOR}=grpo",) if hooked else ("trainer.use_v1=False", *UNFED[name])  # which has no hooks
        yield error(f"{ESTIMATOR}={name}", why, *fix)
    critic = context.get("critic.model.path")
    if needs_critic(context.config) and critic == PLACEHOLDER != (context.model_path or PLACEHOLDER):
        why = "that is verl's placeholder: the critic would be this model, if it is there at all"
        yield error(f"critic.model.path={critic}", why, f"critic.model.path={context.model_path}")
    if name == "gdpo" and not context.get(GDPO_KEYS):
        yield error(f"{ESTIMATOR}=gdpo without {GDPO_KEYS}", "it must list the keys of the rewards, or step 1 fails")
    if context.get("algorithm.use_pf_ppo") and name == "gae":
        why = "trainer V1 gives the resampled responses the keys of other responses (verl PR 7957)"
        yield warning("algorithm.use_pf_ppo=True", why, "algorithm.use_pf_ppo=False")


@check("old trainer", needs="config")
def old_trainer(context: Context) -> Iterable[Problem]:
    """A note: `trainer.use_v1=False`, which verl 0.9.1 deprecates.

    Source: `main` of verl/trainer/main_ppo.py, which warns that main_ppo_v0.py will be removed.
    """
    if context.get("trainer.use_v1") is False and not context.entry:
        yield note("trainer.use_v1=False", "verl deprecates its old trainer, and will remove it")


@check("group size", needs="config")
def group_estimators(context: Context) -> Iterable[Problem]:
    """A group estimator with `rollout.n=1`; a note for 2 or 3.

    Source: core_algos.py. For one response, GRPO and its relatives use mean 0 and standard deviation 1, so the
    advantage is the reward itself; `compute_rloo_vectorized_outcome_advantage` gives 0 to every response, and
    `compute_grpo_passk_outcome_advantage` raises an error.
    """
    name, responses = context.get(ESTIMATOR), context.get(RESPONSES, 1)
    judged = (*WITHOUT_BASELINE, "grpo_passk", "rloo_vectorized")
    if responses >= FEW or name not in judged or ignores_advantages(context.config):
        return
    if responses > 1:
        yield note(f"{RESPONSES}={responses}", "in small groups, all answers are often right, or all wrong: no signal")
        return
    found = f"{ESTIMATOR}={name} with {RESPONSES}={responses}"
    if name == "grpo_passk":
        yield error(found, "verl ends the first step: it needs two responses of each prompt", f"{RESPONSES}=8")
    elif name == "rloo_vectorized":
        yield warning(found, "every advantage is 0: nothing is learnt", f"{RESPONSES}=8")
    else:
        why = "a group of one has no baseline: the advantage is the reward itself"
        yield warning(found, why, f"{RESPONSES}=8")


@check("loss normalisation", needs="config")
def loss_normalisation(context: Context) -> Iterable[Problem]:
    """`seq-mean-token-sum-norm` without a constant; a note: `geo_mean` sums the means of micro-batches (verl issue
    7913).

    Source: `agg_loss` of core_algos.py divides by the padded length of the micro-batch if loss_scale_factor is null;
    Dr.GRPO (arXiv 2503.20783) divides by a constant. `compute_policy_loss_geo_mean` takes the mean over the responses
    of a micro-batch, and the micro-batches are summed (verl issue 7913, PR 7916 is open).
    """
    mode, factor = context.get(f"{ACTOR}.loss_agg_mode"), f"{ACTOR}.loss_scale_factor"
    if mode == "seq-mean-token-sum-norm" and context.get(factor) is None:
        why = "verl then divides by the longest response of each micro-batch, not by a constant as Dr.GRPO does"
        length = context.get("data.max_response_length")
        fix = [f"{factor}={length}"] if is_plain(length) else []
        yield warning(f"loss_agg_mode={mode} without loss_scale_factor", why, *fix)
    if context.get(LOSS_MODE) == "geo_mean":
        why = "verl takes the mean of each micro-batch and sums them: the gradient grows with their number (issue 7913)"
        yield note("loss_mode=geo_mean with several micro-batches", why)


@check("loss aggregation")
def loss_aggregation(context: Context) -> Iterable[Problem]:
    """GSPO with verl's default `loss_agg_mode=token-mean`; its paper averages over responses. GSPO with a mixture of
    experts and no correction of the gap between the engines.

    Source: GSPO (arXiv 2507.18071) takes the mean over responses, which all count the same. verl 0.9.1's
    `compute_policy_loss_gspo` (trainer/ppo/core_algos.py) aggregates by `actor.loss_agg_mode`, whose default is
    token-mean, and its ratio is l_theta to l_old, both of the training engine. In arXiv 2512.01374, weighing by the gap
    made training of a 30B MoE the most stable.
    """
    if not _uses_gspo(context):
        return
    if context.has_experts and not (
        corrected(context) or verls_corrections(context.config) or replay_mode(context.config) == "R3"
    ):
        why = "its ratio leaves out the gap between rollout and training, which is largest with experts"
        yield warning(
            "GSPO with experts and no correction",
            f"{why}; stability=tis weighs it, and stability=moe replays the experts too",
        )
    mode = context.get(AGGREGATION, "token-mean")
    if mode == BY_SEQUENCE:
        yield ok(f"GSPO with loss_agg_mode={mode}, as in its paper")
        return
    why = "GSPO's paper averages over responses; with this mode a long response weighs more than a short one"
    yield warning(f"GSPO with {AGGREGATION}={mode}", why, f"{AGGREGATION}={BY_SEQUENCE}")


@check("loss settings", needs="config")
def loss_settings(context: Context) -> Iterable[Problem]:
    """`clip_ratio`, which verl ignores if `clip_ratio_low` and `clip_ratio_high` are set; k1 as a loss; a correction
    without log-probs; `critic_warmup` without a critic.

    Source: `compute_policy_loss_vanilla` of core_algos.py reads clip_ratio only if clip_ratio_low or clip_ratio_high is
    null; the default of both is 0.2. `kl_penalty`: the gradient of k1 has mean 0. `_compute_advantage` of
    v1/trainer_base.py leaves the correction out if the rollout returned no log-probs, and in bypass mode ends with a
    KeyError. `_update_actor` waits for critic_warmup even without a critic.
    """
    clip, low, high = (context.get(f"{ACTOR}.clip_ratio{side}") for side in ("", "_low", "_high"))
    if None not in (clip, low, high) and clip != low == high == USUAL_CLIP:
        why = f"verl reads clip_ratio_low and clip_ratio_high, which are {USUAL_CLIP}"
        sides = (f"{ACTOR}.clip_ratio_low={clip}", f"{ACTOR}.clip_ratio_high={clip}")
        yield warning(f"{ACTOR}.clip_ratio={clip} has no effect", why, *(sides if is_plain(clip) else ()))
    kind = f"{ACTOR}.kl_loss_type"
    if context.get(f"{ACTOR}.use_kl_loss") and context.get(kind) in ("kl", "k1"):
        why = "as a loss, its expected gradient is 0: it does not keep the policy near the reference"
        yield warning(f"{kind}={context.get(kind)}", why, f"{kind}=low_var_kl")
    asked, silent = verls_corrections(context.config), f"{ROLLOUT}.calculate_log_probs"
    if not context.get(silent) and (asked or context.get(BYPASS)):
        names = ", ".join(asked or [BYPASS])
        level = error if context.get(BYPASS) else warning
        why = "the correction needs the rollout's log-probs; verl leaves the correction out, and bypass mode fails"
        yield level(f"{names} with {silent}=False", why, f"{silent}=True")
    if context.get("trainer.critic_warmup", 0) > 0 and not needs_critic(context.config):
        why = "there is no critic to warm up, and the policy is not updated during these steps"
        yield warning(f"trainer.critic_warmup={context.get('trainer.critic_warmup')}", why, "trainer.critic_warmup=0")


@check("step size", needs="config")
def step_size(context: Context) -> Iterable[Problem]:
    """Clips that hardly clip. A note: many updates of one batch, also of batches that wait in an asynchronous mode.

    Source: `compute_policy_loss_gspo` of core_algos.py clips the geometric mean of a response's ratios; GSPO's paper
    (arXiv 2507.18071) uses 3e-4 and 4e-4. GMPO issue 1: a 30B MoE collapsed at clips of 0.4; its author advises 0.2.
    Entropy-Mechanism-of-RL issue 20: entropy collapses or surges at 16 updates a batch and clips of 1. The loss dppo_tv
    and others read the clips as something else. verl's replay buffer (v1/replay_buffer.py) accepts answers that are up
    to max_off_policy_threshold versions old; a version is all updates of a batch.
    """
    low, high = (context.get(f"{ACTOR}.clip_ratio_{side}", 0) for side in ("low", "high"))
    clips = f"clip_ratio_low={low}, clip_ratio_high={high}"
    if _uses_gspo(context) and max(low, high) > WIDE_GSPO:
        why = "GSPO clips the mean ratio of a response, which hardly moves: these clips never act"
        fix = (f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4")
        yield warning(f"GSPO with {clips}", why, *fix)
    elif context.get(LOSS_MODE, "vanilla") in CLIPPED and max(low, high) >= WIDE:
        yield note(clips, "wide clips: a token's probability may change by this share before its gradient ends")
    updates, mode = updates_of_a_batch(context), context.get(MODE, "sync")
    versions = context.get("trainer.v1.sampler.max_off_policy_threshold", 0) if mode != "sync" else 1
    sizes = ", ".join(f"{name}={context.get(name)}" for name in ("data.train_batch_size", *UPDATES))
    if updates >= MANY:
        why = "the policy moves far from l_old, which the last updates use; larger mini-batches make fewer updates"
        yield note(f"{updates} updates per batch: {sizes}", why)
    elif updates > 1 and updates * versions >= MANY:
        why = f"an answer may be up to {versions} versions, or {updates * versions} updates, older than the policy"
        yield note(f"{mode} with {updates} updates per batch: {sizes}", f"{why} (max_off_policy_threshold)")


def _uses_gspo(context: Context) -> bool:
    return "gspo" in (context.get(LOSS_MODE), context.get(f"{ACTOR}.policy_loss.base"))


@check("trust region")
def trust_region(context: Context) -> Iterable[Problem]:
    """An asynchronous mode in which nothing bounds the distance from the policy to the rollout: no correction, no
    filter by l_old or age, no loss that reads the rollout's probabilities, no `rollout_is` or `rollout_rs` of verl, no
    bypass mode. verl's `dppo_tv` and `dppo_kl` bound the distance to the weights before the update, not to the rollout.

    Source: marin issue 8955: with a lag of one to three updates, plain PPO finished 2 of 128 answers; with truncated
    weights 98, and with a clip against the rollout's probabilities 90. verl 0.9.1 recomputes l_old with the weights of
    the step. PPO's clip, and the masks of the losses dppo_tv and dppo_kl, are around those weights, and around the
    rollout only in bypass mode.
    """
    mode = context.get(MODE, "sync")
    if mode == "sync":
        return
    loss = context.get(LOSS_MODE, "vanilla")
    bounds = context.methods("stability.correction")
    filters = (name for name in context.methods("stability.filters") if name in BATCH_FILTERS)
    bounds += [name for name in filters if BATCH_FILTERS[name].needs_l_old or BATCH_FILTERS[name].needs_lag]
    bounds += [loss] if loss in LOSSES and {"k", "l_infer"} & set(LOSSES[loss].reads) else []
    bounds += [one.removeprefix("algorithm.") for one in verls_corrections(context.config)]
    bounds += ["bypass mode"] if context.get(BYPASS) else []
    if bounds:
        yield ok(f"{mode}, with old rollouts bounded by {', '.join(bounds)}")
        return
    why = "nothing bounds the ratio to the policy that sampled: PPO's clip is around the weights before the update"
    fix = context.corrections("stability.correction=opsm", "stability.opsm.delta=0.1")
    yield warning(f"{mode} without a trust region", why, *fix)


@check("terms", needs="config")
def fighting_terms(context: Context) -> Iterable[Problem]:
    """Terms of the objective that act against each other: the KL to the reference in the reward and in the loss; a
    discount with which nothing of a reward at the end of a long answer is left at its beginning; groups that are
    filtered by a reward with a penalty on length; a distribution distilled by a policy gradient.

    Source: `apply_kl_penalty` and `ppo_loss` add both (verl prints a notice: utils/config.py); NeMo-RL PR 2530. `gae`
    and `reinforce_plus_plus` of core_algos.py discount by token, and the reward stands on the last one.
    `metric=reward` of v1/replay_buffer.py sums what dapo.py of the reward managers has penalised (verl-recipe PR 125).
    workers/config/distillation.py warns of forward_kl_topk.
    """
    both = (context.get("algorithm.use_kl_in_reward"), context.get(f"{ACTOR}.use_kl_loss"))
    if all((*both, context.get("algorithm.kl_ctrl.kl_coef", 1), context.get(f"{ACTOR}.kl_loss_coef", 1))):
        why = "the KL to the reference is penalised twice, in the reward and in the loss"
        yield warning("use_kl_in_reward and use_kl_loss", why, "algorithm.use_kl_in_reward=false")
    gamma, longest = context.get("algorithm.gamma", 1.0), context.get("data.max_response_length", 0)
    if context.get(ESTIMATOR) in DISCOUNTED and isinstance(gamma, float) and gamma**longest < LEFT_OF_REWARD:
        why = f"the reward stands on the last token: of {longest} tokens, the first one sees {gamma**longest:.1g} of it"
        yield warning(f"algorithm.gamma={gamma:g}", why, "algorithm.gamma=1.0")
    if context.get(f"{FILTERED}.enable"):
        yield from _group_filter(context)
    distilled = "distillation.distillation_loss"
    by_gradient = context.get("distillation.enabled") and context.get(f"{distilled}.use_policy_gradient", True)
    if by_gradient and context.get(f"{distilled}.loss_mode") == "forward_kl_topk":
        why = "a policy gradient moves the sampled token only, and hardly uses the teacher's distribution"
        yield warning("forward_kl_topk as a policy gradient", why, f"{distilled}.use_policy_gradient=false")


def _group_filter(context: Context) -> Iterator[Problem]:
    """Source: `_resolve_filter_groups_metric` of v1/trainer_base.py asserts that rewards are there when groups are
    sampled; v1/replay_buffer.py raises for a metric that no answer has (verl PR 6818, verl-tool PR 69)."""
    if not context.get("trainer.use_v1") or context.get("trainer.v1.sampler.custom_sampler.path"):
        return
    scored, metric = "reward.reward_model", context.get(f"{FILTERED}.metric")
    if context.get(f"{scored}.enable") and not context.get(f"{scored}.enable_resource_pool"):
        why = "groups are filtered when they are sampled, and a reward model on the same GPUs scores only later"
        yield error("filter_groups with a colocated reward model", why, f"{scored}.enable_resource_pool=true")
    if metric in ("seq_reward", "seq_final_reward"):
        why = "trainer V1 knows reward and what the reward function returns, and stops after the first rollout"
        yield error(f"{FILTERED}.metric={metric}", why, f"{FILTERED}.metric=reward")
    shaped = context.get(MANAGER) == "dapo" and context.get(f"{REWARD_ARGUMENTS}.overlong_buffer_cfg.enable")
    if metric == "reward" and shaped:
        why = "a group of wrong answers stays if their lengths differ, and teaches only the penalty"
        usual = [] if context.get("reward.custom_reward_function.path") else [f"{FILTERED}.metric=acc"]
        other = "; take a number that your reward function returns" if not usual else ""
        yield warning(f"{FILTERED}.metric=reward with a penalty on length", f"{why}{other}", *usual)


@check("MTP loss", needs="config")
def mtp_loss(context: Context) -> Iterable[Problem]:
    """Draft layers whose loss also trains the model.

    Source: utils/megatron_utils.py: without detach_encoder, the cross entropy of the model's own samples trains the
    model's layers, whatever the samples' advantage (verl PR 6432; Megatron-LM PRs 5080 and 5098).
    """
    trained = context.get(f"{MTP}.enable") and context.get(f"{MTP}.enable_train")
    if trained and not context.get(f"{MTP}.detach_encoder"):
        why = "the draft layers' loss trains the model to repeat its own samples, whatever their advantage"
        yield warning("mtp.enable_train without mtp.detach_encoder", why, f"{MTP}.detach_encoder=true")


@check("reference", needs="config")
def reference(context: Context) -> Iterable[Problem]:
    """A reference in another precision. A note: if training starts from a trained LoRA, the reference is the model
    without it.

    Source: `ref_in_actor` of trainer/ppo/v1/trainer_base.py: the reference of a LoRA is the actor without its adapter,
    even if the run starts from a trained adapter. ref/megatron_ref.yaml and ref/dp_ref.yaml do not inherit the dtype.
    """
    if not needs_reference(context.config):
        return
    if context.get(f"{MODEL}.lora_adapter_path") or context.get(f"{MODEL}.lora.adapter_path"):
        why = "the reference is the model without the adapter with which the run starts: KL is above 0 in step 1"
        yield note("a KL to the reference, from a trained LoRA", why)
    part = "megatron.dtype" if context.on_megatron else "fsdp_config.mixed_precision.param_dtype"
    ref = "actor_rollout_ref.ref"
    ours, theirs = (dtype_name(context.get(f"{role}.{part}", BFLOAT16)) for role in (ACTOR, ref))
    if ours != theirs and not refers_to_actor(context.config):
        why = "the reference rounds differently: KL is above 0 before anything is learnt"
        fix = [f"++{ref}.{part}={ours}"] if ours in DTYPES else []
        yield warning(f"reference in {theirs}, training in {ours}", why, *fix)
