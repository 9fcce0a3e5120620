"""`verl-ext plan`: its options, tables and JSON."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from verl_ext.base.arguments import add_command
from verl_ext.base.errors import ConfigError
from verl_ext.base.printable import number_table, print_number_table, print_text, wide_console
from verl_ext.launch import command_line
from verl_ext.plan.costs import checked_sync_seconds
from verl_ext.plan.memory import Memory, host_memory
from verl_ext.plan.scale import Plan, at_nodes, read_plan, scale_table, units_line
from verl_ext.plan.sizes import GIB, GUESSED_MEAN, UNITS, Sizes, planned_gpu, planned_gpus

if TYPE_CHECKING:
    from rich.console import Console

ROUGH = "estimates at the rates of published runs (docs/plan.md), without weight sync, rewards and tools"
PLAN = """\
Estimate a run's memory per GPU in the update and in the rollout, with the largest part; rough shares of a step's time;
and the cost of the plugin's features at this size. The command computes from the config only and starts nothing.
"""
PLAN_EXAMPLES = """\
example: verl-ext plan --gpu H100 --nodes 2 recipe=qwen3_30b_a3b stability=moe
"""
PER_TOKEN = ("activations", "logits")  # parts of the update that grow with the tokens of a micro-batch
NOTHING_ON = "no feature of the plugin is switched on; to see its cost, add the features, such as stability=moe"


def add_plan_parser(commands: Any) -> None:
    brief = "estimate memory, step time and the plugin's cost of a run"
    codes = "0 if the run fits; 1 if it does not"
    parser = add_command(commands, "plan", brief, PLAN, PLAN_EXAMPLES, codes=codes)
    command_line.add_arguments(parser)
    known = ", ".join(planned_gpus())
    parser.add_argument("--gpu", default="H100", metavar="NAME", help=f"the GPU: {known} (default: %(default)s)")
    parser.add_argument(
        "--nodes",
        metavar="N[,N...]",
        help="number of machines; several numbers print a table over sizes (default: trainer.nnodes)",
    )
    parser.add_argument(
        "--scale-batch",
        action="store_true",
        help="with --nodes: keep the config's trajectories per GPU (default: keep their total)",
    )
    parser.add_argument(
        "--model", help="a model of the table, if actor_rollout_ref.model.path does not end in its name"
    )
    for part in ("prompt", "response"):
        parser.add_argument(
            f"--mean-{part}", type=float, metavar="TOKENS", help=f"mean length of a {part} (default: 1/6 of the limit)"
        )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    parser.set_defaults(run=run_plan)


def run_plan(arguments: argparse.Namespace) -> int:
    """Returns 0 if the run fits at all sizes, 1 if it does not."""
    if not (arguments.overrides or arguments.config_name):
        raise ConfigError("there is no run to plan: give a recipe (recipe=...), overrides, or a launch script")
    config, nodes = command_line.required_config(arguments), _node_counts(arguments.nodes)
    plans = [
        read_plan(
            config if number is None else at_nodes(config, number, scale_batch=arguments.scale_batch),
            arguments.gpu,
            number,
            arguments.model,
            mean_prompt=arguments.mean_prompt,
            mean_response=arguments.mean_response,
        )
        for number in nodes
    ]
    if arguments.json:
        found = [_as_json(plan) for plan in plans]
        print(json.dumps(found if len(found) > 1 else found[0], indent=2))
    elif len(plans) > 1:
        _print_sizes(plans, planned_gpu(arguments.gpu)[0])
    else:
        print_plan(plans[0], planned_gpu(arguments.gpu)[0])
    return 0 if all(plan.fits for plan in plans) else 1


def _node_counts(given: str | None) -> list[int | None]:
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
        "checked_sync_seconds": checked_sync_seconds(sizes),
        "storage_units": {"has": plan.usage.units, "wanted": plan.units_wanted},
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
    return host_memory(plan.sizes, plan.usage, plan.memory, plan.costs)


def _print_sizes(plans: Sequence[Plan], gpu: str) -> None:
    console = wide_console()
    print_text(console, f"{plans[0].sizes.shape.parameters / 1e9:.1f} B parameters, {gpu}")
    header, *rows = scale_table(plans)
    # The last column, "what helps", is printed as lines; if nothing is on, only GPUs and step are left.
    shown = len(header) - 1 if any(plan.on for plan in plans) else 2
    table = number_table(*header[:shown])
    for row in rows:
        table.add_row(*row[:shown])
    print_number_table(console, table)
    print_text(console, lengths_line(plans[0].sizes))
    for plan in plans:
        for line in advice_lines(plan) if plan.fits else fit_lines(plan.sizes, plan.memory):
            print_text(console, f"{plan.sizes.gpus:,} GPUs: {line}")
    if shown == 2:
        print_text(console, NOTHING_ON)
    print_text(console, ROUGH)


def print_plan(plan: Plan, gpu: str) -> None:
    console = wide_console()
    sizes, memory, timing, shape = plan.sizes, plan.memory, plan.timing, plan.sizes.shape
    generate = "and generate" if sizes.shared else f"and {sizes.rollout_gpus} others generate"
    active = f"{shape.parameters / 1e9:.1f} B parameters, {shape.active_parameters / 1e9:.1f} B active"
    print_text(console, f"{active}; {sizes.gpus} x {gpu} train {generate}")
    table = number_table("GiB per GPU", "update", "rollout")
    for name in dict.fromkeys([*memory.update.lines, *memory.rollout.lines]):
        cells = (phase.lines.get(name) for phase in (memory.update, memory.rollout))
        table.add_row(name, *("" if value is None else f"{value / GIB:.1f}" for value in cells))
    table.add_section()
    table.add_row("total", *(f"{phase.total / GIB:.1f}" for phase in (memory.update, memory.rollout)))
    table.add_row("the GPU has", f"{sizes.gpu.memory_gib}", f"{sizes.gpu.memory_gib}")
    print_number_table(console, table)
    for line in fit_lines(sizes, memory):
        print_text(console, line)
    if not memory.fits(sizes):
        return

    table = number_table("stage", "seconds", "share")
    for stage, seconds in timing.stages.items():
        table.add_row(stage, f"{seconds:.0f}", f"{timing.share(stage):.0%}")
    print_number_table(console, table)
    print_text(console, f"{ROUGH}; a replica generates {timing.concurrent} sequences at once")
    print_text(console, lengths_line(sizes))

    if plan.on:
        _print_costs(console, plan)
    else:
        print_text(console, NOTHING_ON)
    if host := _host(plan):
        table = number_table("kept in the host's memory", "GiB per machine")
        for name, value in host.items():
            table.add_row(name, f"{value / GIB:.1f}")
        print_number_table(console, table)
    for line in advice_lines(plan):
        print_text(console, line)


def _print_costs(console: "Console", plan: Plan) -> None:
    """Prints the seconds that a step waits for the active features, and the seconds that the generation hides."""
    hides = any(cost.hidden for cost in plan.on)
    columns = ["switched on", "who", "GiB", "seconds", "share"]
    table = number_table(*columns, *(["hidden"] if hides else []), labels=2)
    for cost in plan.on:
        gib = f"{cost.gib:.2f}" if cost.gib else ""
        hidden = f"{cost.hidden:.2f}" if cost.hidden else ""
        seconds = _seconds_text(cost.waited) if cost.waited or not cost.hidden else ""
        share = f"{plan.share(cost.waited):.2%}" if seconds else ""
        table.add_row(cost.feature, f"{cost.who}, {cost.how}", gib, seconds, share, *([hidden] if hides else []))
    table.add_section()
    table.add_row("all", "", "", _seconds_text(plan.seconds), f"{plan.share(plan.seconds):.2%}")
    print_number_table(console, table)
    also = "; hidden: seconds during generation, for which the step does not wait" if hides else ""
    print_text(console, f"seconds that a step waits; transfers at the rates of two CPU cores{also}")
    if (every := plan.usage.checked_every) is not None:
        more = checked_sync_seconds(plan.sizes)
        then = f", then every {every} steps" if every else ""
        of_step = f"{more:.1f} s more, {plan.share(more):.2%} of a step"
        print_text(console, f"a checked weight sync takes {of_step}: the first{then}")


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 0.005 or not seconds else f"{seconds:.4f}"


def advice_lines(plan: Plan) -> list[str]:
    """Returns lines on the settings that make the plugin cheaper, and on the storage units that the run needs."""
    remedies = plan.remedies()
    each = [f"{one.setting}: {one.seconds:.2f} s, {plan.share(one.seconds):.2%} of the step" for one in remedies]
    lines = [f"the plugin costs less with {'; and also with '.join(each)}"] if each else []
    if (line := units_line(plan)) and not any(one.setting.startswith(UNITS) for one in remedies):
        lines.append(line)
    return lines


def lengths_line(sizes: Sizes) -> str:
    """Returns a line with the mean lengths, and how to set those that are guessed."""
    found = {"prompt": (sizes.mean_prompt, sizes.prompt), "response": (sizes.mean_response, sizes.response)}
    each = []
    for part, (mean, limit) in found.items():
        guess = f" (a guess: --mean-{part} sets it)" if mean == limit * GUESSED_MEAN else ""
        each.append(f"{part} {mean:,.0f} of at most {limit:,} tokens{guess}")
    return f"mean lengths: {', '.join(each)}"


def fit_lines(sizes: Sizes, memory: Memory) -> list[str]:
    """Returns one line if the run fits, else one for each reason why it does not."""
    room = sizes.gpu.memory_gib * GIB
    lines = []
    if memory.update.total > room:
        largest = memory.update.largest
        needs = f"{memory.update.total / GIB:.0f} GiB; its largest part is {largest}"
        fewer = (
            "fewer tokens at once (a lower ppo_max_token_len_per_gpu)"
            if largest in PER_TOKEN
            else "more GPUs (--nodes)"
        )
        lines.append(f"does not fit: the update needs {needs}; try {fewer}")
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
