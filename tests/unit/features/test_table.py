"""The table that is printed once the engines run."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from tests.support.problems import features_of
from verl_ext.base.errors import HookError
from verl_ext.features.feature import Engines
from verl_ext.features.table import StartupRow, print_table, verify
from verl_ext.trainer.trainers import StabilityTrainerSync
from verl_ext.upstream import engine_calls, sglang_server


@pytest.mark.parametrize(
    "setting",
    ["r: warn at val-core/[/math]/acc < 0.5", "r: stop at val-core/[math]/:smile: > 1", "[red]r: warn at a > 1"],
)
def test_what_looks_like_markup_is_printed_as_it_stands(capsys, setting):
    print_table([StartupRow("guard rule", setting, "log and event log")])
    assert setting in capsys.readouterr().out


ACTOR = "actor_rollout_ref.actor"
# By a worker whose loss has nothing of ours.
TOLD = {
    "policy_loss": {"loss_mode": "vanilla"},
    "corrections": {},
    "kl": None,
    "mini_batch": {},
    "first_pass": False,
}
BYPASS = "stability=icepop algorithm.rollout_correction.bypass_mode=true"
LOSS_ASKED_FOR = [
    (BYPASS, {"first_pass": True, "corrections": {"icepop": {}}}, "mismatch metrics (vllm_kl/*)"),
    ("stability=opsm", {"corrections": {"opsm": {"delta": 0.1}}}, "correction (opsm, delta 0.1, stale_only False)"),
    ("stability=llds_loss", {"policy_loss": {"loss_mode": "llds"}}, "policy loss (llds, base vanilla"),
    ("stability.guard.mini_batch.policy_kl=0.1", {"mini_batch": {"policy_kl": 0.1}}, "mini-batch gate (refuse past"),
    (
        f"{ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_type=unbiased",
        {"kl": "unbiased, over l_infer"},
        "KL to the reference (unbiased, over l_infer)",
    ),
]


@pytest.mark.parametrize(("overrides", "report", "said"), LOSS_ASKED_FOR)
def test_a_rank_whose_loss_lacks_something_stops_the_run(compose, overrides, report, said):
    config = compose("actor_rollout_ref.rollout.name=vllm", *overrides.split())
    active, ranks = features_of(config), [TOLD | report, TOLD | report]
    engines = Engines(SimpleNamespace(configure_loss=lambda settings: ranks), [])
    assert verify(active, StabilityTrainerSync, engines)
    ranks[1] = TOLD
    with pytest.raises(HookError) as error:
        verify(active, StabilityTrainerSync, engines)
    assert said in str(error.value) and "a worker's loss does not have it" in str(error.value)


def test_braces_in_the_experiments_name_are_no_place(compose):
    name = ("stability.trajectories.per_step=2", "trainer.experiment_name='a {0} b'")
    config = compose("actor_rollout_ref.rollout.name=vllm", *name)
    rows = verify(features_of(config), StabilityTrainerSync, Engines(None, []))
    assert any("a {0} b" in row.where for row in rows)


@pytest.fixture
def routing_of(compose):
    """routing_of("stability=r2", ..., hooks=what each rank hooked) -> the table's rows about routing."""

    def rows(*overrides, hooks=(("Router", 4), ("Router", 4))):
        config = compose("actor_rollout_ref.rollout.name=vllm", *overrides)
        workers = SimpleNamespace(routing_hooks=lambda: list(hooks), configure_loss=lambda settings: [TOLD, TOLD])
        active = features_of(config)
        return [(row.name, row.setting) for row in verify(active, StabilityTrainerSync, Engines(workers, []))]

    return rows


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("stability=icepop stability.router_agreement=true", [("router agreement", "compute_log_prob")]),
        ("stability=r2", [("routing replay", "R2: update_actor as compute_log_prob")]),
        ("stability=r3", [("routing replay", "R3: both as the rollout")]),
    ],
)
def test_what_is_replayed_is_said(routing_of, overrides, expected):
    rows = routing_of(*overrides.split())
    assert set(expected) <= set(rows)
    assert ("routing replay" in dict(rows)) == ("routing replay" in dict(expected))


def test_ranks_that_hooked_different_routers_stop_the_run(routing_of):
    with pytest.raises(HookError, match="hooked different routers"):
        routing_of("stability=r2", hooks=(("Router", 4), ("Router", 3)))


