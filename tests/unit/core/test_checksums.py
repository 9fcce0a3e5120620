"""A checksum sees every change of a tensor's bits, and `wrong_tensors` names each fault of a weight sync."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.core import checksums
from verl_ext.core.checksums import CAUSES, TensorRecorder, checksum, digest, sums, wrong_tensors

WHOLE = 2**64 - 1
DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def bits_of(dtype, shape, seed=0):
    """A tensor of random bytes, which may be NaN; bools are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    size, most = (*shape, dtype.itemsize), 2 if dtype == torch.bool else 256
    return torch.randint(0, most, size, dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def by_hand(tensor):
    """The checksum in plain Python, from the description in the module."""
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    data += b"\0" * (-len(data) % 8)
    total, block = 0, 2**16
    for place in range(len(data) // 8):
        word = int.from_bytes(data[8 * place : 8 * place + 8], "little") * 0xFF51AFD7ED558CCD & WHOLE
        total += (word ^ word >> 32) * key(place % block) * key(block + place // block)
    return total & WHOLE


def key(place):
    word = (place + 1) * 0x9E3779B97F4A7C15 & WHOLE
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        word = (word ^ word >> 33) * factor & WHOLE
    return word | 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (16, 8)], ids=str)
def test_it_is_the_formula_for_every_dtype(dtype, shape):
    tensor = bits_of(dtype, shape)
    assert checksum(tensor).item() % 2**64 == by_hand(tensor)


tensors = st.builds(
    bits_of,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple),
    st.integers(0, 2**31),
)


BLOCK = 2**19  # bytes
LARGE = bits_of(torch.uint8, (3 * BLOCK + 5,))


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 9, 2 * BLOCK, 3 * BLOCK + 5])
def test_of_several_blocks_it_is_the_formula_however_it_is_cut(size):
    found = {checksum(LARGE[:size], chunk).item() % 2**64 for chunk in (None, 1, 2 * BLOCK, 16 * BLOCK)}
    assert found == {by_hand(LARGE[:size])}


@pytest.mark.parametrize(("first", "second"), [(3, BLOCK + 3), (8, 2 * BLOCK), (BLOCK, 8), (0, 3 * BLOCK - 8)])
def test_bytes_that_change_places_between_blocks_are_seen(first, second):
    swapped = LARGE.clone()
    swapped[[first, second]] = swapped[[second, first]]
    assert (checksum(swapped) == checksum(LARGE)) == torch.equal(swapped, LARGE)
    signs = LARGE.clone()
    signs[[first | 7, second | 7]] ^= 128  # the highest bit of two words
    assert checksum(signs) != checksum(LARGE)


@given(tensors, st.data())
def test_where_it_lies_in_memory_does_not_matter(tensor, data):
    """Neither strides nor an offset that is not a multiple of eight bytes."""
    order = data.draw(st.permutations(range(tensor.ndim)))
    turned = tensor.permute(order)
    assert checksum(turned) == checksum(turned.contiguous())
    room = torch.empty(tensor.numel() + 3, dtype=tensor.dtype)
    room[3:] = tensor.reshape(-1)
    assert checksum(room[3:].view(tensor.shape)) == checksum(tensor)


