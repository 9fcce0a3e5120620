"""What routing replay does to a real run: without, with R2 and with R3, on a model whose experts matter.

The recipe's random experts add little to what they are added to. With eight times as large ones, another expert is
another token, as in a trained model. Training in float32 keeps the rounding of bf16 log-probabilities out of vllm-kl.
"""

from statistics import mean

import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

FLOAT32 = (
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=fp32",
    "actor_rollout_ref.actor.optim.lr=1e-5",  # the gap is the engines', not the policy's movement
)
REPLAY = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"
MODES = {
    "disabled": ("stability=none", "stability.metrics=true", "stability.router_agreement=true"),
    "R2": ("stability=r2",),
    "R3": ("stability=none", "stability.metrics=true", f"{REPLAY}=R3"),
}


@pytest.fixture(scope="module")
def runs(train_in, assets, tmp_path_factory):
    """Mode -> the finished run."""
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
    model = f"actor_rollout_ref.model.path={folder}"
    return {
        mode: train_in(tmp_path_factory.mktemp(mode), *settings, model, *FLOAT32, steps=3)
        for mode, settings in MODES.items()
    }


def average(finished, name):
    return mean(step[name] for step in finished.steps)


def test_all_three_train(runs):
    for mode, finished in runs.items():
        assert finished.code == 0, f"{mode}: {finished.tail}"
        assert [step["training/global_step"] for step in finished.steps] == [1, 2, 3]
        assert all(torch.isfinite(torch.tensor(step["actor/grad_norm"])) for step in finished.steps)


def test_the_start_up_table_says_what_is_replayed(runs):
    assert "routing replay" not in runs["disabled"].console
    assert "R2: update_actor as compute_log_prob" in runs["R2"].console
    assert "R3: both as the rollout" in runs["R3"].console


def test_r3_uses_the_experts_of_the_rollout(runs):
    assert average(runs["disabled"], "router/agreement") < 0.995
    assert average(runs["R2"], "router/agreement") < 0.995
    for step in runs["R3"].steps:
        assert step["router/agreement"] == step["router/exact_match"] == 1.0
        assert step["router/any_layer_differs"] == step["router/unknown"] == 0
        # What the training router would have chosen still differs.
        assert 0.9 < step["router/own_agreement"] < 0.9999
        assert 0.9 < step["actor/router_own_agreement"] < 0.9999


def test_r3_takes_the_experts_share_out_of_vllm_kl(runs):
    without, with_r3 = (average(runs[mode], "vllm_kl/k3") for mode in ("disabled", "R3"))
    assert with_r3 < without / 5


def test_r2_keeps_the_experts_of_compute_log_prob(runs):
    """The first update of a step starts from the old policy: its routers would choose the same."""
    for step in runs["R2"].steps:
        assert step["actor/router_own_agreement"] > 0.999
        assert step["router/own_agreement"] == step["router/agreement"]


def test_where_engines_choose_differently_is_reported(runs):
    for step in runs["disabled"].steps:
        assert step["router/margin_differs"] < step["router/margin_equal"]  # near ties are what flips
        assert step["router/gap_differs"] > step["router/gap_equal"]
        assert step["router/disagreement_gap_correlation"] > 0.1
        assert 0 <= step["router/first_differing_layer"] <= 3
        shares = [step[f"router/first_differs/layer_{layer:02d}"] for layer in range(4)]
        assert sum(shares) == pytest.approx(step["router/any_layer_differs"])
        assert any(name.startswith("router/agreement/prob/") for name in step)
