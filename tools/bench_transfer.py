"""Measures how fast TransferQueue carries expert ids, by storage units and clients, and the cost of only the bytes.

    python tools/bench_transfer.py [--units 1 2 4 8] [--clients 1 2 4] [--megabytes 64] [--rounds 2] [--repeats 4]

It starts Ray and the real TransferQueue with N storage units. A client is a Ray actor, a process of its own. It puts
trajectories one after another, as verl's agent loops do, and gets those of another client all at once, as a training
rank does. All clients start at the same moment; the rate is the bytes of all clients over the time from then until the
last one ends. The data that arrive are compared with those that were sent. Each round takes units and clients in a new
random order. A cell's first repeat in a round, into memory that no process has used, is left out. If the machine is too
slow for all rounds within --minutes, the tables show the finished ones.

GB/s: median, least and most over all rounds. Next to it are the rates of the same clients without TransferQueue: a copy
to other memory, pickle there and back, and the same bytes to Ray's object store and back as a copy. "x ray" is
TransferQueue's rate over Ray's. CPU seconds per GB: the time that the threads of all clients, and of all units, have
run (Linux's schedstat), which does not depend on the number of cores. us per value: the time in which one client puts
and gets a batch of short rows, over the number of its rows and fields: the cost of a row, however short it is.
"""

import argparse
import contextlib
import pickle
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from routing_cost import RoutingShape, load_shape
from tensordict import TensorDict

from verl_ext.plan.costs import GB

PARTITION, FIELD = "train", "routed_experts"
AHEAD = 0.1  # seconds that a call takes to reach all clients
ALONE = ("copy", "pickle", "ray")
SMALL_ROWS, SMALL_FIELDS, SMALL_TOKENS = 512, 6, 16


@ray.remote(num_cpus=0)
class Client:
    """A client of TransferQueue, in its own process.

    Args:
        index: the client's number.
        size: the shape of a trajectory, [tokens, layers, top-k].
        count: number of trajectories.
    """

    def __init__(self, index: int, size: tuple[int, ...], count: int, experts: int) -> None:
        torch.set_num_threads(1)
        self.index, self.size, self.count, self.experts = index, size, count, experts
        self.trajectories = self._made(index)

    def keys(self, index: int, repeat: str) -> list[str]:
        return [f"{repeat}_{index}_{row}" for row in range(self.count)]

    def run(self, what: str, start: float, repeat: str = "", source: int = 0) -> tuple[float, float]:
        """Returns (time of its end, CPU seconds) of `what` from `start` on; it gets the data of the client `source`."""
        call = {"put": self._put, "get": self._get, "copy": self._copy, "pickle": self._pickle, "ray": self._ray}[what]
        time.sleep(max(0.0, start - time.time()))
        used = run_seconds()
        got = call(self.keys(source if what == "get" else self.index, repeat))
        ended = time.time(), run_seconds() - used
        sent = self._made(source) if what == "get" else self.trajectories
        if got is not None and not all(map(_equal, got, sent)):
            raise SystemExit(f"{what}: what arrived differs from what was sent")
        return ended

    def small(self) -> dict[str, float]:
        """Returns the microseconds per row and field of a batch of short rows."""
        keys = [f"small_{row}" for row in range(SMALL_ROWS)]
        rows = [torch.arange(SMALL_TOKENS, dtype=torch.int32) + row for row in range(SMALL_ROWS)]
        fields = {
            f"field_{number}": torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            for number in range(SMALL_FIELDS)
        }
        start = time.perf_counter()
        tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=TensorDict(fields, SMALL_ROWS))
        middle = time.perf_counter()
        got = tq.kv_batch_get(keys=keys, partition_id=PARTITION)
        end = time.perf_counter()
        assert all(torch.equal(got[name].values(), field.values()) for name, field in fields.items())
        tq.kv_clear(keys=keys, partition_id=PARTITION)
        values = SMALL_ROWS * SMALL_FIELDS / 1e6
        return {"put": (middle - start) / values, "get": (end - middle) / values}

    def leave(self) -> None:
        """Leaves the TransferQueue, which is about to end."""
        tq.close()

    def clear(self, repeat: str) -> None:
        tq.kv_clear(keys=self.keys(self.index, repeat), partition_id=PARTITION)

    def _made(self, index: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        dtype = torch.uint8 if self.experts <= 256 else torch.int16
        return [torch.randint(self.experts, self.size, dtype=dtype, generator=generator) for _ in range(self.count)]

    def _put(self, keys: list[str]) -> None:
        for key, ids in zip(keys, self.trajectories, strict=True):
            tq.kv_batch_put(keys=[key], partition_id=PARTITION, fields=TensorDict({FIELD: ids[None]}, [1]))

    def _get(self, keys: list[str]) -> Any:
        return tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=[FIELD])[FIELD].unbind()

    def _copy(self, keys: list[str]) -> Any:
        return [ids.clone() for ids in self.trajectories]

    def _pickle(self, keys: list[str]) -> Any:
        return [pickle.loads(pickle.dumps(ids.numpy(), protocol=5)) for ids in self.trajectories]

    def _ray(self, keys: list[str]) -> Any:
        references = [ray.put(ids.numpy()) for ids in self.trajectories]
        return [ids.copy() for ids in ray.get(references)]


