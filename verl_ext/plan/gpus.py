"""What the data sheets say of the GPUs that `plan` knows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuSpec:
    """Of the manufacturer's data sheet: memory, dense bfloat16 arithmetic, memory bandwidth."""

    memory_gib: float
    tflops: float
    gb_per_s: float


# SXM modules where there are several. Memory is what CUDA reports, a little below the name.
GPUS = {
    "A100-80G": GpuSpec(79.3, 312, 2039),
    "H100": GpuSpec(79.6, 989, 3350),
    "H200": GpuSpec(139.8, 989, 4800),
    "H20": GpuSpec(95.6, 148, 4000),
    "L20": GpuSpec(44.5, 119.5, 864),
    "B200": GpuSpec(178.4, 2250, 8000),
}
ALIASES = {"A100": "A100-80G"}
