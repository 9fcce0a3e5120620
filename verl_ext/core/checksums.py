"""Checksums of tensors on their own device, and the comparison of what one side sent with what another received.

A checksum covers a tensor's bytes: its words of 64 bits, each mixed and multiplied by a key of its place, are added up
with wraparound. So it does not depend on the order of the work or on how the tensor is cut, and it changes if two
elements swap places. Equal bytes have equal checksums, also across dtypes and shapes, which are compared separately.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

WORD = 8  # bytes
BLOCK_WORDS = 1 << 16  # words with a key each; every block of them has the same keys, and one of its own
# Bytes of a tensor that are read at a time; the work needs a few times as many. On a CPU they fit into its cache.
CHUNK, CPU_CHUNK = 16 << 20, 1 << 20
# Of splitmix64 and murmur3's finalizer, as signed numbers: odd, so that no multiplication loses a bit.
STEP, FIRST, SECOND = -0x61C8864680B583EB, -0x00AE502812AA7333, -0x3B314601E57A13AD
SHIFT, HALF = 33, 32
HALF_BITS = (1 << HALF) - 1  # torch shifts signed numbers: this clears the copies of the sign
WITH_ABS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # no fp8, no bool


def checksum(tensor: Tensor, chunk: int | None = None) -> Tensor:
    """Returns the checksum of a tensor's bytes, a scalar int64 on the tensor's device.

    It is the sum of f(word) key(place in its block) key(block), modulo 2^64. f carries high bits into low ones, without
    which two changes of a highest bit would cancel. The keys are odd: a change of one word is always seen.

    Args:
        chunk: bytes that are read at a time, by default CHUNK or CPU_CHUNK; the result does not depend on it.
    """
    keys = _odd_keys(tensor.device)
    in_block, of_blocks = keys[:BLOCK_WORDS], keys[BLOCK_WORDS:]
    total, block = torch.zeros((), dtype=torch.int64, device=tensor.device), 0
    for piece in _pieces(tensor, chunk):
        words = _aligned_words(piece)
        mixed = words * FIRST
        mixed.bitwise_xor_((mixed >> HALF).bitwise_and_(HALF_BITS))
        blocks, rest = divmod(len(words), BLOCK_WORDS)
        if blocks:
            sums_b = mixed[: len(words) - rest].view(blocks, BLOCK_WORDS).mul_(in_block).sum(1)
            total += sums_b.mul_(of_blocks[block : block + blocks]).sum()
        if rest:
            total += mixed[len(words) - rest :].mul_(in_block[:rest]).sum() * of_blocks[block + blocks]
        block = (block + blocks) % BLOCK_WORDS
    return total


@lru_cache
def _odd_keys(device: torch.device) -> Tensor:
    """Returns [2 BLOCK_WORDS] odd numbers: the keys of a block's words, and those of the blocks."""
    mixed = torch.arange(1, 2 * BLOCK_WORDS + 1).mul_(STEP)
    for factor in (FIRST, SECOND):
        mixed.bitwise_xor_((mixed >> SHIFT).bitwise_and_((1 << (64 - SHIFT)) - 1)).mul_(factor)
    return mixed.bitwise_or_(1).to(device)


def sums(tensor: Tensor, chunk: int | None = None) -> Tensor:
    """Returns [2] float64 on the tensor's device: the sum of the elements, and of their absolute values."""
    total = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for piece in _pieces(torch.view_as_real(tensor) if tensor.is_complex() else tensor, chunk):
        numbers = piece if piece.dtype in WITH_ABS else piece.to(torch.float64)
        total += torch.stack([numbers.sum(dtype=torch.float64), numbers.abs().sum(dtype=torch.float64)])
    return total


