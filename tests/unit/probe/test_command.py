"""`verl-ext probe`, with a stand-in for the process that starts the engines."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.unit.probe.test_readings import PLACES, pairs_of
from verl_ext.launch.command_line import compose
from verl_ext.probe.overrides import probe_overrides
from verl_ext.probe.readings import compare_readings

MEGATRON = "actor_rollout_ref.actor.megatron"
FOUND = {
    "tokens": 193,
    "dtype": "float32",
    "pairs": [
        {**asdict(pair), "by_probability": {"0-0.01": 1e-3, "0.9-": 1e-5}} for pair in pairs_of(1e-3, 1e-9, 1e-3, 1e-5)
    ],
    "places": [asdict(place) for place in PLACES],
}


@pytest.fixture
def probe(tmp_path, run_probe):
    """probe(*arguments, says=lines, found=FOUND) -> exit code; the commands that were run are in probe.ran."""

    def run(*arguments, says=(), found=FOUND):
        written = "" if found is None else f"open({str(tmp_path / 'probe.json')!r}, 'w').write({json.dumps(found)!r})"
        return run_probe("\n".join([*(f"print({line!r}, flush=True)" for line in says), written]), *arguments)

    run.ran = run_probe.ran
    return run


def test_it_shows_which_pair_holds_the_gap_and_what_to_try(probe, capsys, tmp_path):
    assert probe("recipe=cpu_smoke", says=["verl_ext: probe: sampling", "of a library"]) == 0
    out = capsys.readouterr().out
    assert "99% of the gap is routing" in out and "next: stability=r3" in out
    assert "the same 193 tokens" in out and "training, the rollout's" in out and "0.attention" in out
    assert "of a library" in (tmp_path / "console.log").read_text()
    (given,) = probe.ran
    assert given[1:3] == ["-m", "verl_ext.probe.engines"] and "recipe=cpu_smoke" in given
    assert given.index("recipe=cpu_smoke") < given.index("actor_rollout_ref.rollout.n=1")


def test_the_engines_are_forked_from_the_process_that_their_workers_are_forked_from(probe, monkeypatch):
    """Ray's workers have the job of their driver, so a driver of another kind would wait for them forever."""
    monkeypatch.delenv("PREFORK_PYTHON", raising=False)
    probe("--no-page", "recipe=cpu_smoke")
    monkeypatch.setenv("PREFORK_PYTHON", "/the/client")
    probe("--no-page", "recipe=cpu_smoke")
    assert [given[0] for given in probe.ran] == [sys.executable, "/the/client"]


def test_its_page_holds_tables_words_and_figures(probe, tmp_path):
    stages = [{"name": "update", "before": 1e-3, "after": 2e-2, "rollout_moved": 1e-6, "train_moved": 0.1}]
    assert probe("recipe=cpu_smoke", found=FOUND | {"stages": stages}) == 0
    page = (tmp_path / "report.html").read_text()
    for said in ("99% of the gap is routing", "Next: stability=r3", "The update does not arrive", "1.00e-03 ± 1e-04"):
        assert said in page
    figures = {file.stem for file in (tmp_path / "figures").iterdir()}
    assert figures == {"states", "probability"}  # no position in FOUND, no sweep


@pytest.mark.parametrize(("limit", "code"), [("1e-2", 0), ("1e-4", 1)])
def test_in_ci_it_fails_above_a_gap_and_tells_all_as_json(probe, capsys, limit, code):
    assert probe("--json", "--fail-above", limit, "recipe=cpu_smoke") == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["pairs"] == FOUND["pairs"] and printed["verdict"]["causes"] == ["temperature"]
    assert ("probe_replay", "closes") in [(each["id"], each["level"]) for each in printed["verdict"]["findings"]]


def with_nan(side, count):
    """Returns what a probe found, with `count` tokens of one reading set to NaN."""
    readings = {name: torch.linspace(-3, -0.1, 193) for name in ("decode", "prefill", "train", "replayed")}
    readings[side][:count] = math.nan
    pairs = [asdict(pair) for pair in compare_readings(readings, torch.arange(193))]
    return json.loads(json.dumps(FOUND | {"pairs": pairs}))


def after_update(**counts):
    """Returns what a probe found whose update made tokens NaN in an engine."""
    after = {"name": "update", "before": 1e-3, "after": None, "rollout_moved": None, "train_moved": 0.1, "tokens": 193}
    return FOUND | {"stages": [after | counts]}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (with_nan("decode", 2), "2 of 193 tokens have a log-probability of NaN or infinity"),
        (with_nan("train", 193), "0 / 193"),
        (after_update(rollout_not_finite=193), "on the rollout side (prefill)"),
        (after_update(train_not_finite=193), "on the training side (train)"),
        (
            FOUND | {"places": [*FOUND["places"][:-1], FOUND["places"][-1] | {"error": None, "train_not_finite": 40}]},
            "0 / 40",
        ),
    ],
)
def test_in_ci_it_fails_where_something_is_nan(probe, capsys, found, said):
    assert probe("--no-page", "--fail-above", "1e9", "recipe=cpu_smoke", found=found) == 1
    out = capsys.readouterr().out
    assert said in out and "agree" not in out


