"""What an update does to the weights: their precision, sums over ranks, attention over shards, LoRAs, what is only in
training.

The files of verl are those of 0.9.1; megatron-core was read in 0.16.1 and 0.18, Megatron-Bridge in 0.3.1 and 0.5.2.
"""

from collections.abc import Iterable

from verl_ext.doctor.checks import CheckResult, Context, check, error, note, warning
from verl_ext.doctor.hooks import needs_reference
from verl_ext.doctor.precision import BFLOAT16, DTYPES, FSDP, TRANSFORMERS, dtype_name
from verl_ext.features.verl_config import ACTOR, MODEL, MTP, trains_lora
from verl_ext.launch.packages import ATTENTION, LAYERS
from verl_ext.launch.sizes import ulysses_size, world_size

MEGATRON = f"{ACTOR}.megatron"
OVERLAP = f"{MEGATRON}.override_ddp_config.overlap_param_gather"
PACKED = f"{MODEL}.use_remove_padding"
# model_type of transformers 5.10 with recurrent layers, to which verl passes no ends of packed sequences on FSDP.
RECURRENT = (
    *("qwen3_next", "nemotron_h", "bamba", "granitemoehybrid", "falcon_h1", "jamba", "lfm2", "lfm2_moe", "minimax"),
    *("zamba", "zamba2", "olmo_hybrid", "mamba", "mamba2"),
)
# model_type whose shared experts Megatron-Bridge 0.5.2 overlaps with the exchange of tokens by itself.
OVERLAPPED = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v4",
    "kimi_k2",
    "kimi_k25",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
)
BENCHMARKS = ("moe_router_force_load_balancing", "moe_router_force_biased")
DROPOUTS, LORA_DROPOUT = (f"{LAYERS}.hidden_dropout", f"{LAYERS}.attention_dropout"), f"{MODEL}.lora.dropout"
USUAL_BETAS = [0.9, 0.999]


@check("gradient reduction", needs="config")
def gradient_reduction(context: Context) -> Iterable[CheckResult]:
    """FSDP1 on several GPUs that each train alone.

    Source: verl issue 7493 (closed). `create_device_mesh` of workers/engine/fsdp/utils.py makes a mesh of (N, 1), whose
    shard group of one rank torch clamps to NO_SHARD, and reduces inside that group only
    (torch/distributed/fsdp/_init_utils.py). FSDP2 reduces over the mesh.
    """
    if context.strategy == "fsdp" and context.get(f"{FSDP}.fsdp_size") == 1 and world_size(context.config) > 1:
        why = "verl's FSDP1 sums no gradients over the ranks then: each trains a model of its own (verl issue 7493)"
        yield warning("fsdp_config.fsdp_size=1 on several GPUs", why, f"{FSDP}.fsdp_size=-1")


@check("master weights", needs="config")
def master_weights(context: Context) -> Iterable[CheckResult]:
    """Weights in bfloat16 that AdamW steps directly.

    Source: `_build_module` and `_build_optimizer` of workers/engine/fsdp/transformer_impl.py; AReaL PRs 1369 and 1634.
    A bfloat16 has 8 bits: a step of 1e-6 is lost in each weight above 5e-4.
    """
    if context.strategy not in TRANSFORMERS or trains_lora(context.config):
        return
    rounding = context.get(f"{ACTOR}.optim.override_optimizer_config", {})
    if {"bf16_stochastic_round", "master_weight_dtype"} & set(rounding):
        return
    setting = f"{FSDP}.model_dtype"
    if dtype_name(context.get(setting, "fp32")) == BFLOAT16:
        why = "AdamW steps the bfloat16 weights themselves, and steps of 1e-6 are lost in all but the smallest of them"
        yield warning("actor.fsdp_config.model_dtype=bfloat16", why, f"{setting}=fp32")


@check("sharded attention", needs="config")
def sharded_attention(context: Context) -> Iterable[CheckResult]:
    """Ulysses with attention that sees its own shard only.

    Source: `apply_monkey_patch` of models/transformers/monkey_patch.py replaces `_flash_attention_forward` alone. For
    gpt-oss it hands over the sinks of all heads, which the kernel refuses (verl PR 4551, open).
    """
    if context.strategy not in TRANSFORMERS or (ranks := ulysses_size(context.config)) == 1:
        return
    found, off = f"ulysses_sequence_parallel_size={ranks}", f"{ACTOR}.ulysses_sequence_parallel_size=1"
    kind = str(context.get(ATTENTION, "flash_attention_2"))
    if context.model_type == "gpt_oss":
        why = "verl hands a rank the sinks of all heads, and the kernel stops (verl PR 4551)"
        yield error(f"{found} with gpt-oss", why, off, f"{FSDP}.ulysses_sequence_parallel_size=1")
    elif "flash" not in kind:
        why = "verl splits the sequence for FlashAttention only: here each rank attends to its own part"
        yield warning(f"{found} with attn_implementation={kind}", why, f"++{ATTENTION}=flash_attention_2")


