"""A planted gap: its settings, those that are refused, and those that the engines get."""

import json

import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from recipes.make_assets import build_tokenizer
from verl_ext.base.errors import ConfigError
from verl_ext.core import fake_quant
from verl_ext.features.settings import FORMATS, NONE
from verl_ext.features.stability import stability_config
from verl_ext.upstream.fake_quantization import LOAD_FORMAT

ACTOR = "actor_rollout_ref.actor"
FAKE, MODEL = "stability.fake_quantization", "actor_rollout_ref.model.path"
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


def test_vllm_loads_by_our_format(checked):
    theirs = f"{VLLM}.model_loader_extra_config={{enable_multithread_load:true}}"
    config = checked(f"{FAKE}.format=fp4", f"{FAKE}.group=16", f"{FAKE}.router=true", theirs)
    arguments = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert arguments.load_format == LOAD_FORMAT
    assert arguments.model_loader_extra_config == {
        "enable_multithread_load": True,
        "verl_ext": {"format": "fp4", "group": 16, "router": True, "head": False, "load_format": "dummy"},
    }


def test_sglang_gets_it_as_a_part_of_the_models_config(checked):
    config = checked(
        f"{ROLLOUT}.name=sglang",
        f"{FAKE}.format=fp4",
        f"{FAKE}.group=16",
        f"++{ROLLOUT}.engine_kwargs.sglang.json_model_override_args='{{\"rope_theta\":1e6}}'",
    )
    overrides = json.loads(config.actor_rollout_ref.rollout.engine_kwargs.sglang.json_model_override_args)
    assert overrides == {"rope_theta": 1e6, "verl_ext": {"format": "fp4", "group": 16, "router": False, "head": False}}


def test_what_sglang_is_given_already_has_to_be_json(checked):
    given = f"++{ROLLOUT}.engine_kwargs.sglang.json_model_override_args=rope"
    with pytest.raises(ConfigError, match="json_model_override_args=rope is not a JSON object"):
        checked(f"{ROLLOUT}.name=sglang", f"{FAKE}.format=fp4", f"{FAKE}.group=16", given)


def test_vllms_own_load_format_goes_over_the_rollouts(checked):
    config = checked(f"{FAKE}.format=int8", f"{FAKE}.group=channel", f"{VLLM}.load_format=safetensors")
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
def test_what_it_cannot_go_with(checked, overrides, said):
    with pytest.raises(ConfigError) as error:
        checked(f"{FAKE}.format=fp4", *overrides.split())
    assert said in str(error.value) and "stability.fake_quantization" in str(error.value)


@pytest.mark.parametrize(
    ("model", "overrides", "said"),
    [
        ("tied", [f"{FAKE}.head=true"], "head=true has no head to round"),
        ("narrow", [], "group=32 does not divide the model's moe_intermediate_size=48"),
        ("quantized", [], "needs weights that are not quantised"),
    ],
)
def test_models_that_it_cannot_round(checked, shapes, model, overrides, said):
    with pytest.raises(ConfigError, match=said):
        checked(f"{FAKE}.format=fp4", *overrides, f"{MODEL}={shapes}/{model}")


@pytest.mark.parametrize(
    ("model", "overrides"), [("tied", []), ("narrow", [f"{FAKE}.group=channel"]), ("narrow", [f"{FAKE}.group=16"])]
)
def test_models_that_it_can(checked, shapes, model, overrides):
    checked(f"{FAKE}.format=fp4", *overrides, f"{MODEL}={shapes}/{model}")


def read(**settings):
    return stability_config({"fake_quantization": settings}).fake_quantization


def test_the_formats_are_those_that_weights_can_be_rounded_to():
    assert set(FORMATS) == {NONE, *fake_quant.FORMATS}


def test_it_is_off_by_default_and_says_what_it_rounds():
    assert not read().active
    assert str(read(format="fp4")) == "fp4, group 32"
    assert str(read(format="int4", group="channel", head=True, router=True)) == "int4, group channel, router, head"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"format": "fp3"}, "format=fp3 is not known; choose one of: none, fp8, int8, int4, fp4"),
        ({"format": "fp4", "group": 0}, "group=0 must be tensor, channel, or a number of inputs, at least 2"),
        ({"format": "fp4", "group": 1}, "group=1 must be"),
        ({"format": "fp4", "group": "row"}, "group=row must be"),
        ({"format": "fp4", "group": 2.5}, "group=2.5 must be"),
        ({"format": "fp4", "group": True}, "group=True must be"),
        ({"size": 3}, "size is not known"),
    ],
)
def test_bad_values_name_the_setting(settings, said):
    with pytest.raises(ConfigError) as error:
        read(**settings)
    assert str(error.value).startswith(f"stability.fake_quantization.{said}") and "\n" not in str(error.value)
