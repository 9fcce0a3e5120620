"""The trajectories of the sync canary, and how each engine scores them.

On verl the trajectories are kept in TransferQueue next to the batch, and scored by workers and servers at temperature
1, without top-k and top-p, because that is how a server scores given tokens.

Shape legend: N response tokens of these trajectories that the model generated, except the last of each; of several
tokens with equal prefixes only the first.
"""

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.base.errors import HookError
from verl_ext.base.names import ONE_A_PASS, OWN_ROUTES, PROMPTS, RESPONSE_MASK, RESPONSES, ROLLOUT_LOG_PROBS
from verl_ext.core.arrival import new_prefixes, prompt_numbers, spread_rows
from verl_ext.features.sync_canary import WITHOUT_CANARY
from verl_ext.trainer.queue import MODEL_INPUTS, computed_log_probs, get_fields, part_of

PARTITION = "verl_ext_canary"  # apart from "train", which the replay buffer reads
TIMEOUT_S = 600.0
TEMPERATURE = 1.0  # of the servers' scores


def has_other_inputs(data: TensorDict) -> bool:
    """Returns True if any trajectory has images or the like; verl leaves the field empty for text."""
    return MODEL_INPUTS in data.keys() and any(data[MODEL_INPUTS])  # noqa: SIM118 (a TensorDict has no `in`)


class CanaryTrajectories:
    """Some trajectories of a batch, of as many prompts as possible, and their scores by either engine.

    Attributes:
        ids: the token ids of each trajectory, without its last token: a server generates one more, and a full
            trajectory has no room for it.
        l_infer_N: the log-probabilities that the rollout returned.
        positions_N: the position of each of these tokens in its response, from 0.
        prompt_N: the number of the prompt that each of these tokens' trajectory answers.

    Args:
        batch: the batch, with the fields that compute_log_prob gets.
        count: the number of trajectories, rounded up to a multiple of `multiple`.
        multiple: `queue.row_multiple`.

    Raises:
        HookError: the trajectories have images or other inputs, which a server would need too, or are too few.
    """

    def __init__(self, batch: KVBatchMeta, count: int, multiple: int):
        real = [number for number, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        prompts = prompt_numbers([batch.keys[number] for number in real])
        rows = [real[place] for place in spread_rows(prompts, -(-count // multiple) * multiple)]
        if len(rows) % multiple:
            raise HookError(
                f"stability.sync_canary: the workers score a multiple of {multiple} trajectories (data-parallel ranks, "
                f"times the stages of an interleaved pipeline), and the batch has only {len(rows)}",
                fix=WITHOUT_CANARY,
            )
        chosen = part_of(batch, rows)
        data = get_fields(chosen, batch.fields)
        if has_other_inputs(data):
            raise HookError(
                "stability.sync_canary scores only text, and this batch has other inputs", fix=WITHOUT_CANARY
            )
        self._batch = tq.kv_batch_put(keys=chosen.keys, partition_id=PARTITION, fields=data, tags=chosen.tags)
        self._lengths = [len(response) for response in data[RESPONSES].unbind()]
        tokens = [
            torch.cat(each).tolist() for each in zip(data[PROMPTS].unbind(), data[RESPONSES].unbind(), strict=True)
        ]
        self.ids = [each[:-1] for each in tokens]
        new = [
            torch.tensor(marks[len(marks) - length :])
            for marks, length in zip(new_prefixes(tokens), self._lengths, strict=True)
        ]
        self._mask_N = self._all_but_last(data[RESPONSE_MASK].unbind()).bool() & self._all_but_last(new)
        self.l_infer_N = self._packed(data[ROLLOUT_LOG_PROBS].unbind())
        self.positions_N = self._packed([torch.arange(length) for length in self._lengths])
        numbers = zip(prompt_numbers(chosen.keys), self._lengths, strict=True)
        self.prompt_N = self._packed([torch.full((length,), number) for number, length in numbers])

    def release(self) -> None:
        """Takes the trajectories out of TransferQueue."""
        tq.kv_clear(keys=self._batch.keys, partition_id=PARTITION)

    def score_in_workers(
        self, workers: Any, *, replays: bool = True, adapter: bool = True, tokens_at_once: int = 0
    ) -> Tensor:
        """Returns the training engine's scores [N] with its present weights.

        Args:
            replays: replay routing, if the run does.
            adapter: apply the LoRA, if there is one.
            tokens_at_once: how many tokens may share a forward pass; 0 for one trajectory per pass.
        """
        settings: dict[str, Any] = {} if replays else {OWN_ROUTES: True}
        settings |= {} if adapter else {"no_lora_adapter": True}
        settings |= {"use_dynamic_bsz": True, "max_token_len_per_gpu": tokens_at_once} if tokens_at_once else {}
        self._batch.extra_info = ONE_A_PASS | {"temperature": TEMPERATURE} | settings
        workers.compute_log_prob(self._batch)
        return self._packed(computed_log_probs(self._batch).unbind())

    def score_in_servers(self, handles: Sequence[Any], *, backwards: bool = False) -> list[Tensor]:
        """Returns the scores [N] of each rollout engine with its present weights.

        Args:
            backwards: ask for the last trajectory first, so that an engine puts them into other batches.

        Raises:
            HookError: an engine does not answer.
        """
        import ray

        order = slice(None, None, -1 if backwards else 1)
        asked = [[_ask_server(handle, ids) for ids in self.ids[order]][order] for handle in handles]
        try:
            answers = [ray.get(each, timeout=TIMEOUT_S) for each in asked]
        except ray.exceptions.RayError as error:
            said = f"stability.sync_canary: a rollout engine did not score {len(self.ids)} trajectories ({error!r})"
            raise HookError(said, fix=WITHOUT_CANARY) from error
        return [self._packed(map(_response_scores, each, self._lengths)) for each in answers]

    def pass_through_server(self, handle: Any, most: int) -> None:
        """Makes a rollout engine score the first `most` tokens of each trajectory, one after another."""
        import ray

        for ids in self.ids:
            ray.get(_ask_server(handle, ids[:most]))

    def _packed(self, rows: Iterable[Tensor]) -> Tensor:
        return self._all_but_last(rows)[self._mask_N]

    def _all_but_last(self, rows: Iterable[Tensor]) -> Tensor:
        return torch.cat([row[: length - 1].cpu() for row, length in zip(rows, self._lengths, strict=True)])


def _response_scores(answer: Any, length: int) -> Tensor:
    """Returns the response's scores [r - 1] from a server's answer: each of its rows has the next token's score."""
    rows = answer.extra_fields["prompt_logprobs"]
    return torch.tensor([row[0] for row in rows[:-1]][len(rows) - length :])


def _ask_server(handle: Any, ids: list[int]) -> Any:
    """Asks one of verl 0.9.1's servers, vLLM's or SGLang's, which score prompts for distillation teachers."""
    return handle.generate.remote(
        prompt_ids=ids,
        sampling_params={"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
        request_id=uuid.uuid4().hex,
    )
