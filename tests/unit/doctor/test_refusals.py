"""What the sources of verl and megatron-core say about settings; test_hazards.py has the launches."""

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import OmegaConf

from verl_ext.doctor.reads import is_read_below, without_reader

ROLLOUT = "actor_rollout_ref.rollout"
SEPARATE = f"trainer.v1.trainer_mode=separate_async {ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=8"


def test_a_refusal_has_verls_words_and_the_settings_that_it_reads(findings):
    (found,) = findings("refusals", "data.train_batch_size=8", "data.gen_batch_size=3")
    assert found.found == "data.train_batch_size=8, data.gen_batch_size=3"
    assert "must be a positive multiple" in found.why


def test_a_refusal_that_another_check_has_told_is_not_repeated(findings):
    given = f"{SEPARATE} trainer.v1.separate_async.parameter_sync_step=3".split()
    assert any(one.level == "error" for one in findings("sizes", *given))
    assert not findings("refusals", *given)


def test_a_misspelt_setting_of_the_layers_gets_the_similar_one(findings):
    layers = "+actor_rollout_ref.actor.megatron.override_transformer_config"
    (found,) = findings("Megatron's layers", "model_engine=megatron", f"{layers}.moe_permute_fuson=true")
    assert "moe_permute_fusion" in found.why


def test_a_name_is_read_of_its_own_node_or_of_what_may_be_any():
    nodes = {
        place: {place.rpartition(".")[2]}
        for place in ("data", "trainer", "trainer.v1", ROLLOUT, f"{ROLLOUT}.val_kwargs")
    }
    assert is_read_below("data", "train_batch_size", nodes) and is_read_below("trainer.v1", "trainer_mode", nodes)
    assert is_read_below("actor_rollout_ref.rollout.val_kwargs", "do_sample", nodes)
    assert not is_read_below("actor_rollout_ref.rollout", "do_sample", nodes)  # of val_kwargs alone
    assert not is_read_below("data", "reward_fn_key", nodes)  # an argument that old reward managers store


def test_the_prompts_of_the_datas_own_files_are_counted(findings, tmp_path):
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 40}), file)
    given = ["data.train_batch_size=8", f"data.train_files={file}"]
    assert not findings("length of the run", *given, "trainer.total_training_steps=150")  # verl's 30 epochs
    (found,) = findings("length of the run", *given, "trainer.total_training_steps=151")
    assert found.fix == ("trainer.total_epochs=31",)


def test_what_nothing_reads_is_no_more_than_was_looked_up(compose):
    """verl 0.9.1: a new name here is to be searched for in its sources, by hand, before a launch is told of it."""
    config = compose("model_engine=megatron", f"{ROLLOUT}.name=vllm")
    names = [
        name for name in leaves_of(config) if not name.startswith(("stability.", "critic.", "actor_rollout_ref.ref."))
    ]
    for name in names:
        if OmegaConf.select(config, name, throw_on_missing=False) is None:
            OmegaConf.update(config, name, 1)
    assert set(without_reader(config, names)) == {
        *(
            f"actor_rollout_ref.actor.{name}"
            for name in ("freeze_vision_tower", "use_prefix_grouper", "use_torch_compile")
        ),
        *(f"actor_rollout_ref.actor.megatron.router_replay.{name}_file" for name in ("record", "replay")),
        "actor_rollout_ref.actor.megatron.dist_checkpointing_prefix",
        "actor_rollout_ref.nccl_timeout",
        "reward_model.model.external_lib",  # verl carries over only the path
        *(
            f"{ROLLOUT}.{name}"
            for name in ("multi_stage_wake_up", "multi_turn.num_repeat_rollouts", "over_sample_rate", "do_sample")
        ),
        *(f"data.{name}" for name in ("return_raw_input_ids", "reward_fn_key")),
        *(f"reward.reward_model.rollout.{name}" for name in ("multi_stage_wake_up", "do_sample")),
        *(f"trainer.{name}" for name in ("balance_batch", "esi_redundant_time", "ray_wait_register_center_timeout")),
    }


def leaves_of(node, above=""):
    """Yields the settings below a node."""
    for name, value in OmegaConf.to_container(node).items():
        if isinstance(value, dict) and value:
            yield from leaves_of(node[name], f"{above}{name}.")
        else:
            yield f"{above}{name}"