@check("recurrent layers", needs="config")
def recurrent_layers(context: Context) -> Iterable[CheckResult]:
    """Packed or sharded sequences with layers that carry a state from token to token.

    Source: the layers of RECURRENT in transformers 5.10 want `seq_idx` or `cu_seqlens`, which verl's FSDP engine does
    not pass (verl PR 6660 passes them to Qwen3.5). Under Ulysses each rank begins with an empty state
    (accelerate PR 4177). Megatron's Mamba layers build `seq_idx` where `total_tokens` is given (mcore 0.18,
    packed_seq_params.py), which verl's models/mcore/util.py does not give. `sizes` judges the models of its table.
    """
    read = (*TRANSFORMERS, "megatron")
    if context.model_type not in RECURRENT or context.shape is not None or context.strategy not in read:
        return
    packed, ranks = context.get(PACKED), 1
    if context.strategy in TRANSFORMERS:
        ranks = ulysses_size(context.config)
    if packed or ranks > 1:
        why = "the state of one sequence goes on into the next, or is cut at each rank: verl does not pass their ends"
        fix = [f"{PACKED}=false"] if packed else []
        fix += [f"{ACTOR}.ulysses_sequence_parallel_size=1", f"{FSDP}.ulysses_sequence_parallel_size=1"] * (ranks > 1)
        yield warning(f"{context.model_type} with packed or sharded sequences", why, *fix)


@check("LoRA of experts", needs="config")
def lora_of_experts(context: Context) -> Iterable[CheckResult]:
    """A LoRA on Megatron whose part for experts is summed wrongly.

    Source: Megatron-Bridge issues 5634 and 5635 (open): with `moe_shared_expert_overlap` the linear layer gives up its
    own reduction, and the adapter's counts once for each tensor-parallel rank; with expert tensor parallelism, the
    adapters of routed experts miss the terms of other ranks. null takes the tensor parallelism
    (megatron/core/parallel_state.py).
    """
    tensor = context.get(f"{MEGATRON}.tensor_model_parallel_size", 1)
    if context.strategy != "megatron" or not trains_lora(context.config) or tensor == 1 or not context.has_experts:
        return
    asked, overlap = context.get(f"{LAYERS}.moe_shared_expert_overlap"), f"++{LAYERS}.moe_shared_expert_overlap=false"
    if asked or (asked is None and context.model_type in OVERLAPPED):
        why = "the adapter of the shared experts counts once for each tensor-parallel rank (Megatron-Bridge issue 5634)"
        yield warning("a LoRA with moe_shared_expert_overlap and tensor parallelism", why, overlap)
    split = f"{MEGATRON}.expert_tensor_parallel_size"
    if context.get(split, tensor) > 1:
        why = "the adapters of routed experts miss the terms of the other ranks (Megatron-Bridge issue 5635)"
        parallel = context.get(f"{MEGATRON}.expert_model_parallel_size", 1) > 1  # else `expert gradients` wants it back
        fix = [f"{split}=1"] if parallel else []
        said = why if parallel else f"{why}; use expert parallelism"
        yield warning(f"a LoRA of experts in {context.get(split, tensor)} parts", said, *fix)


@check("training alone", needs="config")
def training_alone(context: Context) -> Iterable[CheckResult]:
    """What megatron-core does to a training pass, and to none that scores: l_theta is of another model than l_old.

    Source: megatron/core/transformer/moe/router.py (0.16.1) for the switches of benchmarks and the z-loss, whose
    gradient comes with every token of every pass; transformer_config.py for the capacity, past which tokens skip their
    expert. verl scores in eval mode, and updates in train mode, with dropout. NeMo-RL PR 4086: the gather of weights
    that is left to the next forward pass has not happened when verl sends them to the rollout.
    """
    if context.strategy != "megatron":
        return
    for name in BENCHMARKS:
        if context.get(f"{LAYERS}.{name}"):
            why = "a switch for benchmarks: the routers choose experts without looking at the token"
            yield warning(f"{name}={context.get(f'{LAYERS}.{name}')}", why, f"++{LAYERS}.{name}=null")
    if (capacity := context.get(f"{LAYERS}.moe_expert_capacity_factor")) is not None:
        why = "tokens past an expert's capacity skip it in training, and not in the rollout"
        fix = f"++{LAYERS}.moe_expert_capacity_factor=null"
        yield warning(f"moe_expert_capacity_factor={capacity}", why, fix)
    if loss := context.get(f"{LAYERS}.moe_z_loss_coeff"):
        why = "the z-loss trains the routers with every token of every pass, prompts included, whatever the advantage"
        yield warning(f"moe_z_loss_coeff={loss}", why, f"++{LAYERS}.moe_z_loss_coeff=null")
    for setting in (*DROPOUTS, *([LORA_DROPOUT] if trains_lora(context.config) else [])):
        if (share := context.get(setting, 0)) > 0:
            why = "the update drops a part of the model, and the pass that gives l_old does not"
            yield warning(f"{setting}={share}", why, f"++{setting}=0.0")
    if context.get(OVERLAP):
        why = "verl sends the weights before they are gathered: each rank has its own new part, and old ones"
        yield warning("overlap_param_gather=true", f"{why} (NeMo-RL PR 4086)", f"++{OVERLAP}=false")


