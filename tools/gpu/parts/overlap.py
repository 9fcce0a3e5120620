"""The Triton kernel for |T and I| against plain torch: equal results first, then time, bandwidth and memory."""

from bench_routing import SIZES, overlap_calls, random_sets
from measuring import added_bytes, alternating

from gpu.bandwidth import cache_bytes, share_of_peak
from gpu.record import Place, Record

TINY = ("64x3x16x4", "43x2x512x10")
KERNEL = "ours, Triton"


def run(record: Record, place: Place) -> None:
    for size in TINY if place.tiny else SIZES:
        with record.trying(f"{size} (tokens x layers x experts x top-k)"):
            bench(record, place, size)


def bench(record: Record, place: Place, size: str) -> None:
    train, infer = random_sets(size, place.device)
    calls = overlap_calls(train, infer, place.device, interpreted=place.device == "cpu")
    reference, *others = calls
    expected = calls[reference]()
    for name in others:
        record.check(f"{name} = {reference}", bool((calls[name]().long() == expected).all()))
    check_every_place_is_written(record, train, infer, expected)
    del expected
    target = train.clone()
    calls["copy"] = lambda: target.copy_(train)
    times = alternating(calls, place.repeats, place.device)
    record.times(times)
    for name in others:
        record.ratio(times, reference, name)
    moved = train.nbytes + infer.nbytes + train.shape[0] * train.shape[1]
    if moved > 2 * cache_bytes(place):
        share_of_peak(record, f"{KERNEL}: share of peak bandwidth", moved, times[KERNEL])
        share_of_peak(record, "copy: share of peak bandwidth", 2 * train.nbytes, times["copy"])
    else:
        record.note(f"{moved / 1e6:.0f} MB fit the cache: no share of the memory's bandwidth is given")
    if place.device != "cpu":
        for name in (KERNEL, "ours"):
            record.figure(f"{name}: memory added", [added_bytes(calls[name], place.device) / 1e6], "MB")


def check_every_place_is_written(record: Record, train, infer, expected) -> None:
    """Checks that the kernel writes every place. The result's memory is not cleared before: without this check, a place
    that is left out would show only by chance."""
    from unittest import mock

    import torch

    from verl_ext.core.overlap_triton import fused_overlap

    def poisoned(*shape, **settings):
        return torch.full(shape, 255, **settings)

    with mock.patch.object(torch, "empty", poisoned):
        found = fused_overlap(train, infer)
    record.check("the kernel writes every place", bool((found.long() == expected).all()))
