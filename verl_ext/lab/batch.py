"""A rollout and the training engine's reading of it, in the forms that the plugin's step and verl's loss take.

Shape legend: B trajectories, T columns of padded responses, N response tokens of all of them, P tokens of a prompt,
L layers, K experts per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from verl_ext.core.lag import Lag
from verl_ext.core.overlap import expert_overlap
from verl_ext.core.routing import agreement
from verl_ext.core.tokens import Tokens, jagged
from verl_ext.fields import (
    ADVANTAGES,
    ENTROPY,
    FILTER_SCALE,
    OLD_LOG_PROBS,
    RESPONSE_MASK,
    RESPONSES,
    ROLLOUT_LOG_PROBS,
)
from verl_ext.lab.policy import Scored
from verl_ext.lab.sampling import Sampled


@dataclass(frozen=True)
class Batch:
    """The trajectories of a step.

    Attributes:
        prompts: [B, P].
        sampled: what the rollout returned.
        rewards: [B].
        keys: verl's ids of trajectories, `{uid}_{session}_{index}`.
        lag: how old the weights are that sampled them, where the rollout says so.
    """

    prompts: Tensor
    sampled: Sampled
    rewards: Tensor
    keys: Sequence[str]
    lag: Lag | None = None

    @property
    def uids(self) -> list[str]:
        return [key.split("_")[0] for key in self.keys]

    @property
    def offsets(self) -> Tensor:
        """[B + 1], where the response of each starts among the N."""
        lengths = self.sampled.mask.sum(1)
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

    def packed(self, values: Tensor) -> Tensor:
        """[N, ...] of [B, T, ...]."""
        return values[self.sampled.mask]

    def padded(self, values: Tensor) -> Tensor:
        """[B, T] of [N], 0 past the end."""
        return values.new_zeros(self.sampled.mask.shape).masked_scatter(self.sampled.mask, values)

    def token_rewards(self) -> Tensor:
        """[B, T], each reward on the response's last token, where verl's rewards stand."""
        last = self.sampled.mask.sum(1, keepdim=True) - 1
        return torch.zeros(self.sampled.mask.shape).scatter(1, last, self.rewards.unsqueeze(1))


def compare_routing(batch: Batch, scored: Scored) -> tuple[Tensor, Tensor]:
    """What both engines chose for the response tokens: agreement [N], and the packed sums of `router_metrics`."""
    P, T = batch.prompts.shape[1], batch.sampled.mask.shape[1]
    rows = slice(P - 1, P - 1 + T)  # of the passes that predict them
    rollout, used, own = (
        batch.packed(experts[:, rows])
        for experts in (batch.sampled.experts, scored.routing.stacked(), torch.stack(scored.routing.own, 2))
    )
    ones = torch.ones(len(used), dtype=torch.bool)
    own_overlap = expert_overlap(own, rollout)
    overlap = expert_overlap(used, rollout)
    per_token, sums = agreement(overlap, used.shape[-1], ones, ones, batch.offsets, own_NL=own_overlap)
    return per_token, sums.pack()


def response_tokens(batch: Batch, scored: Scored, agreement_N: Tensor | None) -> Tokens:
    """As everything that measures, weighs and filters reads them."""
    sampled, N = batch.sampled, int(batch.sampled.mask.sum())
    return Tokens(
        l_infer=batch.packed(sampled.l_infer),
        l_old=batch.packed(scored.log_probs.detach()),
        mask=torch.ones(N, dtype=torch.bool),
        offsets=batch.offsets,
        entropy=batch.packed(scored.entropy),
        agreement=agreement_N,
        lag=batch.lag,
    )


@dataclass(frozen=True)
class LossFields:
    """What the loss reads of a batch besides its tokens: [B, T] each.

    Attributes:
        mask: bool, the tokens that filters left.
        others: by name of verl_ext.fields; what a loss asks for and no one else.
        filter_scale: see verl_ext.fields.
    """

    l_old: Tensor
    advantages: Tensor
    mask: Tensor
    entropy: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)
    filter_scale: float = 1.0


def mini_batch(batch: Batch, fields: LossFields, rows: slice) -> TensorDict:
    """These trajectories as verl's loss reads a mini-batch, one micro-batch of it.

    What is jagged in a run is padded here, as the loss would pad it first. Of prompts and responses it reads the
    lengths alone: 1, and T for all, whose tokens past the end are not in the mask.
    """
    sampled = batch.sampled
    count, T = sampled.mask[rows].shape
    tensors = {
        RESPONSE_MASK: fields.mask.long(),
        ROLLOUT_LOG_PROBS: sampled.l_infer,
        OLD_LOG_PROBS: fields.l_old,
        ADVANTAGES: fields.advantages,
        ENTROPY: fields.entropy,
        **fields.others,
    }
    there = {name: values[rows] for name, values in tensors.items()}
    there["prompts"] = jagged(batch.prompts[rows, -1], torch.arange(count + 1))
    there[RESPONSES] = jagged(sampled.responses[rows].flatten(), torch.arange(0, (count + 1) * T, T))
    data = TensorDict(there, batch_size=count)
    tokens = int(fields.mask[rows].sum())
    scale = {} if fields.filter_scale == 1 else {FILTER_SCALE: fields.filter_scale}
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=count, **scale)
    return data


def model_output(l_theta: Tensor, **others: Tensor) -> dict[str, Tensor]:
    """[B, T] log-probabilities as engines return them: packed, of every token of a sequence the one that follows it;
    and others of the kind."""
    return {name: torch.nn.functional.pad(x, (0, 1)).flatten() for name, x in {"log_probs": l_theta, **others}.items()}
