"""Settings that verl's config does not have: similar ones, those that verl reads all the same, and those that moved."""

import pytest

from verl_ext.doctor.checks import CHECKS, Context
from verl_ext.doctor.hooks import fit_presets
from verl_ext.launch.command_line import compose as compose_launch
from verl_ext.launch.refused import is_plain, is_read

ACTOR, ROLLOUT, TRAINER = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "trainer"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
NEEDED = (f"{ROLLOUT}.name=vllm", "algorithm.adv_estimator=grpo")


@pytest.fixture
def told():
    """told(*overrides) -> what the check `config` finds on this command line."""

    def find(*overrides):
        composed = compose_launch([*NEEDED, *overrides])
        run = Context({}, config=composed.config, refused=composed.problems)
        run.overrides = [*NEEDED, *overrides]
        if run.config is not None:
            fit_presets(run)
        return list(CHECKS["config"](run))

    return find


@pytest.mark.parametrize(
    ("override", "near", "fix"),
    [
        ("stabilty=moe", "stability", ("~stabilty", "stability=moe")),
        ("stabilty.guard.level=1", "stability.guard.level", ("~stabilty.guard.level", "stability.guard.level=1")),
        ("trainer.nodes=2", "trainer.nnodes", ("~trainer.nodes", "trainer.nnodes=2")),
        (
            f"{ACTOR}.clip_ratio_hgh=0.3",
            f"{ACTOR}.clip_ratio_high",
            (f"~{ACTOR}.clip_ratio_hgh", f"{ACTOR}.clip_ratio_high=0.3"),
        ),
        ("trainer.total_step=5", "trainer.total_training_steps", ()),  # not a letter or two
        (f"{ROLLOUT}.agent.default_agent_lop=mine", f"{ROLLOUT}.agent.default_agent_loop", ()),  # verl has no such one
        ("recipe=qwen3_30b_a3", "qwen3_30b_a3b", ("recipe=qwen3_30b_a3b",)),
        ("model_engine=megtron", "megatron", ("model_engine=megatron",)),
        ("stability=iceop", "icepop", ("stability=icepop",)),
    ],
)
def test_a_misspelt_setting_gets_the_similar_one(told, override, near, fix):
    (finding,) = told(override)
    assert (finding.level, finding.fix) == ("error", fix)
    assert f"similar: {near}" in finding.why and "leave" not in finding.why
    assert not told(*[override] * any(one.startswith("~") for one in fix), *fix)


def test_a_similar_setting_is_not_set_twice(told):
    (finding,) = told("trainer.nodes=2", "trainer.nnodes=3")
    assert finding.fix == ()


def test_only_what_resembles_nothing_is_to_be_left_out(told):
    gone = ("retriever.topk", "max_turns", f"{ACTOR}.fsdp_config.grad_offload")
    (finding,) = told(*(f"{key}=2" for key in gone))
    assert ", ".join(gone) in finding.found and "leave them out" in finding.why
    assert finding.fix == (f"~{gone[-1]}",), "which was verl's; code of the user's own may read the others"
    assert not told(f"{gone[-1]}=2", *finding.fix)


