"""Measures the cost of IcePop with a sequence mask and all metrics: verl's rollout correction and ours, on the same
tensors.

    python tools/bench_correction.py [--sizes 64x512 4096x8192] [--threads 1] [--repeats 7] [--device cpu]

verl: `compute_rollout_correction_and_rejection_mask` on a padded batch. Ours: `measure` with `icepop` and `geo_mask`,
on the padded batch and on the packed tokens; with the breakdown, which verl does not have, and without it. Both read
the same float32 log-probabilities and int64 mask, as in verl's batch (our cast to bool is timed with the rest).
Trajectories have 14 to 100 % of the longest one's tokens. Runs alternate, so that a machine that slows down favours
none.

ratio: median of verl's time over ours. x copy: our median over that of one `copy_` of the valid tokens' float32, the
bound of anything that reads and writes each token once. memory: the most that a call adds, with its outputs, in streams
of 4 bytes per padded element. On a CPU, it is the peak resident set (VmHWM, reset just before) minus the resident set
before, in a process of its own, with an allocator that returns freed tensors at once; on a GPU, it is from torch's own
counter. On a GPU, times are from CUDA events, and "of peak" is 13 bytes per token (two log-probabilities and a mask in,
a weight out) over the time, as a share of --peak-gb-s.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch

os.environ.setdefault("VERL_PLATFORM", "nvidia" if torch.cuda.is_available() else "cpu")  # before verl is imported

from measuring import added_bytes, alternating, available_bytes, in_own_process, print_times, ratio

from verl_ext.core.measure import measure
from verl_ext.core.tokens import Tokens

SIZES = ("64x512", "256x2048", "1024x8192", "4096x8192")
CORRECTIONS = {"icepop": {"alpha": 0.5, "beta": 5.0}, "geo_mask": {"low": 1 / 1.001, "high": 1 / 0.999}}
STREAMS_NEEDED = 40  # of 4 bytes a padded element, with room to spare: the inputs twice, and verl's temporaries
BYTES_PER_TOKEN = 13


class Batch:
    """Random log-probabilities of B trajectories near the policy, padded to T and packed."""

    def __init__(self, size: str, device: str):
        B, T = map(int, size.split("x"))
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(max(T * 14 // 100, 1), T + 1, (B,), generator=generator)
        valid = torch.arange(T) < lengths[:, None]
        infer = torch.empty(B, T).exponential_(1, generator=generator).neg_()
        old = torch.randn(B, T, generator=generator).mul_(0.02).add_(infer)
        self.elements = B * T
        self.mask = valid.long().to(device)
        self.infer, self.old = infer.to(device), old.to(device)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        self.packed_infer, self.packed_old = infer[valid].to(device), old[valid].to(device)
        self.packed_mask, self.offsets = torch.ones_like(self.packed_infer, dtype=torch.long), offsets.to(device)

    def padded(self) -> Tokens:
        return Tokens.from_padded(self.infer, self.old, self.mask)

    def packed(self) -> Tokens:
        return Tokens(self.packed_infer, self.packed_old, self.packed_mask.bool(), self.offsets)

    def verl(self) -> tuple[Any, torch.Tensor, dict[str, float]]:
        # Imported here, so that the other calls work without verl.
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

        return compute_rollout_correction_and_rejection_mask(
            self.old,
            self.infer,
            self.mask,
            rollout_is="token",
            rollout_is_threshold="0.5_5.0",
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold="0.999_1.001",
        )

    def eager(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, dict[str, float]]:
        """Returns the weights and the metrics of `vllm_kl/*` by the plain formulas, with a tensor for every term."""
        mask, infer, old = self.mask.bool(), self.infer.to(dtype), self.old.to(dtype)
        x = torch.where(mask, old - infer, 0.0)
        count, lengths = mask.sum(), mask.sum(1).clamp(min=1)
        clamped = x.clamp(-20, 20)
        k = clamped.exp()
        bounds = CORRECTIONS["icepop"], CORRECTIONS["geo_mask"]
        g = (x.sum(1) / lengths).exp().unsqueeze(1)
        inside = (bounds[0]["alpha"] <= k) & (k <= bounds[0]["beta"])
        weight = torch.where(inside & (bounds[1]["low"] <= g) & (g <= bounds[1]["high"]) & mask, k, 0.0)
        difference = torch.where(mask, (infer.exp() - old.exp()).abs(), 0.0)
        center = difference.sum() / count
        squared = (torch.where(mask, k, 0.0) ** 2).sum()
        metrics = {
            "k1": -x.sum() / count,
            "k3": torch.where(mask, torch.expm1(clamped) - clamped, 0.0).sum() / count,
            "prob_diff_mean": center,
            "prob_diff_max": difference.max(),
            "prob_diff_std": torch.where(mask, (difference - center) ** 2, 0.0).sum().div(count).sqrt(),
            "log_ratio_abs_mean": x.abs().sum() / count,
            "log_ratio_abs_max": x.abs().max(),
            "ess": torch.where(mask, k, 0.0).sum() ** 2 / squared / count,
            "chi2": squared / count - 1,
        }
        return weight, {f"vllm_kl/{name}": value.item() for name, value in metrics.items()}

    def calls(self) -> dict[str, Callable[[], Any]]:
        return {
            "verl, padded": self.verl,
            "ours, padded": lambda: measure(self.padded(), CORRECTIONS, breakdown=False),
            "ours, packed": lambda: measure(self.packed(), CORRECTIONS, breakdown=False),
            "ours, padded, by bucket": lambda: measure(self.padded(), CORRECTIONS),
            "ours, packed, by bucket": lambda: measure(self.packed(), CORRECTIONS),
        }

    def differing(self) -> int:
        """Returns the number of tokens that verl and we weigh differently, beyond float32."""
        weights, kept, _ = self.verl()
        theirs = weights.batch["rollout_is_weights"] * kept
        ours = measure(self.padded(), CORRECTIONS, breakdown=False).weight.view_as(theirs)
        return int((~torch.isclose(ours, theirs, rtol=1e-5, atol=0)).sum())


def streams_added(size: str, name: str, device: str) -> float:
    """Returns what one call adds at its peak; for a process of its own."""
    Batch("8x64", device).calls()[name]()  # whatever is set up once
    batch = Batch(size, device)
    return added_bytes(batch.calls()[name], device) / (4 * batch.elements)


def bench(size: str, arguments: argparse.Namespace) -> None:
    B, T = map(int, size.split("x"))
    needed, free = STREAMS_NEEDED * 4 * B * T, available_bytes()
    if needed > free:
        print(f"{size}: left out, {free / 2**30:.1f} GiB are free and it takes up to {needed / 2**30:.1f}")
        return
    batch = Batch(size, arguments.device)
    names = list(batch.calls())
    added = {name: f"{in_own_process(streams_added, size, name, arguments.device):.2f}" for name in names}
    source = batch.packed_infer
    target = torch.empty_like(source)
    calls = batch.calls() | {"copy": lambda: target.copy_(source)}
    times = alternating(calls, arguments.repeats, arguments.device)
    print(
        f"\n{size}: {len(source):,} of {batch.elements:,} tokens valid ({len(source) / batch.elements:.0%}); "
        f"weights differ on {batch.differing()}"
    )
    columns = {
        "ratio": {name: f"{ratio(times, names[0], name):.2f}" for name in names[1:]},
        "x copy": {name: f"{ratio(times, name, 'copy'):.1f}" for name in names},
        "memory": added,
    }
    if arguments.device != "cpu":
        fastest = BYTES_PER_TOKEN * len(source) / (arguments.peak_gb_s * 1e9)
        columns["of peak"] = {name: f"{fastest / statistics.median(times[name]):.1%}" for name in names}
    print_times(times, columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="timed calls of each (default: %(default)s)")
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="trajectories x tokens (default: %(default)s)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--peak-gb-s", type=float, default=4800, help="memory bandwidth (default: %(default)s, an H200)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.device}, {arguments.threads} thread(s), {arguments.repeats} repeats")
    for size in arguments.sizes:
        bench(size, arguments)


if __name__ == "__main__":
    main()
