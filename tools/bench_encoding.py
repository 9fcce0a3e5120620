"""Measures the seconds that a GB of expert ids takes to encode and decode, and those that it would save on its way.

    python tools/bench_encoding.py [--megabytes 64] [--repeats 5]

The ids are of 128 experts, top-8, a byte each, as vLLM returns them. numpy encodes them on one core:

- 7 bits: the eight ids of a token and layer in seven bytes.
- set: the rank of the set among all of 8 of 128 (the combinatorial number system), 41 bits, in six bytes. The order of
  the ids is lost, which neither agreement nor replay's weights need.
- zlib at its fastest, for comparison: a library that does not know what it packs.

The decoded ids are compared with the original ones. An encoding pays if a GB saves more seconds at the rates of
`verl_ext/plan/costs.py` (one client writes it, one reads it) than encoding and decoding take.
"""

import argparse
import statistics
import zlib
from collections.abc import Callable
from math import comb

import numpy as np
from measuring import alternating

from verl_ext.plan import costs

EXPERTS, TOP_K = 128, 8
BINOMIALS = np.array([[comb(n, k) for n in range(EXPERTS)] for k in range(1, TOP_K + 1)], dtype=np.uint64)
Rows = np.ndarray


def made(sets: int) -> Rows:
    """Returns [sets, 8] uint8, eight different experts each."""
    dice = np.random.default_rng(0)
    scores = dice.random((sets, EXPERTS), dtype=np.float32)
    return np.argpartition(scores, TOP_K, axis=1)[:, :TOP_K].astype(np.uint8)


def pack_7(ids: Rows) -> Rows:
    words, packed = ids.view(np.uint64)[:, 0], np.zeros(len(ids), dtype=np.uint64)
    for place in range(TOP_K):
        packed |= (words >> np.uint64(8 * place) & np.uint64(127)) << np.uint64(7 * place)
    return np.ascontiguousarray(packed.view(np.uint8).reshape(-1, 8)[:, :7])


def unpack_7(packed: Rows) -> Rows:
    words = np.zeros((len(packed), 8), dtype=np.uint8)
    words[:, :7] = packed
    found, bits = np.zeros(len(packed), dtype=np.uint64), words.view(np.uint64)[:, 0]
    for place in range(TOP_K):
        found |= (bits >> np.uint64(7 * place) & np.uint64(127)) << np.uint64(8 * place)
    return found.view(np.uint8).reshape(-1, 8)


def pack_set(ids: Rows) -> Rows:
    ordered, rank = np.sort(ids, axis=1), np.zeros(len(ids), dtype=np.uint64)
    for place in range(TOP_K):
        rank += BINOMIALS[place][ordered[:, place]]
    return np.ascontiguousarray(rank.view(np.uint8).reshape(-1, 8)[:, :6])


def unpack_set(packed: Rows) -> Rows:
    """Unpacks a row's ids, in ascending order."""
    words = np.zeros((len(packed), 8), dtype=np.uint8)
    words[:, :6] = packed
    rank, ids = words.view(np.uint64)[:, 0].copy(), np.empty((len(packed), TOP_K), dtype=np.uint8)
    for place in range(TOP_K - 1, -1, -1):
        ids[:, place] = np.searchsorted(BINOMIALS[place], rank, side="right") - 1
        rank -= BINOMIALS[place][ids[:, place]]
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64, help="megabytes of ids (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    arguments = parser.parse_args()
    ids = made(arguments.megabytes * 10**6 // TOP_K)
    codes: dict[str, tuple[Callable[[], object], Callable[[], object], int]] = {}
    packed, ranked, squeezed = pack_7(ids), pack_set(ids), zlib.compress(ids.tobytes(), 1)
    assert np.array_equal(unpack_7(packed), ids) and np.array_equal(unpack_set(ranked), np.sort(ids, axis=1))
    codes["7 bits"] = lambda: pack_7(ids), lambda: unpack_7(packed), packed.nbytes
    codes["set"] = lambda: pack_set(ids), lambda: unpack_set(ranked), ranked.nbytes
    codes["zlib"] = lambda: zlib.compress(ids.tobytes(), 1), lambda: zlib.decompress(squeezed), len(squeezed)
    a_gb = 1 / costs.CLIENT_PUT + 1 / costs.CLIENT_GET
    print(f"{'':10}{'size':>8}{'encode, s per GB':>18}{'decode, s per GB':>18}{'saves, s per GB':>18}")
    for name, (encode, decode, size) in codes.items():
        times = alternating({"encode": encode, "decode": decode}, arguments.repeats)
        spent = [statistics.median(times[way]) / ids.nbytes * 1e9 for way in ("encode", "decode")]
        saved = a_gb * (1 - size / ids.nbytes)
        print(f"{name:10}{size / ids.nbytes:>8.2f}{spent[0]:>18.2f}{spent[1]:>18.2f}{saved:>18.2f}")
    print(f"\na GB without encoding: {a_gb:.2f} s, written by one client and read by one")


if __name__ == "__main__":
    main()