@pytest.mark.parametrize(
    "override",
    [
        f"{ROLLOUT}.agent.agent_loop_manager_class=a.B",
        f"{ROLLOUT}.custom.runner.mode=1",
        "reward.custom_reward_function.reward_kwargs.scale=2",
        f"{OVERLONG}.len=5",
        f"{ACTOR}.ppo_infer_micro_batch_size_per_gpu=3",  # a field of a base class
    ],
)
def test_what_verl_reads_with_a_plus_is_not_called_unread(told, override):
    (finding,) = told(override)
    assert finding.level == "error" and "nothing reads" not in finding.why
    assert not finding.fix and not told(f"++{override}")  # what is added leaves the refused one


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (f"model_engine=megatron {ACTOR}.router_replay.mode=R3", {f"++{ACTOR}.megatron.router_replay.mode=R3"}),
        (f"{ACTOR}.router_replay.mode=R2", {f"++{ACTOR}.fsdp_config.router_replay.mode=R2"}),
        (
            "async_training.trigger_parameter_sync_step=3",
            {"++trainer.v1.separate_async.parameter_sync_step=3", "++trainer.v1.trainer_mode=separate_async"},
        ),
        ("async_training.partial_rollout=True", {"trainer.v1.trainer_mode=separate_async"}),
        ("rollout.nnodes=2", {f"++{ROLLOUT}.nnodes=2"}),
        ("reward_model.reward_manager.name=dapo", {"++reward.reward_manager.name=dapo"}),
        (f"env.rollout.n=4 {ROLLOUT}.n=1", {f"++{ROLLOUT}.n=4"}),  # verl-agent's group, beside which n is 1
        ("reward_model.overlong_buffer.enable=True data.max_response_length=64", {f"++{OVERLONG}.enable=True"}),
    ],
)
def test_a_setting_that_moved_gets_its_new_place(told, overrides, fix):
    fixes = [override for finding in told(*overrides.split()) for override in finding.fix]
    assert {override for override in fixes if not override.startswith("~")} == fix
    assert "error" not in {one.level for one in told(*overrides.split(), *fixes)}, "what verl refuses is taken back"


@pytest.mark.parametrize(
    ("override", "level"),
    [
        ("+stabilty=moe", "warning"),
        ("+trainer.total_training_step=5", "warning"),
        ("+trainer.mine=5", "warning"),
        (f"+{ROLLOUT}.agent.agent_loop_manager_class=a.B", None),
        ("+stability=moe", None),
    ],
)
def test_a_plus_does_not_hide_a_misspelt_setting(told, override, level):
    assert [finding.level for finding in told(override)] == ([level] if level else [])


@pytest.mark.parametrize("sign", ["", "+"])
def test_the_fix_of_a_misspelt_setting_keeps_its_value(told, sign):
    override = f"{sign}{ROLLOUT}.temprature=0.9"
    (finding,) = told(override)
    assert finding.fix == (f"~{ROLLOUT}.temprature", f"{ROLLOUT}.temperature=0.9")
    config = compose_launch([*NEEDED, override, *finding.fix]).config
    assert config.actor_rollout_ref.rollout.temperature == 0.9 and "temprature" not in config.actor_rollout_ref.rollout


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (("trainer.nnodes=1", "trainer.nnodes=2"), "1, then 2"),
        (("trainer.nnodes=2", "++trainer.nnodes=1", "trainer.nnodes=2"), "2, then 1, then 2"),
        (("trainer.nnodes=2", "trainer.nnodes=2", "trainer.val_only=True", "trainer.val_only=true"), ""),
        (("+data.mine={a:1}", "+data.mine={b:2}"), ""),  # which Hydra adds up
        (("+data.mine=1", "~data.mine"), ""),
    ],
)
def test_a_setting_with_two_values_has_the_last(told, overrides, values):
    found = [one for one in told(*overrides) if one.level == "note"]
    assert [one.found.partition(": ")[2] for one in found] == ([values] if values else [])
    if values:
        config = compose_launch([*NEEDED, *overrides]).config
        assert "the last" in found[0].why and str(config.trainer.nnodes) == values[-1]


def test_fields_of_dataclasses_are_read(compose):
    config = compose(*NEEDED)
    assert is_read(f"{ROLLOUT}.quantization", config) and not is_read(f"{ROLLOUT}.quantisation", config)
    assert not is_read("trainer.mine", config)
    assert is_read("reward.reward_kwargs.x", config) and not is_read("trainer.hf_kwargs.x", config)


@pytest.mark.parametrize("value", [1, 0.5, False, "grpo", "/a/b-c.py"])
def test_plain_values_are_offered(value):
    assert is_plain(value)


@pytest.mark.parametrize("value", [None, "null", "a b", "$(x)", "a;b", "${x}", ""])
def test_other_text_is_not_offered(value):
    assert not is_plain(value)
