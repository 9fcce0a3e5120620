"""What is recorded of a sync in a training worker and in a process of the rollout, with small models in one process."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from verl_ext.core.checksums import wrong_tensors
from verl_ext.upstream import sync_record
from verl_ext.upstream.sync_record import Recorded, SentRecord

EXPERTS, WIDTH = 4, 6
SENT = {
    "embed.weight": (8, WIDTH),
    **{f"{part}_proj.weight": (2, WIDTH) for part in "qkv"},
    **{f"experts.{expert}.weight": (3, WIDTH) for expert in range(EXPERTS)},
}


class Packed(nn.Module):
    """A model as an engine keeps it: q, k and v in one parameter, all experts in another, a head that is tied."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, 8, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.qkv = nn.Parameter(torch.zeros(6, WIDTH, dtype=dtype))
        self.experts = nn.Parameter(torch.zeros(EXPERTS, 3, WIDTH, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(EXPERTS, dtype=torch.float32))

    @torch.no_grad()
    def load_weights(self, weights):
        for name, weight in weights:
            part = name.split(".")
            if name == "embed.weight":
                self.embed.weight.data.copy_(weight)
            elif name == "bias":
                self.bias.data = weight.float()  # in its place
            elif name == "float32_bias":
                self.bias.copy_(weight)
            elif part[0] == "experts":
                self.experts.data[int(part[1])].copy_(weight)
            else:
                row = 2 * "qkv".index(part[0][0])
                self.qkv.data[row : row + 2] = weight


def runner_of(model, quantization=None):
    """SGLang's model runner, as far as the record reads it."""
    return SimpleNamespace(
        model=model, server_args=None, dtype=torch.bfloat16, model_config=SimpleNamespace(quantization=quantization)
    )


def weights_of(**more):
    torch.manual_seed(0)
    sent = {name: torch.randn(shape).bfloat16() for name, shape in SENT.items()}
    return sent | {"bias": torch.randn(EXPERTS)} | more


def load(weights, buckets=1, **runner):
    """Returns the record of a process that loads these weights."""
    process, items = runner_of(Packed(), **runner), [*weights.items()]
    sync_record.record_arrivals(process)
    for bucket in range(buckets):
        process.model.load_weights(iter(items[bucket::buckets]))
    return process, Recorded(**sync_record.end_record(process))


@pytest.mark.parametrize("buckets", [1, 3])
def test_a_sound_sync_has_the_senders_digest_and_writes_everything(buckets):
    weights, record = weights_of(), SentRecord()
    record.begin()
    passed, adapter = record(lambda **_: (weights.items(), None), base_sync_done=True)
    assert dict(passed) == weights and adapter is None
    sent = record.end()
    process, received = load(weights, buckets)
    assert (received.count, received.digest) == (sent.count, sent.digest) == (len(weights), sent.digest)
    assert received.unwritten == {} and received.widened == {} and not received.twice and not sent.twice
    assert not list(
        wrong_tensors(record.tensors, sync_record.read_tensors(sync_record.arrived_tensors(process)), "here")
    )
    assert Recorded(**sync_record.last_record(process)) == received


@pytest.mark.parametrize(
    ("lost", "unwritten"),
    [
        (("embed.weight",), {"embed.weight": "nothing was written to it"}),
        (("k_proj.weight",), {"qkv": "only 24 of its 36 numbers were written"}),
        (("experts.2.weight",), {"experts": "only 54 of its 72 numbers were written; matrices that are not whole: 2"}),
        (
            ("experts.0.weight", "experts.3.weight"),
            {"experts": "only 36 of its 72 numbers were written; matrices that are not whole: 0, 3"},
        ),
        (tuple(weights_of()), None),
    ],
)
def test_what_a_sync_leaves_as_it_was_is_named(lost, unwritten):
    _, received = load({name: weight for name, weight in weights_of().items() if name not in lost})
    if unwritten is None:
        assert set(received.unwritten) == {"embed.weight", "qkv", "experts", "bias"}
    else:
        assert received.unwritten == unwritten


def test_a_part_that_is_written_twice_counts_once():
    weights = weights_of()
    process = runner_of(Packed())
    sync_record.record_arrivals(process)
    process.model.load_weights((name, weight) for name, weight in weights.items() if name != "q_proj.weight")
    process.model.load_weights([("k_proj.weight", weights["k_proj.weight"])])
    received = Recorded(**sync_record.end_record(process))
    assert received.unwritten == {"qkv": "only 24 of its 36 numbers were written"} and received.twice


def test_a_bias_that_was_cast_before_it_was_sent_is_shown_where_the_engine_keeps_it_wider():
    weights = weights_of(float32_bias=torch.randn(EXPERTS).bfloat16())
    del weights["bias"]
    _, received = load(weights)
    assert received.widened == {"bias": "bfloat16 to float32"} and received.unwritten == {}


def test_the_parameters_of_an_engine_that_quantises_are_not_watched():
    _, received = load({}, quantization="fp8")
    assert received.unwritten is None
    _, received = load(weights_of(), quantization="fp8")
    assert received.unwritten is None and received.count == len(weights_of())


def test_a_model_loads_as_before_when_the_record_ends_and_after_a_sync_that_failed():
    process = runner_of(Packed())
    assert sync_record.last_record(process) is None
    sync_record.record_arrivals(process)
    with pytest.raises(AttributeError):
        process.model.load_weights([("embed.weight", None)])
    sync_record.record_arrivals(process)
    process.model.load_weights(weights_of().items())
    assert Recorded(**sync_record.end_record(process)).count == len(weights_of())
    assert "load_weights" not in vars(process.model)


def test_weights_pass_unrecorded_between_syncs():
    record, weights = SentRecord(), weights_of()
    assert dict(record(lambda: (weights.items(), {"r": 8}))[0]) == weights and record.tensors == ()
    for first in (1, 2):
        record.begin()
        for _ in record(lambda: ([("a", torch.full((1,), float(first)))], None))[0]:  # noqa: B023
            pass
        record.end()
    assert [each.total for each in (*record.before, *record.tensors)] == [1, 2]
