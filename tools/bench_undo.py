"""Measures the cost of making an update undoable: the copy before an update against the optimizer's step.

    python tools/bench_undo.py [--parameters 50] [--repeats 7]

It alternates three operations of an Adam in float32 over some millions of parameters: the step, the copy of weights and
moments into the host's memory (pinned if there is a GPU), and taking the step back. Each is printed as a ratio to the
step, which is the smallest part of an update.
"""

import argparse
import statistics

import torch
from measuring import seconds
from torch.optim.lr_scheduler import LambdaLR

from verl_ext.workers.undo import KeptUpdate, UpdateParts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=50, help="millions of parameters")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = max(int(arguments.parameters * 1e6 / 2**20), 1)
    weights = {f"{i}": torch.randn(1024, 1024, device=device, requires_grad=True) for i in range(rows)}
    for weight in weights.values():
        weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-6, fused=True)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    undo = KeptUpdate(UpdateParts(lambda: weights, dict, [optimizer], [schedule]))

    def step() -> None:
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    step()
    undo.keep(0)  # allocates the copies
    times: dict[str, list[float]] = {"step": [], "keep": [], "take back": []}
    for number in range(1, arguments.repeats + 1):
        times["keep"].append(seconds(lambda number=number: undo.keep(number)))
        times["step"].append(seconds(step))
        times["take back"].append(seconds(lambda number=number: undo.take_back(number - 1)))
    size = rows * 2**20
    print(
        f"{size / 1e6:.0f} million parameters on {device}, {12 * size / 1e9:.2f} GB kept; median of {arguments.repeats}"
    )
    least = statistics.median(times["step"])
    for name, each in times.items():
        print(f"{name:10} {1e3 * statistics.median(each):8.1f} ms {statistics.median(each) / least:6.2f} of a step")


if __name__ == "__main__":
    main()
