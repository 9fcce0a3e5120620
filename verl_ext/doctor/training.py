"""The training engines: precision and gradients of an update, what only training does, and checkpoints.

The files of verl are those of 0.9.1; megatron-core was read in 0.12 to 0.19, Megatron-Bridge in 0.3.1 and 0.5.2.
"""

from collections.abc import Iterable, Iterator
from math import ceil, inf

from packaging.version import Version

from verl_ext.base.errors import Problem
from verl_ext.doctor.checks import Context, check, error, note, ok, warning
from verl_ext.doctor.precision import BFLOAT16, FSDP, dtype_name
from verl_ext.features.verl_config import ACTOR, BYPASS, DROPOUTS, MODEL, ROLLOUT, needs_critic, trains_lora
from verl_ext.launch.families import BIASED, OVERLAPPED, RECURRENT
from verl_ext.launch.names import unknown_names
from verl_ext.launch.packages import ATTENTION, LAYERS, MEGATRON
from verl_ext.launch.sizes import ulysses_size, world_size

OWN_GROUPS = "0.19"  # from this megatron-core on, experts have their own process groups whenever they need them
MENDED = "Megatron-LM PR 5916"
UNMARKED = "2.13"  # from this Transformer Engine on, grouped weights are no longer marked as split
BALANCING, BIAS_RATE = f"{LAYERS}.moe_router_load_balancing_type", f"{LAYERS}.moe_router_bias_update_rate"
ADAPTED, DROPPED = "0.1.12", "5.9"  # VeOmni that works without an argument, transformers that dropped the argument
OVERLAP = f"{MEGATRON}.override_ddp_config.overlap_param_gather"
PACKED = f"{MODEL}.use_remove_padding"
USUAL_BETAS = [0.9, 0.999]
FORCED = "a switch for benchmarks: the routers choose experts without reading the token"
DROPS = "the update drops a part of the model, but the pass that computes l_old does not"
# Settings that act in training passes only -> what they do, and the value that switches them off.
TRAINING_ONLY = {
    f"{LAYERS}.moe_router_force_load_balancing": (FORCED, "null"),
    f"{LAYERS}.moe_router_force_biased": (FORCED, "null"),
    f"{LAYERS}.moe_expert_capacity_factor": (
        "tokens above an expert's capacity skip the expert in training, but not in the rollout",
        "null",
    ),
    f"{LAYERS}.moe_z_loss_coeff": (
        "the z-loss trains the routers with every token of every pass, prompts included, whatever the advantage",
        "null",
    ),
    **dict.fromkeys(DROPOUTS, (DROPS, "0.0")),
}


@check("names", needs="config")
def verls_names(context: Context) -> Iterable[Problem]:
    """Names that verl or an engine does not have, such as `algorithm.adv_estimator=grop`; a text in the place of a
    number or of true and false; `resume_mode=resume_path` without a path. A note: a plugin may register the name.

    Source: the table of verl_ext/launch/names.py, read from the installed sources.
    """
    yield from unknown_names(context.config)


@check("warm-up", needs="config")
def warm_up_start(context: Context) -> Iterable[Problem]:
    """A note: with a warm-up, the learning rate of the first step is 0 (verl issue 3674).

    Source: verl issue 3674. `get_constant_schedule_with_warmup` of verl/utils/torch_functional.py starts at 0 /
    lr_warmup_steps, and so does the cosine schedule unless `zero_indexed_step` is False. megatron-core's starts at
    `lr_warmup_init` (optimizer_param_scheduler.py). `train_mini_batch` of verl/workers/engine_workers.py moves the
    schedule after the last update of a batch.
    """
    optim = f"{ACTOR}.optim"
    steps, share = context.get(f"{optim}.lr_warmup_steps", 0), context.get(f"{optim}.lr_warmup_steps_ratio", 0)
    asked = f"lr_warmup_steps={steps}" if steps > 0 else f"lr_warmup_steps_ratio={share}"
    later = context.get(f"{optim}.lr_scheduler_type") == "cosine" and not context.get(
        f"{optim}.zero_indexed_step", True
    )
    if later or context.get(f"{optim}.lr_warmup_init", 0) or not (context.on_fsdp or context.on_megatron):
        return
    if steps <= 0 and not share * context.get("trainer.total_training_steps", inf) >= 1:
        return
    why = (
        "nothing is learnt in it: the weights and the validation after it are those before, as with a lost weight sync"
    )
    yield note(f"{asked}: in the first step the learning rate is 0", why)