@given(tensors, st.data())
def test_swapped_elements_and_a_flipped_bit_are_seen(tensor, data):
    flat = tensor.reshape(-1).view(torch.uint8)
    if tensor.numel() < 2:
        return
    first, second = data.draw(st.lists(st.integers(0, tensor.numel() - 1), min_size=2, max_size=2, unique=True))
    swapped = flat.clone().view(tensor.numel(), -1)
    swapped[[first, second]] = swapped[[second, first]]
    assert (checksum(swapped) == checksum(tensor)) == torch.equal(swapped.reshape(-1), flat)
    if tensor.dtype != torch.bool:
        flipped = flat.clone()
        flipped[data.draw(st.integers(0, len(flat) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        assert checksum(flipped) != checksum(tensor)


def test_sums_are_exact_in_float64():
    numbers = torch.linspace(-3, 1, 1000).to(torch.bfloat16)
    assert sums(numbers, chunk=64).tolist() == [numbers.double().sum(), numbers.double().abs().sum()]
    assert sums(torch.tensor([True, False, True])).tolist() == [2, 2]
    assert sums(torch.tensor([1.5, -1.5]).to(torch.float8_e4m3fn)).tolist() == [0, 3]


def recorded(weights):
    recorder = TensorRecorder()
    for name, tensor in weights:
        recorder.add(name, tensor)
    return recorder.close()


def weights_of(step):
    """A small mixture of experts; each step has other weights."""
    torch.manual_seed(step)
    names = [f"layers.{layer}.experts.{expert}.up_proj" for layer in range(2) for expert in range(3)]
    weights = {name: torch.randn(4, 8).bfloat16() for name in names}
    return weights | {f"layers.{layer}.gate.bias": torch.randn(3) for layer in range(2)}


EXPERTS = [f"layers.1.experts.{expert}.up_proj" for expert in (0, 1)]
BIAS = "layers.0.gate.bias"


def dropped(now, before):
    del now[BIAS]


def cut(now, before):
    now[EXPERTS[0]] = now[EXPERTS[0]][:2]


def swapped(now, before):
    now[EXPERTS[0]], now[EXPERTS[1]] = now[EXPERTS[1]], now[EXPERTS[0]]


def cast(now, before):
    now[BIAS] = now[BIAS].bfloat16()


def stale(now, before):
    now[EXPERTS[1]] = before[EXPERTS[1]]


def scaled(now, before):
    now[BIAS] = now[BIAS] * 2


def renamed(now, before):
    now["gate.bias"] = now.pop(BIAS)


FAULTS = {
    dropped: [(BIAS, "missing", "sent as [3] float32, not received")],
    cut: [(EXPERTS[0], "shape", "sent as [4, 8] bfloat16, received as [2, 8] bfloat16")],
    swapped: [(one, "swapped", f"received with the bits of {other}") for one, other in (EXPERTS, EXPERTS[::-1])],
    cast: [(BIAS, "dtype", "sent as [3] float32, received as [3] bfloat16")],
    stale: [(EXPERTS[1], "stale", "received as it was at the check before")],
    scaled: [(BIAS, "bits", "received with other bits; sums")],
    renamed: [(BIAS, "missing", "sent as"), ("gate.bias", "extra", "received as [3] float32, not sent")],
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_named(fault):
    sent, before = weights_of(1), weights_of(0)
    arrived = dict(sent)
    fault(arrived, before)
    seen, received = recorded(sent.items()), recorded(arrived.items())
    wrong = list(wrong_tensors(seen, received, "server 0, worker 1", recorded(before.items())))
    assert [(each.name, each.kind) for each in wrong] == [(name, kind) for name, kind, _ in FAULTS[fault]]
    for each, (_, kind, found) in zip(wrong, FAULTS[fault], strict=True):
        assert each.found.startswith(found)
        assert str(each).startswith(f"{each.name} on server 0, worker 1: ") and kind in CAUSES
    assert digest(seen) != digest(received)


def test_another_order_is_no_fault():
    sent = recorded(weights_of(1).items())
    assert not list(wrong_tensors(sent, sent[::-1], "server 0", recorded(weights_of(0).items())))
    assert digest(sent) == digest(sent[::-1])


def test_a_layer_that_is_sent_twice_is_named_although_the_bucket_kept_one():
    sent = recorded(weights_of(1).items())
    layer = [each for each in sent if each.name.startswith("layers.1.experts.")]
    for received in ((*sent, *layer), sent):
        wrong = list(wrong_tensors((*sent, *layer), received, "server 0"))
        assert [(each.name, each.kind) for each in wrong] == [(each.name, "twice") for each in layer]
    assert digest((*sent, *layer)) != digest(sent)


def test_a_replica_that_missed_the_sync_misses_all_of_it():
    sent = recorded(weights_of(1).items())
    assert [each.kind for each in wrong_tensors(sent, (), "server 1")] == ["missing"] * len(sent)


def test_equal_tensors_are_not_taken_for_swapped_ones():
    """Norms begin as ones, in every layer: they have one checksum."""
    ones = recorded([("a.norm", torch.ones(8)), ("b.norm", torch.ones(8))])
    assert not list(wrong_tensors(ones, ones, "server 0"))
    (wrong,) = wrong_tensors(ones, (replace(ones[0], checksum=5), ones[1]), "server 0")
    assert (wrong.name, wrong.kind) == ("a.norm", checksums.BITS)
