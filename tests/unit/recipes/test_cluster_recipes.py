"""Every recipe for GPUs composes, passes verl's own validation, and fits its model and its machines."""

import json
import os
import re
from dataclasses import fields
from functools import partial

import pytest
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tests import ROOT
from tests.support.examples import slow_cases
from tests.support.fixing import assert_fixed
from tests.support.problems import check_run, check_sizes
from verl_ext.base.errors import ConfigError
from verl_ext.launch.models import FAMILIES, shape_of
from verl_ext.launch.packages import engine_arguments
from verl_ext.launch.sizes import pipeline_stages, world_size
from verl_ext.plan.memory import plan_memory
from verl_ext.plan.sizes import GIB, read_sizes

ON_CPU = ("cpu_megatron", "cpu_megatron_sglang", "cpu_sglang", "cpu_smoke", "cpu_tool", "cpu_veomni", "dense_smoke")
RECIPES = sorted(path.stem for path in (ROOT / "configs" / "recipe").glob("*.yaml") if path.stem not in ON_CPU)
PRESETS = ("icepop", "dapo")

# Billions: total, active, and which embeddings the publisher counts as active. "none" and "output" are what the
# arithmetic says: 12.2 for GLM-4.5-Air without embeddings, 3.61 for gpt-oss-20b without the input's. Qwen3-Next's "3B"
# has one digit, and only without embeddings does it round to that.
PUBLISHED = {
    "Qwen3-30B-A3B": (30.5, 3.3, "both"),
    "Qwen3-235B-A22B": (235, 22, "both"),
    "Qwen3-Next-80B-A3B": (80, None, "none"),
    "GLM-4.5-Air": (106, 12, "none"),
    "DeepSeek-V3": (671, 37, "both"),
    "Ring-mini-2.0": (16.26, 1.43, "both"),
    "Moonlight-16B-A3B": (16, 3, "both"),
    "gpt-oss-20b": (20.9, 3.61, "output"),
    "Qwen3-0.6B": (0.6, 0.6, "both"),
}
LEFT_OUT = {"both": 0, "output": 0.5, "none": 1}


def composed(compose, name, *overrides):
    return compose(f"recipe={name}", "stability=icepop", *overrides)


def checked(compose, name, *overrides):
    config = composed(compose, name, *overrides)
    check_sizes(config, shape_of(config.actor_rollout_ref.model.path))
    return config


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_published_number_of_parameters(name):
    shape = FAMILIES[name]
    total, active, embeddings = PUBLISHED[name]
    counted = shape.active_parameters - LEFT_OUT[embeddings] * shape.embedding_parameters
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.05)
    if active is None:
        assert round(counted / 1e9) == 3
    else:
        assert counted / 1e9 == pytest.approx(active, rel=0.05)