@check("repeated passes", needs="config")
def repeated_passes(context: Context) -> Iterable[Problem]:
    """Settings with which l_old and l_theta of the same weights differ: experts whose outputs are added in any order
    (`moe_permute_fusion=False`, NeMo-RL issue 2255). A note: micro-batches of another size for l_old (verl issue 6280).

    Source: NeMo-RL issue 2255, PR 2258: without the fusion, megatron-core's `unpermute` adds by `scatter_add_`, and two
    passes differ. megatron-core's default is False; the bridges of Qwen3-MoE and DeepSeek-V3 set True
    (Megatron-Bridge 0.3.1). verl issue 6280: with one update a batch, a clip fraction above 0 that equal micro-batches
    remove.
    """
    fusion = f"{LAYERS}.moe_permute_fusion"
    if context.on_megatron and context.has_experts and context.get(fusion) is False:
        why = "the sum over experts then has no fixed order, and two passes of the same weights differ: r is not 1"
        yield warning("moe_permute_fusion=False", f"{why} (NeMo-RL issue 2255)", f"++{fusion}=true")
    if updates_of_a_batch(context) != 1 or context.get(f"{ACTOR}.use_dynamic_bsz") or context.get(BYPASS):
        return
    ours, theirs = f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"
    update, before = context.get(ours), context.get(theirs)
    if update and before and update != before:
        why = "kernels round by the batch: with one update a batch, r is not exactly 1 and some tokens may be clipped"
        yield note(f"{theirs}={before}, {ours}={update}", f"{why}; equal sizes avoid it (verl issue 6280)")


@check("recomputation", needs="on_megatron")
def recomputation(context: Context) -> Iterable[Problem]:
    """Whole layers that are recomputed, without a method or a number of layers.

    Source: `__post_init__` of megatron-core's TransformerConfig raises a ValueError when the actor is built; verl's
    defaults of both are null (trainer/config/engine/megatron.yaml).
    """
    method, layers = (f"{LAYERS}.recompute_{name}" for name in ("method", "num_layers"))
    if context.get(f"{LAYERS}.recompute_granularity") != "full":
        return
    missing = {method: "uniform", layers: 1}
    missing = {name: value for name, value in missing.items() if context.get(name) is None}
    if missing:
        fix = (f"++{name}={value}" for name, value in missing.items())
        yield error(f"recompute_granularity=full without {' and '.join(missing)}", "megatron-core stops there", *fix)


def updates_of_a_batch(context: Context) -> int:
    """Returns the optimizer steps between two computations of l_old, or in separate_async between two weight syncs; 0
    if a size is not known.

    Source: `_update_actor` of verl/trainer/ppo/v1/trainer_base.py (0.9.1), and `step`: separate_async trains on
    `parameter_sync_step` mini-batches, whose l_old is that of the weights before the first.
    """
    sizes = (context.get("data.train_batch_size"), context.get(f"{ACTOR}.ppo_mini_batch_size"))
    epochs = context.get(f"{ACTOR}.ppo_epochs", 1)
    known = all(isinstance(one, int) and one > 0 for one in (*sizes, epochs))
    return ceil(sizes[0] / sizes[1]) * epochs if known else 0


@check("gradient reduction", needs="config")
def gradient_reduction(context: Context) -> Iterable[Problem]:
    """FSDP1 with `fsdp_size=1` on several GPUs, which sums no gradients (verl issue 7493).

    Source: verl issue 7493 (closed). `create_device_mesh` of workers/engine/fsdp/utils.py makes a mesh of (N, 1). torch
    changes its shard group of one rank to NO_SHARD, and reduces only inside that group
    (torch/distributed/fsdp/_init_utils.py). FSDP2 reduces over the mesh.
    """
    if context.strategy == "fsdp" and context.get(f"{FSDP}.fsdp_size") == 1 and world_size(context.config) > 1:
        why = "verl's FSDP1 then does not sum gradients: each rank trains its own model (verl issue 7493)"
        yield warning("fsdp_config.fsdp_size=1 on several GPUs", why, f"{FSDP}.fsdp_size=-1")


