"""A planted gap on the launching machine: settings that are refused, and settings that vLLM gets."""

import json

import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from recipes.make_assets import build_tokenizer
from tests.support.problems import check_run
from verl_ext.base.errors import ConfigError
from verl_ext.features.stability import stability_config
from verl_ext.features.table import apply_engine_settings, read_features
from verl_ext.upstream.fake_quantization import LOAD_FORMAT

ACTOR = "actor_rollout_ref.actor"
FAKE = "stability.fake_quantization"
ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"+{ROLLOUT}.engine_kwargs.vllm"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Models of other shapes than those of `models`."""
    folder = tmp_path_factory.mktemp("shapes")
    tied = LlamaConfig(tie_word_embeddings=True)
    narrow = Qwen3MoeConfig(num_experts=8, moe_intermediate_size=48)
    quantized = LlamaConfig(quantization_config={"quant_method": "fp8"})
    for name, config in (("tied", tied), ("narrow", narrow), ("quantized", quantized)):
        config.save_pretrained(folder / name)
        build_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture
def check(compose, models):
    def run(*overrides, model=None):
        model = model or models / "moe"
        config = compose(f"{ROLLOUT}.name=vllm", f"actor_rollout_ref.model.path={model}", *overrides)
        check_run(read_features(config, stability_config(config.stability)))
        return config

    return run


def test_vllm_loads_by_our_format(check):
    theirs = f"{VLLM}.model_loader_extra_config={{enable_multithread_load:true}}"
    config = check(f"{FAKE}.format=fp4", f"{FAKE}.group=16", f"{FAKE}.router=true", theirs)
    apply_engine_settings(read_features(config, stability_config(config.stability)))
    arguments = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert arguments.load_format == LOAD_FORMAT
    assert arguments.model_loader_extra_config == {
        "enable_multithread_load": True,
        "verl_ext": {"format": "fp4", "group": 16, "router": True, "head": False, "load_format": "dummy"},
    }


def test_sglang_gets_it_as_a_part_of_the_models_config(check):
    config = check(
        f"{ROLLOUT}.name=sglang",
        f"{FAKE}.format=fp4",
        f"{FAKE}.group=16",
        f"++{ROLLOUT}.engine_kwargs.sglang.json_model_override_args='{{\"rope_theta\":1e6}}'",
    )
    apply_engine_settings(read_features(config, stability_config(config.stability)))
    overrides = json.loads(config.actor_rollout_ref.rollout.engine_kwargs.sglang.json_model_override_args)
    assert overrides == {"rope_theta": 1e6, "verl_ext": {"format": "fp4", "group": 16, "router": False, "head": False}}


def test_what_sglang_is_given_already_has_to_be_json(check):
    given = f"++{ROLLOUT}.engine_kwargs.sglang.json_model_override_args=rope"
    config = check(f"{ROLLOUT}.name=sglang", f"{FAKE}.format=fp4", f"{FAKE}.group=16", given)
    with pytest.raises(ConfigError, match="json_model_override_args=rope is not a JSON object"):
        apply_engine_settings(read_features(config, stability_config(config.stability)))


def test_vllms_own_load_format_goes_over_the_rollouts(check):
    config = check(f"{FAKE}.format=int8", f"{FAKE}.group=channel", f"{VLLM}.load_format=safetensors")
    apply_engine_settings(read_features(config, stability_config(config.stability)))
    arguments = config.actor_rollout_ref.rollout.engine_kwargs.vllm.model_loader_extra_config.verl_ext
    assert (arguments.load_format, arguments.group) == ("safetensors", "channel")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (f"{ROLLOUT}.name=trtllm", "weights of vllm and sglang, not of actor_rollout_ref.rollout.name=trtllm"),
        (f"{ROLLOUT}.quantization=fp8", "quantization=fp8 makes a real one; set stability.fake_quantization.format="),
        (f"{VLLM}.quantization=fp8", "engine_kwargs.vllm.quantization=fp8 makes a real one"),
        (f"{ACTOR}.fsdp_config.qat.enable=true", f"or set {ACTOR}.fsdp_config.qat.enable"),
        (f"{ROLLOUT}.checkpoint_engine.backend=delta_sharded", "that are already loaded"),
        (f"{FAKE}.group=100", "group=100 does not divide the model's hidden_size=2048; set"),
    ],
)
def test_what_it_cannot_go_with(check, overrides, said):
    with pytest.raises(ConfigError) as error:
        check(f"{FAKE}.format=fp4", *overrides.split())
    assert said in str(error.value) and "stability.fake_quantization" in str(error.value)


@pytest.mark.parametrize(
    ("model", "overrides", "said"),
    [
        ("tied", [f"{FAKE}.head=true"], "head=true has no head to round"),
        ("narrow", [], "group=32 does not divide the model's moe_intermediate_size=48"),
        ("quantized", [], "needs weights that are not quantised"),
    ],
)
def test_models_that_it_cannot_round(check, shapes, model, overrides, said):
    with pytest.raises(ConfigError, match=said):
        check(f"{FAKE}.format=fp4", *overrides, model=shapes / model)


@pytest.mark.parametrize(
    ("model", "overrides"), [("tied", []), ("narrow", [f"{FAKE}.group=channel"]), ("narrow", [f"{FAKE}.group=16"])]
)
def test_models_that_it_can(check, shapes, model, overrides):
    check(f"{FAKE}.format=fp4", *overrides, model=shapes / model)
