"""Compares `measure`, the one pass over the batch, with the plain formulas and with verl's correction."""

import math
from importlib.util import find_spec

import torch
from bench_correction import BYTES_PER_TOKEN, CORRECTIONS, Batch
from measuring import added_bytes, alternating

from gpu import without_ray
from gpu.bandwidth import share_of_peak
from gpu.record import Place, Record
from verl_ext.core.measure import measure

SIZES, TINY = ("256x2048", "1024x8192", "4096x8192"), ("8x64",)
NAMES = ("ours, padded", "ours, packed", "ours, padded, by bucket", "ours, packed, by bucket")
EAGER, VERL = "eager formula", "verl, padded"


def run(record: Record, place: Place) -> None:
    with_verl = find_spec("verl") is not None
    if not with_verl:
        record.note("verl is not installed: its correction pass is not among the calls")
    elif without_ray.is_installed():
        record.note("verl's correction pass was imported with a stand-in for Ray, which it does not call")
    for size in TINY if place.tiny else SIZES:
        with record.trying(f"{size} (trajectories x tokens)"):
            bench(record, place, size, with_verl)
    record.note(
        f"bandwidth counts {BYTES_PER_TOKEN} bytes per token: two log-probabilities and a mask in, a weight out; "
        "a stream is 4 bytes per padded element"
    )


def bench(record: Record, place: Place, size: str, with_verl: bool) -> None:
    batch = Batch(size, place.device)
    check_results(record, batch, with_verl)
    calls = {EAGER: batch.eager} | ({VERL: batch.verl} if with_verl else {})
    calls |= {name: call for name, call in batch.calls().items() if name in NAMES}
    target = torch.empty_like(batch.packed_infer)
    calls["copy"] = lambda: target.copy_(batch.packed_infer)
    times = alternating(calls, place.repeats, place.device)
    tokens = len(batch.packed_infer)
    record.times(times)
    for reference in {EAGER, VERL} & set(calls):
        for name in NAMES[:2]:
            record.ratio(times, reference, name)
    for name in NAMES:
        share_of_peak(record, f"{name}: share of peak bandwidth", BYTES_PER_TOKEN * tokens, times[name])
    if place.device != "cpu":
        for name in calls:
            added = added_bytes(calls[name], place.device) / (4 * batch.elements)
            record.figure(f"{name}: memory added", [added], "streams")


def check_results(record: Record, batch: Batch, with_verl: bool) -> None:
    ours, (weight, metrics) = measure(batch.padded(), CORRECTIONS), batch.eager(torch.float64)
    found = ours.weight.view_as(weight)
    differing = int((~torch.isclose(found.double(), weight, rtol=1e-5, atol=0)).sum())
    # A sequence's mean may be next to a bound of the mask: float32 and float64 then fall on two sides of it.
    allowed = batch.elements // 1000
    record.check("weights = the eager formula's", differing <= allowed, f"{differing} of {batch.elements} differ")
    if with_verl:
        differing = batch.differing()
        record.check("weights = verl's", differing <= allowed, f"{differing} of {batch.elements} differ")
    for name, value in metrics.items():
        record.check(
            f"{name} = the eager formula's",
            math.isclose(ours.metrics[name], value, rel_tol=1e-4, abs_tol=1e-9),
            f"{ours.metrics[name]:.8g} and {value:.8g}",
        )
    packed = measure(batch.packed(), CORRECTIONS)
    same = all(math.isclose(packed.metrics[name], ours.metrics[name], rel_tol=1e-4, abs_tol=1e-9) for name in metrics)
    record.check("packed = padded", same and packed.kept == ours.kept, f"{packed.kept} and {ours.kept} tokens kept")