@check("master weights", needs="on_fsdp")
def master_weights(context: Context) -> Iterable[Problem]:
    """FSDP with weights in bfloat16: AdamW's steps of 1e-6 are lost in most weights.

    Source: `_build_module` and `_build_optimizer` of workers/engine/fsdp/transformer_impl.py; AReaL PRs 1369 and 1634.
    A bfloat16 has 8 bits: a step of 1e-6 is lost in each weight above 5e-4.
    """
    if trains_lora(context.config):
        return
    rounding = context.get(f"{ACTOR}.optim.override_optimizer_config", {})
    if {"bf16_stochastic_round", "master_weight_dtype"} & set(rounding):
        return
    setting = f"{FSDP}.model_dtype"
    if dtype_name(context.get(setting, "fp32")) == BFLOAT16:
        why = "AdamW updates the bfloat16 weights themselves; steps of 1e-6 are lost in all but the smallest weights"
        yield warning("actor.fsdp_config.model_dtype=bfloat16", why, f"{setting}=fp32")


@check("sharded attention", needs="on_fsdp")
def sharded_attention(context: Context) -> Iterable[Problem]:
    """Ulysses with attention other than FlashAttention, or with gpt-oss.

    Source: `apply_monkey_patch` of models/transformers/monkey_patch.py replaces only `_flash_attention_forward`. For
    gpt-oss it passes the sinks of all heads, which the kernel refuses (verl PR 4551, open).
    """
    if (ranks := ulysses_size(context.config)) == 1:
        return
    found, off = f"ulysses_sequence_parallel_size={ranks}", f"{ACTOR}.ulysses_sequence_parallel_size=1"
    kind = str(context.get(ATTENTION, "flash_attention_2"))
    if context.model_type == "gpt_oss":
        why = "verl passes each rank the sinks of all heads, which the kernel refuses (verl PR 4551)"
        yield error(f"{found} with gpt-oss", why, off, f"{FSDP}.ulysses_sequence_parallel_size=1")
    elif "flash" not in kind:
        why = "verl supports split sequences only with FlashAttention: here each rank attends only to its own part"
        yield warning(f"{found} with attn_implementation={kind}", why, f"++{ATTENTION}=flash_attention_2")


@check("recurrent layers", needs="config")
def recurrent_layers(context: Context) -> Iterable[Problem]:
    """Packed or sharded sequences of a model with Mamba's or other recurrent layers that is not in the plan's table.

    Source: the layers of RECURRENT in transformers 5.10 need `seq_idx` or `cu_seqlens`, which verl's FSDP engine does
    not pass (verl PR 6660 passes them to Qwen3.5). Under Ulysses each rank starts with an empty state (accelerate PR
    4177). Megatron's Mamba layers build `seq_idx` only from `total_tokens` (mcore 0.18, packed_seq_params.py), which
    verl's models/mcore/util.py does not pass. The check `sizes` judges the models of the plan's table.
    """
    if not (context.on_fsdp or context.on_megatron):
        return
    if context.model_type not in RECURRENT or context.shape is not None:
        return
    packed, sharded = context.get(PACKED), context.on_fsdp and ulysses_size(context.config) > 1
    if packed or sharded:
        why = "verl does not pass the sequences' ends: a state continues into the next sequence, or is cut at each rank"
        fix = [f"{PACKED}=false"] if packed else []
        if sharded:
            fix += [f"{ACTOR}.ulysses_sequence_parallel_size=1", f"{FSDP}.ulysses_sequence_parallel_size=1"]
        yield warning(f"{context.model_type} with packed or sharded sequences", why, *fix)


