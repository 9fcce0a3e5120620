"""The table and the JSON of `verl-ext plan`."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from verl_ext.doctor import composed
from verl_ext.errors import ConfigError, UserError
from verl_ext.plan.memory import Memory, plan_memory
from verl_ext.plan.routing import RoutingShape
from verl_ext.plan.sizes import GIB, Sizes, planned_gpu, planned_gpus, read_sizes
from verl_ext.plan.timing import Timing, plan_timing
from verl_ext.printable import printable

# Measured on two CPU cores (tools/bench_correction.py, bench_guard.py); a controller is not slower.
CORRECTION_NS, GUARD_MS = 17.0, 0.5
WEIGHT_BYTES = 4  # rollout_is_weights, per response token
HEAD_BYTES, USUAL_HEAD = 8, 32  # an id in int32 and a log-probability in float32; tokens of a head
VERLS_ID_BYTES = 2  # which are sent where an engine's are wider
EXPERT_WEIGHT_BYTES = 2  # in float16
WIDTH = 120  # where the output is not a terminal


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="does a run fit its GPUs, and where does its time go",
        description="Memory a GPU in the update and in the rollout, the largest part of it, rough shares of a step's "
        "time, and what the plugin's features cost at this size. Arithmetic on the config alone; nothing is started.",
        epilog="example: verl-ext plan --gpu H100 --nodes 2 recipe=qwen3_30b_a3b stability=icepop. Exit code: 0 it "
        "fits, 1 it does not, 2 it cannot be planned.",
    )
    composed.add_arguments(parser)
    known = ", ".join(planned_gpus())
    parser.add_argument("--gpu", default="H100", metavar="NAME", help=f"{known} (default: %(default)s)")
    parser.add_argument("--nodes", type=int, help="default: trainer.nnodes")
    parser.add_argument("--model", help="of the table, where actor_rollout_ref.model.path does not end in its name")
    parser.add_argument(
        "--mean-response",
        type=float,
        metavar="TOKENS",
        help="of a response, on average (default: half of the limit)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 when it fits, 1 when it does not, 2 when the config cannot be planned."""
    try:
        config, sizes = _read(arguments)
        mean_response = _mean_response(arguments.mean_response, sizes)
        features = _features(config, sizes, mean_response)
    except UserError as error:
        line = " ".join(str(error).split())
        print(f"verl-ext plan: {printable(line, most=len(line))}", file=sys.stderr)
        return 2
    memory = plan_memory(sizes)
    timing = plan_timing(sizes, memory, mean_response)
    if arguments.json:
        print(json.dumps(_as_json(sizes, memory, timing, features), indent=2))
    else:
        _print(sizes, memory, timing, features, planned_gpu(arguments.gpu)[0])
    return 0 if memory.fits(sizes) else 1


def _read(arguments: argparse.Namespace) -> tuple[Any, Sizes]:
    config = composed.required(arguments)
    return config, read_sizes(config, arguments.gpu, arguments.nodes, arguments.model)


def _mean_response(given: float | None, sizes: Sizes) -> float:
    if given is None:
        return sizes.response / 2
    if not 0 < given <= sizes.response:
        limit = f"data.max_response_length={sizes.response}"
        raise ConfigError(f"--mean-response={given:g} must be above 0 and at most {limit}")
    return given


def _features(config: Any, sizes: Sizes, mean_response: float) -> list[tuple[str, str]]:
    """What each feature costs a step at this size, as name and sentence."""
    from verl_ext.launch.features import GUARD, HEAD, LOG_PROBS, MEASURE, ROUTERS, WEIGHTS, features, uses
    from verl_ext.launch.head import head_k, reads_in_update
    from verl_ext.settings.stability import stability_config

    stability = stability_config(config.stability)
    asked = features(config, stability)
    tokens = sizes.sequences * mean_response
    seconds, weights = tokens * CORRECTION_NS / 1e9, tokens * WEIGHT_BYTES / 1e9
    found = [
        (
            uses(asked, MEASURE),
            "corrections, vllm_kl/*",
            f"{seconds:.2f} s on the controller",
        ),
        (
            uses(asked, WEIGHTS),
            "weights to the workers",
            f"{weights:.2f} GB through TransferQueue",
        ),
        (uses(asked, GUARD), "guard", f"{GUARD_MS} ms"),
    ]
    k = head_k(config, stability, compares=uses(asked, LOG_PROBS)) or USUAL_HEAD
    heads, reads = tokens * k * HEAD_BYTES / 1e9, "twice" if reads_in_update(config, stability) else "once"
    cost = f"{heads:.1f} GB of {k} tokens a place, written once and read {reads}"
    found.append((uses(asked, HEAD), "sampler's head", cost))
    if sizes.shape.moe_layers:
        shape = sizes.shape
        routing = RoutingShape(shape.layers, shape.moe_layers, shape.routed_experts, shape.top_k)
        ids = routing.ids * (routing.engine_id_bytes if sizes.engine == "vLLM" else VERLS_ID_BYTES)
        routed = sizes.sequences * (sizes.prompt / 2 + mean_response) / 1e9
        cost = f"{ids * routed:.1f} GB of expert ids each way, {ids} bytes a token"
        found.append((uses(asked, ROUTERS), "router agreement, replay", cost))
        if stability.router_weights:
            weights = EXPERT_WEIGHT_BYTES * routing.ids
            found.append(
                (True, "router weights", f"{weights * routed:.1f} GB more to the workers, {weights} bytes a token")
            )
    return [(name, cost if on else f"{cost}, if switched on") for on, name, cost in found]


