"""Every override that the report names composes with the real config and passes our checks."""

import argparse
import re
import shlex

import numpy as np
import pytest

from tests import ROOT
from tests.unit.report.made_runs import make
from verl_ext.features.stability import stability_config
from verl_ext.probe.command import add_probe_parser
from verl_ext.report.advice import INCLUDES
from verl_ext.report.figures.panels import PANELS
from verl_ext.report.load import read_run
from verl_ext.report.verdict import judge_run

REWARD, K3, STALE = "critic/score/mean", "vllm_kl/k3", "training/off_policy/trajectory_staleness/mean"
GROWING = 1e-4 * np.exp(0.1 * np.arange(1, 61))
HALVED = [0.6] * 60 + [0.19] * 60
SOUND = np.linspace(0.2, 0.6, 40)
RUNS = [
    make({REWARD: SOUND, K3: [1e-3] * 40, "router/any_layer_differs": [0.1] * 40}),
    make({K3: GROWING, "router/agreement": [0.9] * 60}),
    make({K3: GROWING, "router/agreement": [0.9] * 60, STALE: [3.0] * 60}),
    make({K3: [0.5] * 40, STALE: [3.0] * 40, "vllm_kl/log_ratio_abs_mean": [0.3] * 40}),
    make({K3: [0.5] * 40, REWARD: SOUND}),
    make({REWARD: HALVED, "actor/lr": [3e-6] * 120, K3: [1e-3] * 120}),
    make({REWARD: HALVED, K3: [1e-3] * 45 + [0.3] * 75, STALE: [70.0] * 120}),
    make({K3: GROWING, "correction/dropped": 1e-3 * np.exp(-0.1 * np.arange(1, 61)), "guard/mask_blind": [1.0] * 60}),
    *map(read_run, sorted((ROOT / "tests" / "cases" / "field").glob("*.csv"))),
    *map(read_run, sorted((ROOT / "recipes" / "collapse" / "runs").glob("*/*/seed0"))),
]
VERDICTS = [judge_run(run) for run in RUNS]
# Of verl's runs: another trainer's is told its own setting, without a dot, or a sentence.
OVERRIDE = re.compile(r"\+*(?:stability|precision|recipe|\w+\.[\w.]+)[.\w]*=")
ADVISED = {step.do for verdict in VERDICTS for step in verdict.steps if OVERRIDE.match(step.do)}
COMMANDS = {step.do for verdict in VERDICTS for step in verdict.steps if step.is_command}
PANELS_SAY = {panel.override for panel in PANELS if panel.override}
CAPTIONS = " ".join(f"{panel.reading} {panel.verls}" for panel in PANELS)
READINGS = set(re.findall(r"\b(?:stability|precision|recipe)[.\w]*=\w+", CAPTIONS))


@pytest.mark.parametrize(
    "word",
    [
        *("stability=tis", "stability=r3", "stability=opsm", "stability=moe", "stability=kpop", "stability=guard"),
        *("stability.sync_canary", "stability.metrics", "stability.router_agreement", "stability.batch_skip"),
        *("trainer.resume_mode=resume_path", "trainer.resume_mode=disable", "trainer.v1.trainer_mode"),
        *("actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.use_kl_loss", "reward.reward_manager.name"),
    ],
)
def test_the_runs_above_make_the_verdict_advise_it(word):
    assert any(each.startswith(word) for text in ADVISED for each in text.split())


@pytest.mark.parametrize("text", sorted(ADVISED | PANELS_SAY | READINGS | INCLUDES.keys()))
def test_an_override_composes(compose, text):
    words = shlex.split(text)
    own = () if text.startswith("stability=") else ("stability=icepop",)
    config = compose("recipe=cpu_smoke", *own, *words)
    stability_config(config.stability)
    for word in words:
        name, _, value = word.removeprefix("++").partition("=")
        if "." in name and not value.startswith(("{", "[", "$")):
            node = config
            for part in name.split("."):
                node = node[part]
            assert str(node).lower() == {"null": "none"}.get(value, value.lower()), name


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_command_is_one_of_ours_with_its_options(command):
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    add_probe_parser(commands)
    commands.add_parser("doctor")
    parser.parse_args(shlex.split(command)[1:])


