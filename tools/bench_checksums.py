"""Measures the record that `stability.sync_check` makes of a weight sync at each end, and other sums of its tensors.

    python tools/bench_checksums.py [--sets 231x1 4000x0.004] [--threads 1] [--repeats 5] [--device cpu]

A set is a number of tensors x gigabytes of bfloat16, all tensors of about the same size. Ours: 64 bits of every bit and
its place, and the sums of elements and absolute values, by `TensorRecorder`. The others: torch's sum in float64, which
neither sees two elements that swap places nor many a lost last bit; SHA-256 and BLAKE2b of the bytes, on the host; a
copy, the bound of anything that reads and writes each byte once. Runs alternate, so that a machine that slows down
favours none.
"""

import argparse
import hashlib
import statistics
from collections.abc import Callable
from functools import partial

import torch
from measuring import alternating, print_times, ratio
from torch import Tensor

from verl_ext.core.checksums import TensorRecorder, checksum

OURS = "ours: checksum and sums"


def tensors_of(count: int, size: float, device: str) -> list[Tensor]:
    """Returns random tensors whose rows are 64 numbers, or one number each if they are smaller."""
    numbers = int(size * 1e9 / 2 / count)
    width = 64 if numbers >= 64 else 1
    generator = torch.Generator().manual_seed(0)
    shape = (max(numbers // width, 1), width)
    return [torch.randn(shape, generator=generator, dtype=torch.bfloat16).to(device) for _ in range(count)]


def record(tensors: list[Tensor]) -> None:
    recorder = TensorRecorder()
    for number, tensor in enumerate(tensors):
        recorder.add(str(number), tensor)
    recorder.close()


def on_device(of: Callable[[Tensor], Tensor], tensors: list[Tensor]) -> None:
    """Computes a number for each tensor, and copies all of them to the host at once."""
    torch.stack([of(tensor) for tensor in tensors]).tolist()


def hashed(name: str, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        hashlib.new(name, tensor.cpu().view(torch.uint8).numpy()).digest()


def bench(given: str, arguments: argparse.Namespace) -> None:
    count, size = given.split("x")
    tensors = tensors_of(int(count), float(size), arguments.device)
    calls = {
        OURS: partial(record, tensors),
        "ours: checksum": partial(on_device, checksum, tensors),
        "torch.sum in float64": partial(on_device, partial(torch.sum, dtype=torch.float64), tensors),
        "SHA-256": partial(hashed, "sha256", tensors),
        "BLAKE2b": partial(hashed, "blake2b", tensors),
        "copy": lambda: [tensor.clone() for tensor in tensors],
    }
    times = alternating(calls, arguments.repeats, arguments.device)
    total = sum(tensor.nbytes for tensor in tensors) / 1e9
    print(f"\n{count} tensors, {total:.3f} GB")
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    columns = {
        "GB/s": {name: f"{total / spent:.3f}" for name, spent in medians.items()},
        "ms a tensor": {name: f"{1000 * spent / len(tensors):.3f}" for name, spent in medians.items()},
        "over ours": {name: f"{ratio(times, name, OURS):.2f}" for name in times},
    }
    print_times(times, columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each (default: %(default)s)")
    parser.add_argument("--sets", nargs="+", default=["231x1", "4000x0.004"], help="tensors x GB (%(default)s)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.device}, {arguments.threads} thread(s), {arguments.repeats} repeats")
    for each in arguments.sets:
        bench(each, arguments)


if __name__ == "__main__":
    main()
