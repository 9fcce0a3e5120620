"""The cost of the plugin's features per step: bytes through TransferQueue, and seconds that a process waits for them.

A transfer takes as long as its slowest part: the clients (the processes that transfer at the same time, each with its
own copies), the storage units, or the machines' network. docs/plan.md has the formulas and the tables of the rates
below. The rates were measured on two CPU cores that clients and units share, so they are low for a training machine.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from verl_ext.core.tokens import BLOCK_TOKENS
from verl_ext.plan.sizes import GIB, Sizes, Usage
from verl_ext.plan.timing import scoring_seconds

# Measured, GB/s of expert ids (docs/routing.md): one client with one unit; one unit with the largest number of clients.
CLIENT_PUT, CLIENT_GET = 1.1, 0.82
UNIT_PUT, UNIT_GET = 1.2, 0.90
# Microseconds that a client needs per row and field, measured with short rows and two units.
VALUE_PUT_US, VALUE_GET_US = 43.0, 19.0
# Assumed: 100 Gbit/s of Ethernet per node, which TransferQueue's sockets use.
NODE_GB_S = 12.5

CORRECTION_NS = 17.0  # in the controller, per response token: python tools/bench_correction.py
GUARD_MS = 0.5  # in the controller, per step: measured (docs/guard.md)
# The sync check, at both ends: reads and writes of memory per byte of a weight in bfloat16, 12 by its checksum and 4
# by its sums (counted in core/checksums.py); milliseconds per tensor, measured on a CPU core (docs/guard.md).
CHECK_PASSES, CHECK_TENSOR_MS = 2 * 16, 0.5
LAYER_TENSORS = 9  # of a layer, without its experts or its MLP: attention, norms, router

UNITS_A_NODE = 2  # TransferQueue's own advice: "Recommended: >= 2 x number of nodes" (its config.yaml, 0.1.11)
READ_SHARE = 0.005  # share of a step that the training ranks may wait for the storage units

GB = 1e9
BYTE_IDS = 256  # up to this number of experts, vLLM returns uint8; above, uint16
VERLS_ID_BYTES = 2  # per expert id, which verl sends in int16 for every engine except vLLM
TOP_TOKEN_BYTES = 8  # an id in int32 and a log-probability in float32
SUM_BYTES = 8
# (bytes per response token, number of fields) of what our trainers read and write (trainer/batch.py). Before verl
# computes advantages: rewards; log-probabilities of both engines, mask and entropy. verl does not read these again for
# a batch of one block, all but the entropy, and filters then read only the token ids. A larger batch reads the
# advantages too, and fields again for filters and for advantages that differ in sign within a trajectory.
REWARDS, FIELDS, ADVANTAGES = (4, 1), (20, 4), (4, 1)
LEFT_OUT, TOKEN_IDS, FILTERS_AGAIN, SIGNS_AGAIN = (-20, -4), (8, 1), (44, 8), (20, 4)
READ_AGREEMENT = (4, 1)
WRITTEN_WEIGHTS, WRITTEN_LAG, WRITTEN_MASKS = (4, 1), (8, 1), (16, 2)
AGREEMENT_BYTES = 4  # router_agreement, per response token, next to a trajectory's sums

MEASURE, WEIGHTS, GUARD = "corrections, vllm_kl/*", "weights to the workers", "guard"
TOP_TOKENS, AGREEMENT, REPLAY = "sampler's top tokens", "router agreement", "routing replay"
SYNC_CHECK = "sync check"
CONTROLLER, LOOPS, RANKS, ENDS = "controller", "agent loops", "training ranks", "both ends"


@dataclass(frozen=True)
class Cost:
    """One operation of a feature in a step.

    Attributes:
        who, how: the processes that do it, and "computes", "reads" or "writes".
        gib: GiB through TransferQueue, all processes together.
        seconds: its duration.
        hidden: the part of these seconds that falls into the generation.
    """

    feature: str
    who: str
    how: str
    on: bool
    gib: float
    seconds: float
    hidden: float = 0.0

    @property
    def waited(self) -> float:
        """The seconds that it adds to the step."""
        return self.seconds - self.hidden

    @property
    def name(self) -> str:
        return f"{self.feature}: {self.who}, {self.how}"


def transfer_seconds(how: str, gb: float, values: float, clients: int, units: int, nodes: int) -> float:
    """Returns the seconds of one transfer.

    Args:
        how: "reads" or "writes".
        gb: gigabytes, all clients together.
        values: rows x fields, all clients together; each has a fixed cost.
        clients, units: numbers of processes that transfer at the same time, and of storage units.
        nodes: number of machines whose network they share.
    """
    reads = how == "reads"
    client, unit = (CLIENT_GET, UNIT_GET) if reads else (CLIENT_PUT, UNIT_PUT)
    each = (VALUE_GET_US if reads else VALUE_PUT_US) / 1e6
    return max(gb / (client * clients) + values / clients * each, gb / (unit * units), gb / (NODE_GB_S * nodes))


def plan_costs(sizes: Sizes, usage: Usage, generation: float) -> list[Cost]:
    """Returns the costs of all features, on or off, in the order of the table.

    Args:
        generation: seconds of the generation, during which the agent loops write.
    """
    found: list[Cost] = []
    rows, ranks = sizes.sequences, sizes.replica_ranks
    tokens = rows * sizes.mean_response

    def passes(feature: str, who: str, how: str, on: bool, gb: float, values: float) -> None:
        writing = max(1, sizes.gpus // ranks)  # one of the ranks with the same trajectories writes
        clients = {CONTROLLER: 1, LOOPS: usage.workers, RANKS: sizes.gpus if how == "reads" else writing}[who]
        nodes = min(clients, sizes.nodes)
        seconds = transfer_seconds(how, gb, values, clients, usage.units, nodes)
        # All fields of a trajectory are written together, so the active features share the generation's time.
        before = sum(cost.hidden for cost in found if cost.on)
        hidden = min(seconds, max(generation - before, 0.0)) if who == LOOPS else 0.0
        found.append(Cost(feature, who, how, on, gb * GB / GIB, seconds, hidden))

    def fields(*sizes_and_counts: tuple[int, int]) -> tuple[float, float]:
        size, count = (sum(column) for column in zip(*sizes_and_counts, strict=True))
        return tokens * size / GB, rows * count

    found.append(Cost(MEASURE, CONTROLLER, "computes", usage.measures, 0.0, tokens * CORRECTION_NS / 1e9))
    gb, values = fields(*controller_reads(usage, tokens))
    if usage.compares and not usage.one_pass:
        gb += rows * _sum_bytes(sizes) / GB
        values += rows
    passes(MEASURE, CONTROLLER, "reads", usage.measures, gb, values)
    if usage.filters:
        passes(MEASURE, CONTROLLER, "writes", usage.measures, *fields(WRITTEN_MASKS))
    # If neither is on, the row shows the cost of weights.
    written = [WRITTEN_WEIGHTS] if usage.weighs or not usage.lag else []
    if usage.lag:
        written.append(WRITTEN_LAG)
    gb, values = fields(*written)
    passes(WEIGHTS, CONTROLLER, "writes", usage.weighs or usage.lag, gb, values)
    passes(WEIGHTS, RANKS, "reads", usage.weighs or usage.lag, gb * ranks, values * ranks)
    found.append(Cost(GUARD, CONTROLLER, "computes", usage.guards, 0.0, GUARD_MS / 1e3))
    seconds = checked_sync_seconds(sizes) / usage.checked_every if usage.checked_every else 0.0
    found.append(Cost(SYNC_CHECK, ENDS, "computes", usage.checked_every is not None, 0.0, seconds))
    for feature, (trajectories, every, versions) in usage.scored_again.items():
        parts, on = min(versions, trajectories), bool(trajectories and every)  # each version's trajectories are a part
        seconds = parts * scoring_seconds(sizes, math.ceil(trajectories / parts)) / every if on else 0.0
        found.append(Cost(feature, RANKS, "computes", on, 0.0, seconds))
    gb, reads = tokens * usage.top_tokens * TOP_TOKEN_BYTES / GB, usage.top_token_reads * ranks
    passes(TOP_TOKENS, LOOPS, "writes", usage.has_top_tokens, gb, 2 * rows)
    passes(TOP_TOKENS, RANKS, "reads", usage.has_top_tokens, reads * gb, 2 * reads * rows)
    if sizes.shape.moe_layers:
        for feature, who, how, on, gb, values in _routing_flows(sizes, usage):
            passes(feature, who, how, on, gb, values)
    return found


def checked_sync_seconds(sizes: Sizes) -> float:
    """Returns the seconds that `stability.sync_check` adds to a sync that it checks.

    Each process of both ends reads all weights, the rollout's after training's. What the controller compares, 8 bytes
    per process, takes no time.
    """
    shape = sizes.shape
    mlps = shape.moe_layers * (shape.routed_experts + bool(shape.shared_experts)) + shape.dense_layers
    tensors = 3 * mlps + LAYER_TENSORS * shape.layers + 3  # embedding, last norm, head
    return CHECK_PASSES * 2 * shape.parameters / (sizes.gpu.gb_per_s * GB) + tensors * CHECK_TENSOR_MS / 1e3


def controller_reads(usage: Usage, tokens: float) -> list[tuple[int, int]]:
    """Returns bytes per response token and number of fields of each read, and of what verl reads less."""
    agreement = [READ_AGREEMENT] if usage.compares and not usage.one_pass else []
    found = [REWARDS, FIELDS, *agreement]
    if tokens <= BLOCK_TOKENS:
        return [*found, LEFT_OUT, *([TOKEN_IDS] if usage.filters else [])]
    if usage.splits:
        found.append(ADVANTAGES)
    if usage.signs:
        found.append(SIGNS_AGAIN)
    return [*found, *([FILTERS_AGAIN, *agreement] if usage.filters else [])]


def engine_id_bytes(experts: int) -> int:
    """Returns the bytes of one expert id as vLLM returns it."""
    return 1 if experts <= BYTE_IDS else 2


def id_bytes(sizes: Sizes) -> int:
    """Returns the bytes of a token's expert ids that the agent loops write, for all layers: vLLM returns ids for dense
    layers too."""
    shape = sizes.shape
    each = engine_id_bytes(shape.routed_experts) if sizes.engine == "vLLM" else VERLS_ID_BYTES
    return shape.layers * shape.top_k * each


def _sum_bytes(sizes: Sizes) -> int:
    """Returns the bytes of a trajectory's sums over its tokens, `core.routing.RouterSums`."""
    return (4 * sizes.shape.moe_layers + 8) * SUM_BYTES


