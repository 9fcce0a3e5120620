"""The sync canary's trajectories on verl: kept in TransferQueue beside the batch, scored by workers and servers.

Both engines score at temperature 1 and without top-k and top-p: what a server says of tokens that it is given.

Shape legend: N response tokens of these trajectories that the model generated, but for the last of each.
"""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.base.errors import HookError
from verl_ext.base.names import OWN_ROUTES, PROMPTS, RESPONSE_MASK, RESPONSES, ROLLOUT_LOG_PROBS
from verl_ext.features.sync_canary import SyncCanarySettings
from verl_ext.guard.state import Decision
from verl_ext.trainer.queue import get_fields
from verl_ext.trainer.sync_canary import SyncCanary

OTHERS = "multi_modal_inputs"
PARTITION = "verl_ext_canary"  # the replay buffer looks into "train"
OFF = ("stability.sync_canary.trajectories=0",)
TIMEOUT_S = 600.0
# One forward pass a trajectory: a batch as small as this need not fit the run's micro-batches.
ALONE = {"calculate_entropy": False, "compute_loss": False, "temperature": 1.0, "micro_batch_size_per_gpu": 1}


def has_other_inputs(data: TensorDict) -> bool:
    """Whether any trajectory has images or the like; verl gives all of them the field, and leaves it empty for text."""
    return OTHERS in data.keys() and any(data[OTHERS])  # noqa: SIM118 (a TensorDict has no `in`)


