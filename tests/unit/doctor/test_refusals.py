"""What the installed verl and megatron-core refuse or never read is told before the launch, and a sound twin is told
nothing. Sources: verl issues 3364, 5342, 5354, 7462 and 1352, verl PRs 1555, 2693 and 1026."""

import pytest

from verl_ext.doctor.unread import named_in_verl

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LAYERS = f"model_engine=megatron +{ACTOR}.megatron.override_transformer_config"
MODEL = "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B"
POOL = "reward.reward_model.enable=true reward.reward_model.enable_resource_pool=true"
SEPARATE = f"trainer.v1.trainer_mode=separate_async {ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=8"
SPLIT = f"{ROLLOUT}.disaggregation.enabled=true"
VALIDATES = f"trainer.test_freq=5 {ROLLOUT}.val_kwargs.temperature=0.6"
FULL = f"{LAYERS}.recompute_granularity=full"

# check, overrides, level or None for nothing, what must be in it
CASES = [
    ("refusals", "", None, ""),
    ("refusals", f"{POOL} reward.reward_model.n_gpus_per_node=8", "error", "nnodes"),
    ("refusals", f"{POOL} reward.reward_model.n_gpus_per_node=8 reward.reward_model.nnodes=1", None, ""),
    ("refusals", f"{SPLIT} {ROLLOUT}.data_parallel_size=2", "error", "data_parallel_size=2"),
    ("refusals", "data.train_batch_size=8 +data.gen_batch_size=3", "error", "gen_batch_size=3"),
    ("refusals", "data.train_batch_size=8 +data.gen_batch_size=4", None, ""),
    ("Megatron's layers", LAYERS.split()[0], None, ""),
    ("Megatron's layers", FULL, "error", "recompute_method"),
    ("Megatron's layers", f"{FULL} {LAYERS}.recompute_method=uniform", "error", "recompute_num_layers"),
    ("Megatron's layers", f"{FULL} {LAYERS}.recompute_method=uniform {LAYERS}.recompute_num_layers=1", None, ""),
    (
        "Megatron's layers",
        f"{LAYERS}.recompute_granularity=selective {LAYERS}.recompute_num_layers=1",
        "error",
        "recompute_num_layers",
    ),
    ("Megatron's layers", f"{LAYERS}.recompute_granularity=selective", None, ""),
    ("Megatron's layers", f"{LAYERS}.moe_enable_deepep=true {MODEL}", "error", "flex"),
    (
        "Megatron's layers",
        f"{LAYERS}.moe_enable_deepep=true {LAYERS}.moe_token_dispatcher_type=flex {MODEL}",
        None,
        "",
    ),
    ("Megatron's layers", f"{LAYERS}.moe_permute_fuson=true", "warning", "moe_permute_fusion"),
    ("Megatron's layers", f"{LAYERS}.moe_permute_fuson=true trainer.device=npu", None, ""),
    ("Megatron's layers", f"{LAYERS}.moe_permute_fusion=true", None, ""),
    ("unread settings", "", None, ""),
    ("unread settings", "actor_rollout_ref.nccl_timeout=1200", "warning", "nccl_timeout=1200"),
    ("unread settings", "actor_rollout_ref.nccl_timeout=600", None, ""),  # verl's default
    ("unread settings", "trainer.balance_batch=False", "warning", "balance_batch=False"),
    ("unread settings", "trainer.balance_batch=False trainer.use_v1=False", None, ""),
    ("unread settings", f"{ACTOR}.fsdp_config.offload_policy=True", "warning", "fsdp2"),
    ("unread settings", f"{ACTOR}.fsdp_config.offload_policy=True {ACTOR}.strategy=fsdp2", None, ""),
    ("unread settings", f"{ACTOR}.kl_loss_coef=0.01", "warning", "use_kl_loss"),
    ("unread settings", f"{ACTOR}.kl_loss_coef=0.01 {ACTOR}.use_kl_loss=True", None, ""),
    ("unread settings", f"{ACTOR}.kl_loss_coef=0.01 {ACTOR}.use_kl_loss=False", None, ""),  # its author knows
    ("unread settings", "algorithm.kl_ctrl.kl_coef=0.01", "warning", "use_kl_in_reward"),
    ("unread settings", f"{ACTOR}.use_prefix_grouper=True", "warning", "use_prefix_grouper"),
    ("unread settings", "+actor_rollout_ref.model.lora.rank_of_mine=3 actor_rollout_ref.model.lora.alpha=8", None, ""),
    ("validation", f"{VALIDATES} {ROLLOUT}.val_kwargs.do_sample=False", "warning", "0.6"),
    ("validation", f"{VALIDATES} {ROLLOUT}.val_kwargs.do_sample=True", None, ""),
    ("validation", VALIDATES, None, ""),
    ("unread settings", "critic.ppo_micro_batch_size_per_gpu=2 algorithm.adv_estimator=gae", "warning", "critic"),
    ("unread settings", "algorithm.rollout_correction.rollout_is_threshold=4", "warning", "rollout_is"),
    ("unread settings", f"{ACTOR}.optim.lr=3e-6 data.max_prompt_length=77 {ROLLOUT}.temperature=0.7", None, ""),
]


@pytest.mark.parametrize(("name", "overrides", "level", "said"), CASES)
def test_it_is_told_and_its_twin_is_not(findings, name, overrides, level, said):
    found = [one for one in findings(name, *overrides.split()) if one.level != "ok"]
    assert {one.level for one in found} == ({level} if level else set()), found
    assert said in " ".join(f"{one.found} {one.why}" for one in found)


def test_a_refusal_that_another_check_has_told_is_not_repeated(findings):
    given = f"{SEPARATE} trainer.v1.separate_async.parameter_sync_step=3".split()
    assert any(one.level == "error" for one in findings("sizes", *given))
    assert not findings("refusals", *given)


def test_a_name_is_read_as_an_attribute_a_key_or_by_interpolation():
    words = frozenset({"nccl_timeout", "ppo_mini_batch_size", "train_batch_size", "no_such_word"})
    assert named_in_verl(words) == {"ppo_mini_batch_size", "train_batch_size"}
