"""Computes the size of the rollout's routing, ids of [tokens, layers, top_k], on each hop to the training workers.

python tools/routing_cost.py --model Qwen3-30B-A3B --tokens 32768 --trajectories 512
python tools/routing_cost.py --model PATH --replay --ranks 8 --get-gb-s 4 --step-seconds 500

Written for verl 0.9.1 and vLLM 0.27. docs/routing.md describes each hop. 1 GB is 10^9 bytes. tools/bench_transfer.py
measures how fast TransferQueue carries such ids.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.base.errors import ConfigError
from verl_ext.launch.models import SHAPES
from verl_ext.plan.costs import GB, VERLS_ID_BYTES, engine_id_bytes

# As vLLM looks them up, in this order (model_executor/layers/fused_moe/routed_experts_capturer.py).
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
TOP_KS = ("num_experts_per_tok", "top_k_experts")

# Bytes per response token of the other fields that verl 0.9.1 puts into TransferQueue; a prompt token has only the
# first three. Seen in a run of recipes/cpu_smoke. Entropy and log-probabilities are bfloat16 on some engines.
WITH_THE_IDS = {
    "input_ids": 8,
    "position_ids": 8,
    "prompts or responses": 8,
    "response_mask": 8,
    "loss_mask": 8,
    "rollout_log_probs": 4,
    "rm_scores": 4,
}
FOR_THE_UPDATE = {"log_probs": 4, "entropy": 4, "old_log_probs": 4, "advantages": 4, "returns": 4}


@dataclass(frozen=True)
class RoutingShape:
    """The numbers of a model that decide the size of its ids.

    Attributes:
        layers: all decoder layers, which vLLM returns; rows of dense ones are zeros.
        moe_layers: those with a router.
    """

    layers: int
    moe_layers: int
    experts: int
    top_k: int

    def __post_init__(self) -> None:
        if not (1 <= self.moe_layers <= self.layers and 1 <= self.top_k <= self.experts):
            raise ConfigError(f"{self} is no mixture of experts: 1 <= moe_layers <= layers and 1 <= top_k <= experts")

    @classmethod
    def from_config(cls, hf_config: Any) -> "RoutingShape":
        """Reads a transformers config.

        Raises:
            ConfigError: vLLM would find no experts in it.
        """
        config = hf_config.get_text_config()
        experts, top_k = (_first(config, names) for names in (EXPERT_COUNTS, TOP_KS))
        if not experts or not top_k:
            raise ConfigError(
                f"model_type={config.model_type} has none of {', '.join(EXPERT_COUNTS)}, or none of "
                f"{', '.join(TOP_KS)}: vLLM returns no routing for it; name a mixture of experts"
            )
        return cls(config.num_hidden_layers, _moe_layers(config), experts, top_k)

    @property
    def engine_id_bytes(self) -> int:
        """Bytes of one id as vLLM returns it."""
        return engine_id_bytes(self.experts)

    @property
    def ids(self) -> int:
        """Ids of a token."""
        return self.layers * self.top_k


MODELS = {
    name: RoutingShape(shape.layers, shape.moe_layers, shape.routed_experts, shape.top_k)
    for name, shape in SHAPES.items()
    if name in ("Qwen3-30B-A3B", "Qwen3-235B-A22B", "DeepSeek-V3")
}


@dataclass(frozen=True)
class Hop:
    """A passage of the ids from one process, or memory, to the next.

    Attributes:
        rule: the formula for `times`.
        times: how often the ids of a token pass.
        bytes_per_token: bytes of all passages.
        bytes_per_step: bytes of all tokens.
    """

    source: str
    target: str
    id_bytes: int
    rule: str
    times: float
    bytes_per_token: float
    bytes_per_step: float

    def share(self, gb_per_s: float, step_seconds: float) -> float:
        """Returns the share of the step, at the rate of all senders or readers together."""
        return self.bytes_per_step / (gb_per_s * GB) / step_seconds


def routing_cost(
    shape: RoutingShape,
    tokens: int,
    trajectories: int,
    *,
    narrow: bool = True,
    reads: int = 1,
    ranks: int = 1,
    turns: int = 1,
) -> dict[str, Hop]:
    """Returns every hop that carries the ids of all layers, in order.

    Args:
        tokens: mean of prompt and response together.
        narrow: ids stay in the dtype of vLLM (upstream/agent_loop.py); otherwise verl's int16 from `put` on.
        reads: stages that fetch them: 1 with router agreement (compute_log_prob), 2 with replay (update_actor).
        ranks: training ranks that share a data-parallel rank (TP x PP x CP). Each has all of its tokens on its device;
            they are fetched once for all of them (workers/replica_fetch.py).
        turns: number of turns, of equal length. At every turn, vLLM's scheduler sends the ids from the first token on;
            its server sends only those that the agent loop's process does not have yet (upstream/agent_loop.py).

    Returns:
        capture, engine, agent_loop, put: from vLLM's worker to TransferQueue, while the rollout generates.
        get, device: on to the training ranks and their devices; the stages that read them wait for it.
    """
    given = {"tokens": tokens, "trajectories": trajectories, "reads": reads, "ranks": ranks, "turns": turns}
    for name, value in given.items():
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    returned = shape.engine_id_bytes
    queued = returned if narrow else VERLS_ID_BYTES
    again, once = ("(turns + 1) / 2", (turns + 1) / 2), ("1", 1.0)
    passages: dict[str, tuple[str, str, int, tuple[str, float]]] = {
        "capture": ("vLLM worker", "scheduler", 4, once),
        "engine": ("scheduler", "vLLM server", returned, again),
        "agent_loop": ("vLLM server", "agent loop", returned, once),
        "put": ("agent loop", "TransferQueue", queued, once),
        "get": ("TransferQueue", "training ranks", queued, ("reads", reads)),
        "device": ("training ranks", "their devices", queued, ("reads x ranks", reads * ranks)),
    }
    hops = {}
    for name, (source, target, id_bytes, (rule, times)) in passages.items():
        per_token = shape.ids * id_bytes * times
        hops[name] = Hop(source, target, id_bytes, rule, times, per_token, per_token * tokens * trajectories)
    return hops


def models_table(tokens: int, trajectories: int) -> list[list[str]]:
    """Returns header and rows for MODELS; in "a / b", a is for vLLM's dtype and b for verl's int16."""
    header = ["model", "layers, MoE", "experts, top-k", "a token", f"{tokens:,} tokens", f"{trajectories:,} times that"]
    rows = [header]
    for name, shape in MODELS.items():
        puts = [routing_cost(shape, tokens, trajectories, narrow=narrow)["put"] for narrow in (True, False)]
        token = " / ".join(f"{hop.bytes_per_token:,.0f}" for hop in puts)
        trajectory = " / ".join(f"{hop.bytes_per_token * tokens / 1e6:.1f}" for hop in puts)
        step = " / ".join(f"{hop.bytes_per_step / GB:.1f}" for hop in puts)
        sizes = [f"{token} B", f"{trajectory} MB", f"{step} GB"]
        rows.append([name, f"{shape.layers}, {shape.moe_layers}", f"{shape.experts}, {shape.top_k}", *sizes])
    return rows


def hops_table(hops: Mapping[str, Hop], *, rules: bool = False) -> list[list[str]]:
    """Returns header and rows; with `rules`, the formula for the number of passages instead of the number."""
    rows = [["from", "to", "B an id", "times", "B a token", "GB a step"]]
    for hop in hops.values():
        times = hop.rule if rules else f"{hop.times:g}"
        size = [f"{hop.bytes_per_token:,.0f}", f"{hop.bytes_per_step / GB:.1f}"]
        rows.append([hop.source, hop.target, str(hop.id_bytes), times, *size])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    header, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *body))


def load_shape(model: str) -> RoutingShape:
    """Returns the shape of a name in MODELS, or of a model folder, config file or Hugging Face name."""
    if model in MODELS:
        return MODELS[model]
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model {model} has no config that loads ({type(error).__name__}); name one of {', '.join(MODELS)}, a "
            "model folder or a config.json"
        ) from error
    return RoutingShape.from_config(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if it worked, 2 with one line on stderr if the user has to act."""
    arguments = _hops_parser().parse_args(argv)
    try:
        _print_hops(arguments)
    except ConfigError as error:
        print(f"routing_cost: {error}", file=sys.stderr)
        return 2
    return 0