class CanaryScores:
    """Some trajectories of a batch, and what either engine makes of them.

    Attributes:
        ids: of each trajectory, but for its last token.
        sampled_N: the log-probabilities that the rollout returned.
        positions_N: of each of these tokens in its response, from 0.

    Args:
        batch: with the fields that compute_log_prob is to be sent.
        count: of trajectories; rounded up so that `ranks`, which share them, have the same number each.

    Raises:
        HookError: they have images or the like, which a server would have to be sent too, or are too few.
    """

    def __init__(self, batch: KVBatchMeta, count: int, ranks: int):
        real = (number for number, tag in enumerate(batch.tags) if not tag.get("is_padding", False))
        rows = list(islice(real, -(-count // ranks) * ranks))
        if len(rows) % ranks:
            raise HookError(f"stability.sync_canary: {len(rows)} trajectories for {ranks} ranks", fix=OFF)
        chosen = replace(batch, keys=[batch.keys[row] for row in rows], tags=[batch.tags[row] for row in rows])
        data = get_fields(chosen, batch.fields)
        if has_other_inputs(data):
            raise HookError("stability.sync_canary scores text alone, and this batch has other inputs", fix=OFF)
        self._batch = tq.kv_batch_put(keys=chosen.keys, partition_id=PARTITION, fields=data, tags=chosen.tags)
        self._mask_N = _scored(data[RESPONSE_MASK], data[RESPONSE_MASK]).bool()
        self._responses = data[RESPONSES]
        # Not their last tokens: a server generates one more, and a full one has no room for it.
        self.ids = [
            torch.cat([prompt, response[:-1]]).tolist()
            for prompt, response in zip(data[PROMPTS].unbind(), data[RESPONSES].unbind(), strict=True)
        ]
        self.sampled_N = self._packed(data[ROLLOUT_LOG_PROBS])
        positions = [torch.arange(len(response) - 1) for response in self._responses.unbind()]
        self.positions_N = torch.cat(positions)[self._mask_N]

    def by_workers(self, workers: Any, *, replays: bool = True) -> Tensor:
        """[N] from the training engine as it is.

        Args:
            replays: routing, where the run does.
        """
        from verl.workers.utils.padding import response_from_nested

        self._batch.extra_info = ALONE | ({} if replays else {OWN_ROUTES: True})
        workers.compute_log_prob(self._batch)
        data = get_fields(self._batch, ("log_probs", RESPONSE_MASK))
        return self._packed(response_from_nested(data["log_probs"], data[RESPONSE_MASK]))

    def by_servers(self, handles: Sequence[Any]) -> list[Tensor]:
        """[N] from each rollout engine as it is.

        Raises:
            HookError: one does not answer.
        """
        import ray

        asked = [[_ask_server(handle, ids) for ids in self.ids] for handle in handles]
        try:
            return [self._of_answers(ray.get(each, timeout=TIMEOUT_S)) for each in asked]
        except ray.exceptions.RayError as error:
            said = f"stability.sync_canary: a rollout engine did not score {len(self.ids)} trajectories ({error!r})"
            raise HookError(said, fix=OFF) from error

    def by_turns(self, handle: Any) -> None:
        """Have a rollout engine score one trajectory after another, in their order."""
        import ray

        for ids in self.ids:
            ray.get(_ask_server(handle, ids), timeout=TIMEOUT_S)

    def _of_answers(self, answers: Sequence[Any]) -> Tensor:
        scored = []
        for answer, response in zip(answers, self._responses.unbind(), strict=True):
            rows = answer.extra_fields["prompt_logprobs"]  # of each token the next one's; of the last one nothing
            scored.append(torch.tensor([row[0] for row in rows[:-1]][len(rows) - len(response) :]))
        return torch.cat(scored)[self._mask_N]

    def _packed(self, nested: Tensor) -> Tensor:
        return _scored(nested, self._responses)[self._mask_N]


def _scored(nested: Tensor, responses: Tensor) -> Tensor:
    """Of [B, r] what is scored, packed: all but the last of each."""
    rows = zip(nested.unbind(), responses.unbind(), strict=True)
    return torch.cat([row[: len(response) - 1].cpu() for row, response in rows])


def _ask_server(handle: Any, ids: list[int]) -> Any:
    """Of verl 0.9.1's servers, of vLLM as of SGLang, which score prompts for the teachers of a distillation."""
    return handle.generate.remote(
        prompt_ids=ids,
        sampling_params={"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
        request_id=uuid.uuid4().hex,
    )


class CanaryRun:
    """The canary in a run's steps: before the first update, after each one, after its sync.

    Args:
        settings: trajectories, every.
        comparable: whether a rollout's log-probabilities are what a server says of given tokens, so that those of the
            first batch do for the first comparison.
    """

    def __init__(self, settings: SyncCanarySettings, comparable: bool):
        self.canary = SyncCanary()
        self.metrics: dict[str, float] = {}
        self._settings, self._comparable = settings, comparable
        self._scores: CanaryScores | None = None
        self._first: Tensor | None = None
        self._train: Tensor | None = None

    def before_update(self, batch: KVBatchMeta, workers: Any) -> None:
        """Of the first one, choose the trajectories and score them."""
        if self._scores is None:
            ranks = max(workers._dispatch_info["actor"]) + 1  # which verl has asked for, to balance the batch
            self._scores = CanaryScores(batch, self._settings.trajectories, ranks)
            self._first = self._scores.by_workers(workers) if self._comparable else None

    def after_update(self, step: int, workers: Any) -> None:
        """While the workers have the engine to themselves: at the sync they may give way to the rollout."""
        due = self._scores is not None and step % self._settings.every == 0
        self._train = self._scores.by_workers(workers) if due and self._scores else None

    def after_sync(self, step: int, handles: Sequence[Any]) -> Decision:
        """Look at the sync of this step; `metrics` are what it logs."""
        self.metrics = {}
        if self._scores is None or self._train is None:
            return Decision()
        infer = self._scores.by_servers(handles)
        if not self.canary.begun:
            if self._first is None:
                self.canary.begin(step, self._train, infer)
                return Decision()
            self.canary.begin(step - 1, self._first, [self._scores.sampled_N] * len(infer))
        self.metrics, decision = self.canary.check(step, self._train, infer)
        return decision