def test_shapes_are_those_of_transformers_models():
    """Counted on the meta device, where nothing is allocated; the models whose defaults are the published ones."""
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, GptOssConfig, Qwen3NextConfig

    configs = {
        "Qwen3-Next-80B-A3B": Qwen3NextConfig(),
        "GLM-4.5-Air": Glm4MoeConfig(head_dim=128),
        "DeepSeek-V3": DeepseekV3Config(),
        "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    }
    for name, config in configs.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        counted = sum(weight.numel() for weight in model.parameters())
        assert FAMILIES[name].parameters == pytest.approx(counted, rel=1e-3), name


def test_cache_bytes_by_hand():
    assert FAMILIES["Qwen3-30B-A3B"].cached_numbers(1) == 48 * 2 * 4 * 128
    assert FAMILIES["DeepSeek-V3"].cached_numbers(1) == 61 * (512 + 64)
    assert FAMILIES["Qwen3-Next-80B-A3B"].cached_numbers(1) == 12 * 2 * 2 * 256
    assert FAMILIES["gpt-oss-20b"].cached_numbers(1) == 12 * 2 * 8 * 64


def test_the_table_of_models_in_the_readme():
    readme = (ROOT / "recipes" / "README.md").read_text()
    for name in PUBLISHED:
        shape = FAMILIES[name]
        numbers = f"{shape.parameters / 1e9:.1f} B | {shape.active_parameters / 1e9:.1f} B | "
        numbers += f"{shape.parameters * 2 / 1e9:.0f} GB | {2 * shape.cached_numbers(1) / 1000:.0f} kB"
        assert f"| {name} | {numbers} |" in readme


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_80_gb_as_the_table_in_the_readme_says(compose, name):
    config = composed(compose, name)
    sizes = read_sizes(config, "A100-80G")
    memory = plan_memory(sizes)
    assert memory.fits(sizes) and memory.kv_sequences >= 16
    gpus = f"{config.trainer.nnodes} x {config.trainer.n_gpus_per_node}"
    numbers = f"{memory.update.total / GIB:.0f} | {memory.rollout.total / GIB:.0f} | {memory.kv_sequences:.0f}"
    readme = (ROOT / "recipes" / "README.md").read_text()
    assert "`verl-ext plan --gpu A100-80G recipe=NAME`" in readme
    (row,) = re.findall(rf"^\| \[{name}\]\({name}\) \| (.+) \|$", readme, re.MULTILINE)
    assert row == f"{gpus} | {numbers}"


def test_a_model_is_found_by_the_start_of_its_name():
    assert shape_of("Qwen/Qwen3-30B-A3B-Base") is FAMILIES["Qwen3-30B-A3B"]
    assert shape_of("/models/gpt-oss-20b-bf16/") is FAMILIES["gpt-oss-20b"]
    with pytest.raises(ConfigError, match=r"model\.path=some/model is not in verl_ext/launch/models\.py"):
        shape_of("some/model")


SMALL = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("of", "more"),
    [
        (LlamaConfig, {"intermediate_size": 80}),
        (Qwen2Config, {"intermediate_size": 80, "tie_word_embeddings": True}),
        (Qwen3Config, {"intermediate_size": 80, "head_dim": 16}),
        (Qwen3MoeConfig, {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}),
    ],
)
def test_a_models_own_config_gives_its_shape(tmp_path, of, more):
    config = of(**SMALL, **more, vocab_size=100)
    config.save_pretrained(tmp_path / "checkpoint")
    shape = shape_of(str(tmp_path / "checkpoint"))
    weights = [each.numel() for each in AutoModelForCausalLM.from_config(config).parameters() if each.dim() > 1]
    assert (shape.parameters, shape.layers, shape.kv_heads) == (sum(weights), 3, 2)
    assert shape.active_parameters == shape.parameters - 3 * 6 * 3 * 48 * 24 * (of is Qwen3MoeConfig)


@pytest.mark.parametrize(
    "change",
    [{"model_type": "unheard_of"}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}, {"hidden_size": None}],
)
def test_a_config_that_does_not_say_all_gives_no_shape(tmp_path, change):
    found = Qwen3MoeConfig(**SMALL).to_dict() | change
    (tmp_path / "Qwen3-30B-A3B").mkdir()
    (tmp_path / "Qwen3-30B-A3B" / "config.json").write_text(json.dumps(found))
    assert shape_of(str(tmp_path / "Qwen3-30B-A3B")) is FAMILIES["Qwen3-30B-A3B"], "its name says it"
    (tmp_path / "Qwen3-30B-A3B").rename(tmp_path / "mine")
    with pytest.raises(ConfigError, match="mine is not in"):
        shape_of(str(tmp_path / "mine"))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", slow_cases([*RECIPES, "dense_smoke"]))
def test_a_recipe_passes_our_checks_and_verls_validation(compose, name, preset):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from verl_ext.features.stability import stability_config
    from verl_ext.features.table import read_features

    length = (
        ["data.max_response_length=4096"] if name == "dense_smoke" else []
    )  # dapo's stretch of punishment is that long
    config = compose(f"recipe={name}", f"stability={preset}", *length)
    read_model = name != "dense_smoke"  # whose model is made first
    check_run(read_features(config, stability_config(config.stability), read_model=read_model))
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert actor.strategy == ("megatron" if "megatron" in name else "fsdp2")
    assert (rollout.name, rollout.calculate_log_probs) == ("vllm", True)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_model_and_its_machines(compose, name):
    config = checked(compose, name)
    if config.actor_rollout_ref.actor.strategy == "megatron":
        layers = shape_of(config.actor_rollout_ref.model.path).layers
        assert sum(pipeline_stages(config, layers)) == layers


def test_the_dense_smoke_test_fits_its_machine(compose):
    check_sizes(composed(compose, "dense_smoke"), None)


def test_qwen3_30b_also_fits_one_node(compose):
    assert world_size(checked(compose, "qwen3_30b_a3b", "trainer.nnodes=1")) == 8


