"""Updates that are not what the settings or the method say: in verl's losses, in Megatron, of old rollouts."""

from collections.abc import Iterable, Iterator

from packaging.version import Version

from verl_ext.doctor.checks import CheckResult, Context, check, error, note, ok, warning
from verl_ext.doctor.hooks import needs_critic
from verl_ext.doctor.sampling import CORRECTION
from verl_ext.features.losses import LOSSES
from verl_ext.features.verl_config import ACTOR, BYPASS, MODE
from verl_ext.launch.packages import LAYERS

AGGREGATION = f"{ACTOR}.loss_agg_mode"
BY_SEQUENCE = "seq-mean-token-mean"
OWN_GROUPS = "0.19"  # megatron-core that gives experts process groups of their own wherever they need them
MENDED = "Megatron-LM PR 5916"
BALANCING, BIAS_RATE = f"{LAYERS}.moe_router_load_balancing_type", f"{LAYERS}.moe_router_bias_update_rate"
# model_type whose routers Megatron-Bridge (0.3.1, 0.5.2) gives a bias, with the rate of megatron-core, 0.001.
BIASED = (
    *("deepseek_v3", "deepseek_v4", "kimi_k2", "kimi_k25", "nemotron_h", "minimax_m2", "glm_moe_dsa", "mimo_v2_flash"),
    *("bailing_moe_v2", "ernie4_5_moe", "sarvam_moe"),
)
ADAPTED, DROPPED = "0.1.12", "5.9"  # VeOmni that knows the transformers that dropped an argument
UNMARKED = "2.13"  # Transformer Engine that no longer marks grouped weights as split


def _trained_by_megatron(context: Context) -> Iterator[str]:
    """Yields the config paths of the models that Megatron trains."""
    if context.config is None:
        return
    if context.strategy == "megatron":
        yield ACTOR
    if context.get("critic.strategy") == "megatron" and needs_critic(context.config):
        yield "critic"


@check("resumed schedule")
def resumed_schedule(context: Context) -> Iterable[CheckResult]:
    """A learning-rate schedule on Megatron that starts again when a run resumes.

    Source: verl 0.9.1. `MegatronCheckpointManager` (utils/checkpoint/megatron_checkpoint_manager.py) saves the schedule
    and loads it only with `use_checkpoint_opt_param_scheduler`, whose default is False. Without it
    `OptimizerParamScheduler` (megatron-core, optimizer_param_scheduler.py) counts from step 0. Seen in a run on CPU
    cores: 3e-4 before the checkpoint, 1e-4 after it. verl's FSDP engine always loads its schedule.
    """
    for role in _trained_by_megatron(context):
        optim = f"{role}.optim"
        warm_up = max(context.get(f"{optim}.lr_warmup_steps", 0), context.get(f"{optim}.lr_warmup_steps_ratio", 0))
        constant = warm_up <= 0 and context.get(f"{optim}.lr_decay_style") == "constant"
        if constant or context.get("trainer.resume_mode") == "disable":
            continue
        setting = f"{optim}.use_checkpoint_opt_param_scheduler"
        if context.get(setting):
            yield ok(f"{setting}=true: the schedule continues when the run resumes")
        else:
            why = "verl then does not load the schedule: a resumed run warms up again, and decays from the start"
            yield warning(f"{setting}=false", why, f"{setting}=true")


@check("expert gradients")
def expert_gradients(context: Context) -> Iterable[CheckResult]:
    """Gradients of experts that megatron-core reduces over the wrong ranks, or leaves out of the gradient norm.

    Source: megatron-core 0.12 to 0.18.2 set `allreduce = not expert_model_parallel_size > 1` on the weights of experts
    (extensions/transformer_engine.py lines 644 and 1551 and tensor_parallel/layers.py line 886 in 0.16.1), so that
    without expert parallelism DDP reduces them over the data-parallel ranks of the dense layers. These are not the
    ranks that hold the same expert, unless experts are split as the dense layers are. 0.19.0 looks at that too
    (PR 5916), and mends the norm: `GroupedLinear` of Transformer Engine marks expert weights as split over ranks in
    2.12, and no longer in 2.13 and 2.16.1 (pytorch/module/grouped_linear.py), and what is not marked
    `param_is_not_tensor_parallel_duplicate` counts on the first tensor-parallel rank only. Read, not tried.
    """
    if not context.has_experts:
        return
    installed = context.version("megatron-core")
    if installed is not None and Version(installed) >= Version(OWN_GROUPS):
        return
    engine = context.version("transformer-engine")
    unmarked = engine is None or Version(engine) >= Version(UNMARKED)
    for role in _trained_by_megatron(context):
        megatron = f"{role}.megatron"
        dense = context.get(f"{megatron}.tensor_model_parallel_size", 1)
        split = context.get(f"{megatron}.expert_tensor_parallel_size", dense)
        sharing = context.get(f"{megatron}.expert_model_parallel_size", 1)
        if sharing == 1 and split != dense:
            found = f"{megatron}: experts in {split} part(s), dense layers in {dense}, expert_model_parallel_size=1"
            why = f"megatron-core before {OWN_GROUPS} sums an expert's gradients over the wrong ranks ({MENDED})"
            yield warning(found, why, f"{megatron}.expert_tensor_parallel_size={dense}")
        elif dense > 1 and unmarked:
            why = (
                f"with megatron-core before {OWN_GROUPS} and Transformer Engine {UNMARKED} or newer, the gradient norm "
                f"misses the experts of all tensor-parallel ranks but the first ({MENDED}): clip_grad clips too little"
            )
            yield note(f"{megatron}.tensor_model_parallel_size={dense} with experts", why)


