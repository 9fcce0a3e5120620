"""Reports of routing that cannot be right, and the runs that stop for it."""

import pytest
import torch
from omegaconf import OmegaConf

from verl_ext.base.errors import HookError
from verl_ext.core.routing import REASONS, STUCK_TOKENS, RouteCounts, RouterSums
from verl_ext.trainer.captured import CapturedRouting


def config(mode="disabled", strategy="fsdp2"):
    engine = "megatron" if strategy == "megatron" else "fsdp_config"
    actor = {"strategy": strategy, engine: {"router_replay": {"mode": mode}}}
    return OmegaConf.create({"actor_rollout_ref": {"actor": actor}})


def of_a_share(share, processes):
    asked = {"stability": {"router_agreement_share": share}}
    agents = {"actor_rollout_ref": {"rollout": {"agent": {"num_workers": processes}}}}
    return OmegaConf.merge(config(), asked, agents)


@pytest.mark.parametrize(("share", "processes", "trajectories"), [(0.5, 1, 20), (0.9, 1, 100), (0.5, 4, 80)])
def test_a_share_of_which_nothing_is_left_out_stops_the_run(share, processes, trajectories):
    asked, enough, one = (
        of_a_share(share, processes),
        RouteCounts(9, 0, {}, compared=trajectories + 1),
        RouteCounts(9, 0, {}, 1),
    )
    captured = CapturedRouting()
    captured.judge_counts(
        RouteCounts(9, 0, {}, compared=trajectories - 1), asked, 1
    )  # chance, or none for this process
    with pytest.raises(HookError, match=rf"_share={share:g}, and each of \d+ trajectories .*; set stability.*=1, or"):
        [captured.judge_counts(one, asked, step) for step in (2, 3)]
    captured = CapturedRouting()
    captured.judge_counts(RouteCounts(9, 0, {}, compared=1, left_out=1), asked, 1)
    captured.judge_counts(enough, asked, 2)
    CapturedRouting().judge_counts(enough, of_a_share(1.0, processes), 1)


def test_rows_that_fill_a_batch_do_not_count_as_compared():
    """One of four trajectories was left out, and verl added one without a generated token."""
    sums = RouterSums.zeros(4, layers=2)
    sums.tokens[0], sums.unknown[1], sums.left_out[2] = 5.0, 3.0, 4.0
    found = RouteCounts.from_sums(sums.pack())
    assert (found.accepted, found.unknown, found.compared, found.left_out) == (5, 3, 2, 1)


def counts(accepted=0, unknown=0, **refused):
    return RouteCounts(accepted, unknown, dict.fromkeys(REASONS, 0) | refused)


def test_each_reason_is_told_the_first_time():
    captured, events = CapturedRouting(), []
    for step, found in enumerate(
        (counts(9), counts(9, repeated=1), counts(8, repeated=2, stuck=10), counts(7, stuck=3))
    ):
        events += captured.judge_counts(found, config(), step).events
    assert [(event.step, event.signal, event.value, event.action) for event in events] == [
        (1, "router/invalid", 0.1, "warn"),
        (2, "router/invalid", 0.6, "warn"),
    ]
    assert events[0].reason.startswith("1 of 10 tokens name an expert twice") and "not compared" in events[0].reason
    assert events[1].reason.startswith("10 of 20 tokens have the experts of every other token")


@pytest.mark.parametrize(
    ("mode", "strategy", "outcome"),
    [
        ("R3", "fsdp2", "The training router chooses their experts."),
        ("R3", "megatron", "verl still replays them; set actor_rollout_ref"),
    ],
)
def test_what_becomes_of_them_depends_on_who_replays(mode, strategy, outcome):
    (event,) = CapturedRouting().judge_counts(counts(9, out_of_range=1), config(mode, strategy), 1).events
    assert outcome in event.reason


@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
@pytest.mark.parametrize(
    ("found", "said"),
    [
        (counts(unknown=6), r"6 of 6 tokens came without routing"),
        (counts(unknown=1, repeated=5), r"1 of 6 tokens came .* 5 of 6 tokens name an expert twice"),
        (counts(out_of_range=6), r"6 of 6 tokens name an expert that the model lacks"),
    ],
)
def test_a_replay_of_nothing_stops_the_run_with_the_remedy(strategy, found, said):
    place = "megatron" if strategy == "megatron" else "fsdp_config"
    setting = rf"actor_rollout_ref.actor.{place}.router_replay.mode"
    match = rf"{setting}=R3 has nothing to replay: {said}.*set {setting}=disabled, or .*moe_backend=triton"
    with pytest.raises(HookError, match=match):
        CapturedRouting().judge_counts(found, config("R3", strategy), 1)


def test_the_remedy_is_the_rollout_engines():
    sglang = OmegaConf.merge(config("R3"), {"actor_rollout_ref": {"rollout": {"name": "sglang"}}})
    with pytest.raises(HookError, match=r"if SGLang's kernel .*engine_kwargs.sglang.moe_runner_backend=triton"):
        CapturedRouting().judge_counts(counts(unknown=6), sglang, 1)


def test_once_a_token_was_accepted_the_run_goes_on():
    captured = CapturedRouting()
    assert captured.judge_counts(counts(1, unknown=5), config("R3"), 1).events == ()
    (event,) = captured.judge_counts(counts(unknown=6), config("R3"), 2).events
    assert event.signal == "router/unknown" and event.value == 1
    assert captured.judge_counts(counts(unknown=6), config("R3"), 3).events == ()


def test_agreement_with_nothing_to_compare_is_told_and_goes_on():
    (event,) = CapturedRouting().judge_counts(counts(unknown=6), config(), 1).events
    assert event.reason == "6 of 6 tokens came without routing. They are not compared."


def test_retractions_are_told_once():
    captured = CapturedRouting()
    assert captured.judge_retracted(0.0, 1).events == ()
    (event,) = captured.judge_retracted(0.25, 2).events
    assert (event.step, event.signal, event.value, event.action) == (2, "router/retracted", 0.25, "warn")
    assert event.reason.startswith("SGLang ran out of KV cache and read the tokens of 25.00% of the trajectories again")
    assert captured.judge_retracted(0.5, 3).events == ()


def test_a_batch_without_generated_tokens_says_nothing():
    assert CapturedRouting().judge_counts(counts(), config("R3"), 1).events == ()
    assert counts().metrics == {}


def test_a_sample_counts_the_tokens_but_the_last_of_each_trajectory():
    """Two MoE layers behind a dense one."""
    generator = torch.Generator().manual_seed(0)
    scores = [torch.rand(n, 3, 16, generator=generator) for n in (5, STUCK_TOKENS + 1, 1)]
    routes = [score.topk(2).indices.to(torch.int16) for score in scores]
    for rows in routes:
        rows[:, 0] = 0
        rows[-1] = 0
    routes[0][1, 2] = 7
    routes[0][2] = 0
    routes[0][3, 1, 0] = -1
    routes[1][:-1, 1] = torch.tensor([3, 4])
    found = RouteCounts.from_routes(routes)
    assert found == RouteCounts(1, 1, {"out_of_range": 1, "repeated": 1, "stuck": STUCK_TOKENS})
    assert found.metrics == {
        "router/unknown": 1 / (STUCK_TOKENS + 4),
        "router/invalid": (STUCK_TOKENS + 2) / (STUCK_TOKENS + 4),
    }


def test_a_sample_of_zeros_is_unknown():
    assert RouteCounts.from_routes([torch.zeros(4, 3, 2, dtype=torch.uint8)]) == counts(unknown=3)