def _first(config: Any, names: Sequence[str]) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _moe_layers(config: Any) -> int:
    """Returns the number of decoder layers with a router, by the three ways in which transformers' configs name dense
    layers."""
    layers = range(config.num_hidden_layers)
    if types := getattr(config, "mlp_layer_types", None):
        return sum(kind != "dense" for kind in types)
    if (dense := getattr(config, "first_k_dense_replace", None)) is not None:
        return len(layers[dense:])
    step, dense_layers = getattr(config, "decoder_sparse_step", None) or 1, getattr(config, "mlp_only_layers", None)
    return sum((layer + 1) % step == 0 and layer not in (dense_layers or ()) for layer in layers)


def _print_hops(arguments: argparse.Namespace) -> None:
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
    console.print(_rich_table(f"{arguments.model} ({size})", hops_table(hops)))
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


def _hops_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tools/routing_cost.py",
        description="Bytes of the rollout's routing on each hop to the training workers, and what they take of a step.",
    )
    positive: dict[str, Any] = {"type": _positive, "metavar": "N"}
    rate: dict[str, Any] = {"type": float, "metavar": "R"}
    add = parser.add_argument
    add("--model", default="Qwen3-30B-A3B", help=f"{', '.join(MODELS)}, or a path (default: %(default)s)")
    add("--tokens", default=32768, **positive, help="mean of prompt and response together (default: %(default)s)")
    add("--trajectories", default=512, **positive, help="trajectories per step (default: %(default)s)")
    add("--int16", action="store_true", help="verl's own dtype instead of vLLM's")
    add("--replay", action="store_true", help="update_actor fetches the ids too, not only compute_log_prob")
    add("--ranks", default=1, **positive, help="training ranks per data-parallel rank: TP x PP x CP (default: 1)")
    add("--turns", default=1, **positive, help="turns of a trajectory (default: 1)")
    add("--put-gb-s", **rate, help="rate of writes to TransferQueue, all agent loops together")
    add("--get-gb-s", **rate, help="rate of reads from TransferQueue, all training ranks together")
    add("--step-seconds", type=float, metavar="S", help="length of a step; the share of it is shown too")
    return parser


def _rich_table(title: str, rows: Sequence[Sequence[str]]) -> Any:
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
