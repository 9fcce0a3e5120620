"""Measures what a batch costs the controller, by its size: time and memory of this process, with and without blocks.

    python tools/bench_controller.py [--millions 1,4,16,64,128,256,512] [--whole-up-to 64] [--filters]

It uses Ray, TransferQueue and the training step's own code. Trajectories of 32,768 response tokens with
log-probabilities of both engines, entropy, router agreement, rewards and advantages are measured, weighed by IcePop,
judged, split by the sign of the advantage, and, with --filters, filtered. A batch is taken in blocks of
`BLOCK_TOKENS` tokens; batches up to --whole-up-to million tokens also at once. verl's own reading of the batch is
left out: it pads the whole batch.

TransferQueue holds --stored trajectories; a larger batch has each of them several times, under different keys.
"""

import argparse
import logging
import statistics
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import transfer_queue as tq
from measuring import added_bytes, kibibytes, seconds
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_ext.core.routing import REASONS, RouterSums
from verl_ext.core.tokens import jagged
from verl_ext.features.stability import stability_config
from verl_ext.trainer import batch as batches
from verl_ext.trainer import queue
from verl_ext.trainer.run import StabilityRun

LENGTH, GROUP = 32_768, 16  # response tokens of a trajectory; trajectories of a prompt
LAYERS = 48
AT_A_TIME = 16  # trajectories put at once
NEVER = 2**62
TOKENIZER = SimpleNamespace(eos_token_id=1, decode=str, encode=str)  # these filters read only the end token


class Copies:
    """A TransferQueue that returns for each trajectory the one stored under its number modulo `stored`."""

    def __init__(self, stored: int):
        self.stored = stored

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        parts = [
            tq.kv_batch_get(keys=self._there(some), partition_id=partition_id, select_fields=select_fields)
            for some in batched(keys, self.stored)
        ]
        if len(parts) == 1:
            return parts[0]
        fields = {field: nested([row for part in parts for row in part[field].unbind()]) for field in parts[0].keys()}  # noqa: SIM118
        return TensorDict(fields, batch_size=len(keys))

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        if len(keys) <= self.stored:  # a write of more trajectories than are stored is left out
            tq.kv_batch_put(keys=self._there(keys), partition_id=partition_id, fields=fields)
        return KVBatchMeta(keys=keys, tags=[{}] * len(keys), partition_id=partition_id)

    def get_client(self) -> "Copies":
        return self

    def kv_retrieve_meta(self, keys: list[str], partition_id: str) -> Any:
        return tq.get_client().kv_retrieve_meta(keys=[*dict.fromkeys(self._there(keys))], partition_id=partition_id)

    def _there(self, keys: list[str]) -> list[str]:
        return [name(number_of(key) % self.stored) for key in keys]


def batched(keys: list[str], size: int) -> list[list[str]]:
    return [keys[first : first + size] for first in range(0, len(keys), size)]


def name(number: int) -> str:
    return f"{number // GROUP}_{number % GROUP}_0"


def number_of(key: str) -> int:
    group, session, _ = key.split("_")
    return int(group) * GROUP + int(session)


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def fill(count: int) -> None:
    """Puts this many trajectories."""
    for first in range(0, count, AT_A_TIME):
        rows = min(AT_A_TIME, count - first)
        offsets = torch.arange(0, (rows + 1) * LENGTH, LENGTH)
        tokens = rows * LENGTH
        l_infer = -torch.rand(tokens).square() * 5
        fields = {
            "rollout_log_probs": l_infer,
            "old_log_probs": l_infer + 0.02 * torch.randn(tokens),
            "response_mask": torch.ones(tokens, dtype=torch.long),
            "loss_mask": torch.ones(tokens, dtype=torch.long),
            "entropy": torch.rand(tokens),
            "router_agreement": 1 - (torch.rand(tokens) < 0.2) / (8 * LAYERS),
            "rm_scores": torch.zeros(tokens),
            "advantages": torch.randn(rows).repeat_interleave(LENGTH),
            "responses": torch.randint(0, 150_000, (tokens,)),
        }
        data = {field: jagged(values, offsets) for field, values in fields.items()}
        by_layer, none = torch.full((rows, LAYERS), float(LENGTH)), torch.zeros(rows, 1)
        sums = RouterSums(
            *(by_layer, by_layer, 0 * by_layer, by_layer, none, none, by_layer[:, :1]),
            *(none, none, none.expand(rows, len(REASONS))),
        )
        data["router_sums"] = nested(list(sums.pack().double()))
        keys = [name(first + row) for row in range(rows)]
        tq.kv_batch_put(keys=keys, partition_id="train", fields=TensorDict(data, batch_size=rows))


