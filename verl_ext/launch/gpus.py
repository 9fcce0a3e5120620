"""GPUs by name: their data sheets, and the FlashAttention that vLLM picks for them."""

import contextlib
import re
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class DataSheet:
    """A GPU's memory, dense bfloat16 arithmetic and memory bandwidth; for the SXM module if there are several.

    Memory is the amount that CUDA reports, a little less than the GPU's name says.
    """

    memory_gib: float
    tflops: float
    gb_per_s: float


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]  # NVIDIA's compute capability
    sheet: DataSheet | None = None

    @property
    def hopper(self) -> bool:
        return self.capability[0] == 9

    @property
    def flash_attention(self) -> int:
        """The FlashAttention version that vLLM prefers, `get_flash_attn_version` of
        vllm/v1/attention/backends/fa_utils.py (0.27)."""
        return {9: 3, 10: 4}.get(self.capability[0], 2)


A100, H100 = DataSheet(79.3, 312, 2039), DataSheet(79.6, 989, 3350)  # A800 and H800 are these with a slower NVLink
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", (8, 0), A100),
        Gpu("A800", (8, 0), A100),
        Gpu("A30", (8, 0), DataSheet(23.5, 165, 933)),
        Gpu("A10", (8, 6), DataSheet(22.1, 125, 600)),
        Gpu("A10G", (8, 6), DataSheet(22.1, 70, 600)),
        Gpu("A40", (8, 6), DataSheet(44.4, 149.7, 696)),
        Gpu("L4", (8, 9), DataSheet(22.0, 121, 300)),
        Gpu("L20", (8, 9), DataSheet(44.5, 119.5, 864)),
        Gpu("L40", (8, 9), DataSheet(44.4, 181, 864)),
        Gpu("L40S", (8, 9), DataSheet(44.4, 362, 864)),
        Gpu("H20", (9, 0), DataSheet(95.6, 148, 4000)),
        Gpu("H100", (9, 0), H100),
        Gpu("H200", (9, 0), DataSheet(139.8, 989, 4800)),
        Gpu("H800", (9, 0), H100),
        Gpu("GH200", (9, 0), DataSheet(94.5, 989, 4000)),
        Gpu("B200", (10, 0), DataSheet(178.4, 2250, 8000)),
        Gpu("GB200", (10, 0), DataSheet(184.0, 2500, 8000)),
    )
}


def named(name: str) -> Gpu | None:
    """Returns the GPU of a name such as `a100` or `NVIDIA A100-SXM4-80GB`; None if it is not in the table."""
    return next((GPUS[word] for word in re.split(r"[\s\-_]+", name.upper()) if word in GPUS), None)


def present() -> Gpu | None:
    """Returns the first GPU of this machine."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        if metadata.version("torch").endswith("+cpu"):  # built without CUDA; importing torch to ask takes seconds
            return None
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    return Gpu(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
