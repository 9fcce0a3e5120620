"""Measures time and memory for the benchmarks, on a CPU and on a GPU."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

# For a process whose memory is measured: freed tensors go back to the system at once.
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536"}


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


def kibibytes(file: Path, field: str) -> int:
    """Returns the number in the line `field:  123 kB` of a file under /proc."""
    line = next(line for line in file.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def _resident(field: str) -> int:
    return kibibytes(Path("/proc/self/status"), field) * 1024
