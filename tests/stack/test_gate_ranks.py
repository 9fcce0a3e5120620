"""The mini-batch gate on two real data-parallel ranks of verl's FSDP2 engine: both decide alike, and none waits."""

import pytest
import torch

from recipes.make_assets import make_assets
from tests.stack.gate_ranks import CASES, DROPPING_CASES, UNDO_CASES, rank_main

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def ranks(quick_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate")
    make_assets("cpu_tool", folder)
    torch.multiprocessing.spawn(rank_main, (2, str(folder / "model"), f"file://{folder}/store", str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.shows("vllm_kl", "policy_kl", "grad_norm", engine="fsdp2")
@pytest.mark.parametrize(
    ("case", "steps", "refused"),
    [
        ("no limits", 2, [0.0, 0.0]),
        ("within", 2, [0.0, 0.0]),
        ("mismatch", 1, [0.0, 1.0]),
        ("nan", 1, [0.0, 1.0]),
        ("infinite", 1, [0.0, 1.0]),
        ("moved", 0, [1.0, 1.0]),
        ("steep", 0, [1.0, 1.0]),
    ],
)
def test_every_rank_takes_the_same_steps(ranks, case, steps, refused):
    """Only the second mini-batch of rank 1 has the mismatch and the NaN."""
    assert [rank[case]["steps"] for rank in ranks] == [steps, steps]
    assert torch.equal(ranks[0][case]["weights"], ranks[1][case]["weights"])
    for rank in ranks:
        metrics = rank[case]["metrics"]
        assert len(metrics.get("grad_norm", [])) == steps, "of the steps taken alone"
        assert metrics["gate/refused"] == [*refused[:1] * 2, *refused[1:] * 2]


def test_a_refused_step_leaves_the_weights_and_an_allowed_one_is_verls(ranks):
    found = {case: ranks[0][case]["weights"] for case in CASES}
    assert torch.equal(found["within"], found["no limits"])
    assert torch.equal(found["moved"], found["steep"]), "no step at all"
    assert not torch.equal(found["mismatch"], found["moved"]), "the first step was taken"
    assert torch.equal(found["mismatch"], found["nan"])


def test_what_it_was_decided_by_is_the_same_on_every_rank(ranks):
    first, second = (rank["within"]["metrics"] for rank in ranks)
    for name in ("gate/vllm_kl", "gate/policy_kl", "gate/grad_norm"):
        assert first[name] == second[name] and len(first[name]) == 4
    assert first["gate/grad_norm"][::2] == pytest.approx(first["grad_norm"], rel=1e-5), "the norm that verl clips by"
    # Here l_infer is l_old, so both are the same k3.
    assert first["gate/vllm_kl"] == pytest.approx(first["gate/policy_kl"], rel=1e-5)


@pytest.mark.parametrize(("case", "steps"), [("bypass", 2), ("bypass, a gap", 0), ("bypass, later", 2)])
def test_in_bypass_mode_the_first_mini_batch_of_any_rank_decides_for_all(ranks, case, steps):
    """Only one mini-batch of rank 1 has the gap; 0.5 is the limit."""
    assert [rank[case]["steps"] for rank in ranks] == [steps, steps]
    assert torch.equal(ranks[0][case]["weights"], ranks[1][case]["weights"])
    metrics = [{name: values for name, values in rank[case]["metrics"].items() if "/" in name} for rank in ranks]
    measured = {
        name: metrics[0][name] for name in metrics[0] if name.startswith(("vllm_kl/", "correction/", "first_pass/"))
    }
    assert measured == {name: metrics[1][name] for name in measured}
    assert all(len(values) == 2 and values[0] == values[1] for values in measured.values()), "once, as of each rank"
    assert measured["first_pass/refused"] == [float(steps == 0)] * 2
    assert measured["first_pass/tokens"] == [18.0, 18.0], "of both ranks' first mini-batch"
    assert (measured["vllm_kl/k3"][0] > 0.5) is (steps == 0)


def test_a_batch_refused_in_bypass_mode_leaves_the_weights(ranks):
    assert torch.equal(ranks[0]["bypass, a gap"]["weights"], ranks[0]["moved"]["weights"])
    assert not torch.equal(ranks[0]["bypass"]["weights"], ranks[0]["moved"]["weights"])


@pytest.mark.parametrize("case", DROPPING_CASES)
def test_a_step_is_left_out_on_every_rank_if_the_loss_drops_the_tokens_of_all(ranks, case):
    """Adam would move the weights by the moments of the update before."""
    taken = case != "all dropped"
    assert [rank["dropping"][case] for rank in ranks] == [(taken, taken)] * 2


@pytest.mark.shows("undo", "lower_lr", engine="fsdp2")
@pytest.mark.parametrize("case", UNDO_CASES)
def test_an_update_is_taken_back_bit_for_bit_on_every_rank(ranks, case):
    for rank in ranks:
        found = rank[case]
        assert all(holds for holds in found.values() if isinstance(holds, bool)), found
        assert found["moved at half the rate"] == pytest.approx(0.5, rel=0.02) and found["rate"] == 1e-2


@pytest.mark.shows("after_update.trajectories", engine="fsdp2")
@pytest.mark.parametrize("case", UNDO_CASES)
def test_what_an_update_moved_is_scored_again_over_all_ranks(ranks, case):
    distances = [rank[case]["after_update"] for rank in ranks]
    assert distances[0] == distances[1]
    total, tokens = (sum(rank[case]["independently"][i] for rank in ranks) for i in range(2))
    policy_kl, vllm_kl = distances[0]
    assert policy_kl == pytest.approx([total / tokens], rel=1e-5) == vllm_kl, "here l_infer is l_old"


def test_a_step_with_the_log_probs_of_its_own_pass_is_that_of_two_passes(ranks):
    for rank in ranks:
        assert rank["reuse"]["weights"], "bit for bit"
        for found, expected in rank["reuse"]["metrics"].values():
            assert found == expected
        assert rank["reuse"]["self_gap"] == [0.0, 0.0], "of both ranks: the two passes are equal, bit for bit"
    assert ranks[0]["reuse"]["k3"] == ranks[1]["reuse"]["k3"] and ranks[0]["reuse"]["k3"][0] > 0