def _as_json(sizes: Sizes, memory: Memory, timing: Timing, features: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "fits": memory.fits(sizes),
        "gpu_gib": sizes.gpu.memory_gib,
        "update_gib": {name: value / GIB for name, value in memory.update.lines.items()},
        "rollout_gib": {name: value / GIB for name, value in memory.rollout.lines.items()},
        "kv_tokens": memory.kv_tokens,
        "kv_sequences": memory.kv_sequences,
        "seconds": timing.stages if memory.fits(sizes) else {},
        "concurrent_sequences": timing.concurrent,
        "features": dict(features),
        "sizes": {name: value for name, value in asdict(sizes).items() if name not in ("shape", "gpu")},
    }


def _print(sizes: Sizes, memory: Memory, timing: Timing, features: list[tuple[str, str]], gpu: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    shape = sizes.shape
    console.print(
        f"{shape.parameters / 1e9:.1f} B parameters, {shape.active_parameters / 1e9:.1f} B active; "
        f"{sizes.gpus} x {gpu} train, {sizes.rollout_gpus} generate"
    )
    table = Table("GiB a GPU", "update", "rollout", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in dict.fromkeys([*memory.update.lines, *memory.rollout.lines]):
        cells = (phase.lines.get(name) for phase in (memory.update, memory.rollout))
        table.add_row(name, *("" if value is None else f"{value / GIB:.1f}" for value in cells))
    table.add_section()
    table.add_row("total", *(f"{phase.total / GIB:.1f}" for phase in (memory.update, memory.rollout)))
    table.add_row("of", f"{sizes.gpu.memory_gib}", f"{sizes.gpu.memory_gib}")
    console.print(table)
    for line in verdict(sizes, memory):
        console.print(line, soft_wrap=True)
    if not memory.fits(sizes):
        return

    table = Table("stage", "seconds", "share")
    for stage, seconds in timing.stages.items():
        table.add_row(stage, f"{seconds:.0f}", f"{timing.share(stage):.0%}")
    console.print(table)
    rough = f"rough: a roofline, {timing.concurrent} sequences at once a replica; no weight sync, rewards, tools"
    console.print(rough, soft_wrap=True)

    table = Table("feature of the plugin", "cost a step")
    for row in features:
        table.add_row(*row)
    console.print(table)


def verdict(sizes: Sizes, memory: Memory) -> list[str]:
    """One line where it fits, else one for each phase that does not."""
    room = sizes.gpu.memory_gib * GIB
    lines = []
    if memory.update.total > room:
        needs = f"{memory.update.total / GIB:.0f} GiB, the largest part {memory.update.largest}"
        lines.append(f"does not fit: the update needs {needs}")
    if memory.rollout.total > room:
        lines.append(
            f"does not fit: the rollout needs {memory.rollout.total / GIB:.0f} GiB; lower "
            "actor_rollout_ref.rollout.gpu_memory_utilization, or offload the training engine"
        )
    if memory.kv_sequences < 1:
        lines.append(
            f"does not fit: the rollout's KV cache holds {memory.kv_tokens:,} tokens, less than one sequence; raise "
            "actor_rollout_ref.rollout.tensor_model_parallel_size or gpu_memory_utilization"
        )
    return lines or [
        f"fits: the largest part of the update is {memory.update.largest}; the KV cache of a replica holds "
        f"{memory.kv_tokens:,} tokens, {memory.kv_sequences:.0f} sequences of full length"
    ]
