"""`expert_overlap` against Python's set intersection: plain torch, and the Triton kernel in Triton's interpreter."""

import os
import subprocess
import sys
from itertools import accumulate, product
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import profile

from verl_ext.core import routing
from verl_ext.core.routing import expert_overlap

U8, I16, I32, I64 = torch.uint8, torch.int16, torch.int32, torch.int64
LAYOUTS = {
    "contiguous": lambda ids: ids,
    "planes": lambda ids: ids.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "every second token": lambda ids: ids.repeat_interleave(2, 0)[::2],
    "first of more ids": lambda ids: torch.cat([ids, ids], -1)[..., : ids.shape[-1]],
    "one id into its memory": lambda ids: torch.cat([ids.new_zeros(1), ids.flatten()])[1:].view(ids.shape),
}


def random_sets(N, L, K, E, seed):
    """[N, L, K] distinct ids in random order, from few enough that two sets share some; 0 and E - 1 are among them."""
    pool = torch.linspace(0, E - 1, 2 * K + 1).long()
    shuffled = torch.rand(N, L, len(pool), generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return pool[shuffled[..., :K]]


def intersection_sizes(train_NLK, infer_NLK):
    """The oracle: [N, L] as lists."""
    return [
        [len(set(t) & set(i)) for t, i in zip(*layers, strict=True)]
        for layers in zip(train_NLK.tolist(), infer_NLK.tolist(), strict=True)
    ]


def plain_overlap(train_NLK, infer_NLK):
    return (train_NLK.unsqueeze(-1) == infer_NLK.unsqueeze(-2)).any(-1).sum(-1)


@given(
    N=st.integers(0, 9),
    L=st.integers(0, 5),
    K=st.integers(1, 12),
    ids=st.sampled_from(
        [(256, U8, U8), (256, U8, I16), (256, I64, U8), (512, I16, I16), (512, I16, I32), (512, I64, I64)]
    ),
    layouts=st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 2),
    equal=st.sampled_from([0.0, 0.6, 1.0]),
    block=st.sampled_from([1, 30, 2**16]),
    seed=st.integers(0, 2**31),
)
def test_overlap_equals_pythons_set_intersection(N, L, K, ids, layouts, equal, block, seed):
    E, *dtypes = ids
    train, infer = (random_sets(N, L, K, E, seed + i) for i in range(2))
    same = torch.rand(N, L, 1, generator=torch.Generator().manual_seed(seed)) < equal
    sets = (train, torch.where(same, train, infer))
    train, infer = (LAYOUTS[layout](ids.to(dtype)) for ids, layout, dtype in zip(sets, layouts, dtypes, strict=True))
    with mock.patch.multiple(routing, PAIRS_AT_ONCE=block, COMPARISONS_AT_ONCE=4 * block):
        found = expert_overlap(train, infer)
    assert found.dtype == U8 and found.shape == (N, L)
    assert found.tolist() == intersection_sizes(train, infer)


@pytest.mark.parametrize("offsets", [(1, 0), (0, 1), (1, 2), (3, 1), (4, 8)])
@pytest.mark.parametrize("dtype", [U8, I16, I32])
def test_the_two_may_stand_anywhere_in_their_memory(dtype, offsets):
    sets = [random_sets(5, 3, 8, 256, seed).to(dtype) for seed in range(2)]
    moved = [
        torch.cat([ids.new_zeros(offset), ids.flatten()])[offset:].view(ids.shape)
        for ids, offset in zip(sets, offsets, strict=True)
    ]
    assert expert_overlap(*moved).tolist() == intersection_sizes(*sets)


def test_255_experts_of_256():
    ids = torch.arange(256, dtype=U8)
    assert expert_overlap(ids[None, None, 1:], ids[None, None, 1:].flip(-1)).tolist() == [[255]]
    assert expert_overlap(ids[None, None, 1:], ids[None, None, :-1]).tolist() == [[254]]


def test_int16_ids_that_agree_in_their_low_byte_differ():
    assert expert_overlap(torch.tensor([[[256, 3]]], dtype=I16), torch.tensor([[[0, 3]]], dtype=U8)).tolist() == [[1]]


def test_different_shapes_are_an_error_that_shows_both():
    with pytest.raises(ValueError, match=r"\(1, 2, 2\).*\(1, 3, 2\)"):
        expert_overlap(torch.zeros(1, 2, 2, dtype=U8), torch.zeros(1, 3, 2, dtype=U8))


def temporary_bytes(function, tokens):
    """Returns the peak of `function`'s CPU memory in torch, without its result of one byte per pair."""
    layers = 4
    ids = random_sets(tokens, layers, 8, 128, 0).to(U8)
    with profile(profile_memory=True) as profiler:
        function(ids, ids)
    changes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(changes)) - tokens * layers


def test_temporaries_do_not_grow_with_the_tokens(monkeypatch):
    monkeypatch.setattr(routing, "PAIRS_AT_ONCE", 2**10)
    block = 2**10 // 4  # tokens
    assert temporary_bytes(expert_overlap, 3 * block) == temporary_bytes(expert_overlap, 7 * block + 1)
    assert temporary_bytes(plain_overlap, 3 * block) < temporary_bytes(plain_overlap, 7 * block)  # it does see them


KERNEL_CASES = [
    *product([(1, 1), (43, 3), (129, 2)], [1, 2, 3, 4, 6, 8, 10], [(256, U8, U8)], [("contiguous", "contiguous")]),
    *product([(43, 3)], [3, 8], [(256, U8, I16), (512, I16, I16), (512, I64, I32)], [("planes", "contiguous")]),
    ((43, 3), 4, (256, U8, U8), ("every second token", "first of more ids")),
    ((0, 3), 4, (256, U8, U8), ("contiguous", "contiguous")),
    ((3, 0), 4, (256, U8, U8), ("contiguous", "contiguous")),
]
RUN_KERNEL = """
import sys, torch
from verl_ext.core.overlap_triton import fused_overlap
torch.save([fused_overlap(*pair) for pair in torch.load(sys.argv[1])], sys.argv[2])
"""


@pytest.fixture(scope="module")
def kernel_results(tmp_path_factory):
    """Returns (train, infer, the kernel's result) of each case; Triton needs a process, to choose its interpreter."""
    pytest.importorskip("triton")
    pairs = []
    for (N, L), K, (E, *dtypes), layouts in KERNEL_CASES:
        sets = [random_sets(N, L, K, E, seed).to(dtype) for seed, dtype in enumerate(dtypes)]
        pairs.append([LAYOUTS[layout](ids) for layout, ids in zip(layouts, sets, strict=True)])
    folder = tmp_path_factory.mktemp("kernel")
    torch.save(pairs, folder / "pairs.pt")
    subprocess.run(
        [sys.executable, "-c", RUN_KERNEL, folder / "pairs.pt", folder / "found.pt"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
    )
    return [(*pair, found) for pair, found in zip(pairs, torch.load(folder / "found.pt"), strict=True)]


@pytest.mark.parametrize("case", range(len(KERNEL_CASES)), ids=map(str, KERNEL_CASES))
def test_kernel_equals_pythons_set_intersection(case, kernel_results):
    train, infer, found = kernel_results[case]
    assert found.dtype == U8 and found.shape == train.shape[:2]
    assert found.tolist() == intersection_sizes(train, infer)
