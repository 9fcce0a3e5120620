"""Memory of a GPU in the update and in the rollout, and the plugin's memory on a machine.

docs/plan.md explains each line. `RESERVE` is a rough allowance for libraries: workspaces, fragmentation.
"""

from dataclasses import dataclass

from verl_ext.plan.costs import AGREEMENT, LOOPS, REPLAY, TOP_TOKENS, Cost, id_bytes
from verl_ext.plan.sizes import FULL, GIB, Sizes, Usage

RESERVE = 5 * GIB  # contexts of the processes on a GPU, NCCL's buffers, fragmentation, a sleeping vLLM
ENGINE_RESERVE = 3 * GIB  # the rollout engine's activations and graphs: inside vLLM's share, in addition to SGLang's
# Activations of a layer per token and hidden unit (Korthikanti et al., 2022, without attention scores), and how much of
# that is norms and MLP; an MoE's tokens on their way to the experts count as its MLP.
LAYER_BYTES, NORM_BYTES, MLP_BYTES = 34, 4, 19
FUSED_TOKENS = 1024  # tokens whose logits exist at once with use_fused_kernels, at most
# Per token and vocabulary entry: logits and gradient in 2 bytes each, softmax in 4. With stability.float32_head logits
# and gradient have 4 each, and the gradient is then copied to 2.
LOGIT_BYTES, FLOAT32_LOGIT_BYTES = 8, 14
UNDO, VERSIONS, CACHED = "undo: weights and optimizer", "rescoring: old weights", "expert ids of the KV cache"


@dataclass(frozen=True)
class Phase:
    """One phase's lines in bytes per GPU."""

    lines: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.lines.values())

    @property
    def largest(self) -> str:
        return max(self.lines, key=lambda name: self.lines[name])


@dataclass(frozen=True)
class Memory:
    """Both phases of a run on one GPU.

    Attributes:
        kv_tokens: tokens that the KV cache of one rollout replica holds.
        kv_sequences: how many sequences of full length these tokens are.
    """

    update: Phase
    rollout: Phase
    kv_tokens: int
    kv_sequences: float

    def fits(self, sizes: Sizes) -> bool:
        room = sizes.gpu.memory_gib * GIB
        return self.update.total <= room and self.rollout.total <= room and self.kv_sequences >= 1


