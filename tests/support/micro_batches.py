"""A micro-batch as verl 0.9.1 gives it to the workers' loss: jagged fields and the model's outputs."""

from dataclasses import dataclass, field

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@dataclass
class Micro:
    """A mini-batch whose rows can be taken apart: response tensors per row, and log_prob leaves to differentiate.

    `rows[name][b]` is [r_b]; `leaf(b)` the gradient of row b's response log-probabilities is summed into.
    """

    rows: dict[str, list[torch.Tensor]]
    prompts: list[int]
    settings: dict = field(default_factory=dict)

    def __post_init__(self):
        self.leaves = [row.clone().requires_grad_() for row in self.rows["log_prob"]]

    def part(self, indices, dtype=torch.float32):
        """(model_output, data) of these rows, normalised over the whole."""
        lengths = [len(self.leaves[i]) for i in indices]
        prompts = [torch.zeros(self.prompts[i], dtype=torch.long) for i in indices]
        responses = [torch.zeros(n, dtype=torch.long) for n in lengths]
        # log_probs[t] is of token t + 1: verl cuts them at prompt - 1 and leaves out the last.
        full = [
            torch.cat([torch.zeros(self.prompts[i] - 1), self.leaves[i], torch.zeros(1)]).to(dtype) for i in indices
        ]
        fields = {
            "prompts": nested(prompts),
            "responses": nested(responses),
            "input_ids": nested([torch.cat(pair) for pair in zip(prompts, responses, strict=True)]),
        }
        fields |= {name: nested([rows[i] for i in indices]) for name, rows in self.rows.items() if name != "log_prob"}
        data = TensorDict(fields, batch_size=len(indices))
        tokens = int(sum(mask.sum() for mask in self.rows["response_mask"]))
        tu.assign_non_tensor(
            data,
            **{"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": len(self.leaves), **self.settings},
        )
        return {
            "log_probs": torch.nested.nested_tensor_from_jagged(torch.cat(full), fields["input_ids"].offsets())
        }, data

    def whole(self, dtype=torch.float32):
        return self.part(range(len(self.leaves)), dtype)

    def take_gradients(self):
        found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        return torch.cat(found)

    def padded(self, name):
        rows = self.leaves if name == "log_prob" else self.rows[name]
        return torch.nn.utils.rnn.pad_sequence([row.detach() for row in rows], batch_first=True)
