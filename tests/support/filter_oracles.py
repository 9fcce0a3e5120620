"""The batch filters in plain Python over ragged trajectories: which tokens each keeps.

A row is a list of tokens, each a dict of what differs from an on-policy token of the model's.
"""

import math

import torch

from verl_ext.core.filters import FilterBatch
from verl_ext.core.tokens import Tokens

EOS = 2


def make_batch(rows, keys=None, **more):
    """A batch from rows of tokens, each a dict of what differs from an on-policy token of the model's."""
    token = {"id": 5, "m": 1, "infer": -1.0, "old": -1.0, "advantage": 1.0, "agreement": 1.0}
    tokens = [token | given for row in rows for given in row]

    def column(name, dtype=torch.float32):
        return torch.tensor([t[name] for t in tokens], dtype=dtype)

    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    defaults = {
        "tokens": Tokens(
            column("infer"), column("old"), column("m", torch.bool), offsets, agreement=column("agreement")
        ),
        "keys": keys or [f"u{i}_0_0" for i in range(len(rows))],
        "rewards_B": torch.zeros(len(rows)),
        "advantages_N": column("advantage"),
        "responses_N": column("id", torch.int64),
        "max_response_length": 4,
        "eos_ids": frozenset({EOS}),
    }
    return FilterBatch(**(defaults | more))


def overlong_rows(rows):
    """Kept: all but full responses without an end token of the model."""
    return [not (len(row) >= 4 and not (row[-1]["m"] and row[-1]["id"] == EOS)) or not row for row in rows]


def low_agreement_tokens(rows, threshold):
    return [t["agreement"] >= threshold for row in rows for t in row]


def low_probability_tokens(rows, threshold):
    return [math.exp(t["infer"]) >= threshold for row in rows for t in row]


def off_policy_negative_tokens(rows, delta):
    """DeepSeek-V3.2 eq. 9 at l_theta = l_old."""

    def off_policy(row):
        gaps = [t["infer"] - t["old"] for t in row if t["m"]]
        return bool(gaps) and sum(gaps) / len(gaps) > delta

    return [not (off_policy(row) and t["advantage"] < 0) for row in rows for t in row]
