"""The table and the JSON of `verl-ext plan`."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from verl_ext.doctor import composed
from verl_ext.errors import ConfigError, UserError
from verl_ext.plan.costs import AGREEMENT, HEAD, LOOPS, REPLAY, Cost, id_bytes
from verl_ext.plan.host import host_memory
from verl_ext.plan.memory import Memory
from verl_ext.plan.scale import Plan, at_nodes, read_plan, scale_table, units_line
from verl_ext.plan.sizes import GIB, Sizes, planned_gpu, planned_gpus
from verl_ext.printable import printable

WIDTH = 120  # where the output is not a terminal
ROUGH = "rough: a roofline, and rates of two CPU cores; no weight sync, rewards, tools"


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
    parser.add_argument(
        "--nodes", metavar="N[,N...]", help="machines; several: a table over sizes (default: trainer.nnodes)"
    )
    parser.add_argument(
        "--scale-batch",
        action="store_true",
        help="with --nodes: as many trajectories a GPU as the config has (default: as many in all)",
    )
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
    """0 when it fits, 1 when it does not, at any of the sizes, 2 when the config cannot be planned."""
    try:
        config, nodes = composed.required(arguments), _nodes(arguments.nodes)
        plans = [
            read_plan(
                config if number is None else at_nodes(config, number, scale_batch=arguments.scale_batch),
                arguments.gpu,
                number,
                arguments.model,
                arguments.mean_response,
            )
            for number in nodes
        ]
    except UserError as error:
        line = " ".join(str(error).split())
        print(f"verl-ext plan: {printable(line, most=len(line))}", file=sys.stderr)
        return 2
    if arguments.json:
        found = [_as_json(plan) for plan in plans]
        print(json.dumps(found if len(found) > 1 else found[0], indent=2))
    elif len(plans) > 1:
        _print_sizes(plans, planned_gpu(arguments.gpu)[0])
    else:
        _print(plans[0], planned_gpu(arguments.gpu)[0])
    return 0 if all(plan.fits for plan in plans) else 1


def _nodes(given: str | None) -> list[int | None]:
    if given is None:
        return [None]
    try:
        return [int(number) for number in given.split(",")]
    except ValueError:
        raise ConfigError(f"--nodes={given} must be whole numbers, with commas between them") from None


def _as_json(plan: Plan) -> dict[str, Any]:
    sizes, memory = plan.sizes, plan.memory
    found: dict[str, Any] = {
        "fits": plan.fits,
        "gpu_gib": sizes.gpu.memory_gib,
        "update_gib": {name: value / GIB for name, value in memory.update.lines.items()},
        "rollout_gib": {name: value / GIB for name, value in memory.rollout.lines.items()},
        "host_gib": {name: value / GIB for name, value in _host(plan).items()},
        "kv_tokens": memory.kv_tokens,
        "kv_sequences": memory.kv_sequences,
        "seconds": plan.timing.stages if plan.fits else {},
        "concurrent_sequences": plan.timing.concurrent,
        "features": [{**asdict(cost), "waited": cost.waited} for cost in plan.costs],
        "storage_units": {"has": plan.asked.units, "wanted": plan.units_wanted},
        "sizes": {name: value for name, value in asdict(sizes).items() if name not in ("shape", "gpu")},
    }
    if plan.fits:
        found["plugin"] = {
            "seconds": plan.seconds,
            "share": plan.share(plan.seconds),
            "largest": plan.largest.name if plan.largest else None,
            "helps": [asdict(remedy) for remedy in plan.remedies()],
        }
    return found


def _host(plan: Plan) -> dict[str, float]:
    return host_memory(plan.sizes, plan.asked, plan.memory, plan.costs)


def _print_sizes(plans: Sequence[Plan], gpu: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    first = plans[0].sizes
    console.print(f"{first.shape.parameters / 1e9:.1f} B parameters, {gpu}", soft_wrap=True)
    header, *rows = scale_table(plans)
    table = Table(*header[:-1])
    for row in rows:
        table.add_row(*row[:-1])
    console.print(table)
    for plan, row in zip(plans, rows, strict=True):
        if row[-1]:
            console.print(f"{plan.sizes.gpus:,} GPUs, what helps, one on top of the other: {row[-1]}", soft_wrap=True)
        if line := units_line(plan):
            console.print(line, soft_wrap=True)
    console.print(ROUGH, soft_wrap=True)


def _print(plan: Plan, gpu: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    sizes, memory, timing, shape = plan.sizes, plan.memory, plan.timing, plan.sizes.shape
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
    console.print(f"{ROUGH}; {timing.concurrent} sequences at once a replica", soft_wrap=True)

    table = Table("feature of the plugin", "who", "GB a step", "seconds", "of the step", "")
    for column in table.columns[2:5]:
        column.justify = "right"
    for cost in plan.costs:
        gb = f"{cost.gb:.2f}" if cost.gb else ""
        table.add_row(cost.feature, f"{cost.who}, {cost.how}", gb, *_seconds(cost, plan), _note(cost, plan))
    table.add_section()
    table.add_row("all that is on", "", "", f"{plan.seconds:.2f}", f"{plan.share(plan.seconds):.2%}", "")
    console.print(table)
    if host := _host(plan):
        table = Table("kept in the host's memory", "GiB a machine")
        for name, value in host.items():
            table.add_row(name, f"{value / GIB:.1f}")
        console.print(table)
    for remedy in plan.remedies():
        share = f"{plan.share(remedy.seconds):.2%}"
        console.print(f"helps: {remedy.setting}: {remedy.seconds:.2f} s, {share} of the step", soft_wrap=True)
    if line := units_line(plan):
        console.print(line, soft_wrap=True)


def _seconds(cost: Cost, plan: Plan) -> tuple[str, str]:
    return f"{cost.seconds:.2f}" if cost.seconds >= 0.005 else f"{cost.seconds:.4f}", f"{plan.share(cost.waited):.2%}"


def _note(cost: Cost, plan: Plan) -> str:
    said = []
    if cost.hidden:
        said.append("while the rollout generates" if not cost.waited else "beyond the generation")
    if cost.who == LOOPS and cost.feature in (AGREEMENT, REPLAY):
        said.append(f"{id_bytes(plan.sizes)} bytes a token")
    if cost.who == LOOPS and cost.feature == HEAD:
        said.append(f"{plan.asked.head} tokens a place")
    if not cost.on:
        said.append("if switched on")
    return ", ".join(said)


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
