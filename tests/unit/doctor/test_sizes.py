"""Sizes of a run, and the files of its model and data on this machine."""

import pytest
from transformers import GemmaConfig, GPT2Config, Qwen3Config, Qwen3MoeConfig

from verl_ext.doctor.checks import run_checks
from verl_ext.launch.command_line import Launch, Machines
from verl_ext.launch.gpus import named

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model.path"
CPU = "trainer.device=cpu"  # else the run is for another machine
ROLLOUT = "actor_rollout_ref.rollout"


def levels(found):
    return {finding.level for finding in found}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], None),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=3"],
            "tensor_model_parallel_size=3 x data_parallel_size=1 must divide",
        ),
        (["trainer.nnodes=0"], "trainer.nnodes=0 must be a whole number above 0"),
        (["trainer.n_gpus_per_node=0"], "trainer.n_gpus_per_node=0 must be"),
        (["trainer.nnodes=two"], "trainer.nnodes=two must be"),
        (["data.max_prompt_length=long"], "data.max_prompt_length=long must be a whole number"),
        (["recipe=ring_mini_2", f"{ROLLOUT}.max_model_len=4096"], "max_model_len=4096 is below"),
    ],
)
def test_sizes(findings, overrides, said):
    found = findings("sizes", *overrides)
    assert levels(found) == {"ok" if said is None else "warning" if "max_model_len" in said else "error"}
    assert said is None or any(said in finding.found for finding in found)


def test_sizes_that_contradict_each_other_are_told_at_once(findings):
    tensor, expert = f"{ROLLOUT}.tensor_model_parallel_size=3", f"{ROLLOUT}.expert_parallel_size=2"
    found = [finding.found for finding in findings("sizes", tensor, expert, "data.max_prompt_length=30000")]
    assert any("tensor_model_parallel_size=3 x" in one for one in found)
    assert any("expert_parallel_size=2 must be" in one for one in found)


def test_a_fix_of_the_sizes_is_told(findings):
    batch, dynamic = f"{ACTOR}.ppo_micro_batch_size_per_gpu=null", f"{ACTOR}.use_dynamic_bsz=true"
    (finding,) = findings("sizes", batch)
    assert finding.fix == (dynamic,)
    (finding,) = findings("sizes", batch, dynamic)
    assert finding.level == "ok"


def test_a_batch_of_0_is_that_of_verls_old_asynchronous_launches(findings):
    launch = ("trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=4")
    (finding,) = findings("sizes", *launch, "data.train_batch_size=0", f"{ACTOR}.ppo_mini_batch_size=32")
    assert (finding.level, finding.fix) == ("error", ("data.train_batch_size=128",))
    (finding,) = findings("sizes", "data.train_batch_size=-1")
    assert (finding.level, finding.fix) == ("error", ())


def test_sizes_of_a_known_model_are_compared_with_it(findings):
    overrides = [f"{ROLLOUT}.tensor_model_parallel_size=5", "trainer.n_gpus_per_node=5", f"{ROLLOUT}.n=5"]
    for model in (f"{MODEL}=Qwen/Qwen3-30B-A3B", ""):  # of the table, and one with its config.json on this machine
        found = findings("sizes", *filter(None, [model]), *overrides)
        assert any("must divide the model's 32 attention heads" in finding.found for finding in found)
    (finding,) = findings("sizes", f"{MODEL}=nobody/nothing", *overrides)
    assert finding.level == "ok" and "the model's shape is not known" in finding.found


def test_a_model_that_is_not_here_is_a_note_of_what_was_not_checked(findings, models, tmp_path):
    assert not findings("model files", CPU)
    (finding,) = findings("model files", CPU, f"{MODEL}=nobody/nothing")
    assert finding.level == "note" and "nobody/nothing" in finding.found
    assert finding.why == "lengths, vocabulary and the model's routers were not checked"
    (tmp_path / "config.json").write_text((models / "fitting" / "config.json").read_text())
    (finding,) = findings("model files", CPU, f"{MODEL}={tmp_path}")
    assert finding.why == "vocabulary was not checked"


@pytest.mark.parametrize("config", [Qwen3MoeConfig, Qwen3Config, GemmaConfig, GPT2Config])
def test_a_model_without_its_tokenizer_has_an_unknown_vocabulary(findings, tmp_path, config):
    """transformers 5 builds a tokenizer of special tokens for these models, where it finds none."""
    config().save_pretrained(tmp_path)
    assert not findings("vocabulary", f"{MODEL}={tmp_path}")
    (finding,) = findings("model files", CPU, f"{MODEL}={tmp_path}")
    assert (finding.level, finding.why) == ("note", "vocabulary was not checked")


