"""Effects of routing replay on a real run: without, with R2 and with R3 in turn, on a model whose experts matter.

The recipe's random experts add little to the residual. With experts eight times as large, another expert gives another
token, as in a trained model. Training in float32 keeps the rounding of bf16 log-probabilities out of vllm-kl.
"""

import re
from statistics import mean

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.stack.replaying import BROKEN, BYPASSED, MOVED, SCHEDULE
from tests.stack.running import SMALL, run

pytestmark = pytest.mark.e2e

SETTINGS = (
    "stability=none",
    "stability.metrics=true",
    "stability.router_agreement=true",  # R3 brings it by itself, but for its own steps alone
    "actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=fp32",
    "actor_rollout_ref.actor.optim.lr=1e-9",  # the gap is the engines': a rollout in bf16 loses a part of each update
)


@pytest.fixture(scope="module")
def model(assets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("large_experts")
    for file in (assets / "model").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    down = [name for name in weights if ".experts." in name and name.endswith("down_proj.weight")]
    assert down
    save_file(
        {name: value * 8 if name in down else value for name, value in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


@pytest.fixture(scope="module")
def finished(assets, model, stack, tmp_path_factory):
    where = (f"assets={assets}", f"actor_rollout_ref.model.path={model}")
    steps = f"trainer.total_training_steps={len(SCHEDULE)}"
    arguments = ["-m", "tests.stack.replaying", *SMALL, *where, *SETTINGS, steps]
    return run(arguments, tmp_path_factory.mktemp("replaying"), stack)


@pytest.fixture(scope="module")
def steps(finished):
    """Mode -> the metrics of its steps."""
    *before, last = SCHEDULE
    assert last == MOVED and len(finished.steps) == len(before), finished.tail
    return {mode: [step for step, now in zip(finished.steps, before, strict=True) if now == mode] for mode in before}


def test_routes_that_moved_on_the_way_to_the_update_end_the_run(finished, steps):
    assert finished.code == 1
    assert all(step["router/checked"] == 1 for mode in ("disabled", "R2", "R3") for step in steps[mode])
    (error,) = {line for line in finished.console.splitlines() if line.startswith("verl_ext: error:")}
    assert re.search(r"trajectory of \d+ tokens that begins with \[.*\] is not what its rollout captured", error)


def average(steps, name):
    return mean(step[name] for step in steps)


def test_every_step_trains(finished, steps):
    assert "R3: both as the rollout" in finished.console
    assert all(step["actor/grad_norm"] > 0 for step in finished.steps)
    assert all(torch.isfinite(torch.tensor(step["actor/grad_norm"])) for step in finished.steps)


def test_r3_uses_the_experts_of_the_rollout(steps):
    assert average(steps["disabled"], "router/agreement") < 0.995
    assert average(steps["R2"], "router/agreement") < 0.995
    for step in steps["R3"]:
        assert step["router/agreement"] == step["router/exact_match"] == 1.0
        assert step["router/any_layer_differs"] == step["router/unknown"] == 0
        # What the training router would have chosen still differs.
        assert 0.9 < step["router/own_agreement"] < 0.9999
        assert 0.9 < step["actor/router_own_agreement"] < 0.9999


def test_routing_that_no_router_chooses_is_refused_and_told_once(finished, steps):
    (broken,) = steps[BROKEN]
    assert 0.3 < broken["router/invalid"] < 0.7
    assert broken["router/agreement"] == 1.0 and broken["router/unknown"] == 0
    assert all(step["router/invalid"] == 0 for mode in steps if mode != BROKEN for step in steps[mode])
    assert finished.console.count("name an expert twice in a layer") == 1


def test_r3_takes_the_experts_share_out_of_vllm_kl(steps):
    without, with_r3 = (average(steps[mode], "vllm_kl/k3") for mode in ("disabled", "R3"))
    assert with_r3 < without / 20


def test_r3_in_bypass_mode_is_replayed_in_the_update_whose_gap_is_measured(steps):
    (bypassed,) = steps[BYPASSED]
    assert 0.9 < bypassed["actor/router_own_agreement"] < 0.9999
    assert bypassed["vllm_kl/k3"] < average(steps["disabled"], "vllm_kl/k3") / 20
    assert bypassed["router/unknown"] == bypassed["router/invalid"] == 0
    assert bypassed["router/agreement"] == 1.0 and 0.9 < bypassed["router/own_agreement"] < 0.9999


def test_r2_keeps_the_experts_of_compute_log_prob(steps):
    """The first update of a step starts from the old policy, so its routers would choose the same experts."""
    for step in steps["R2"]:
        assert step["actor/router_own_agreement"] > 0.999
        assert step["router/own_agreement"] == step["router/agreement"]


def test_where_engines_choose_differently_is_reported(steps):
    for step in steps["disabled"]:
        assert step["router/margin_differs"] < step["router/margin_equal"]  # near ties are what flips
        assert step["router/gap_differs"] > step["router/gap_equal"]
        assert step["router/disagreement_gap_correlation"] > 0.1
        assert 0 <= step["router/first_differing_layer"] <= 3
        shares = [step[f"router/first_differs/layer_{layer:02d}"] for layer in range(4)]
        assert sum(shares) == pytest.approx(step["router/any_layer_differs"])
        assert any(name.startswith("router/agreement/prob/") for name in step)
