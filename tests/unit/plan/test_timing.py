"""The time of a step: the formulas of docs/plan.md written again, and the published runs."""

import math
import statistics
from dataclasses import replace

import pytest

from tests.unit.plan.test_plan import FSDP, MEGATRON
from tools.plan_page import comparisons
from verl_ext.launch.gpus import GPUS
from verl_ext.launch.models import FAMILIES
from verl_ext.plan.memory import plan_memory
from verl_ext.plan.sizes import GUESSED_MEAN
from verl_ext.plan.timing import (
    BANDWIDTH,
    LINK_GB_S,
    MOE_LAYER_MS,
    NETWORK_GB_S,
    NETWORK_LAYER_MS,
    PEAK_SHARES,
    SUM_GB_S,
    SYNC,
    TOKEN_US,
    forward_flops,
    lengths_of,
    plan_timing,
    recomputed_share,
)

DENSE = replace(FSDP, shape=FAMILIES["Qwen2.5-7B"], gpus=8, shards=8, rollout_gpus=8, rollout_tensor=1)


def stages(sizes):
    return plan_timing(sizes, plan_memory(sizes)).stages


@pytest.fixture(scope="module")
def runs():
    return comparisons()


@pytest.mark.parametrize("stage", ["generation", "old log-probs", "update"])
def test_the_half_that_the_rates_were_not_fitted_to_is_planned_within_a_factor_of_1_6(runs, stage):
    factors = [factor for one in runs if not one.fitted and (factor := one.factor(stage))]
    assert len(factors) >= 15
    assert sum(1 / 1.6 <= factor <= 1.6 for factor in factors) >= 0.8 * len(factors)


def test_the_shares_of_that_half_are_within_12_points(runs):
    errors = [max(map(abs, one.share_errors.values())) for one in runs if not one.fitted and one.share_errors]
    assert len(errors) >= 20 and max(errors) <= 12


def test_every_published_run_fits(runs):
    assert [one.run["run"] for one in runs if not one.fits] == []


def test_the_guessed_mean_is_in_the_middle_of_the_runs(runs):
    shares = [float(one.run["mean_response"]) / int(one.run["response"]) for one in runs]
    assert statistics.median(shares) == pytest.approx(GUESSED_MEAN, abs=0.02)


def test_derived_lengths_are_what_the_published_mfu_of_the_fitted_half_says(runs):
    """verl counts 6 operations per active parameter and token, and 12 per layer, head and pair of tokens."""
    found = {}
    for one in (one for one in runs if one.fitted and one.run["lengths"] == "derived" and "update" in one.published):
        run, shape = one.run, FAMILIES[one.run["model"]]
        flops = float(run["mfu"]) * one.published["update"] * int(run["gpus"]) * GPUS[run["gpu"]].sheet.tflops * 1e12
        flops /= int(run["prompts"]) * int(run["n"])
        prompt, mean = float(run["mean_prompt"]), 1000.0
        for _ in range(60):
            square = prompt**2 + 2 * prompt * mean + min(2 * mean**2, mean * int(run["response"]))
            pairs = 12 * shape.layers * shape.heads * shape.head_dim * square
            mean *= flops / (6 * shape.active_parameters * (prompt + mean) + pairs)
        found.setdefault(float(run["mean_response"]), []).append(mean)
    assert len(found) == 3
    for recorded, means in found.items():
        assert statistics.median(means) == pytest.approx(recorded, rel=0.01)


def test_lengths_of_an_exponential_cut_at_its_limit():
    lengths = lengths_of(replace(FSDP, mean_prompt=200, mean_response=500, response=100_000))
    longest = 500 * (math.log(1024) + 0.5772)  # the mean maximum of 1024 of them
    assert lengths.longest == pytest.approx(longest)
    assert lengths.context == pytest.approx(200 + 500) and lengths.total == 700
    assert lengths.attended == pytest.approx((200**2 + 2 * 200 * 500 + 2 * 500**2) / 700)
    cut = lengths_of(replace(FSDP, mean_prompt=200, mean_response=8000, response=8192))
    assert cut.longest == 8192 and cut.context == pytest.approx(200 + 4096)


def test_operations_of_a_forward_pass_by_hand():
    shape = FAMILIES["Qwen2.5-7B"]
    weights = 28 * (3584 * 128 * (2 * 28 + 2 * 4) + 3 * 3584 * 18944) + 152064 * 3584
    assert forward_flops(shape, 1000) == pytest.approx(2 * weights + 28 * 28 * 128 * 2 * 1000)
    tied = replace(shape, tied_embeddings=True)
    assert forward_flops(tied, 1000) == forward_flops(shape, 1000)
    scores = 28 * 28 * 128 * 2 * 1000 / forward_flops(shape, 1000)
    assert recomputed_share(replace(DENSE, recompute=("core_attn",)), 1000) == pytest.approx(scores)
    mlp = 2 * 28 * 3 * 3584 * 18944 / forward_flops(shape, 1000)
    assert recomputed_share(replace(DENSE, recompute=("mlp",)), 1000) == pytest.approx(mlp)
    assert recomputed_share(DENSE, 1000) == 1 and recomputed_share(replace(DENSE, recompute=()), 1000) == 0