def test_deepseek_v3_also_fits_the_twelve_nodes_of_its_readme(compose):
    sizes = {"tensor_model": 8, "pipeline_model": 12, "expert_model": 8}
    parallel = [f"{MEGATRON}.{name}_parallel_size={size}" for name, size in sizes.items()]
    ends = [f"{STAGES}.num_layers_in_{end}_pipeline_stage={layers}" for end, layers in (("first", "null"), ("last", 6))]
    config = checked(compose, "deepseek_v3_megatron", "trainer.nnodes=12", *parallel, *ends)
    assert pipeline_stages(config, 61) == [5] * 11 + [6]


MEGATRON = "actor_rollout_ref.actor.megatron"
STAGES = f"{MEGATRON}.override_transformer_config"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REF_MICRO = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
GPUS = ("trainer.nnodes=1", "trainer.n_gpus_per_node=8")
WRONG = [
    (
        "qwen3_30b_a3b_megatron",
        f"{MEGATRON}.expert_model_parallel_size=3",
        "expert_tensor_parallel_size x expert_model",
    ),
    ("gpt_oss_20b", f"{ROLLOUT}.tensor_model_parallel_size=3", r"rollout\.tensor_model_parallel_size=3"),
    ("qwen3_30b_a3b_megatron", f"{MEGATRON}.tensor_model_parallel_size=3", "tensor_model_parallel_size x pipeline"),
    ("qwen3_30b_a3b_megatron", f"{MEGATRON}.sequence_parallel=false", "sequence_parallel=false"),
    (
        "qwen3_30b_a3b_megatron",
        f"{MEGATRON}.virtual_pipeline_model_parallel_size=2",
        "virtual_pipeline.*needs a pipeline",
    ),
    ("qwen3_30b_a3b_megatron", f"{MEGATRON}.expert_tensor_parallel_size=null", "expert_tensor_parallel_size x expert"),
    (
        "qwen3_235b_a22b_megatron",
        f"{STAGES}.num_layers_in_last_pipeline_stage=10",
        "leaves 73 of 94 layers to 6 stages",
    ),
    ("qwen3_235b_a22b_megatron", f"{MEGATRON}.virtual_pipeline_model_parallel_size=5", "must divide 11 layers"),
    ("glm45_air_megatron", f"{MEGATRON}.pipeline_model_parallel_size=4", "must divide the model's 46 layers"),
    ("deepseek_v3_megatron", f"{ROLLOUT}.expert_parallel_size=16", "expert_parallel_size=16 must be 1 or"),
    ("qwen3_30b_a3b", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=3", "ulysses_sequence_parallel_size=3"),
    ("qwen3_30b_a3b", f"{ACTOR}.fsdp_config.fsdp_size=5", "fsdp_size=5"),
    ("qwen3_30b_a3b", f"{ACTOR}.ppo_max_token_len_per_gpu=8192", r"cannot hold data\.max_prompt_length"),
    ("qwen3_30b_a3b", f"{ROLLOUT}.n=1 {ACTOR}.ppo_mini_batch_size=8", "16 data-parallel ranks must divide"),
    ("qwen3_30b_a3b", f"{ROLLOUT}.data_parallel_size=3", "data_parallel_size=3"),
    (
        "qwen3_30b_a3b",
        f"+{ROLLOUT}.engine_kwargs.vllm.no_such_argument=1",
        "no_such_argument is not an argument of vLLM",
    ),
    ("gpt_oss_20b", f"{ACTOR}.ppo_micro_batch_size_per_gpu=5", "ppo_micro_batch_size_per_gpu=5"),
    ("gpt_oss_20b", f"{ACTOR}.ppo_micro_batch_size_per_gpu=null", "not set: .*ppo_micro_batch"),
    ("gpt_oss_20b", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=5", "log_prob_micro_batch_size_per_gpu=5"),
    ("gpt_oss_20b", f"{REF_MICRO}=7 {ACTOR}.use_kl_loss=true", "ref.log_prob_micro_batch_size_per_gpu=7"),
    ("gpt_oss_20b", f"{ROLLOUT}.log_prob_use_dynamic_bsz=true", "log_prob_use_dynamic_bsz=True contradicts"),
    ("gpt_oss_20b", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "needs packed sequences"),
    ("qwen3_next_80b_a3b", "actor_rollout_ref.model.use_remove_padding=true", "use_remove_padding=true packs"),
    ("qwen3_30b_a3b_async", "trainer.v1.separate_async.parameter_sync_step=2", "parameter_sync_step=2"),
    ("qwen3_30b_a3b_async", f"{ROLLOUT}.checkpoint_engine.backend=naive", "backend=naive"),
    ("qwen3_30b_a3b_async", f"{ROLLOUT}.nnodes=0", "nnodes=0 leaves"),
]


@pytest.mark.parametrize(
    "overrides",
    [
        # 64 prompts x 8 on 8 ranks: log-probs are computed of the whole batch, not of a mini-batch.
        f"{ACTOR}.ppo_mini_batch_size=32 {ROLLOUT}.log_prob_micro_batch_size_per_gpu=64",
        # Padding makes two mini-batches of 64 of 80 prompts: 128 trajectories a rank.
        f"data.train_batch_size=80 {ACTOR}.ppo_mini_batch_size=64 {ROLLOUT}.log_prob_micro_batch_size_per_gpu=128",
        f"{REF_MICRO}=7",  # no reference policy
        f"{REF_MICRO}=7 {ACTOR}.use_kl_loss=true actor_rollout_ref.model.lora_rank=8",  # the actor is the reference
    ],
)
def test_sizes_of_passes_that_fit(compose, overrides):
    checked(compose, "gpt_oss_20b", "data.train_batch_size=64", f"{ROLLOUT}.n=8", *GPUS, *overrides.split())


@pytest.mark.parametrize(("name", "overrides", "message"), WRONG)
def test_a_wrong_size_is_caught_by_name(compose, name, overrides, message):
    run = partial(checked, compose, name, *overrides.split())
    with pytest.raises(ConfigError, match=message) as error:
        run()
    assert_fixed(error.value, run)


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        ("Qwen3-30B-A3B", (f"{MEGATRON}.expert_model_parallel_size=5", "trainer.n_gpus_per_node=10"), "128 experts"),
        ("gpt-oss-20b", (f"{MEGATRON}.tensor_model_parallel_size=128", "trainer.n_gpus_per_node=128"), "64 attention"),
        (
            "Qwen3-235B-A22B",
            (f"{MEGATRON}.tensor_model_parallel_size=3", "trainer.n_gpus_per_node=24"),
            "attention heads",
        ),
        ("Qwen3-0.6B", (), "needs experts; set .*expert_model_parallel_size=1"),
        ("Qwen3-Next-80B-A3B", (), "megatron-core 0.16 refuses"),
    ],
)
def test_sizes_that_fit_the_machines_must_fit_the_model_too(compose, model, overrides, message):
    def run(*fix):
        check_sizes(composed(compose, "qwen3_30b_a3b_megatron", *overrides, *fix), FAMILIES[model])

    with pytest.raises(ConfigError, match=message) as error:
        run()
    assert_fixed(error.value, run)