def _equal(one: Any, other: torch.Tensor) -> bool:
    return np.array_equal(np.asarray(one).reshape(other.shape), other.numpy())


def run_seconds(pid: int | str = "self") -> float:
    """Returns the seconds that the threads of a process have run."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def units_seconds() -> float:
    """Returns the seconds that the storage units under this process have run."""
    children = psutil.Process().children(recursive=True)
    return sum(run_seconds(child.pid) for child in children if child.name().startswith("ray::SimpleSto"))


@contextlib.contextmanager
def transfer_queue(units: int) -> Iterator[None]:
    """A TransferQueue with this many storage units; its actors are gone at the end of the block."""
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": units}}}))
    try:
        yield
    finally:
        tq.close()
        with contextlib.suppress(ValueError):
            while ray.get_actor("TransferQueueController", namespace="transfer_queue"):
                time.sleep(0.1)


class Bench:
    """The rates of every cell, (units, clients, what) -> GB/s per repeat; CPU seconds per GB by owner; us per value."""

    def __init__(self, shape: RoutingShape, arguments: argparse.Namespace) -> None:
        self.arguments, self.until = arguments, time.monotonic() + 60 * arguments.minutes
        size = (arguments.tokens, shape.layers, shape.top_k)
        bytes_each = arguments.tokens * shape.ids * shape.engine_id_bytes
        self.count = max(1, round(arguments.megabytes * 1e6 / bytes_each))
        self.gigabytes = self.count * bytes_each / GB  # of one client
        self.rates: dict[tuple[int, int, str], list[float]] = defaultdict(list)
        self.cpu: dict[tuple[int, int, str], list[float]] = defaultdict(list)
        self.small: dict[tuple[int, str], list[float]] = defaultdict(list)
        self._of_client = (size, self.count, shape.experts)

    def run(self) -> None:
        most = max(self.arguments.clients)
        actors = [Client.remote(index, *self._of_client) for index in range(most)]
        total, done = self.arguments.rounds * len(self.arguments.units) * len(self.arguments.clients), 0
        for number in range(self.arguments.rounds):
            for units in random.sample(self.arguments.units, len(self.arguments.units)):
                if time.monotonic() > self.until:
                    return
                with transfer_queue(units):
                    for clients in random.sample(self.arguments.clients, len(self.arguments.clients)):
                        self._cell(units, actors[:clients], f"{number}_{clients}")
                        done += 1
                        put, get = (self.rates[units, clients, what][-1] for what in ("put", "get"))
                        said = f"{units} unit(s), {clients} client(s): put {put:.2f}, get {get:.2f} GB/s"
                        print(f"{done} of {total}: {said}", file=sys.stderr, flush=True)
                    for what, microseconds in ray.get(actors[0].small.remote()).items():
                        self.small[units, what].append(microseconds)
                    ray.get([actor.leave.remote() for actor in actors])

    def _cell(self, units: int, actors: list[Any], name: str) -> None:
        repeats = self.arguments.repeats
        for number in range(repeats):
            for what in ("put", "get", *ALONE):
                before = units_seconds()
                start = time.time() + AHEAD
                calls = [
                    actor.run.remote(what, start, f"{name}_{number}", (index + 1) % len(actors))
                    for index, actor in enumerate(actors)
                ]
                ended = ray.get(calls)
                if number == 0 and repeats > 1:
                    continue
                gigabytes = self.gigabytes * len(actors)
                self.rates[units, len(actors), what].append(gigabytes / (max(end for end, _ in ended) - start))
                if what not in ALONE:
                    used = {"clients": sum(cpu for _, cpu in ended), "units": units_seconds() - before}
                    for whose, seconds in used.items():
                        self.cpu[units, len(actors), f"{what}, {whose}"].append(seconds / gigabytes)
            ray.get([actor.clear.remote(f"{name}_{number}") for actor in actors])

    def print(self, model: str) -> None:
        from rich.console import Console
        from rich.table import Table

        console = Console(width=None if sys.stdout.isatty() else 180)
        size = f"{self.count} trajectories of {self.arguments.tokens:,} tokens, {self.gigabytes * 1e3:.0f} MB a client"
        repeats = min(map(len, self.rates.values()))
        title = f"GB/s, {model}: {size}; median (least to most) of {repeats} or more; {psutil.cpu_count()} CPUs"
        table = Table(
            "units", "clients", "put", "get", *ALONE, "put x ray", "get x ray", title=title, title_justify="left"
        )
        cells = sorted({(units, clients) for units, clients, _ in self.rates})
        for units, clients in cells:
            of = {what: self.rates[units, clients, what] for what in ("put", "get", *ALONE)}
            ratios = (f"{statistics.median(of[what]) / statistics.median(of['ray']):.2f}" for what in ("put", "get"))
            table.add_row(str(units), str(clients), *map(_spread, of.values()), *ratios)
        console.print(table)
        table = Table("units", "clients", title="CPU seconds per GB", title_justify="left")
        whose = [f"{what}, {who}" for what in ("put", "get") for who in ("clients", "units")]
        for name in whose:
            table.add_column(name)
        for units, clients in cells:
            table.add_row(str(units), str(clients), *(_spread(self.cpu[units, clients, name]) for name in whose))
        console.print(table)
        table = Table("units", "put", "get", title="us per value (a row of a field), short rows", title_justify="left")
        for units in sorted({units for units, _ in cells}):
            table.add_row(str(units), *(_spread(self.small[units, what], 1) for what in ("put", "get")))
        console.print(table)


def _spread(values: list[float], digits: int = 2) -> str:
    least, median, most = min(values), statistics.median(values), max(values)
    return f"{median:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--units", type=int, nargs="+", default=[1, 2, 4, 8], help="storage units (default: %(default)s)")
    add("--clients", type=int, nargs="+", default=[1, 2, 4], help="clients (default: %(default)s)")
    add("--megabytes", type=int, default=64, help="per client (default: %(default)s)")
    add("--tokens", type=int, default=32768, help="per trajectory (default: %(default)s)")
    add("--model", default="Qwen3-30B-A3B", help="a name in tools/routing_cost.py, or a path (default: %(default)s)")
    add("--rounds", type=int, default=2, help="over all units and clients, in random order (default: %(default)s)")
    add("--repeats", type=int, default=4, help="per cell and round (default: %(default)s)")
    add("--minutes", type=float, default=6, help="no TransferQueue is started after these (default: %(default)s)")
    arguments = parser.parse_args()
    bench = Bench(load_shape(arguments.model), arguments)
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init("local", num_cpus=max(arguments.units) + 2, **quiet)  # whatever else runs here
    try:
        bench.run()
    finally:
        ray.shutdown()
    bench.print(arguments.model)


if __name__ == "__main__":
    main()