def _pieces(tensor: Tensor, chunk: int | None) -> Iterator[Tensor]:
    """Yields the elements in order, as flat tensors of about `chunk` bytes; all but the last have whole blocks."""
    if chunk is None:
        chunk = CPU_CHUNK if tensor.device.type == "cpu" else CHUNK
    block = BLOCK_WORDS * WORD // tensor.itemsize
    yield from tensor.detach().reshape(-1).split(max(chunk // (BLOCK_WORDS * WORD), 1) * block)


def _aligned_words(piece: Tensor) -> Tensor:
    """Returns a flat tensor's bytes as int64, zeros added to the last word; a copy where they are not aligned."""
    flat = piece.view(torch.uint8)
    if len(flat) % WORD or flat.storage_offset() % WORD or flat.data_ptr() % WORD:
        aligned = torch.zeros(-(-len(flat) // WORD) * WORD, dtype=torch.uint8, device=flat.device)
        aligned[: len(flat)] = flat
        flat = aligned
    return flat.view(torch.int64)


@dataclass(frozen=True)
class SentTensor:
    """What was seen of a tensor where it was sent or received.

    Attributes:
        total, size: the sum of its elements, and of their absolute values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    checksum: int
    total: float
    size: float

    @property
    def form(self) -> str:
        """`[16, 64] bfloat16`"""
        return f"{list(self.shape)} {self.dtype}"


class TensorRecorder:
    """Records tensors as they pass. The numbers stay on the device until `close`, so that nothing waits for it."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, tuple[int, ...], str]] = []
        self._checksums: list[Tensor] = []
        self._sums: list[Tensor] = []

    def add(self, name: str, tensor: Tensor) -> None:
        self._seen.append((name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
        tensor = tensor.contiguous()  # once for both: each would copy it
        self._checksums.append(checksum(tensor))
        self._sums.append(sums(tensor))

    def close(self) -> tuple[SentTensor, ...]:
        """Returns all tensors that passed, in order."""
        numbers = zip(_on_host(self._checksums), _on_host(self._sums), strict=True)
        return tuple(
            SentTensor(*seen, checksum, *both) for seen, (checksum, both) in zip(self._seen, numbers, strict=True)
        )


def _on_host(values: Sequence[Tensor]) -> list:
    """Returns the values as Python numbers, copied once per device."""
    found: dict[int, object] = {}
    for device in {value.device for value in values}:
        there = [place for place, value in enumerate(values) if value.device == device]
        found |= zip(there, torch.stack([values[place] for place in there]).tolist(), strict=True)
    return [found[place] for place in range(len(values))]


def digest(tensors: Iterable[SentTensor]) -> int:
    """Returns 64 bits of names, shapes, dtypes and checksums; the tensors' order does not matter."""
    total = 0
    for each in tensors:
        said = repr((each.name, each.shape, each.dtype, each.checksum)).encode()
        total += int.from_bytes(hashlib.blake2b(said, digest_size=WORD).digest())
    return total % 2**64


CAUSES = {  # kind of a fault -> its usual cause, as a clause
    "missing": "a filter of names or a bucket lost it on the way",
    "extra": "it is left over from another sync, or two names were mixed up",
    "twice": "two pipeline ranks export the same layer, or a shared tensor is sent under one name twice",
    "shape": "a buffer was cut with the sizes of another rank, or an old conversion was used",
    "dtype": "a cast on the way: a router's bias in bfloat16 chooses other experts",
    "bits": "a buffer was used again before it was read, or a kernel changed it on the way",
    "swapped": "names and buffers got out of step, such as experts numbered per rank",
    "stale": "a buffer or a cache of the sync before was sent again",
    "unwritten": "the weight was not sent, or under a name that the engine's loader skips",
}
MISSING, EXTRA, TWICE, SHAPE, DTYPE, BITS, SWAPPED, STALE, UNWRITTEN = CAUSES


@dataclass(frozen=True)
class WrongTensor:
    """A tensor that did not arrive as it was sent.

    Attributes:
        where: the process that has it otherwise.
        kind: one of CAUSES.
        found: what was sent and what was received, as a clause.
    """

    name: str
    where: str
    kind: str
    found: str

    def __str__(self) -> str:
        return f"{self.name} on {self.where}: {self.found}"


def wrong_tensors(
    sent: Sequence[SentTensor], received: Sequence[SentTensor], where: str, before: Sequence[SentTensor] = ()
) -> Iterator[WrongTensor]:
    """Yields what differs; the order in which tensors arrive does not matter.

    Args:
        where: the receiver's name.
        before: what was sent in the check before.
    """
    sent_by, received_by, before_by = ({each.name: each for each in those} for those in (sent, received, before))
    times_sent, times = Counter(each.name for each in sent), Counter(each.name for each in received)
    owners: dict[int, list[SentTensor]] = {}
    for each in sent_by.values():
        owners.setdefault(each.checksum, []).append(each)
    for name, one in sent_by.items():
        if times_sent[name] > 1 or times[name] > 1:
            yield WrongTensor(name, where, TWICE, f"sent {times_sent[name]} times, received {times[name]} times")
        other = received_by.get(name)
        if other is None:
            yield WrongTensor(name, where, MISSING, f"sent as {one.form}, not received")
        elif other.shape != one.shape:
            yield WrongTensor(name, where, SHAPE, f"sent as {one.form}, received as {other.form}")
        elif other.dtype != one.dtype:
            yield WrongTensor(
                name, where, DTYPE, f"sent as {one.form}, received as {other.form}; {_both_sums(one, other)}"
            )
        elif other.checksum != one.checksum:
            yield WrongTensor(name, where, *_other_bits(one, other, owners, before_by.get(name)))
    for name, other in received_by.items():
        if name not in sent_by:
            yield WrongTensor(name, where, EXTRA, f"received as {other.form}, not sent")


def _other_bits(
    one: SentTensor, other: SentTensor, owners: dict[int, list[SentTensor]], before: SentTensor | None
) -> tuple[str, str]:
    if before is not None and before.checksum == other.checksum:
        return STALE, f"received as it was at the check before; {_both_sums(one, other)}"
    if alike := [each.name for each in owners.get(other.checksum, ()) if each.form == one.form]:
        return SWAPPED, f"received with the bits of {alike[0]}; {_both_sums(one, other)}"
    return BITS, f"received with other bits; {_both_sums(one, other)}"


def _both_sums(one: SentTensor, other: SentTensor) -> str:
    return (
        f"sums {one.total:.6g} sent and {other.total:.6g} received, of absolute values {one.size:.6g} and "
        f"{other.size:.6g}"
    )