def test_json_has_no_nan(probe, capsys):
    assert probe("--json", "--no-page", "recipe=cpu_smoke", found=with_nan("decode", 193)) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed["verdict"]["findings"][0]["level"] == "rollout"
    assert 193 in {pair["one_not_finite"] for pair in printed["pairs"]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["recipe=cpu_smoke", "actor_rollout_ref.actor.strategy=torchtitan"], "and this run has torchtitan"),
        (["recipe=cpu_smoke", "actor_rollout_ref.rollout.name=hf"], "vLLM and SGLang, and this run samples with hf"),
        (
            ["recipe=cpu_megatron", f"{MEGATRON}.dynamic_context_parallel=true"],
            f"sequences that {MEGATRON}.dynamic_context_parallel=true splits; set",
        ),
        (["recipe=nothing"], "recipe=nothing"),
        (["recipe=cpu_smoke", "stability.plugins=[mine]"], "would be imported; --trust allows it"),
    ],
)
def test_what_it_cannot_probe_is_one_line(probe, capsys, arguments, said):
    assert probe(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("verl-ext probe: ") and said in captured.err
    assert captured.err.count("\n") == 1 and not probe.ran


def test_the_error_of_the_run_is_its_own(probe, capsys):
    says = ["(pid=1) verl_ext: error: actor_rollout_ref.rollout.calculate_log_probs=False leaves nothing"]
    assert probe("recipe=cpu_smoke", says=says, found=None) == 2
    assert "calculate_log_probs=False leaves nothing" in capsys.readouterr().err


def test_every_error_of_the_run_is_told(probe, capsys):
    says = [f"verl_ext: error: {each} does not fit" for each in ("trainer.nnodes=3", "data.train_batch_size=5")]
    assert probe("recipe=cpu_smoke", says=says, found=None) == 2
    error = capsys.readouterr().err
    assert "nnodes=3" in error and "train_batch_size=5" in error


def test_missing_files_are_named_before_anything_starts(probe, capsys, monkeypatch):
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)  # which would ask the Hub
    missing = ["data.train_files=gone.parquet", "actor_rollout_ref.model.path=/no/such/model"]
    assert probe("recipe=cpu_smoke", *missing) == 2
    error = capsys.readouterr().err
    assert all(f"{one} does not exist" in error for one in missing) and not probe.ran


def test_engines_that_end_without_a_word_leave_a_console(probe, capsys):
    assert probe("recipe=cpu_smoke", says=["Killed"], found=None) == 2
    assert "output: " in capsys.readouterr().err


def test_a_dense_model_is_probed_without_its_routing(tmp_path):
    from transformers import Qwen3Config

    Qwen3Config().save_pretrained(tmp_path)
    dense = compose(["recipe=cpu_smoke", f"actor_rollout_ref.model.path={tmp_path}"]).config
    assert not any("router" in override for override in probe_overrides(dense, 8, tmp_path))


def overrides_of(moe_override, *given, prompts=8):
    composed = compose([*given, moe_override])
    assert composed.config is not None and not composed.problems, composed
    overrides = probe_overrides(composed.config, prompts, Path())
    assert compose([*given, moe_override, *overrides]).config is not None
    return dict(override.split("=", 1) for override in overrides)


@pytest.mark.parametrize(
    "launch",
    [
        ("recipe=cpu_smoke",),
        ("recipe=cpu_megatron", f"{MEGATRON}.router_replay.mode=R2"),
        ("stability=none", "model_engine=veomni"),
    ],
)
def test_the_rollouts_experts_are_replayed_and_compared_in_all_trajectories(moe_override, launch):
    share = ("stability.router_agreement=true", "stability.router_agreement_share=0.5")
    overrides = overrides_of(moe_override, *launch, *share)
    assert overrides["stability.replay"] == "R3"
    assert overrides["stability.router_agreement"] == "true"
    assert overrides["stability.router_agreement_share"] == "1"


@pytest.mark.parametrize(
    ("sizes", "prompts"),
    [
        ((), 8),
        (("trainer.n_gpus_per_node=8", "trainer.nnodes=2"), 32),
        (("trainer.n_gpus_per_node=8", f"{MEGATRON}.pipeline_model_parallel_size=4"), 8),
        (
            (
                "trainer.n_gpus_per_node=24",
                f"{MEGATRON}.pipeline_model_parallel_size=4",
                f"{MEGATRON}.virtual_pipeline_model_parallel_size=2",
            ),
            48,
        ),
    ],
)
def test_every_rank_has_as_many_prompts_as_it_takes_passes(moe_override, sizes, prompts):
    overrides = overrides_of(moe_override, "recipe=cpu_megatron", *sizes)
    assert overrides["data.train_batch_size"] == str(prompts)
