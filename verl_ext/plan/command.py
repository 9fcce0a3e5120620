"""The table and the JSON of `verl-ext plan`."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from verl_ext.errors import UserError
from verl_ext.plan.memory import Memory, plan_memory
from verl_ext.plan.sizes import GIB, GPUS, Sizes, read_sizes
from verl_ext.plan.timing import Timing, plan_timing
from verl_ext.routing_cost import RoutingShape

# Measured on two CPU cores (tools/bench_correction.py, bench_guard.py); a controller is not slower.
CORRECTION_NS, GUARD_MS = 17.0, 0.5
WEIGHT_BYTES = 4  # rollout_is_weights, per response token


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="does a run fit its GPUs, and where does its time go",
        description="Memory a GPU in the update and in the rollout, what bounds it, rough shares of a step's time, and "
        "what the plugin's features cost at this size. Arithmetic on the config alone; nothing is started.",
        epilog="example: verl-ext plan --gpu H100 --nodes 2 recipe=qwen3_30b_a3b stability=icepop. Exit code: 0 it "
        "fits, 1 it does not, 2 it cannot be planned.",
    )
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", help="as given to verl_ext.main_ppo")
    parser.add_argument("--gpu", default="H100", choices=list(GPUS), help="default: %(default)s")
    parser.add_argument("--nodes", type=int, help="default: trainer.nnodes")
    parser.add_argument("--model", help="of the table, where actor_rollout_ref.model.path does not end in its name")
    parser.add_argument(
        "--mean-response", type=float, help="tokens of a response on average (default: half of the limit)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 when it fits, 1 when it does not, 2 when the config cannot be planned."""
    try:
        config = _compose(arguments.overrides)
        sizes = read_sizes(config, arguments.gpu, arguments.nodes, arguments.model)
        memory = plan_memory(sizes)
        timing = plan_timing(sizes, memory, arguments.mean_response or sizes.response / 2)
    except UserError as error:
        print(f"verl-ext plan: {error}", file=sys.stderr)
        return 2
    features = _features(sizes, arguments.mean_response or sizes.response / 2)
    if arguments.json:
        print(json.dumps(_as_json(sizes, memory, timing, features), indent=2))
    else:
        _print(sizes, memory, timing, features, arguments.gpu)
    return 0 if memory.fits(sizes) else 1


def _compose(overrides: Sequence[str]) -> Any:
    import hydra

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its names of arguments are checked; it talks to stdout
    from verl_ext.compose import PRIMARY, VERL_CONFIGS, prepare

    with hydra.initialize_config_dir(str(VERL_CONFIGS), version_base=None):
        return hydra.compose(PRIMARY, overrides=prepare(overrides))


def _features(sizes: Sizes, mean_response: float) -> list[tuple[str, str]]:
    """What each feature costs a step at this size, as name and sentence."""
    tokens = sizes.sequences * mean_response
    found = [
        ("corrections, vllm_kl/*", f"{tokens * CORRECTION_NS / 1e9:.2f} s on the controller"),
        ("weights to the workers", f"{tokens * WEIGHT_BYTES / 1e9:.2f} GB through TransferQueue"),
        ("guard", f"{GUARD_MS} ms"),
    ]
    if sizes.shape.moe_layers:
        shape = sizes.shape
        routing = RoutingShape(shape.layers, shape.moe_layers, shape.routed_experts, shape.top_k)
        ids = routing.ids * routing.engine_id_bytes
        total = ids * sizes.sequences * (sizes.prompt / 2 + mean_response) / 1e9
        found.append(("router agreement, replay", f"{total:.1f} GB of expert ids each way, {ids} bytes a token"))
    return found


def _as_json(sizes: Sizes, memory: Memory, timing: Timing, features: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "fits": memory.fits(sizes),
        "gpu_gib": sizes.gpu.memory_gib,
        "update_gib": {name: value / GIB for name, value in memory.update.lines.items()},
        "rollout_gib": {name: value / GIB for name, value in memory.rollout.lines.items()},
        "kv_tokens": memory.kv_tokens,
        "kv_sequences": memory.kv_sequences,
        "seconds": timing.stages,
        "concurrent_sequences": timing.concurrent,
        "features": dict(features),
        "sizes": {name: value for name, value in asdict(sizes).items() if name not in ("shape", "gpu")},
    }


def _print(sizes: Sizes, memory: Memory, timing: Timing, features: list[tuple[str, str]], gpu: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
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
    console.print(_verdict(sizes, memory))

    table = Table("stage", "seconds", "share")
    for stage, seconds in timing.stages.items():
        table.add_row(stage, f"{seconds:.0f}", f"{timing.share(stage):.0%}")
    console.print(table)
    console.print(f"rough: a roofline, {timing.concurrent} sequences at once a replica; no weight sync, rewards, tools")

    table = Table("feature of the plugin", "cost a step")
    for row in features:
        table.add_row(*row)
    console.print(table)


def _verdict(sizes: Sizes, memory: Memory) -> str:
    room = sizes.gpu.memory_gib * GIB
    if memory.update.total > room:
        return f"does not fit: the update needs {memory.update.total / GIB:.0f} GiB, most of it {memory.update.largest}"
    if memory.rollout.total > room:
        return (
            f"does not fit: the rollout needs {memory.rollout.total / GIB:.0f} GiB; lower "
            "actor_rollout_ref.rollout.gpu_memory_utilization, or offload the training engine"
        )
    if memory.kv_sequences < 1:
        return (
            f"does not fit: the KV cache holds {memory.kv_tokens:,} tokens, less than one sequence; raise "
            "actor_rollout_ref.rollout.tensor_model_parallel_size or gpu_memory_utilization"
        )
    return (
        f"fits: the update is bounded by {memory.update.largest}; the KV cache of a replica holds {memory.kv_tokens:,} "
        f"tokens, {memory.kv_sequences:.0f} sequences of full length"
    )
