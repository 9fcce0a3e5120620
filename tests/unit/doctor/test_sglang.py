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


def test_what_is_refused_of_sglangs_routing_is_told_with_its_fix(findings, models):
    given = (MOE.format(models=models), "stability=r3", SGLANG, f"{ROLLOUT}.skip_tokenizer_init=false")
    (error,) = (finding for finding in findings("hooks", *given, **INSTALLED) if finding.level == "error")
    assert f"{ROLLOUT}.skip_tokenizer_init=false" in error.found
    assert error.fix == (f"{ROLLOUT}.skip_tokenizer_init=true",)
