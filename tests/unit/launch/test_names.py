"""Names that verl enumerates, read from the installed sources, and similar ones."""

from types import SimpleNamespace

import pytest

from verl_ext.launch import names
from verl_ext.launch.names import TABLE, known_names, similar, similar_keys, unknown_names

ACTOR, ROLLOUT, TRAINER = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "trainer"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
NEEDED = (f"{ROLLOUT}.name=vllm", "algorithm.adv_estimator=grpo")


@pytest.fixture
def problems(compose, monkeypatch):
    monkeypatch.delenv(names.MODULES, raising=False)
    return lambda *overrides: list(unknown_names(compose(*NEEDED, *overrides)))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.setting} of {row.package}")
def test_the_sources_still_list_the_names(row):
    found = names._names_in(row.package, row.files, row.pattern)
    assert found or not names.package_folder(row.package)
    assert not found & {"language_model", "value_model", "full", "verl"}  # text beside the names


def test_verls_registries_are_these(compose):
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, AdvantageEstimator, get_policy_loss_fn
    from verl.utils.tracking import Tracking

    assert known_names("algorithm.adv_estimator") >= {one.value for one in AdvantageEstimator}
    verls = {name for name, loss in POLICY_LOSS_REGISTRY.items() if loss.__module__ == get_policy_loss_fn.__module__}
    assert known_names(LOSS) >= verls > {"vanilla"}
    assert known_names("reward.reward_manager.name") == {*REWARD_MANAGER}
    assert known_names("trainer.logger") == {*Tracking.supported_backend, "tracking"}


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("algorithm.adv_estimator=grop", "grpo"),
        (f"{LOSS}=gsppo", "gspo"),
        (f"{LOSS}=clip-cov", "clip_cov"),
        (f"{ACTOR}.loss_agg_mode=token_mean", "token-mean"),
        (f"{ACTOR}.strategy=megtron", "megatron"),
        (f"{ROLLOUT}.name=vlm", "vllm"),
        (f"{ROLLOUT}.mode=sync", "async"),
        (f"{ROLLOUT}.dtype=bfloat61", "bfloat16"),
        (f"{ROLLOUT}.load_format=dummy_dtensor", "dummy"),
        (f"{ROLLOUT}.agent.default_agent_loop=tool_agnt", "tool_agent"),
        (f"{ROLLOUT}.checkpoint_engine.backend=ncll", "nccl"),
        ("reward.reward_manager.name=daop", "dapo"),
        (f"{ACTOR}.optim.lr_scheduler_type=cosin", "cosine"),
        ("algorithm.rollout_correction.rollout_is=tokens", "token"),
        ("trainer.resume_mode=disabled", "disable"),
    ],
)
def test_a_misspelt_name_is_an_error_and_its_fix_makes_it_go_away(problems, override, near):
    setting = override.partition("=")[0]
    (problem,) = problems(override)
    assert (problem.level, problem.fix) == ("error", (f"{setting}={near}",))
    assert problem.found == f"{override} is not known" and problem.why == f"similar: {near}"
    assert not problems(override, *problem.fix)


