"""Ranks of a replica that fetch routing together, from a real TransferQueue, against verl's plain fetch."""

import pytest
import torch

from tests.stack.replica_ranks import BATCHES, RANKS, ROUTING, rank_main

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def ranks(quick_ranks, tmp_path_factory):
    """The results of each rank."""
    folder = tmp_path_factory.mktemp("replica")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_AUTH_MODE", "disabled")  # one rank's cluster, which the others join
        torch.multiprocessing.spawn(rank_main, (f"file://{folder}/store", str(folder)), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def rows(ranks, name, field="routed_experts"):
    return [rank[name][1].get(field, 0) for rank in ranks]


CASES = [*BATCHES, "all fields", "without routing", "not sent the same", "replicas of one rank", "two replicas"]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_the_batch_of_the_plain_fetch(ranks, name):
    assert [rank[name][0] for rank in ranks] == [True] * RANKS


@pytest.mark.parametrize("name", ["ragged", "alike", "one long", "empty rows", "fewer than ranks", "all fields"])
def test_routing_is_fetched_once_for_a_replica_and_all_else_by_each_rank(ranks, name):
    trajectories = len(BATCHES.get(name, BATCHES["ragged"]))
    for field in ROUTING:
        assert sum(rows(ranks, name, field)) == trajectories
    assert rows(ranks, name, "input_ids") == [trajectories] * RANKS


def test_rows_are_divided_by_their_tokens(ranks):
    assert rows(ranks, "ragged") == [4, 1, 2]  # 16, 2 and 31 of 49 tokens; each is one run of rows
    assert rows(ranks, "alike") == [1, 2, 1]
    assert rows(ranks, "one long") == [0, 1, 2]


def test_where_ranks_share_nothing_each_fetches_as_ever(ranks):
    assert rows(ranks, "replicas of one rank") == [7] * RANKS
    assert rows(ranks, "without routing") == [0] * RANKS
    assert rows(ranks, "two replicas")[2] == 3 and sum(rows(ranks, "two replicas")[:2]) == 4


def test_a_rank_that_cannot_fetch_fails_all_of_its_replica_with_its_error(ranks):
    assert ranks[1]["failure"] == ("TimeoutError", "no answer\nfrom unit 7")
    for rank in (0, 2):
        name, text = ranks[rank]["failure"]
        assert name == "BatchError" and "rank 1 " in text and text.endswith("TimeoutError: no answer from unit 7")
        assert "\n" not in text