def test_the_setting_that_a_reading_names_exists(compose):
    """They are named without a value."""
    named = set(re.findall(r"stability\.(\w+)\b(?!=)", CAPTIONS))
    stability = compose("recipe=cpu_smoke", "stability=icepop").stability
    assert named == {"filters", "batch_skip"} and named <= set(stability)


ENDED = 'Traceback (most recent call last):\n  File "x.py", line 1\n{}\n'
ON_GPU = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.mark.parametrize(
    ("error", "metrics", "advised"),
    [
        (ON_GPU, {}, "ppo_max_token_len_per_gpu"),
        (f"{ON_GPU} for the KV cache", {}, "gpu_memory_utilization"),
        ("MemoryError: Unable to allocate memory for the data", {}, "dataloader_num_workers"),
        ("ray.exceptions.OutOfMemoryError: killed due to the node running low on memory", {}, "dataloader_num_workers"),
        (f"{ON_GPU} in the log-probs", {}, "ppo_max_token_len_per_gpu"),  # the words alone
        (ON_GPU, {"response_length/clip_ratio": 0.97}, "ppo_max_token_len_per_gpu"),  # and most answers are cut
    ],
)
def test_where_memory_ran_out_is_mended_first(tmp_path, error, metrics, advised):
    values = {REWARD: 0.05, "actor/grad_norm": 0.3, "response_length/mean": 500.0, **metrics}
    row = " - ".join(f"{name}:{value}" for name, value in values.items())
    log = tmp_path / "run.log"
    log.write_text("".join(f"step:{step} - {row}\n" for step in range(1, 13)) + ENDED.format(error))
    verdict = judge_run(read_run(log))
    assert verdict.first is not None and advised in verdict.first.do
    assert sum(advised in step.do for step in verdict.steps) == 1


def test_another_trainers_run_out_of_memory_is_told_its_own_setting(tmp_path):
    log = tmp_path / "run.log"
    rows = [
        f"{{'loss': 0.1, 'reward': 0.05, 'reward_std': 0.1, 'clip_ratio': 0.0, 'epoch': 0.{step}}}\n"
        for step in range(9)
    ]
    log.write_text("".join(rows) + ENDED.format(ON_GPU))
    verdict = judge_run(read_run(log))
    assert verdict.first is not None and verdict.first.do == "per_device_train_batch_size=1"
    log.write_text("".join(rows) + ENDED.format(f"{ON_GPU} for the KV cache"))
    verdict = judge_run(read_run(log))
    assert verdict.first is not None and verdict.first.do == "vllm_gpu_memory_utilization=0.7"


@pytest.mark.parametrize("rows", ["", "step:1 - critic/rewards/mean:0.1 - actor/lr:1e-6\n" * 9])
def test_a_run_that_an_error_ended_is_told_what_to_check_and_to_measure_nothing(tmp_path, rows):
    log = tmp_path / "run.log"
    frame = 'Traceback (most recent call last):\n  File "/site-packages/verl/t.py", line 3, in save_checkpoint\n'
    log.write_text(rows + frame + "OSError: [Errno 28] No space left on device\n")
    verdict = judge_run(read_run(log))
    assert [step.do[:26] for step in verdict.steps] == ["check free space, inodes a"]
    assert not verdict.check_of(verdict.suspects[0]) and not verdict.reason_of(verdict.steps[0])


def test_a_restart_with_settings_of_the_plugin_names_its_module():
    heads = {(step.do, verdict.first_heading) for verdict in VERDICTS if (step := verdict.first) is not None}
    ours = {head for do, head in heads if do.startswith(("stability", "precision"))}
    others = {head for do, head in heads if do.startswith("actor_rollout_ref")}
    assert ours and all("python -m verl_ext.main_ppo" in head for head in ours)
    assert others and not any("verl_ext" in head for head in others)
