"""Relates a measured time to the memory's bandwidth."""

from collections.abc import Sequence

import torch

from gpu.record import SHARE, Place, Record
from verl_ext.launch.gpus import named


def cache_bytes(place: Place) -> int:
    """Returns the size of the last cache; data that fit into it are read from it, not from memory."""
    return 0 if place.device == "cpu" else torch.cuda.get_device_properties(0).L2_cache_size


def share_of_peak(record: Record, name: str, moved: int, times: Sequence[float]) -> None:
    """Records bytes over seconds in GB/s, and as a share of the data sheet's bandwidth if it is known."""
    speeds = [moved / spent / 1e9 for spent in times]
    record.figure(name.replace("share of peak ", ""), speeds, "GB/s")
    gpu = named(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None
    if gpu is not None and (spec := gpu.sheet):
        record.figure(name, [speed / spec.gb_per_s for speed in speeds], SHARE, note=f"of {spec.gb_per_s:,.0f} GB/s")
