"""What versions, GPU and model tell of routing that would not be what was chosen."""

import pytest
from transformers import GptOssConfig, Qwen3MoeConfig

from tests.unit.doctor.conftest import VERSIONS
from verl_ext.launch.gpus import named

MOE = "actor_rollout_ref.model.path={models}/moe"
VLLM = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
MEGATRON = ("model_engine=megatron", "actor_rollout_ref.model.use_remove_padding=true")
REPLAY = "actor_rollout_ref.actor.megatron.router_replay.mode"
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


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model of 512 experts."""
    folder = tmp_path_factory.mktemp("wide")
    Qwen3MoeConfig(num_experts=512).save_pretrained(folder)
    return f"actor_rollout_ref.model.path={folder}"


@pytest.mark.parametrize(
    ("version", "overrides", "level", "fix"),
    [
        ("0.9.0", [f"{REPLAY}=R2"], "error", [f"{REPLAY}=disabled"]),
        ("0.9.0", [f"{AGREEMENT}=true"], "error", [f"{REPLAY}=disabled", f"{AGREEMENT}=false"]),
        ("0.9.0", [f"{REPLAY}=R3"], None, []),
        ("0.9.0", [], None, []),
        ("0.9.1", [f"{REPLAY}=R2"], "ok", []),
    ],
)
def test_more_experts_than_a_byte_counts(findings, wide, version, overrides, level, fix):
    fields = {"versions": VERSIONS | {"verl": version}}
    found = findings("recorded routing", wide, *MEGATRON, *overrides, **fields)
    assert [finding.level for finding in found] == ([level] if level else [])
    assert [override for finding in found for override in finding.fix] == fix
    if fix:
        assert findings("recorded routing", wide, *MEGATRON, *overrides, *fix, **fields) == []


def test_256_experts_or_fewer_fit(findings, models):
    fields = {"versions": VERSIONS | {"verl": "0.9.0"}}
    assert findings("recorded routing", MOE.format(models=models), *MEGATRON, f"{REPLAY}=R2", **fields) == []