@pytest.mark.parametrize(("old", "now"), [("token", "token_k1"), ("geometric", "seq_mean_k1")])
def test_a_name_of_an_older_verl_has_its_new_one_as_fix(problems, old, now):
    setting = "algorithm.rollout_correction.rollout_rs"
    (problem,) = problems(f"{setting}={old}")
    assert (problem.level, problem.fix) == ("error", (f"{setting}={now}",))
    assert not problems(*problem.fix)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.v1.trainer_mode=asnyc", "similar: colocate_async, separate_async"),
        (f"{ROLLOUT}.name=hf", "choose one of: sglang, trtllm, vllm"),
        ("reward.reward_manager.name=prime", "choose one of: dapo, gdpo, naive, rate_limited, remote"),
        ("trainer.logger=[console,wanbd]", "similar: wandb"),
        ("algorithm.rollout_correction.rollout_rs='token_k1,token_k9'", "similar: token_k1, token_k2, token_k3"),
    ],
)
def test_several_similar_names_or_none_have_no_fix(problems, override, said):
    (problem,) = problems(override)
    assert (problem.level, problem.why, problem.fix) == ("error", said, ())


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model_engine=megatron"],
        ["model_engine=veomni"],
        [f"{ROLLOUT}.name=sglang"],
        [f"{LOSS}=icepop"],
        ["algorithm.adv_estimator=qae"],
        [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=k3+"],
        [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=unbiased"],
        ["reward.reward_manager.source=importlib", "reward.reward_manager.name=MyManager"],
        ["algorithm.rollout_correction.rollout_rs='token_k1,seq_max_k2'"],
        ["trainer.logger=console"],
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/c/global_step_5"],
        [f"{ACTOR}.optim.lr='1e-6'", "trainer.max_actor_ckpt_to_keep=null"],
        [f"+{ROLLOUT}.engine_kwargs.vllm.seed=abc"],
    ],
)
def test_known_names_have_no_problem(problems, overrides):
    assert problems(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "level"),
    [
        ([f"{LOSS}=mine", "+stability.plugins=[mine]"], "note"),
        ([f"{LOSS}=mine", "actor_rollout_ref.model.external_lib=mine"], "note"),
        ([f"{ROLLOUT}.agent.default_agent_loop=mine", f"{ROLLOUT}.agent.agent_loop_config_path=mine.yaml"], "note"),
        ([f"{ROLLOUT}.name=mine", "+stability.plugins=[mine]"], "error"),  # verl reads no such plugin's engine
        ([f"{ACTOR}.kl_loss_type=low_var"], "warning"),  # without a KL loss, verl does not read it
        ([f"{ACTOR}.kl_loss_type=full", f"{ACTOR}.use_kl_loss=True"], "error"),  # verl has not implemented it
        (["trainer.resume_mode=resume_path"], "error"),
    ],
)
def test_the_level_depends_on_who_reads_the_name(problems, overrides, level):
    assert [problem.level for problem in problems(*overrides)] == [level]


def test_what_verl_imports_besides_may_register_names(problems, monkeypatch):
    engine, estimator = "actor_rollout_ref.rollout.name=mine", "algorithm.adv_estimator=mine"
    assert [problem.level for problem in problems(engine)] == ["error"]
    with monkeypatch.context() as patched:
        patched.setenv(names.MODULES, "mine")
        assert [problem.level for problem in problems(f"{LOSS}=mine", engine, estimator)] == ["note"] * 3
    monkeypatch.setattr(
        names, "entry_points", lambda group: [SimpleNamespace(name="verl_ext"), SimpleNamespace(name="b")]
    )
    (problem,) = problems(engine)
    assert problem.level == "note" and "the plugin b" in problem.why


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("trainer.total_training_steps=abc", ()),
        ("trainer.total_training_steps=None", ("trainer.total_training_steps=null",)),
        (f"{ACTOR}.optim.lr=1e-6x", ()),
        (f"{ACTOR}.use_kl_loss=no", (f"{ACTOR}.use_kl_loss=false",)),
        (f"{ACTOR}.use_dynamic_bsz=Ture", (f"{ACTOR}.use_dynamic_bsz=true",)),
    ],
)
def test_a_text_in_the_place_of_a_number_or_a_switch(problems, override, fix):
    (problem,) = problems(override)
    assert (problem.level, problem.fix) == ("error", fix)
    assert problem.found.startswith(f"{override} is n")


def test_a_package_that_is_not_installed_knows_every_name(problems, monkeypatch):
    names._names_in.cache_clear()
    folder = names.package_folder
    monkeypatch.setattr(names, "package_folder", lambda name: None if name == "vllm" else folder(name))
    try:
        assert problems(f"{ROLLOUT}.dtype=bfloat61") == []
    finally:
        names._names_in.cache_clear()


def test_words_are_compared_too():
    assert similar("asnyc", ["colocate_async", "sync", "one_step_off"]) == ["colocate_async"]
    assert similar("total_step", ["total_epochs", "total_training_steps"]) == ["total_training_steps"]
    assert similar("hf", ["sglang", "vllm"]) == []


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("stabilty", ["stability"]),
        ("stabilty.guard.level", ["stability.guard.level"]),
        ("recpie", ["recipe"]),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpuu", [f"{ACTOR}.ppo_micro_batch_size_per_gpu"]),
        ("actor_rolout_ref.actor.strategy", [f"{ACTOR}.strategy"]),
        ("trainer.nodes", ["trainer.nnodes"]),
        (f"{ACTOR}.lr", [f"{ACTOR}.optim.lr", "critic.optim.lr"]),  # at another place
        ("env.seed", []),
        ("max_turns", []),
    ],
)
def test_similar_keys(compose, key, near):
    assert similar_keys(key, compose(*NEEDED)) == near