def run_of(filters: bool) -> StabilityRun:
    settings: dict[str, Any] = {"correction": "icepop", "router_agreement": True, "batch_skip": {"threshold": 1.0}}
    if filters:
        settings["filters"] = {"overlong": {}, "off_policy_negative": {"delta": 0.1}}
    parts = {
        "actor": {"policy_loss": {"loss_mode": "vanilla"}},
        "rollout": {"response_length": LENGTH + 1},
        "model": {"path": "/no/such/model"},
    }
    config = {"stability": settings, "actor_rollout_ref": parts, "algorithm": {"adv_estimator": "grpo"}}
    config["trainer"] = {"default_local_dir": "/no/such/folder"}
    return StabilityRun(OmegaConf.create(config), stability_config(settings))


def one_batch(run: StabilityRun, batch: KVBatchMeta) -> None:
    """Measures, judges and settles a batch, with advantages that are there already."""
    metrics: dict[str, float] = {}
    run.guard.begin(run.guard.step + 1)
    run.measure(batch, metrics, TOKENIZER)
    run.settle(batch, metrics, TOKENIZER)
    assert metrics["guard/skipped"] == 0


def measured(run: StabilityRun, trajectories: int, at_once: int) -> tuple[float, int]:
    """Returns seconds, and bytes added at the peak."""
    batches.BLOCK_TOKENS = at_once
    tags = [{"response_len": LENGTH}] * trajectories
    batch = KVBatchMeta(keys=[name(i) for i in range(trajectories)], tags=tags, partition_id="train")
    spent: list[float] = []
    added = added_bytes(lambda: spent.append(seconds(partial(one_batch, run, batch))))
    return spent[0], added


def of_size(run: StabilityRun, size: int, at_once: int, repeats: int) -> tuple[float, int, int]:
    """Returns the median of the seconds, and the bytes added and in total, at the peak."""
    found, resident = [], 0
    for _ in range(repeats if size <= 64 else 1):
        found.append(measured(run, size * 2**20 // LENGTH, at_once))
        resident = max(resident, kibibytes(Path("/proc/self/status"), "VmHWM") * 1024)
    spent, added = statistics.median(one[0] for one in found), max(one[1] for one in found)
    how = "at once" if at_once == NEVER else "in blocks"
    print(f"{size} M tokens {how}: {spent:.2f} s, {added / 1e6:,.0f} MB added", file=sys.stderr, flush=True)
    return spent, added, resident


def main() -> None:
    logging.disable(logging.WARNING)  # TransferQueue's, at each call on fewer than eight cores
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", default="1,4,16,64,128,256,512", help="million tokens (default: %(default)s)")
    parser.add_argument("--whole-up-to", type=int, default=64, help="million tokens (default: %(default)s)")
    parser.add_argument("--stored", type=int, default=2048, help="trajectories (default: %(default)s)")
    parser.add_argument("--units", type=int, default=2, help="storage units of TransferQueue (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="per size up to 64 million (default: %(default)s)")
    parser.add_argument("--filters", action="store_true", help="filter the batch too")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.millions.split(",")]
    stored = min(arguments.stored, max(sizes) * 2**20 // LENGTH)
    torch.manual_seed(0)
    ray.init(num_cpus=arguments.units + 2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": arguments.units}}}))
        print(f"storing {stored:,} trajectories of {LENGTH:,} tokens", file=sys.stderr, flush=True)
        fill(stored)
        queue.tq = Copies(stored)
        run, block = run_of(arguments.filters), batches.BLOCK_TOKENS
        measured(run, min(32, stored), block)  # first allocations
        whole = [size for size in sizes if size <= arguments.whole_up_to]
        # All of them in blocks first: the process does not give back the memory that a batch at once takes.
        ours = {size: of_size(run, size, block, arguments.repeats) for size in sizes}
        others = {size: of_size(run, size, NEVER, arguments.repeats) for size in whole}
        columns = ("tokens, M", "trajectories", "s", "ns per token", "MB added", "MB in all")
        title = f"the controller, in blocks of {block:,} tokens, and at once"
        table = Table(*columns, "at once: s", "MB added", "ratio, s", title=title, title_justify="left")
        for size, (spent, added, resident) in ours.items():
            cells = [f"{size}", f"{size * 2**20 // LENGTH:,}", f"{spent:.2f}", f"{spent * 1e9 / size / 2**20:.0f}"]
            cells += [f"{added / 1e6:,.0f}", f"{resident / 1e6:,.0f}"]
            if size in others:
                other, more, _ = others[size]
                cells += [f"{other:.2f}", f"{more / 1e6:,.0f}", f"{spent / other:.2f}"]
            table.add_row(*cells)
        Console(width=140).print(table)
        tq.close()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
