"""Measures the cost of router agreement: comparing the expert sets of two engines.

    python tools/bench_routing.py [--sizes 16384x48x128x8] [--threads 2] [--repeats 7] [--devices cpu]

A size is tokens x layers x experts x top-k. Ids are uint8 up to 256 experts, else int16. In the second engine's sets,
about 1 % of the ids are replaced. They have the order of the first engine's, because both sort by score. "reversed" is
the worst case of `blockwise_overlap`, which looks for sets that are equal in order too: the second engine's ids have
the reverse order.

plain: `(train.unsqueeze(-1) == infer.unsqueeze(-2)).any(-1).sum(-1)`, in blocks of tokens if its temporaries do not fit
half of the free memory. ours: `blockwise_overlap`, plain torch on any device; on a GPU also `fused_overlap`, the Triton
kernel. All results are checked to be equal before anything is timed. Calls alternate, so that a machine that slows down
favours none. "refused rows" is not a comparison, but the check of each id of the rollout before it (core/routing.py).

ratio: median of the plain comparison over this one's. x copy: this one's median over that of one `copy_` of an id
tensor. memory: the most that a call adds, in MB, with its result (a byte per token and layer). On a CPU, it is the peak
resident set (VmHWM, reset just before) minus the resident set before, in a process of its own, with an allocator that
returns freed tensors at once; on a GPU, it is from torch's own counter.
"""

import argparse
from collections.abc import Callable

import torch
from measuring import added_bytes, alternating, available_bytes, in_own_process, print_times, ratio
from torch import Tensor

from verl_ext.core.routing import blockwise_overlap, refused_rows

SIZES = ("16384x48x128x8", "16384x48x512x10", "131072x94x256x8", "1048576x94x256x8")
TILE = 4096  # tokens drawn at random; more repeat them
REPLACED = 0.01  # of the ids
TRAJECTORY = 4096  # tokens


def random_sets(size: str, device: str) -> tuple[Tensor, Tensor]:
    """Returns [tokens, layers, top-k] ids of two engines: runs of one random order of the experts, with random
    starts."""
    N, L, E, K = map(int, size.split("x"))
    if 2 * K > E:
        raise SystemExit(
            f"{size}: top-k must be at most half of the experts, because ids are replaced by ids half-way on"
        )
    generator = torch.Generator().manual_seed(0)
    experts = torch.randperm(E, generator=generator).to(torch.uint8 if E <= 256 else torch.int16)
    place = torch.randint(E, (min(N, TILE), L, 1), generator=generator) + torch.arange(K)
    replaced = torch.rand(place.shape, generator=generator) < REPLACED
    other_place = place + replaced * (E // 2)
    repeats = -(-N // TILE)
    train, infer = (experts[where % E].to(device).repeat(repeats, 1, 1)[:N] for where in (place, other_place))
    return train, infer


def plain(train: Tensor, infer: Tensor) -> Tensor:
    return (train.unsqueeze(-1) == infer.unsqueeze(-2)).any(-1).sum(-1)


def plain_in_blocks(train: Tensor, infer: Tensor, tokens: int) -> Tensor:
    if tokens >= len(train):
        return plain(train, infer)
    return torch.cat([plain(*pair) for pair in zip(train.split(tokens), infer.split(tokens), strict=True)])


def overlap_calls(
    train: Tensor, infer: Tensor, device: str, *, interpreted: bool = False
) -> dict[str, Callable[[], Tensor]]:
    """Returns every way to the same result, the plain one first; on a CPU, the Triton kernel only if interpreted."""
    _, L, K = train.shape
    reverse = infer.flip(-1)
    tokens = (
        available_bytes(device) // 2 // (L * (K * K + K + 2 * 8))
    )  # bools of both comparisons, int64 sums and result
    calls = {
        "plain" if tokens >= len(train) else "plain, in blocks": lambda: plain_in_blocks(train, infer, tokens),
        "ours": lambda: blockwise_overlap(train, infer),
        "ours, reversed": lambda: blockwise_overlap(train, reverse),
    }
    if device != "cpu" or interpreted:
        from verl_ext.core.overlap_triton import fused_overlap

        calls["ours, Triton"] = lambda: fused_overlap(train, infer)
    return calls


def megabytes_added(size: str, name: str, device: str) -> float:
    """Returns what one call adds at its peak; for a process of its own."""
    warm_up = random_sets("64x" + size.split("x", 1)[1], device)
    overlap_calls(*warm_up, device)[name]()  # whatever is set up once
    return added_bytes(overlap_calls(*random_sets(size, device), device)[name], device) / 1e6


def bench_overlap(size: str, device: str, arguments: argparse.Namespace) -> None:
    N, L, E, K = map(int, size.split("x"))
    ours = ["ours", "ours, reversed"]
    if device != "cpu":
        ours.append("ours, Triton")
    added = {name: f"{in_own_process(megabytes_added, size, name, device):.1f}" for name in ours}
    train, infer = random_sets(size, device)
    target = torch.empty_like(train)
    calls = overlap_calls(train, infer, device)
    reference, *others = calls
    expected = calls[reference]()
    for name in others:
        if not torch.equal(calls[name]().long(), expected):
            raise SystemExit(f"{size} on {device}: {name} and {reference} differ")
    del expected
    offsets = torch.tensor([*range(0, N, TRAJECTORY), N], device=device)
    calls["refused rows"] = lambda: refused_rows(infer, E, offsets)
    calls["copy"] = lambda: target.copy_(train)
    times = alternating(calls, arguments.repeats, device, warm_up=0)
    print(
        f"\n{size}, {str(train.dtype).removeprefix('torch.')}, {device}: {N * L * K / 1e6:,.1f} million ids, "
        f"{train.nbytes / 1e6:,.1f} MB per tensor, {N * L / 1e6:,.1f} MB of result; all results equal"
    )
    compared = {name: f"{ratio(times, reference, name):.1f}" for name in others}
    copies = {name: f"{ratio(times, name, 'copy'):.1f}" for name in times}
    print_times(times, {"ratio": compared, "x copy": copies, "memory": added})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="timed calls of each (default: %(default)s)")
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="TOKENSxLAYERSxEXPERTSxTOPK (default: %(default)s)")
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--devices", nargs="+", default=devices, help="(default: those here, %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), {arguments.repeats} repeats")
    for device in arguments.devices:
        for size in arguments.sizes:
            bench_overlap(size, device, arguments)


if __name__ == "__main__":
    main()
