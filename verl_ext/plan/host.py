"""What the plugin's features keep in a machine's memory, beside what verl keeps there."""

from verl_ext.plan.asked import Asked
from verl_ext.plan.costs import AGREEMENT, HEAD, LOOPS, REPLAY, Cost, id_bytes
from verl_ext.plan.memory import Memory
from verl_ext.plan.routing import GB
from verl_ext.plan.sizes import Sizes

UNDO_BYTES = 12  # a parameter: a float32 and Adam's two moments of it (workers/undo.py)
UNDO, VERSIONS, CACHED = "undo: weights and optimizer", "rescoring: old weights", "expert ids of the KV cache"


def host_memory(sizes: Sizes, asked: Asked, memory: Memory, costs: list[Cost]) -> dict[str, float]:
    """Bytes a machine that trains, of what is on: weights that are kept, ids that wait in TransferQueue and in vLLM."""
    lines = {}
    if asked.undoes:
        lines[UNDO] = UNDO_BYTES * sizes.shape.parameters / sizes.gpus * sizes.per_node
    if asked.versions:
        lines[VERSIONS] = asked.versions * memory.update.lines["weights"] * sizes.per_node
    for cost in costs:
        if cost.on and cost.who == LOOPS and cost.feature in (AGREEMENT, REPLAY, HEAD):
            lines[f"TransferQueue: {cost.feature}"] = cost.gb * GB / sizes.nodes
    routes = any(cost.on and cost.feature in (AGREEMENT, REPLAY) for cost in costs)
    if routes and sizes.engine == "vLLM":  # its scheduler has a slot for each token of the cache, sampled or not
        lines[CACHED] = memory.kv_tokens * id_bytes(sizes) * max(1.0, sizes.per_node / sizes.rollout_tensor)
    return lines