@check("loss aggregation")
def loss_aggregation(context: Context) -> Iterable[CheckResult]:
    """GSPO with another mean than its paper's.

    Source: GSPO (arXiv 2507.18071) takes the mean over responses, each of which counts the same. verl 0.9.1's
    `compute_policy_loss_gspo` (trainer/ppo/core_algos.py) aggregates by `actor.loss_agg_mode`, whose default is
    token-mean, and says so in a comment.
    """
    loss = f"{ACTOR}.policy_loss"
    if "gspo" not in (context.get(f"{loss}.loss_mode"), context.get(f"{loss}.base")):
        return
    mode = context.get(AGGREGATION, "token-mean")
    if mode == BY_SEQUENCE:
        yield ok(f"GSPO with loss_agg_mode={mode}, as in its paper")
        return
    why = "GSPO's paper averages over responses; with this mode a long response weighs more than a short one"
    yield warning(f"GSPO with {AGGREGATION}={mode}", why, f"{AGGREGATION}={BY_SEQUENCE}")


@check("router training")
def router_training(context: Context) -> Iterable[CheckResult]:
    """Routers that something else than the policy's loss trains, on Megatron.

    Source: Megatron-LM PR 5694: an auxiliary loss of 0.001 over all tokens gave 3.4 times the gradient norm of the
    policy's loss. verl 0.9.1 sets `moe_router_load_balancing_type=none` for Megatron-Bridge, and
    override_transformer_config goes over it (workers/engine/megatron/transformer_impl.py). `_update_router_expert_bias`
    of megatron/core/distributed/finalize_model_grads.py (0.16.1) moves the bias of sigmoid routers after every backward
    pass, by `moe_router_bias_update_rate` (0.001), where the update is skipped too. FSDP adds transformers' auxiliary
    loss only where a model is given labels, and verl gives none; a bias is a buffer there, which nothing trains.
    """
    if context.strategy != "megatron" or not context.experts:
        return
    balancing, rate = context.get(BALANCING, "none"), context.get(BIAS_RATE)
    found = False
    if balancing != "none":
        found = True
        why = "an auxiliary loss over all tokens trains the routers with the policy's (3.4 times the gradient: PR 5694)"
        yield warning(f"moe_router_load_balancing_type={balancing}", why, f"++{BALANCING}=none")
    if rate if rate is not None else context.model_type in BIASED:
        found = True
        why = "megatron-core moves the routers' bias after every backward pass, also where the update is skipped"
        said = "not set (0.001)" if rate is None else rate
        yield warning(f"moe_router_bias_update_rate: {said}", why, f"++{BIAS_RATE}=0.0")
    if not found and context.model_config is not None:
        yield ok("routers: no auxiliary loss, no bias that moves")


@check("trust region")
def trust_region(context: Context) -> Iterable[CheckResult]:
    """Old rollouts, and nothing that bounds how far the policy may be from them.

    Source: marin issue 8955: one to three updates behind, plain PPO finished 2 of 128 answers, and with truncated
    weights or a clip against the rollout's probabilities 98 and 90. verl 0.9.1 recomputes l_old with the weights of the
    step, so that the clip of PPO, and the masks of its losses dppo_tv and dppo_kl, are around those weights and not
    around the rollout. In bypass mode they are around the rollout.
    """
    mode = context.get(MODE, "sync")
    if mode == "sync":
        return
    loss = context.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    bounds = context.methods("stability.correction") + context.methods("stability.filters")
    bounds += [loss] if loss in LOSSES and {"k", "l_infer"} & set(LOSSES[loss].reads) else []
    bounds += [
        f"rollout_correction.{one}" for one in ("rollout_is", "rollout_rs") if context.get(f"{CORRECTION}.{one}")
    ]
    bounds += ["bypass mode"] if context.get(BYPASS) else []
    if bounds:
        yield ok(f"{mode}, with old rollouts bounded by {', '.join(bounds)}")
        return
    why = "nothing bounds the ratio to the policy that sampled: PPO's clip is around the weights before the update"
    yield warning(f"{mode} without a trust region", why, "stability.correction=opsm", "stability.opsm.delta=0.1")


@check("VeOmni version", needs="config")
def veomni_version(context: Context) -> Iterable[CheckResult]:
    """A VeOmni whose models call transformers as it was before 5.9.

    Source: VeOmni 0.1.11, which verl 0.9.1 pins in an extra, passes `cache_position` to `create_causal_mask` (its Qwen3
    models in veomni/models/transformers). transformers 5.9, which verl 0.9.1 pins for vLLM, dropped the
    argument: seen with 5.10.4, a TypeError in the first forward pass. 0.1.12 leaves it out there.
    """
    found, transformers = context.version("veomni"), context.version("transformers")
    if context.strategy != "veomni" or not found or not transformers:
        return
    if Version(found) < Version(ADAPTED) and Version(transformers) >= Version(DROPPED):
        why = f"its models pass an argument that transformers dropped in {DROPPED}, so the first forward pass fails"
        said = f"{why}; install veomni {ADAPTED}"
        yield error(f"VeOmni {found} with transformers {transformers}", said)
    else:
        yield ok(f"VeOmni {found} with transformers {transformers}")