@pytest.mark.parametrize(("recompute", "passes"), [(("full",), 4), ((), 3)])
def test_the_update_takes_three_passes_and_what_is_recomputed(recompute, passes):
    sizes = replace(DENSE, recompute=recompute, reference=True)
    update, forward = PEAK_SHARES["H100", "fsdp"]
    flops = forward_flops(sizes.shape, lengths_of(sizes).attended) * 1024 * (1024 + 4096)
    found = stages(sizes)
    assert found["update"] == pytest.approx(passes * flops / (8 * 989e12 * update))
    assert found["old log-probs"] == found["reference"] == pytest.approx(flops / (8 * 989e12 * forward))
    assert stages(replace(sizes, epochs=2, updates=16))["update"] == pytest.approx(2 * found["update"])
    a100 = stages(replace(sizes, gpu=GPUS["A100"].sheet))["update"]
    assert a100 / found["update"] == pytest.approx(989 / 312), "without rates of its own, a GPU has the H100's"


def test_fsdp_waits_for_its_weights_where_a_micro_batch_has_few_tokens():
    many, sizes = 1024 * 5120 / 8 / 16, replace(FSDP, micro_tokens=512)
    micro = 8 * math.ceil(many / 512)
    assert stages(sizes)["update"] == pytest.approx(micro * 8 * FSDP.shape.parameters / (NETWORK_GB_S * 1e9))
    inside = stages(replace(sizes, shards=8))["update"]
    assert inside == pytest.approx(micro * 8 * FSDP.shape.parameters / (LINK_GB_S * 1e9))
    fixed = stages(replace(sizes, micro_rows=2))["update"]  # 8 sequences of a rank and update
    assert fixed == pytest.approx(8 * 4 * 8 * FSDP.shape.parameters / (NETWORK_GB_S * 1e9))


def test_experts_stages_and_gradients_take_time_with_megatron():
    shape = FAMILIES["Qwen3-30B-A3B"]
    sizes = replace(MEGATRON, shape=shape, gpus=32, tensor=2, pipeline=2, expert=8, rollout_tensor=4, rollout_gpus=32)
    own = 1024 * 5120 / 32
    busy = 4 * own * forward_flops(shape, lengths_of(sizes).attended) / (989e12 * PEAK_SHARES["H100", "megatron"][0])
    exchange = 4 * own * 48 * 8 * 2048 * 2 * 2 / (LINK_GB_S * 1e9)
    micro = math.ceil(1024 * 5120 / 8 / 8 / 8192)  # of each of 8 ranks, in each of 8 updates
    local = (shape.parameters - shape.expert_parameters) / 4 + shape.expert_parameters / 16
    sync = 8 * SYNC * 6 * local / (NETWORK_GB_S * 1e9)
    assert stages(sizes)["update"] == pytest.approx((busy + exchange) * (1 + 1 / micro) + sync)
    wide = stages(replace(sizes, expert=16))["update"]
    assert wide > stages(sizes)["update"], "experts on two machines"


def test_generation_reads_weights_at_each_step_and_ends_with_the_longest_answer():
    sizes = replace(DENSE, mean_prompt=64, mean_response=512, sequences=8)
    weights = 2 * DENSE.shape.parameters / (BANDWIDTH * 3350e9)
    longest = 512 * (math.log(8) + 0.5772)
    one = stages(sizes)["generation"]
    assert one == pytest.approx(longest * weights + 512 * TOKEN_US / 1e6)
    slower = replace(sizes, gpu=GPUS["A100"].sheet)
    flops = 2 * DENSE.shape.active_parameters / (312e12 * PEAK_SHARES["H100", "megatron"][0])
    each = DENSE.kv_bytes * (64 + 512) / (BANDWIDTH * 2039e9) + flops
    assert each > TOKEN_US / 1e6
    assert stages(slower)["generation"] == pytest.approx(longest * weights * 3350 / 2039 + 512 * each)
    full = replace(sizes, sequences=100_000)
    memory = plan_memory(full)
    assert plan_timing(full, memory).concurrent == int(memory.kv_tokens / (64 + 512))
    assert plan_timing(replace(full, max_num_seqs=64), memory).concurrent == 64
    few = replace(sizes, sequences=100_000, max_num_seqs=64)
    assert stages(few)["generation"] > 2 * stages(full)["generation"]


def test_a_replica_over_several_machines_pays_for_each_layer():
    shape = FAMILIES["Qwen3-235B-A22B"]
    sizes = replace(FSDP, shape=shape, gpus=256, rollout_gpus=256, rollout_tensor=16)
    sizes = replace(sizes, mean_prompt=64, mean_response=512, sequences=16)
    found, lengths = stages(sizes)["generation"], lengths_of(sizes)
    far = 94 * (MOE_LAYER_MS + NETWORK_LAYER_MS) / 1e3
    each = TOKEN_US / 1e6 + 8 * 94 * 4096 / (SUM_GB_S * 1e9)
    assert found == pytest.approx(lengths.longest * far + 512 * each)
    near = stages(replace(sizes, rollout_tensor=8, per_node=16))["generation"]
    assert near < found
