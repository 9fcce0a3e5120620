"""The table that is printed once the engines stand."""

from types import SimpleNamespace

import pytest

from verl_ext.errors import HookError
from verl_ext.settings.stability import stability_config
from verl_ext.trainer.active import read_active
from verl_ext.trainer.startup import Engines, Feature, print_table, verify
from verl_ext.trainer.trainers import StabilityTrainerSync


@pytest.mark.parametrize(
    "setting",
    ["r: warn at val-core/[/math]/acc < 0.5", "r: stop at val-core/[math]/:smile: > 1", "[red]r: warn at a > 1"],
)
def test_what_looks_like_markup_is_printed_as_it_stands(capsys, setting):
    print_table([Feature("guard rule", setting, "log and event log")])
    assert setting in capsys.readouterr().out


@pytest.fixture
def routing_of(compose):
    """routing_of("stability=r2", ..., hooks=what each rank hooked) -> the table's rows about routing."""

    def rows(*overrides, hooks=(("Router", 4), ("Router", 4))):
        config = compose("actor_rollout_ref.rollout.name=vllm", *overrides)
        told = {"policy_loss": {"loss_mode": "vanilla"}, "kl": None, "mini_batch": {}, "router_shift": None}
        workers = SimpleNamespace(routing_hooks=lambda: list(hooks), configure_loss=lambda settings: [told, told])
        active = read_active(config, stability_config(config.stability))
        return [(row.name, row.setting) for row in verify(active, StabilityTrainerSync, Engines(workers, []))]

    return rows


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["stability=icepop", "stability.router_agreement=true"], [("router agreement", "compute_log_prob")]),
        (["stability=r2"], [("routing replay", "R2: update_actor as compute_log_prob")]),
        (["stability=r3"], [("routing replay", "R3: both as the rollout")]),
    ],
)
def test_what_is_replayed_is_said(routing_of, overrides, expected):
    rows = routing_of(*overrides)
    assert set(expected) <= set(rows)
    assert ("routing replay" in dict(rows)) == ("routing replay" in dict(expected))


def test_ranks_that_hooked_different_routers_stop_the_run(routing_of):
    with pytest.raises(HookError, match="hooked different routers"):
        routing_of("stability=r2", hooks=(("Router", 4), ("Router", 3)))
