"""Every override that the report suggests composes with the real config and passes our checks."""

import re
import shlex

import numpy as np
import pytest

from tests.unit.report.made_runs import make
from verl_ext.features.stability import stability_config
from verl_ext.report.figures.panels import PANELS
from verl_ext.report.verdict import judge_run

GROWING = 1e-4 * np.exp(0.1 * np.arange(1, 41))
STALE = {"training/off_policy/trajectory_staleness/mean": [3.0] * 40}
OLD = {"training/off_policy/trajectory_staleness/mean": [32.0] * 120}
HALVED = {"critic/score/mean": [0.6] * 60 + [0.19] * 60}
RUNS = [
    make({"critic/score/mean": [0.5]}),
    make({"vllm_kl/k3": [1e-3] * 40}),
    make({"vllm_kl/k3": [1e-3] * 40, "critic/score/mean": [0.1] * 8 + [0.7] * 24 + [0.2] * 8}),
    make({"vllm_kl/k3": GROWING, "router/agreement": [0.9] * 40, **STALE}),
    make({"vllm_kl/k3": GROWING, "correction/dropped": [0.01] * 40}),
    make({"vllm_kl/k3": GROWING, "correction/dropped": [0.01] * 40, "router/agreement": [0.9] * 40}),
    make({"vllm_kl/k3": [0.5] * 40}),
    make({"vllm_kl/k3": [0.5] * 40, **STALE}),
    make({"critic/score/mean": [0.5] * 40 + [0.0] * 40, "actor/lr": [3e-6] * 80}),
    make({**HALVED, "vllm_kl/k3": [1e-3] * 45 + [0.3] * 75}),
    make({**HALVED, "vllm_kl/k3": [1e-3] * 45 + [0.3] * 75, "router/agreement": [0.9] * 120}),
    make({**HALVED, "vllm_kl/k3": [1e-3] * 45 + [0.3] * 75, "correction/dropped": [0.01] * 120}),
    make({**HALVED, "vllm_kl/k3": [1e-3] * 45 + [0.3] * 75, **OLD}),
    make({**HALVED, "vllm_kl/k3": [1e-3] * 45 + [0.3] * 75, **OLD, "actor/opsm/dropped": [0.1] * 120}),
    make({"critic/score/mean": [0.6] * 20 + [0.19] * 60, "vllm_kl/k3": [0.3] * 80, **OLD}),
    make(
        {
            "vllm_kl/k3": GROWING,
            "correction/dropped": 1e-3 * np.exp(-0.1 * np.arange(1, 41)),
            "guard/mask_blind": [1.0] * 40,
        }
    ),
]
SAID = {override.text for run in RUNS for override in judge_run(run).overrides}
PANELS_SAY = {panel.override for panel in PANELS if panel.override}
READINGS = {
    found for panel in PANELS for found in re.findall(r"\b(?:stability|precision|recipe)[.\w]*=\w+", panel.reading)
}


def test_the_runs_above_make_the_verdict_say_all_it_can():
    assert len(SAID) == 21, "an override was added to advice.py: give RUNS a run that gets it"
    assert {"stability=geo_mask", "stability=r3", "stability=dapo"} <= READINGS


@pytest.mark.parametrize("text", sorted(SAID | PANELS_SAY | READINGS))
def test_an_override_composes(compose, text):
    words = shlex.split(text)
    own = () if text.startswith("stability=") else ("stability=icepop",)  # whose band action:tighten narrows
    config = compose("recipe=cpu_smoke", *own, *words)
    stability_config(config.stability)
    for word in words:
        name, _, value = word.partition("=")
        if "." in name and "{" not in value:
            node = config
            for part in name.split("."):
                node = node[part]
            assert str(node).lower() == {"null": "none"}.get(value, value.lower()), name


def test_the_precision_that_the_advice_names_for_megatron_composes(compose):
    why = next(o.why for o in judge_run(RUNS[-1]).overrides if o.text == "precision=fp16")
    (named,) = re.findall(r"\bfp16_\w+", why)
    config = compose("recipe=qwen3_30b_a3b_megatron", "stability=icepop", f"precision={named}")
    assert config.actor_rollout_ref.rollout.dtype == "float16"


def test_the_setting_that_a_reading_names_exists(compose):
    """The setting is stability.filters, without a value."""
    named = {found for panel in PANELS for found in re.findall(r"stability\.(\w+)\b(?!=)", panel.reading)}
    stability = compose("recipe=cpu_smoke", "stability=icepop").stability
    assert named == {"filters"} and named <= set(stability)