@check("ignored optimizer settings", needs="config")
def ignored_optimizer_settings(context: Context) -> Iterable[CheckResult]:
    """Betas that Megatron's optimizer does not get.

    Source: `init_megatron_optim_config` of utils/megatron/optimizer.py hands over lr, min_lr, clip_grad and
    weight_decay (verl PR 4214, open).
    """
    betas, override = context.get(f"{ACTOR}.optim.betas"), f"{ACTOR}.optim.override_optimizer_config"
    if context.strategy != "megatron" or betas is None or context.get(f"{override}.adam_beta1") is not None:
        return
    if context.get(f"{ACTOR}.optim.optimizer") == "muon":  # takes its first beta
        return
    if (betas := [float(beta) for beta in betas]) != USUAL_BETAS:
        fix = tuple(f"++{override}.adam_beta{place}={beta}" for place, beta in enumerate(betas, 1))
        yield warning(f"{ACTOR}.optim.betas={list(betas)} has no effect", "verl does not pass it to Megatron", *fix)


@check("MTP loss", needs="config")
def mtp_loss(context: Context) -> Iterable[CheckResult]:
    """A loss of the draft layers that trains the whole model.

    Source: utils/megatron_utils.py: without detach_encoder the cross entropy of the model's own samples reaches its
    layers, whatever their advantage (verl PR 6432; Megatron-LM PRs 5080 and 5098).
    """
    trained = context.get(f"{MTP}.enable") and context.get(f"{MTP}.enable_train")
    if trained and not context.get(f"{MTP}.detach_encoder"):
        why = "the draft layers' loss trains the model to repeat its own samples, whatever their advantage"
        yield warning("mtp.enable_train without mtp.detach_encoder", why, f"{MTP}.detach_encoder=true")


@check("reference", needs="config")
def reference(context: Context) -> Iterable[CheckResult]:
    """A reference that is not what the run starts from, or in another precision.

    Source: `ref_in_actor` of trainer/ppo/v1/trainer_base.py: the reference of a LoRA is the actor without its adapter,
    also where the run begins from a trained one. ref/megatron_ref.yaml and ref/dp_ref.yaml do not inherit the dtype.
    """
    if not needs_reference(context.config):
        return
    if context.get(f"{MODEL}.lora_adapter_path") or context.get(f"{MODEL}.lora.adapter_path"):
        why = "the reference is the model without the adapter that the run begins with: KL is above 0 in step 1"
        yield note("a KL to the reference, from a trained LoRA", why)
    part = "megatron.dtype" if context.strategy == "megatron" else "fsdp_config.mixed_precision.param_dtype"
    ref = "actor_rollout_ref.ref"
    ours, theirs = (dtype_name(context.get(f"{role}.{part}", BFLOAT16)) for role in (ACTOR, ref))
    if ours != theirs and not trains_lora(context.config):
        why = "the reference rounds differently: KL is above 0 before anything is learnt"
        fix = [f"++{ref}.{part}={ours}"] if ours in DTYPES else []
        yield warning(f"reference in {theirs}, training in {ours}", why, *fix)


@check("checkpoints", needs="config")
def checkpoints(context: Context) -> Iterable[CheckResult]:
    """Asynchronous checkpoints that no restart finds.

    Source: verl issue 7952, PR 7955 (open): outside Megatron nobody writes the file that names the last checkpoint
    (trainer/ppo/v1/trainer_base.py), so that a restarted run begins at step 0.
    """
    setting = f"{ACTOR}.checkpoint.async_save"
    if context.get(setting) and context.strategy != "megatron":
        yield warning(f"{setting}=True on {context.strategy}", "a restart begins at step 0 again", f"{setting}=False")
