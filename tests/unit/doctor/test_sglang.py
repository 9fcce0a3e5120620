"""Findings of doctor for runs whose rollout engine is SGLang."""

import pytest

from tests.support.examples import slow_cases
from tests.unit.doctor.conftest import VERSIONS
from verl_ext.doctor.checks import run_checks
from verl_ext.launch.compose import stability_choices
from verl_ext.launch.gpus import named

ROLLOUT = "actor_rollout_ref.rollout"
MOE = "actor_rollout_ref.model.path={models}/moe"
SGLANG = f"{ROLLOUT}.name=sglang"
RAW = f"{ROLLOUT}.logprobs_mode=raw_logprobs"
MERGED = "++actor_rollout_ref.model.lora.merge=true"
REFERENCE = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1"  # for the presets with a KL
NEEDED = {
    "score_centering": (
        "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}",
        "stability.top_tokens.k=64",
    ),
    "qae": ("algorithm.adv_estimator=qae",),  # instead of the launch's
    "grpo_positive": ("algorithm.adv_estimator=grpo_positive",),
}
INSTALLED = {"versions": VERSIONS | {"sglang": "0.5.12"}, "has": lambda module: True, "gpu": named("H100")}


@pytest.mark.parametrize("name", slow_cases(sorted(stability_choices())))
def test_no_preset_has_an_error_with_sglang(context, models, name):
    given = (f"stability={name}", MOE.format(models=models), SGLANG, REFERENCE, "data.max_response_length=8192")
    given += NEEDED.get(name, ())
    found = run_checks(context(*given, **INSTALLED))
    assert [
        finding for finding in found if finding.level == "error" and finding.check not in ("sizes", "trl", "files")
    ] == []
    said = {finding.check: finding.found for finding in found}
    assert said["log-prob mode"].startswith("SGLang's log-probs are of the whole vocabulary")
    assert "cascade attention" not in said and "vocabulary" not in said  # vLLM's


@pytest.mark.parametrize(
    ("overrides", "level", "fix"),
    [
        (["stability=icepop", f"{ROLLOUT}.top_k=64"], "ok", ()),
        (["stability=none", f"{ROLLOUT}.top_k=64"], "warning", ("stability.top_tokens.k=64",)),
        (["stability=icepop", f"{ROLLOUT}.top_k=64", RAW], "warning", (f"{ROLLOUT}.top_k=-1",)),
    ],
)
def test_whether_both_engines_know_what_was_kept(findings, models, overrides, level, fix):
    found = findings("truncated sampling", MOE.format(models=models), SGLANG, *overrides, **INSTALLED)
    assert [(finding.level, finding.fix) for finding in found] == [(level, fix)]


@pytest.mark.parametrize(("version", "more", "errors"), [("0.5.12", [], 1), ("0.5.15", [], 0), ("0.5.12", [MERGED], 0)])
def test_a_lora_as_an_adapter_is_an_error_with_the_sglang_that_verl_pins(findings, models, version, more, errors):
    given = (f"actor_rollout_ref.model.path={models}/dense", "actor_rollout_ref.model.lora_rank=8", SGLANG, *more)
    installed = INSTALLED | {"versions": VERSIONS | {"sglang": version}}
    found = [each for each in findings("weight sync", *given, **installed) if each.level == "error"]
    assert len(found) == errors and all(each.fix == (MERGED,) for each in found)


def test_what_is_refused_of_sglangs_routing_is_told_with_its_fix(findings, models):
    given = (MOE.format(models=models), "stability=r3", SGLANG, f"{ROLLOUT}.skip_tokenizer_init=false")
    (error,) = (finding for finding in findings("hooks", *given, **INSTALLED) if finding.level == "error")
    assert f"{ROLLOUT}.skip_tokenizer_init=false" in error.found
    assert error.fix == (f"{ROLLOUT}.skip_tokenizer_init=true",)
