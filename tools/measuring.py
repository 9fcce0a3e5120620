"""How the benchmarks take time and memory, on a CPU and on a GPU."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

# For a process whose memory is measured: freed tensors go back to the system at once.
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def seconds(call: Callable[[], object], device: str = "cpu") -> float:
    """Of one call; on a GPU by CUDA events."""
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


def added_bytes(call: Callable[[], object], device: str = "cpu") -> int:
    """What one call adds at its peak: to the resident set of this process, or by torch's count on a GPU."""
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
    """A line `field:  123 kB` of a file under /proc."""
    line = next(line for line in file.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def _resident(field: str) -> int:
    return kibibytes(Path("/proc/self/status"), field) * 1024
