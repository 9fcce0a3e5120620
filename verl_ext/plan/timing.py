"""The time of a step by stage: operations and bytes, at the rates of published runs.

The rates are a fit to every second run of docs/published_runs.csv, beginning with the first: least squares of the
logarithms of generation, log-probs and update. docs/plan.md compares both halves. The formulas are there, too.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from verl_ext.launch.gpus import GPUS
from verl_ext.launch.models import ModelShape
from verl_ext.plan.sizes import FULL, Sizes

if TYPE_CHECKING:
    from verl_ext.plan.memory import Memory

# Share of the GPU's dense bfloat16 peak, by GPU and training engine: in the update, and in a forward pass alone. A MoE
# reaches the same share; what it lacks is the exchange of tokens between experts, at the rates of the links below.
# Source: dapo7b.csv, dapo14b.csv, dapo32b.csv and dapo_moe30b.csv of ISEEKYAN/verl_megatron_practice.
PEAK_SHARES = {
    ("H100", "fsdp"): (0.40, 0.375),
    ("H100", "megatron"): (0.33, 0.265),
    ("H20", "fsdp"): (0.76, 0.71),
    ("H20", "megatron"): (0.76, 0.61),
}
# GB/s per GPU, within a machine and between machines: the exchange of an MoE and the gathering of FSDP (the same).
LINK_GB_S, NETWORK_GB_S = 77.0, 30.0
SYNC = 0.44  # Megatron's exchange of gradients and weights: the part that its update does not hide (the same)
BANDWIDTH = 0.77  # share of the data sheet's bandwidth that decoding reaches (dapo7b.csv)
TOKEN_US = 71.0  # least microseconds of a rollout replica per token, whatever its GPUs: its scheduler (dapo7b.csv)
# Least milliseconds of a decode step per layer: launching kernels (dapo7b.csv, dapo_moe30b.csv).
DENSE_LAYER_MS, MOE_LAYER_MS = 0.092, 0.65
# A replica over several machines: milliseconds more per layer, GB/s of its sums (dapo_moe235b.csv, verl's dpsk.md).
NETWORK_LAYER_MS, SUM_GB_S = 0.45, 9.1
EULER = 0.5772
ATTENTION, MLP = "core_attn", ("mlp", "moe")  # Megatron's recompute_modules that cost operations


@dataclass(frozen=True)
class Timing:
    """Seconds by stage, and how many sequences one replica decodes at once."""

    stages: dict[str, float]
    concurrent: int

    def share(self, stage: str) -> float:
        return self.stages[stage] / sum(self.stages.values())


@dataclass(frozen=True)
class Lengths:
    """Tokens of a batch's trajectories; responses are taken to be exponential, cut at their limit.

    Attributes:
        prompt, response: means.
        longest: mean of the batch's longest response.
        context: mean number of tokens before a response's token.
        attended: mean number of tokens in the trajectory of a token.
    """

    prompt: float
    response: float
    longest: float
    context: float
    attended: float

    @property
    def total(self) -> float:
        return self.prompt + self.response


def lengths_of(sizes: Sizes) -> Lengths:
    prompt, mean = sizes.mean_prompt, sizes.mean_response
    longest = min(sizes.response, mean * max(1.0, math.log(sizes.sequences) + EULER))
    square = min(2 * mean**2, mean * longest)  # of an exponential variable; of one that is either 0 or the longest
    attended = (prompt**2 + 2 * prompt * mean + square) / (prompt + mean)
    return Lengths(prompt, mean, longest, prompt + square / (2 * mean), attended)


def plan_timing(sizes: Sizes, memory: "Memory", *, one_pass: bool = False) -> Timing:
    """Returns the seconds of each stage, without weight synchronisation, rewards and tools.

    Args:
        one_pass: compute_log_prob does not run.
    """
    lengths = lengths_of(sizes)
    waiting = sizes.sequences / (sizes.rollout_gpus / sizes.rollout_tensor)
    concurrent = max(1, int(min(waiting, memory.kv_tokens / lengths.total, sizes.max_num_seqs)))
    stages = {"generation": _generation(sizes, lengths, waiting, concurrent)}
    forward = _training(sizes, lengths, passes=1, updates=0)
    if not one_pass:
        stages["old log-probs"] = forward
    if sizes.reference:
        stages["reference"] = forward
    passes = sizes.epochs * (3 + recomputed_share(sizes, lengths.attended))
    stages["update"] = _training(sizes, lengths, passes=passes, updates=sizes.updates)
    return Timing({name: seconds for name, seconds in stages.items() if math.isfinite(seconds)}, concurrent)


def scoring_seconds(sizes: Sizes, trajectories: int) -> float:
    """Returns the seconds in which the training ranks score a few trajectories, one in a pass; each group of ranks that
    shares trajectories gets equally many."""
    groups = max(1, sizes.gpus // sizes.replica_ranks)
    few = replace(sizes, sequences=groups * math.ceil(trajectories / groups), micro_rows=1)
    return _training(few, lengths_of(few), passes=1, updates=0)


def _attention_flops(shape: ModelShape, attended: float) -> float:
    """Returns operations per token for scores and their sums over values, half of them behind the causal mask."""
    mla = shape.mla
    width = (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim) / 2 if mla else shape.head_dim
    layers = shape.layers - (shape.linear.layers if shape.linear else 0) - shape.window_layers
    return 2 * layers * shape.heads * width * attended


def forward_flops(shape: ModelShape, attended: float) -> float:
    """Returns operations per token of one forward pass; looking up the input embedding takes none."""
    lookup = 0 if shape.tied_embeddings else shape.vocabulary * shape.hidden
    return 2 * (shape.active_parameters - lookup) + _attention_flops(shape, attended)


def recomputed_share(sizes: Sizes, attended: float) -> float:
    """Returns the share of a forward pass that the backward pass repeats."""
    shape, modules = sizes.shape, sizes.recompute
    if FULL in modules:
        return 1.0
    flops = _attention_flops(shape, attended) if ATTENTION in modules else 0.0
    if any(module in modules for module in MLP):
        flops += 2 * (shape.active_parameters - shape.embedding_parameters - shape.attention_parameters)
    return flops / forward_flops(shape, attended)


def _training(sizes: Sizes, lengths: Lengths, passes: float, updates: int) -> float:
    """Returns the seconds of passes over a batch; a backward pass counts as two.

    Args:
        updates: number of optimizer steps, 0 for a forward pass alone.
    """
    shape = sizes.shape
    flops = _flops_per_second(sizes, "megatron" if sizes.megatron else "fsdp", 0 if updates else 1)
    own = sizes.sequences * lengths.total / sizes.gpus  # tokens of a GPU, if all split all of them
    seconds = passes * own * forward_flops(shape, lengths.attended) / flops
    batches = _micro_batches(sizes, lengths, max(1, updates // sizes.epochs)) * (sizes.epochs if updates else 1)
    if not sizes.megatron:  # weights in 2 bytes for each pass, gradients in 4, while the GPU computes
        each = (2 if not updates else 8) * shape.parameters
        return max(seconds, batches * each / _link(sizes, sizes.shards))
    if shape.moe_layers and sizes.expert > 1:  # to the experts and back, 2 bytes a number
        seconds += passes * own * shape.moe_layers * shape.top_k * shape.hidden * 4 / _link(sizes, sizes.expert)
    seconds *= 1 + (sizes.pipeline - 1) / (batches / max(1, updates))  # the pipeline's bubble
    split = (shape.parameters - shape.expert_parameters) / sizes.tensor
    split += shape.expert_parameters / (sizes.expert * sizes.expert_tensor)
    return seconds + updates * SYNC * 6 * split / sizes.pipeline / _link(sizes, sizes.gpus)


def _flops_per_second(sizes: Sizes, engine: str, phase: int) -> float:
    gpu = "H20" if sizes.gpu == GPUS["H20"].sheet else "H100"
    return sizes.gpu.tflops * 1e12 * PEAK_SHARES[gpu, engine][phase]


def _link(sizes: Sizes, ranks: int) -> float:
    """Returns the bytes per second that a GPU exchanges with neighbours of this number of ranks."""
    return 1e9 * (LINK_GB_S if ranks <= sizes.per_node else NETWORK_GB_S)


def _micro_batches(sizes: Sizes, lengths: Lengths, updates: int) -> int:
    """Returns the number of micro-batches of a rank for a whole batch."""
    sequences = sizes.sequences / updates / max(1, sizes.gpus // sizes.replica_ranks)
    if sizes.micro_rows:
        return updates * math.ceil(sequences / sizes.micro_rows)
    return updates * math.ceil(sequences * lengths.total / (sizes.micro_tokens * sizes.context * sizes.ulysses))


def _generation(sizes: Sizes, lengths: Lengths, waiting: float, concurrent: int) -> float:
    """Returns the seconds until the longest response ends.

    Args:
        waiting: sequences of a replica; concurrent: how many of them it decodes at once.
    """
    shape, tensor = sizes.shape, sizes.rollout_tensor
    bandwidth = BANDWIDTH * sizes.gpu.gb_per_s * 1e9
    # The parameters that a GPU reads to decode one token of each sequence.
    weights = (shape.parameters - shape.expert_parameters) / tensor
    if shape.moe_layers:
        routed = concurrent * sizes.rollout_data  # all ranks of data-parallel attention send the experts their tokens
        needed = 1 - (1 - shape.top_k / shape.routed_experts) ** routed  # share of the experts that a step needs
        weights += needed * shape.expert_parameters / (tensor * sizes.rollout_data)
    far = tensor * sizes.rollout_data > sizes.per_node
    layer_ms = (MOE_LAYER_MS if shape.moe_layers else DENSE_LAYER_MS) + far * NETWORK_LAYER_MS
    step = max(sizes.rollout_bytes * weights / bandwidth, shape.layers * layer_ms / 1e3)
    tokens = waiting * lengths.response
    # The longest response takes this many steps, however few others are left.
    steps = max(tokens / concurrent, lengths.longest)
    flops = 2 * shape.active_parameters / tensor
    each = sizes.kv_bytes * lengths.context / bandwidth + flops / _flops_per_second(sizes, "megatron", 0)
    each = max(each, TOKEN_US / 1e6) + far * 8 * shape.layers * shape.hidden / (SUM_GB_S * 1e9)
    return steps * step + tokens * each
