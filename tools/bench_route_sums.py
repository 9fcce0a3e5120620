"""Measures how long the checksum of a trajectory's routes takes: python tools/bench_route_sums.py [--tokens N]
[--repeats N]

It runs on one core, for 48 layers and top-8 of 128 experts, as vLLM returns them (uint8) and as verl carries them
(int16): in the server and in the agent loop's process (from numpy), and in a worker (from a tensor).
"""

import argparse
import statistics
import time

import numpy as np
import torch

from verl_ext.core.routing import route_terms
from verl_ext.upstream.agent_loop import row_terms

LAYERS, TOP_K, EXPERTS = 48, 8, 128


def milliseconds(function, repeats: int) -> str:
    function()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        taken.append(1e3 * (time.perf_counter() - begin))
    return f"{statistics.median(taken):.1f} ms ({min(taken):.1f} to {max(taken):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of a trajectory (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="default: %(default)s")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = np.random.default_rng(0).integers(0, EXPERTS, (given.tokens, LAYERS, TOP_K), np.uint8)
    tokens = list(range(given.tokens))
    print(f"{given.tokens} tokens, {rows.nbytes / 1e6:.1f} MB of ids in uint8")
    print("server, uint8:", milliseconds(lambda: row_terms(rows, tokens, 0).sum(), given.repeats))
    ids, places = torch.tensor(tokens), torch.arange(given.tokens)
    for dtype in (torch.uint8, torch.int16):
        routes = torch.from_numpy(rows).to(dtype)
        print(f"worker, {dtype}:", milliseconds(lambda: route_terms(routes, ids, places).sum(), given.repeats))  # noqa: B023


if __name__ == "__main__":
    main()
