"""What it costs to carry the rollout's routing to the training workers: `verl_ext.plan.routing` as a command.

python -m verl_ext.plan.routing_cost --model Qwen3-30B-A3B --tokens 32768 --trajectories 512
python -m verl_ext.plan.routing_cost --model PATH --replay --ranks 8 --get-gb-s 4 --step-seconds 500

How fast TransferQueue carries such ids here: tools/bench_transfer.py.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from verl_ext.errors import ConfigError
from verl_ext.plan.routing import (
    FOR_THE_UPDATE,
    GB,
    MODELS,
    WITH_THE_IDS,
    hops_table,
    load_shape,
    routing_cost,
)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when it worked, 2 with one line on stderr when the user has to act."""
    arguments = _parser().parse_args(argv)
    try:
        _run(arguments)
    except ConfigError as error:
        print(f"routing_cost: {error}", file=sys.stderr)
        return 2
    return 0


def _run(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    console = Console()
    shape = load_shape(arguments.model)
    hops = routing_cost(
        shape,
        arguments.tokens,
        arguments.trajectories,
        narrow=not arguments.int16,
        reads=2 if arguments.replay else 1,
        ranks=arguments.ranks,
        turns=arguments.turns,
    )
    size = f"{shape.layers} layers, {shape.experts} experts, top-{shape.top_k}"
    console.print(_rich(f"{arguments.model} ({size})", hops_table(hops)))
    other = sum(WITH_THE_IDS.values())
    console.print(
        f"The other fields of a response token: {other} bytes to compute_log_prob, "
        f"{other + sum(FOR_THE_UPDATE.values())} to update_actor."
    )
    for name, rate in (("put", arguments.put_gb_s), ("get", arguments.get_gb_s)):
        if rate is not None:
            hop = hops[name]
            share = ""
            if arguments.step_seconds is not None:
                share = f", {hop.share(rate, arguments.step_seconds):.1%} of a step of {arguments.step_seconds:g} s"
            console.print(f"{name}: {hop.bytes_per_step / GB / rate:.1f} s at {rate:g} GB/s{share}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m verl_ext.plan.routing_cost",
        description="Bytes of the rollout's routing on each hop to the training workers, and what they take of a step.",
    )
    positive: dict[str, Any] = {"type": _positive, "metavar": "N"}
    rate: dict[str, Any] = {"type": float, "metavar": "R"}
    add = parser.add_argument
    add("--model", default="Qwen3-30B-A3B", help=f"{', '.join(MODELS)}, or a path (default: %(default)s)")
    add("--tokens", default=32768, **positive, help="prompt and response, mean of a trajectory (default: %(default)s)")
    add("--trajectories", default=512, **positive, help="of a step (default: %(default)s)")
    add("--int16", action="store_true", help="verl's own dtype instead of vLLM's")
    add("--replay", action="store_true", help="update_actor fetches the ids too, not compute_log_prob alone")
    add("--ranks", default=1, **positive, help="training ranks per data-parallel rank: TP x PP x CP (default: 1)")
    add("--turns", default=1, **positive, help="turns of a trajectory (default: 1)")
    add("--put-gb-s", **rate, help="rate of writes to TransferQueue, all agent loops together")
    add("--get-gb-s", **rate, help="rate of reads from TransferQueue, all training ranks together")
    add("--step-seconds", type=float, metavar="S", help="of a step: the share is shown too")
    return parser


def _rich(title: str, rows: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(*rows[0], title=Text(title), title_justify="left")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