def units_wanted(sizes: Sizes, usage: Usage, costs: Iterable[Cost], generation: float, step: float) -> int:
    """Returns the number of storage units that the run should have.

    The training ranks then wait at most READ_SHARE of a step, the generation hides the agent loops' writes, and each
    machine has UNITS_A_NODE. Units that the clients or the network could not keep busy are not counted.
    """
    most = min(CLIENT_GET * sizes.gpus, NODE_GB_S * sizes.nodes) / UNIT_GET
    on = [cost for cost in costs if cost.on]
    read = sum(cost.gib for cost in on if (cost.who, cost.how) == (RANKS, "reads")) * GIB / GB
    written = sum(cost.gib for cost in on if cost.who == LOOPS) * GIB / GB
    by_read = min(read / (UNIT_GET * READ_SHARE * max(step, 1e-3)), most)
    by_write = min(written / (UNIT_PUT * max(generation, 1e-3)), CLIENT_PUT * usage.workers / UNIT_PUT)
    return max(UNITS_A_NODE * sizes.nodes, math.ceil(by_read), math.ceil(by_write))


def _routing_flows(sizes: Sizes, usage: Usage) -> list[tuple[str, str, str, bool, float, float]]:
    """Returns (feature, who, how, on, GB, values) of each transfer for routing.

    A model replica reads once for all of its ranks. With R3 all ids are sent, and agreement uses R3's first read. R2
    writes and reads the experts of compute_log_prob. Without that pass, the update compares, and sends no more than
    metrics.
    """
    shape, rows = sizes.shape, sizes.sequences
    r3, compares = usage.replay == "R3", usage.compares
    tokens = rows * (sizes.mean_prompt + sizes.mean_response)
    ids = id_bytes(sizes) * tokens / GB
    used = shape.moe_layers * shape.top_k * engine_id_bytes(shape.routed_experts) * tokens / GB  # R2's
    agrees = 0.0 if r3 else usage.agreement_share
    result = rows * (AGREEMENT_BYTES * sizes.mean_response + _sum_bytes(sizes)) / GB
    found = [
        (AGREEMENT, LOOPS, "writes", compares and not r3, agrees * ids, agrees * rows),
        (AGREEMENT, RANKS, "reads", compares and not r3, agrees * ids, agrees * rows),
        (AGREEMENT, RANKS, "writes", compares and not usage.one_pass, result, 2 * rows),
    ]
    if usage.replay == "R2":
        return [*found, (REPLAY, RANKS, "writes", True, used, rows), (REPLAY, RANKS, "reads", True, used, rows)]
    passes = 1 if usage.one_pass else 2
    return [*found, (REPLAY, LOOPS, "writes", r3, ids, rows), (REPLAY, RANKS, "reads", r3, passes * ids, passes * rows)]
