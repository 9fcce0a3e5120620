"""A checkpoint engine for verl's `separate_async` trainer on one CPU machine: weights travel through a file.

verl's own engines (nccl, nixl, ...) need GPUs or their network. Chosen with
    actor_rollout_ref.rollout.checkpoint_engine.backend=file
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_ext.cpu.weights
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    """The first actor rank writes one safetensors file per sync, under a name that readers look for."""

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_s: float = 600.0) -> None:
        self.is_master = is_master
        self.timeout_s = timeout_s
        self.file: Path | None = None

    def prepare(self) -> str | None:
        """Returns the master's new file name; it does not exist yet."""
        return os.path.join(tempfile.mkdtemp(prefix="verl_ext_weights_"), "weights") if self.is_master else None

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[str | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        file = metadata[0]
        return {"file": [file] * actor_wg_world_size}, {"file": [file] * rollout_world_size}

    def init_process_group(self, file: str) -> None:
        self.file = Path(file)

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None) -> dict:
        assert self.file is not None
        # Every rank iterates over the weights: gathering a sharded one is a collective.
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
        if self.is_master:
            partial = self.file.with_suffix(".partial")
            save_file(tensors, partial)
            partial.rename(self.file)  # readers never see half a file
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        assert self.file is not None
        for _ in range(int(self.timeout_s * 50)):
            if self.file.exists():
                break
            await asyncio.sleep(0.02)
        else:
            raise TimeoutError(f"no weights came from the trainer within {self.timeout_s:g} s ({self.file})")
        for name, tensor in load_file(self.file).items():
            yield name, tensor

    def finalize(self) -> None:
        """Runs after all ranks have sent or received: the master removes the file."""
        if self.is_master and self.file is not None:
            self.file.unlink(missing_ok=True)
            self.file.parent.rmdir()
        self.file = None