@check("expert gradients", needs="has_experts")
def expert_gradients(context: Context) -> Iterable[Problem]:
    """Megatron with `expert_model_parallel_size=1` and experts that are split differently from the dense layers, such
    as tensor parallelism 2 with `expert_tensor_parallel_size=1`: megatron-core before 0.19 reduces their gradients over
    the wrong ranks (Megatron-LM PR 5916). A note: with tensor parallelism and Transformer Engine 2.13 or newer, its
    gradient norm leaves experts out.

    Source: megatron-core 0.12 to 0.18.2 set `allreduce = not expert_model_parallel_size > 1` on the weights of experts
    (extensions/transformer_engine.py lines 644 and 1551 and tensor_parallel/layers.py line 886 in 0.16.1). Without
    expert parallelism, DDP then reduces them over the data-parallel ranks of the dense layers, which hold the same
    expert only if experts are split like the dense layers. 0.19.0 fixes this and the norm (PR 5916). The norm counts
    weights that `param_is_not_tensor_parallel_duplicate` rejects only on the first tensor-parallel rank, and
    `GroupedLinear` of Transformer Engine marks expert weights as split in 2.12, but no longer in 2.13 and 2.16.1
    (pytorch/module/grouped_linear.py). Read, not tried.
    """
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


@check("LoRA of experts", needs="on_megatron")
def lora_of_experts(context: Context) -> Iterable[Problem]:
    """A LoRA on Megatron with tensor parallelism and overlapped shared experts, or split experts (Megatron-Bridge issue
    5634).

    Source: Megatron-Bridge issues 5634 and 5635 (open). With `moe_shared_expert_overlap` the linear layer does not
    reduce, and the adapter counts once per tensor-parallel rank. With expert tensor parallelism, the adapters of routed
    experts miss the terms of other ranks; null means the size of tensor parallelism (megatron/core/parallel_state.py).
    """
    tensor = context.get(f"{MEGATRON}.tensor_model_parallel_size", 1)
    if not trains_lora(context.config) or tensor == 1 or not context.has_experts:
        return
    asked, overlap = context.get(f"{LAYERS}.moe_shared_expert_overlap"), f"++{LAYERS}.moe_shared_expert_overlap=false"
    if asked or (asked is None and context.model_type in OVERLAPPED):
        why = "the adapter of the shared experts counts once per tensor-parallel rank (Megatron-Bridge issue 5634)"
        yield warning("a LoRA with moe_shared_expert_overlap and tensor parallelism", why, overlap)
    split = f"{MEGATRON}.expert_tensor_parallel_size"
    if context.get(split, tensor) > 1:
        why = "the adapters of routed experts miss the terms of the other ranks (Megatron-Bridge issue 5635)"
        parallel = context.get(f"{MEGATRON}.expert_model_parallel_size", 1) > 1  # else `expert gradients` would undo it
        fix = [f"{split}=1"] if parallel else []
        said = why if parallel else f"{why}; use expert parallelism"
        yield warning(f"a LoRA of experts in {context.get(split, tensor)} parts", said, *fix)


@check("router training", needs="on_megatron")
def router_training(context: Context) -> Iterable[Problem]:
    """An auxiliary loss (`moe_router_load_balancing_type`) or a router bias that moves (`moe_router_bias_update_rate`,
    0.001 by default), on Megatron.

    Source: in Megatron-LM PR 5694, an auxiliary loss of 0.001 over all tokens gave 3.4 times the gradient norm of the
    policy's loss. verl 0.9.1 sets `moe_router_load_balancing_type=none` for Megatron-Bridge, but
    override_transformer_config overrides it (workers/engine/megatron/transformer_impl.py). `_update_router_expert_bias`
    of megatron/core/distributed/finalize_model_grads.py (0.16.1) moves the bias of sigmoid routers by
    `moe_router_bias_update_rate` (0.001) after every backward pass, even if the update is skipped. On FSDP,
    transformers adds its auxiliary loss only if a model gets labels, which verl does not pass, and the bias is a buffer
    that is not trained.
    """
    if not context.experts:
        return
    balancing, rate = context.get(BALANCING, "none"), context.get(BIAS_RATE)
    found = False
    if balancing != "none":
        found = True
        why = "an auxiliary loss over all tokens also trains the routers (3.4 times the policy's gradient: PR 5694)"
        yield warning(f"moe_router_load_balancing_type={balancing}", why, f"++{BALANCING}=none")
    if rate if rate is not None else context.model_type in BIASED:
        found = True
        why = "megatron-core moves the routers' bias after every backward pass, even if the update is skipped"
        said = "not set (0.001)" if rate is None else rate
        yield warning(f"moe_router_bias_update_rate: {said}", why, f"++{BIAS_RATE}=0.0")
    if not found and context.model_config is not None:
        yield ok("routers: no auxiliary loss, no bias that moves")


