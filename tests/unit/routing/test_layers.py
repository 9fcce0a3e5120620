"""The places of Megatron's layers, and the joining of tokens that ranks share.

tests/stack/test_megatron_engine.py compares the states of verl's engine with those of transformers.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from verl_ext.routing.layers import megatron_layers, megatron_points, unsplit
from verl_ext.routing.recorder import Recorder, joined_passes


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sequence_that_verl_split_for_context_parallelism_is_put_together(monkeypatch, ranks):
    from verl.models.mcore import util

    ids = torch.arange(1, 22)  # padded to a multiple of 2 ranks

    def of_rank(rank):
        sizes = {"get_tensor_model_parallel_world_size": 1, "get_context_parallel_world_size": ranks}
        for name, value in (sizes | {"get_context_parallel_rank": rank}).items():
            monkeypatch.setattr(util.mpu, name, lambda value=value: value)
        nested = torch.nested.as_nested_tensor([ids], layout=torch.jagged)
        return util.preprocess_thd_engine(nested)[0].flatten().unsqueeze(1)

    whole = unsplit([of_rank(rank) for rank in range(ranks)]).flatten()
    assert whole[: len(ids)].tolist() == ids.tolist() and not whole[len(ids) :].any()


class Part(nn.Module):
    """Returns (output, bias), as megatron-core's attention and MLP do."""

    def forward(self, hidden):
        return 2 * hidden, torch.ones(hidden.shape[-1])


class Router(nn.Module):
    def gating(self, hidden):
        return hidden[..., :2]

    def forward(self, hidden):
        return hidden.sigmoid(), hidden > 0


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()

    def forward(self, hidden):
        self.router(hidden)
        return 3 * hidden, None


class Layer(nn.Module):
    def __init__(self, number, mlp):
        super().__init__()
        self.layer_number, self.self_attention, self.mlp = number, Part(), mlp

    def forward(self, hidden):
        value, bias = self.self_attention(hidden)
        value, _ = self.mlp(value + bias)
        return value, None


class Chunk(nn.Module):
    """The second of three pipeline stages: no embedding, no last norm."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([Layer(3, Part()), Layer(4, Experts())])
        self.decoder.final_layernorm = None
        self.mtp = nn.Module()
        self.mtp.layers = nn.ModuleList([Layer(1, Experts())])

    def forward(self, hidden):
        for layer in self.decoder.layers:
            hidden, _ = layer(hidden)
        return hidden


def test_layers_have_their_numbers_over_all_stages_and_those_for_multi_token_prediction_are_left_out():
    chunk = Chunk()
    assert [number for number, _ in megatron_layers([chunk])] == [2, 3]
    assert [number for number, _ in megatron_layers([SimpleNamespace(language_model=chunk)])] == [2, 3]
    points = [point.name for point in megatron_points([chunk])]
    assert points == ["2.attention", "2.experts", "2.layer", "3.attention", "3.router", "3.experts", "3.layer"]


def test_a_state_is_what_a_part_adds_to_the_residual_its_bias_with_it():
    chunk = Chunk()
    recorder = Recorder(megatron_points([chunk]))
    hidden = torch.arange(6.0).view(2, 1, 3)  # [s, b, h]
    chunk(hidden)
    found = joined_passes(recorder.close())
    assert torch.equal(found["2.attention"], 2 * hidden[:, 0] + 1)
    assert torch.equal(found["3.experts"], 3 * found["3.attention"])
    assert torch.equal(found["3.router"], found["3.attention"][:, :2])
