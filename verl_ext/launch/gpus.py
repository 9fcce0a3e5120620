"""GPUs by name, and which FlashAttention vLLM picks for them."""

import contextlib
import re
from dataclasses import dataclass
from importlib import metadata

# NVIDIA's compute capabilities.
CAPABILITIES = {
    "A100": (8, 0),
    "A800": (8, 0),
    "A30": (8, 0),
    "A10": (8, 6),
    "A40": (8, 6),
    "L4": (8, 9),
    "L20": (8, 9),
    "L40": (8, 9),
    "L40S": (8, 9),
    "H20": (9, 0),
    "H100": (9, 0),
    "H200": (9, 0),
    "H800": (9, 0),
    "GH200": (9, 0),
    "B200": (10, 0),
    "GB200": (10, 0),
}


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]

    @property
    def hopper(self) -> bool:
        return self.capability[0] == 9

    @property
    def flash_attention(self) -> int:
        """The version that vLLM prefers, `get_flash_attn_version` of vllm/v1/attention/backends/fa_utils.py (0.27)."""
        return {9: 3, 10: 4}.get(self.capability[0], 2)


def named(name: str) -> Gpu | None:
    """The GPU of a name such as `a100` or `NVIDIA A100-SXM4-80GB`; None where it is not in the table."""
    for word in re.split(r"[\s\-_]+", name.upper()):
        if word in CAPABILITIES:
            return Gpu(word, CAPABILITIES[word])
    return None


def present() -> Gpu | None:
    """The first GPU of this machine."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        if metadata.version("torch").endswith("+cpu"):  # built without CUDA, which its import would tell in seconds
            return None
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    return Gpu(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