@pytest.mark.parametrize("strategy", ["torchtitan", "veomni", "fsdp_turbo", "automodel"])
def test_sizes_of_a_strategy_that_is_not_known_are_a_note(findings, strategy):
    (finding,) = findings("sizes", f"{ACTOR}.strategy={strategy}", "trainer.nnodes=0")
    assert finding.level == "note" and strategy in finding.found


def test_a_size_that_the_config_lacks_is_a_note(findings):
    (finding,) = findings("sizes", f"{ACTOR}.fsdp_config.fsdp_size=null")
    assert finding.level == "note" and "fsdp_size" in finding.found


def test_files_that_are_not_here_are_errors(findings, tmp_path):
    (tmp_path / "here.parquet").touch()
    files = [f"data.train_files=[{tmp_path}/here.parquet,{tmp_path}/gone.parquet]", "data.val_files=hdfs://there.json"]
    code = ["reward.custom_reward_function.path=pkg://mine", f"trainer.v1.sampler.custom_sampler.path={tmp_path}/b.py"]
    tools = ["multi_turn.tool_config_path=trainer/config/ppo_trainer.yaml", "agent.agent_loop_config_path=no.yaml"]
    run = [*files, *code, *(f"actor_rollout_ref.rollout.{tool}" for tool in tools)]
    found = findings("files", CPU, *run)
    assert {one.level for one in found} == {"error"}
    assert [one.found.partition("=")[0] for one in found] == [
        "data.train_files",
        "trainer.v1.sampler.custom_sampler.path",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path",
    ]
    assert not findings("files", *run, gpu=named("H100"), other_machine=True)
    own = "data.custom_cls.path=pkg://mine"  # which may read its files from anywhere
    assert not findings("files", CPU, f"data.train_files={tmp_path}/gone", "data.val_files=[]", own)


@pytest.mark.parametrize(
    ("model", "level"), [("Qwen3-Next-80B-A3B-Instruct", "error"), ("Qwen3.6-27B", "ok"), ("Qwen3.5-35B-A3B", "ok")]
)
@pytest.mark.parametrize("ulysses", [1, 2])
def test_packed_linear_attention(findings, model, level, ulysses):
    split = (f"{ACTOR}.ulysses_sequence_parallel_size={ulysses}", "trainer.n_gpus_per_node=8")
    packed = "actor_rollout_ref.model.use_remove_padding=true"
    found = findings("sizes", f"{MODEL}=Qwen/{model}", packed, *split, f"{ROLLOUT}.n=8")
    assert levels(found) == {level} and (level == "ok" or len(found) == ulysses)


@pytest.mark.parametrize(
    ("machines", "overrides", "told"),
    [
        (("CUDA_VISIBLE_DEVICES=0,1", 1, 2), "trainer.n_gpus_per_node=4", True),
        (("CUDA_VISIBLE_DEVICES=0,1", 1, 2), "trainer.n_gpus_per_node=2", False),
        (("CUDA_VISIBLE_DEVICES=0,1", 1, 2), "trainer.n_gpus_per_node=4 trainer.nnodes=2", False),
        (("CUDA_VISIBLE_DEVICES=0,1", 1, 2), "trainer.n_gpus_per_node=4 +ray_kwargs.ray_init.address=auto", False),
        (("#SBATCH --nodes=1", 1, None), "trainer.n_gpus_per_node=8 trainer.nnodes=2", True),
        (("#SBATCH --nodes=1 --gres=gpu:8", 1, 8), "trainer.n_gpus_per_node=4 trainer.nnodes=2", False),
        (("#SBATCH --gres=gpu:4", None, 4), "trainer.n_gpus_per_node=8", True),
    ],
)
def test_machines_of_the_script_have_the_gpus(findings, machines, overrides, told):
    launch = Launch(machines=(Machines(*machines),))
    assert levels(findings("machine", *overrides.split(), launch=launch)) == ({"warning"} if told else set())


def test_lost_overrides_are_told_and_no_fix_repeats_them(context):
    lost = {f"{ROLLOUT}.n": "a command of its own (run.sh, line 3)", "trainer.nnodes": "tee (run.sh, line 5)"}
    run = context(f"{ROLLOUT}.n=1", launch=Launch(lost=lost))
    own, tee = run_checks(run, ["lost overrides"])
    assert own.level == tee.level == "warning" and f"{ROLLOUT}.n" in own.found and "without a backslash" in own.why
    (finding,) = run_checks(run, ["group size"])
    assert finding.fix == () and "does not arrive" in finding.why