@check("training alone", needs="on_megatron")
def training_alone(context: Context) -> Iterable[Problem]:
    """Settings of Megatron that act only in training passes: z-loss, expert capacity, dropout, switches for benchmarks;
    a gather of weights after they were sent.

    Source: megatron/core/transformer/moe/router.py (0.16.1) for the switches for benchmarks and the z-loss, whose
    gradient is added for every token of every pass; transformer_config.py for the capacity, above which tokens skip
    their expert. verl scores in eval mode, and updates in train mode, with dropout. NeMo-RL PR 4086: with the overlap,
    weights are gathered in the next forward pass, after verl has sent them to the rollout.
    """
    for setting, (why, off) in TRAINING_ONLY.items():
        acts = setting.startswith(LAYERS) or trains_lora(context.config)  # else a dropout of the LoRA
        if acts and (value := context.get(setting)):
            yield warning(f"{setting.removeprefix(f'{LAYERS}.')}={value}", why, f"++{setting}={off}")
    if context.get(OVERLAP):
        why = "verl sends the weights before they are gathered: each rank has only its own part of the new weights"
        yield warning("overlap_param_gather=true", f"{why} (NeMo-RL PR 4086)", f"++{OVERLAP}=false")


@check("resumed schedule", after=("verl's settings",))
def resumed_schedule(context: Context) -> Iterable[Problem]:
    """Megatron with a warm-up or a decay of the learning rate, and `optim.use_checkpoint_opt_param_scheduler=false`,
    verl's default: the schedule starts again whenever the run resumes.

    Source: verl 0.9.1. `MegatronCheckpointManager` (utils/checkpoint/megatron_checkpoint_manager.py) saves the schedule
    but loads it only with `use_checkpoint_opt_param_scheduler`, whose default is False. Without it,
    `OptimizerParamScheduler` (megatron-core, optimizer_param_scheduler.py) counts from step 0. In a run on CPU cores,
    the rate was 3e-4 before the checkpoint and 1e-4 after it. verl's FSDP engine always loads its schedule.
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


@check("ignored optimizer settings", needs="on_megatron")
def ignored_optimizer_settings(context: Context) -> Iterable[Problem]:
    """`optim.betas` on Megatron.

    Source: `init_megatron_optim_config` of utils/megatron/optimizer.py passes only lr, min_lr, clip_grad and
    weight_decay (verl PR 4214, open).
    """
    betas, override = context.get(f"{ACTOR}.optim.betas"), f"{ACTOR}.optim.override_optimizer_config"
    if betas is None or context.get(f"{override}.adam_beta1") is not None:
        return
    if context.get(f"{ACTOR}.optim.optimizer") == "muon":  # takes its first beta
        return
    if (betas := [float(beta) for beta in betas]) != USUAL_BETAS:
        fix = tuple(f"++{override}.adam_beta{place}={beta}" for place, beta in enumerate(betas, 1))
        yield warning(f"{ACTOR}.optim.betas={list(betas)} has no effect", "verl does not pass it to Megatron", *fix)


@check("VeOmni version", needs="config")
def veomni_version(context: Context) -> Iterable[Problem]:
    """VeOmni before 0.1.12, such as verl's own pin 0.1.11, with transformers 5.9 or newer: the first forward pass
    fails. Install VeOmni 0.1.12.

    Source: VeOmni 0.1.11, which verl 0.9.1 pins in an extra, passes `cache_position` to `create_causal_mask` (its Qwen3
    models in veomni/models/transformers). transformers 5.9, which verl 0.9.1 pins for vLLM, dropped the argument: the
    first forward pass ended with a TypeError (tried with 5.10.4). VeOmni 0.1.12 does not pass it.
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


def _trained_by_megatron(context: Context) -> Iterator[str]:
    """Yields the config paths of the models that Megatron trains."""
    if context.config is None:
        return
    if context.on_megatron:
        yield ACTOR
    if context.get("critic.strategy") == "megatron" and needs_critic(context.config):
        yield "critic"
