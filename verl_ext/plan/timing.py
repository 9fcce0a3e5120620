"""Seconds of a step's stages, as rough shares: whether generation or the update is what to look at."""

import math
from dataclasses import dataclass

from verl_ext.plan.memory import Memory
from verl_ext.plan.sizes import Sizes

MFU = 0.25  # of an MoE's update; dense models reach more
BANDWIDTH = 0.6  # of the data sheet's, in decoding


@dataclass(frozen=True)
class Timing:
    """Seconds by stage, and how many sequences one replica decodes at once."""

    stages: dict[str, float]
    concurrent: int

    def share(self, stage: str) -> float:
        return self.stages[stage] / sum(self.stages.values())


def plan_timing(sizes: Sizes, memory: Memory, mean_response: float) -> Timing:
    """Roofline of each stage. Weight synchronisation, rewards and tools are not in it."""
    shape = sizes.shape
    length = sizes.prompt / 2 + mean_response  # prompts are rarely as long as they may be
    replicas = sizes.rollout_gpus / sizes.rollout_tensor
    waiting = sizes.sequences / replicas
    concurrent = max(1, int(min(waiting, memory.kv_tokens / length, sizes.max_num_seqs)))
    touched = float(shape.parameters)
    if shape.moe_layers:
        seen = 1 - (1 - shape.top_k / shape.routed_experts) ** concurrent  # share of the experts that a step needs
        touched = shape.parameters - shape.expert_parameters * (1 - seen)
    read = sizes.rollout_bytes * touched + concurrent * length / 2 * shape.kv_bytes_per_token
    step = read / sizes.rollout_tensor / (BANDWIDTH * sizes.gpu.gb_per_s * 1e9)
    # The longest response decodes to its end, however few are left beside it.
    steps = max(waiting * mean_response / concurrent, float(sizes.response))
    flops = sizes.gpus * sizes.gpu.tflops * 1e12 * MFU
    tokens = sizes.sequences * length
    forward = 2 * shape.active_parameters * tokens / flops
    stages = {"generation": steps * step, "old log-probs": forward}
    if sizes.reference:
        stages["reference"] = forward
    stages["update"] = (4 if sizes.recompute else 3) * forward
    return Timing({name: seconds for name, seconds in stages.items() if math.isfinite(seconds)}, concurrent)