@pytest.fixture
def servers_of(compose, monkeypatch):
    """servers_of(True, False, ...) starts a run with SGLang and routing, with one server for each value; it decodes
    routing if the value is True."""
    name = ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.enable_rollout_routing_replay=true")
    config = compose("stability=r3", *name)
    workers = SimpleNamespace(routing_hooks=lambda: [("Router", 4)], configure_loss=lambda settings: [TOLD])

    def start(*decoding):
        monkeypatch.setattr(sglang_server, "decodes_routing", lambda server: server)
        active = features_of(config)
        managers = [SimpleNamespace(server_handles=[server]) for server in decoding]
        return verify(active, StabilityTrainerSync, Engines(workers, managers))

    return start


def test_sglang_servers_that_decode_no_routing_stop_the_run(servers_of):
    assert servers_of(True, True)
    with pytest.raises(HookError, match=r"returns routed experts as text.*VERL_USE_EXTERNAL_PLUGINS"):
        servers_of(True, False)


@pytest.fixture
def rounding_of(compose, monkeypatch):
    """rounding_of({"linear": 24}, ...) -> the table's row; each argument is what one worker has rounded."""
    config = compose(
        "actor_rollout_ref.rollout.name=vllm",
        "stability.fake_quantization.format=fp4",
        "stability.fake_quantization.router=true",
    )
    active = features_of(config)
    settings = asdict(active.stability.fake_quantization)

    def row(*rounded, settings=settings):
        reports = [one and {"settings": settings, "rounded": one} for one in rounded]
        monkeypatch.setattr(engine_calls, "call", lambda server, function: reports)
        engines = Engines(None, [SimpleNamespace(server_handles=["server"])])
        (found,) = verify(active, StabilityTrainerSync, engines)
        return found.where

    return row


def test_the_rounded_weights_are_counted(rounding_of):
    row = rounding_of({"linear": 24, "router": 2}, {"linear": 24, "router": 2})
    assert row == "24 linear, 2 router weights in 2 worker(s) of the rollout"


@pytest.mark.parametrize(
    ("rounded", "settings", "said"),
    [
        ([], {}, "a rollout worker reports None"),
        ([{"linear": 24, "router": 2}, None], {}, "a rollout worker reports None"),
        ([{"linear": 24, "router": 2}], {"settings": {"format": "fp8"}}, "reports {'settings': {'format': 'fp8'}"),
        ([{"linear": 24, "router": 0}], {}, "rounds router weights, but the rollout received none"),
        ([{"linear": 24, "router": 2}, {"linear": 0, "router": 0}], {}, "rounds linear weights, but"),
    ],
)
def test_a_worker_that_does_not_round_stops_the_run(rounding_of, rounded, settings, said):
    with pytest.raises(HookError) as error:
        rounding_of(*rounded, **settings)
    assert said in str(error.value) and "set stability.fake_quantization.format=none" in str(error.value)


@pytest.fixture
def adapter_of(compose, monkeypatch):
    """adapter_of(a vLLM worker's report on its LoRA, ...) -> the place where the sync canary acts."""
    lora, canary = "actor_rollout_ref.model.lora_rank=8", "stability.sync_canary.trajectories=8"

    def where(*reports, overrides=(lora, canary)):
        config = compose("actor_rollout_ref.rollout.name=vllm", *overrides)
        active = features_of(config)
        monkeypatch.setattr(engine_calls, "call", lambda server, function: reports)
        engines = Engines(None, [SimpleNamespace(server_handles=["server"])])
        return verify(active, StabilityTrainerSync, engines)[-1].where

    return where


TAKEN = {"adapters": 1, "used": 14, "unused": []}


def test_the_modules_that_took_a_lora_are_counted(adapter_of):
    assert adapter_of(TAKEN, TAKEN) == "PPOTrainerSync.on_step_end; 14 modules with the LoRA in 2 vLLM worker(s)"


def test_no_worker_is_asked_where_full_weights_are_sent(adapter_of):
    canary, merged = "stability.sync_canary.trajectories=8", "++actor_rollout_ref.model.lora.merge=true"
    assert adapter_of(overrides=(canary,)) == "PPOTrainerSync.on_step_end"
    lora = "actor_rollout_ref.model.lora_rank=8"
    assert adapter_of(overrides=(canary, lora, merged)) == "PPOTrainerSync.on_step_end"


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([], "received no adapter"),
        ([TAKEN, None], "received no adapter"),
        ([TAKEN | {"adapters": 0}], "received no adapter"),
        ([TAKEN | {"unused": list("abcdef")}], "no modules for 6 names of the LoRA, such as a, b, c, d: it would"),
    ],
)
def test_a_lora_that_vllm_does_not_take_stops_the_run(adapter_of, reports, said):
    with pytest.raises(HookError) as error:
        adapter_of(*reports)
    assert said in str(error.value) and error.value.fix == ("++actor_rollout_ref.model.lora.merge=true",)
