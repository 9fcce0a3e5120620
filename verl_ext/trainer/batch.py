"""What the training step reads of a batch, as packed tokens.

Shape legend: N response tokens of all trajectories, B trajectories.
"""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_ext.core.mismatch import count_non_finite
from verl_ext.errors import BatchError

FIELDS = ("rollout_log_probs", "old_log_probs", "response_mask", "entropy")


@dataclass(frozen=True)
class ResponseTokens:
    """The response tokens of a batch.

    Attributes:
        l_infer, l_old, entropy: [N] float, the rollout's and the training engine's log-probabilities, and the
            training policy's entropy (None where the trainer did not compute it).
        mask: [N] bool, true on tokens the model generated.
        offsets: [B + 1], where each trajectory's response starts.
    """

    l_infer: Tensor
    l_old: Tensor
    mask: Tensor
    offsets: Tensor
    entropy: Tensor | None = None

    @classmethod
    def from_batch(cls, data: TensorDict) -> "ResponseTokens":
        """From verl's nested tensors.

        Raises:
            BatchError: a field is missing or has another number of tokens than response_mask, or no token of the
                batch is the model's.
        """
        if "rollout_log_probs" not in data.keys():  # noqa: SIM118 (a TensorDict)
            raise BatchError(
                "the rollout returned no rollout_log_probs: set actor_rollout_ref.rollout.calculate_log_probs=True"
            )
        mask = data["response_mask"]
        packed = {name: data[name].values() for name in FIELDS if name in data.keys()}  # noqa: SIM118
        for name, values in packed.items():
            if values.shape != mask.values().shape or not torch.equal(data[name].offsets(), mask.offsets()):
                raise BatchError(
                    f"{name} has {len(values)} tokens and response_mask {len(mask.values())}, or they are divided "
                    "differently over the trajectories: every response token needs one value"
                )
        if not mask.values().any():
            raise BatchError(
                "response_mask is 0 everywhere: no response of this batch has a token that the model generated; check "
                "the agent loop and data.max_response_length"
            )
        return cls(
            l_infer=packed["rollout_log_probs"],
            l_old=packed["old_log_probs"],
            mask=packed["response_mask"].bool(),
            offsets=mask.offsets(),
            entropy=packed.get("entropy"),
        )

    @property
    def count(self) -> int:
        return int(self.mask.sum())

    def non_finite(self) -> dict[str, int]:
        """Tensor name -> how many of its values on generated tokens are NaN or infinite."""
        return {
            "rollout_log_probs": count_non_finite(self.l_infer, self.mask),
            "old_log_probs": count_non_finite(self.l_old, self.mask),
        }

    def nested(self, values: Tensor) -> Tensor:
        """[N] values as the nested [B, r] tensor that verl keeps."""
        return torch.nested.nested_tensor_from_jagged(values, self.offsets)