@pytest.mark.parametrize(
    ("overrides", "stages"),
    [
        ((), [24, 24]),
        ((f"+{STAGES}.num_layers_in_first_pipeline_stage=20",), [20, 28]),
        ((f"+{STAGES}.account_for_embedding_in_pipeline_split=true", f"+{STAGES}.account_for_loss_in_pipeline_split=1"),
         [24, 24]),
    ],
)  # fmt: skip
def test_pipeline_stages(compose, overrides, stages):
    config = composed(compose, "qwen3_30b_a3b_megatron", f"{MEGATRON}.pipeline_model_parallel_size=2", *overrides)
    assert pipeline_stages(config, 48) == stages


@pytest.mark.slow
def test_vllms_own_parser_takes_the_rollout_arguments(compose):
    """The arguments are built as verl builds them; a value of the wrong kind ends the parser."""
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert engine_arguments("vllm") == {field.name for field in fields(AsyncEngineArgs)}, "read from the source"
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    for name in RECIPES:
        rollout = composed(compose, name).actor_rollout_ref.rollout
        given = OmegaConf.to_container(rollout.engine_kwargs.vllm, resolve=True)
        arguments = {"tensor_parallel_size": rollout.tensor_model_parallel_size, **given}
        parsed = parser.parse_args(build_cli_args_from_config(arguments))
        assert all(getattr(parsed, key) == value for key, value in arguments.items())
    with pytest.raises(SystemExit):
        parser.parse_args(build_cli_args_from_config({"mamba_ssm_cache_dtype": "float128"}))


@pytest.mark.parametrize("name", [*RECIPES, "dense_smoke"])
def test_a_recipe_has_a_launch_script_and_a_readme(name):
    script = ROOT / "recipes" / name / "run.sh"
    assert os.access(script, os.X_OK)
    (command,) = re.findall(r"python -m verl_ext\.main_ppo.*", script.read_text())
    assert f"recipe={name} stability=" in command and '"$@"' in script.read_text()
    assert "on gpus" in (ROOT / "recipes" / name / "README.md").read_text().lower() or name == "dense_smoke"
