"""The gate and the undo on two ranks of verl's Megatron engine: the ranks decide alike, and an update is taken back bit
for bit with each kind of megatron-core's optimizer."""

import json

import pytest

from tests.stack.megatron_engine import run_ranks
from tests.stack.megatron_gate import CASES
from tests.stack.megatron_recipes import make_model
from tests.stack.small_models import save_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def ranks(stack, tmp_path_factory):
    """Case -> what each rank found."""
    folder = tmp_path_factory.mktemp("megatron_gate")
    save_model(folder / "qwen3" / "model", even=True)
    make_model(folder / "moonlight", "moonlight")
    output = run_ranks(stack, "tests.stack.megatron_gate", "judge_and_undo", 2, folder)
    found = [{line["case"]: line for line in map(json.loads, lines)} for lines in output]
    assert [list(rank) for rank in found] == [list(CASES)] * 2
    return {case: [rank[case] for rank in found] for case in CASES}


@pytest.mark.shows("undo", "lower_lr", engine="megatron")
@pytest.mark.parametrize("case", CASES)
def test_an_update_is_taken_back_bit_for_bit_on_every_rank(ranks, case):
    for found in ranks[case]:
        for what in (
            "the first, before which the optimizer held nothing",
            "made again, it is the same",
            "one with moments",
            "given up before",
            "nothing is kept",
        ):
            assert found[what], what
        assert found["moved at half the rate"] == pytest.approx(0.5, rel=0.02) and found["rate"] == 1e-2
        assert found["buffers moved"] is (case == "float32 DP2, a bias of the routers")
        assert found["offloaded"] is ("offloaded" in case)


@pytest.mark.shows("grad_norm", engine="megatron")
@pytest.mark.parametrize("case", CASES)
def test_the_norm_judged_is_the_one_that_verl_clips_by_and_reading_it_changes_nothing(ranks, case):
    for norms in (found["norms"] for found in ranks[case]):
        assert norms["wide, taken back"] and norms["none, taken back"]
        assert norms["an allowed one is verl's"] and norms["a refused one leaves the weights"]
    gathered = [found["norms"] for found in ranks[case] if found["outputs"]]
    assert gathered and all(one == gathered[0] for one in gathered)
    every = len(gathered)  # verl gathers a list of each rank's
    judged, clipped, refused = gathered[0]["wide"]
    assert judged[::every] == pytest.approx(clipped, rel=1e-6) and min(clipped) > 0
    assert refused == [0.0] * 2 * every and gathered[0]["none"] == [None, clipped, refused]
    judged, clipped, refused = gathered[0]["narrow"]
    assert refused == [1.0] * 2 * every and clipped is None and judged[0] == gathered[0]["wide"][0][0]


@pytest.mark.shows("after_update.trajectories", engine="megatron")
@pytest.mark.parametrize("case", CASES)
def test_what_an_update_moved_is_scored_again_over_all_ranks(ranks, case):
    policy_kl, vllm_kl = next(found["after_update"] for found in ranks[case] if found["outputs"])
    total, tokens = (sum(found["independently"][i] for found in ranks[case]) for i in range(2))
    assert policy_kl == pytest.approx([total / tokens], rel=1e-5) == vllm_kl, "here l_infer is l_old"


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_left_out_if_the_loss_drops_every_token(ranks, case):
    """Adam would move the weights by the moments of the update before."""
    for found in ranks[case]:
        for what in ("all dropped", "all dropped, with a KL", "no advantage"):
            moved, reported = found["dropping"][what]
            taken = what != "all dropped"
            assert moved is taken and reported is (taken if found["outputs"] else None), what


@pytest.mark.parametrize("case", CASES)
def test_a_step_with_the_log_probs_of_its_own_pass_is_that_of_two_passes(ranks, case):
    for found in ranks[case]:
        assert found["reuse"]["weights"], "bit for bit"
        assert all(ours == of_two_passes for ours, of_two_passes in found["reuse"]["metrics"].values())
        assert not any(found["reuse"]["self_gap"] or ()), "the two passes are equal, bit for bit"
    assert any(found["reuse"]["self_gap"] is not None for found in ranks[case])
    assert any(found["reuse"]["k3"] for found in ranks[case])
