"""The load of the experts, against counts one by one in float64 (numpy)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.core import expert_load
from verl_ext.core.expert_load import ExpertLoad, count_load, load_metrics


def some_ids(tokens: int, layers: int, top_k: int, experts: int, seed: int = 0) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    rows = [generator.permutation(experts)[:top_k] for _ in range(tokens * layers)]
    return torch.tensor(np.array(rows)).view(tokens, layers, top_k) if rows else torch.zeros(0, layers, top_k).long()


def counted(ids: torch.Tensor, experts: int) -> np.ndarray:
    counts = np.zeros((ids.shape[1], experts), dtype=np.int64)
    for token in ids.tolist():
        for layer, chosen in enumerate(token):
            for expert in chosen:
                counts[layer, expert] += 1
    return counts


def oracle(train: np.ndarray, infer: np.ndarray, first: np.ndarray) -> dict[str, float]:
    experts = train.shape[1]
    largest, used, moved, apart = [], [], [], []
    for of_train, of_infer, of_first in zip(train, infer, first, strict=True):
        p, q, r = (counts / counts.sum() for counts in (of_train, of_infer, of_first))
        largest.append(of_train.max() / of_train.mean())
        used.append(np.exp(-sum(x * np.log(x) for x in p if x > 0)) / experts)
        moved.append(0.5 * sum(abs(a - b) for a, b in zip(p, r, strict=True)))
        apart.append(0.5 * sum(abs(a - b) for a, b in zip(p, q, strict=True)))
    found = {
        "router/load_max": max(largest),
        "router/load_idle": float(np.mean(train == 0)),
        "router/load_effective": float(np.mean(used)),
        "router/load_moved": float(np.mean(moved)),
        "router/load_apart": float(np.mean(apart)),
    }
    return found | {f"router/load_max/layer_{layer:02d}": value for layer, value in enumerate(largest)}


@given(tokens=st.integers(1, 40), layers=st.integers(1, 4), experts=st.integers(1, 300), seed=st.integers(0, 99))
def test_matches_the_counts_one_by_one(tokens, layers, experts, seed):
    top_k = min(experts, 1 + seed % 4)
    train, infer, first = (some_ids(tokens, layers, top_k, experts, seed + each) for each in range(3))
    dtype = torch.uint8 if experts <= 256 else torch.int16
    counts = [count_load(ids.to(dtype), experts) for ids in (train, infer, first)]
    of_oracle = [counted(ids, experts) for ids in (train, infer, first)]
    for found, expected in zip(counts, of_oracle, strict=True):
        assert (found.numpy() == expected).all()
    assert load_metrics(*counts) == pytest.approx(oracle(*of_oracle), rel=1e-12, abs=1e-12)


def test_blocks_count_as_one(monkeypatch):
    ids = some_ids(50, 3, 2, 8)
    whole = count_load(ids, 8)
    monkeypatch.setattr(expert_load, "IDS_AT_ONCE", 7)
    assert torch.equal(count_load(ids, 8), whole)


def test_even_load_and_a_single_expert():
    even = torch.full((2, 8), 5)
    found = load_metrics(even, even, even)
    assert found["router/load_max"] == 1
    assert found["router/load_effective"] == pytest.approx(1)
    assert found["router/load_idle"] == found["router/load_moved"] == found["router/load_apart"] == 0
    one = torch.zeros(2, 8).long()
    one[:, 3] = 7
    found = load_metrics(one, even, even)
    assert found["router/load_max"] == 8
    assert found["router/load_effective"] == pytest.approx(1 / 8)
    assert found["router/load_idle"] == found["router/load_moved"] == found["router/load_apart"] == 7 / 8


def test_without_a_token():
    nothing = torch.zeros(2, 4).long()
    assert load_metrics(nothing, nothing, nothing) == {}
    load = ExpertLoad(2, 4)
    assert load.take() == {}
    load.add(some_ids(0, 2, 2, 4), some_ids(0, 2, 2, 4))
    assert load.take() == {}


def test_take_begins_anew_and_compares_with_the_first_batch():
    load, ids = ExpertLoad(3, 8), [some_ids(30, 3, 2, 8, seed) for seed in range(4)]
    load.add(ids[0][:10], ids[1][:10])
    load.add(ids[0][10:], ids[1][10:])
    first = load.take()
    assert first == pytest.approx(load_metrics(count_load(ids[0], 8), count_load(ids[1], 8), count_load(ids[0], 8)))
    assert first["router/load_moved"] == 0
    assert load.take() == {}  # a step without compared tokens
    load.add(ids[2], ids[3])
    expected = load_metrics(*(count_load(ids[which], 8) for which in (2, 3, 0)))
    assert load.take() == pytest.approx(expected)


def test_a_load_that_is_resumed_compares_with_the_first_batch_of_before():
    load, resumed, ids = ExpertLoad(3, 8), ExpertLoad(3, 8), [some_ids(30, 3, 2, 8, seed) for seed in range(3)]
    assert load.first() == []
    load.add(ids[0], ids[0])
    load.take()
    assert load.first() == load.first([]) == resumed.first(load.first()) == counted(ids[0], 8).tolist()
    for each in (load, resumed):
        each.add(ids[1], ids[2])
    found = resumed.take()
    assert found == load.take() and found["router/load_moved"] > 0
