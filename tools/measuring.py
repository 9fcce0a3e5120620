"""Measures time and memory for the benchmarks, on a CPU and on a GPU, and prints them."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from verl_ext.base.printable import number_table, print_number_table

RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # environment: freed tensors go back to the system at once


def seconds(call: Callable[[], object], device: str = "cpu") -> float:
    """Times one call; on a GPU by CUDA events."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def alternating(
    calls: Mapping[str, Callable[[], object]], repeats: int, device: str = "cpu", warm_up: int = 1
) -> dict[str, list[float]]:
    """Returns the seconds of each call. Every second round is in reverse, so that a machine that slows down favours
    none."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(warm_up + repeats):
        for name in list(calls) if repeat % 2 == 0 else list(calls)[::-1]:
            spent = seconds(calls[name], device)
            if repeat >= warm_up:
                times[name].append(spent)
    return times


def print_times(times: Mapping[str, Sequence[float]], columns: Mapping[str, Mapping[str, str]]) -> None:
    """Prints the median and the shortest time of each call.

    Args:
        columns: further columns, title -> call -> cell.
    """
    table = number_table("", "median, ms", "best, ms", *columns)
    for name, spent in times.items():
        milliseconds = (f"{1000 * each:,.3f}" for each in (median(spent), min(spent)))
        table.add_row(name, *milliseconds, *(cells.get(name, "") for cells in columns.values()))
    print_number_table(Console(width=120), table)


def ratio(times: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    """Returns the median of one call over that of another."""
    return median(times[one]) / median(times[other])


def added_bytes(call: Callable[[], object], device: str = "cpu") -> int:
    """Returns the memory that one call adds at its peak: to the resident set of this process, or by torch's count on a
    GPU."""
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM back to VmRSS
        before = _resident("VmRSS")
        call()
        return _resident("VmHWM") - before
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a function of a script returns in a process of its own, in which `added_bytes` sees only its call:
    the allocator returns freed tensors at once."""
    environment = RETURN_FREED | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with mock.patch.dict(os.environ, environment), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def available_bytes(device: str = "cpu") -> int:
    """Returns the memory that can be taken; on a CPU, without swapping."""
    if device == "cpu":
        return kibibytes(Path("/proc/meminfo"), "MemAvailable") * 1024
    return torch.cuda.mem_get_info()[0]


def kibibytes(file: Path, field: str) -> int:
    """Returns the number in the line `field:  123 kB` of a file under /proc."""
    line = next(line for line in file.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def _resident(field: str) -> int:
    return kibibytes(Path("/proc/self/status"), field) * 1024