def plan_memory(sizes: Sizes) -> Memory:
    weights, gradients, optimizer = _state(sizes)
    update = {"weights": weights, "gradients": gradients, "optimizer": optimizer * (1 - sizes.cpu_adam)}
    if not sizes.megatron:
        update["gathered layers"] = _gathered(sizes)
    update |= {"activations": _activations(sizes), "logits": _logits(sizes), "reserve": RESERVE}

    shape, share = sizes.shape, sizes.utilization * sizes.gpu.memory_gib * GIB
    experts = shape.expert_parameters / (sizes.rollout_tensor * sizes.rollout_data)
    served = sizes.rollout_bytes * (experts + (shape.parameters - shape.expert_parameters) / sizes.rollout_tensor)
    cache = share - served - (ENGINE_RESERVE if sizes.engine == "vLLM" else 0)
    rollout = {"weights of the rollout": served, "KV cache": max(cache, 0.0)}
    rollout[f"workspace of {sizes.engine}"] = ENGINE_RESERVE
    if sizes.shared:
        if not sizes.param_offload:
            rollout["training weights"] = weights
        if not sizes.optimizer_offload:
            rollout["training optimizer"] = update["optimizer"]
        rollout["reserve"] = RESERVE / 2
    tokens = int(max(cache, 0.0) // sizes.kv_bytes)
    return Memory(Phase(update), Phase(rollout), tokens, tokens / (sizes.prompt + sizes.response))


def host_memory(sizes: Sizes, usage: Usage, memory: Memory, costs: list[Cost]) -> dict[str, float]:
    """Returns the bytes that active features keep in a machine's memory: old weights, and ids in TransferQueue and
    vLLM."""
    lines = {}
    if usage.undoes:
        weights, _, optimizer = _state(sizes)  # workers/undo.py copies these
        lines[UNDO] = (weights + optimizer) * sizes.per_node
    if usage.versions:
        lines[VERSIONS] = usage.versions * memory.update.lines["weights"] * sizes.per_node
    for cost in costs:
        if cost.on and cost.who == LOOPS and cost.feature in (AGREEMENT, REPLAY, TOP_TOKENS):
            lines[f"TransferQueue: {cost.feature}"] = cost.gib * GIB / sizes.nodes
    routes = any(cost.on and cost.feature in (AGREEMENT, REPLAY) for cost in costs)
    if routes and sizes.engine == "vLLM":  # its scheduler has a slot for each token of the cache, sampled or not
        lines[CACHED] = memory.kv_tokens * id_bytes(sizes) * max(1.0, sizes.per_node / sizes.rollout_tensor)
    return lines


def _state(sizes: Sizes) -> tuple[float, float, float]:
    """Returns the bytes of weights, gradients and Adam's state per GPU."""
    shape = sizes.shape
    if not sizes.megatron:  # fp32, sharded over a group of ranks
        parameters = shape.parameters / sizes.shards
        return 4 * parameters, 4 * parameters, 8 * parameters
    dense = (shape.parameters - shape.expert_parameters) / (sizes.tensor * sizes.pipeline)
    experts = shape.expert_parameters / (sizes.expert * sizes.expert_tensor * sizes.pipeline)
    # The distributed optimizer splits fp32 weights and both moments over the ranks that hold the same parameters.
    dense_ranks = sizes.gpus / (sizes.tensor * sizes.pipeline)
    expert_ranks = sizes.gpus / (sizes.expert * sizes.expert_tensor * sizes.pipeline)
    optimizer = 12 * (dense / dense_ranks + experts / expert_ranks)
    return sizes.compute_bytes * (dense + experts), 4 * (dense + experts), optimizer


def _gathered(sizes: Sizes) -> float:
    """Returns the bytes of FSDP's unsharded parameters: embeddings, the current layer with its gradient, the next
    layer."""
    shape = sizes.shape
    layer = (shape.parameters - shape.embedding_parameters) / shape.layers
    return sizes.compute_bytes * (shape.embedding_parameters + 3 * layer)


def _activations(sizes: Sizes) -> float:
    """Returns the bytes of the activations that the layers keep, and of one layer's own if it is recomputed."""
    shape, modules = sizes.shape, sizes.recompute
    tokens = sizes.micro_tokens / (sizes.ulysses * sizes.context)
    split = sizes.tensor if sizes.megatron else 1  # sequence parallelism splits the inputs as well
    experts = (shape.top_k + shape.shared_experts) * sizes.compute_bytes if shape.moe_layers else 0
    act = experts * shape.moe_intermediate
    mlp = MLP_BYTES * shape.hidden + experts * 2 * shape.hidden + 3 * act
    own = (LAYER_BYTES - MLP_BYTES) * shape.hidden + mlp
    # Per layer: its input if all of it is recomputed, else what the recomputed modules do not drop.
    kept = own
    if FULL in modules:
        kept = shape.hidden * sizes.compute_bytes
    else:
        if "layernorm" in modules:
            kept -= NORM_BYTES * shape.hidden
        if "moe" in modules or "mlp" in modules:
            kept -= mlp
        elif "moe_act" in modules:
            kept -= act
    # The first stage of a 1F1B pipeline holds as many micro-batches as there are stages.
    layers = shape.layers / sizes.pipeline * (sizes.pipeline if sizes.megatron else 1)
    return tokens * (layers * kept + (own if kept < own else 0)) / split


def _logits(sizes: Sizes) -> float:
    split = sizes.tensor if sizes.megatron else 1
    bytes_each = FLOAT32_LOGIT_BYTES if sizes.float32_head else LOGIT_BYTES
    tokens = sizes.micro_tokens / (sizes.ulysses * sizes.context)
    return (min(tokens, FUSED_TOKENS) if sizes.fused else tokens) * sizes.shape.vocabulary * bytes_each / split
