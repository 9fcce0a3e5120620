"""`verl-ext probe --sweep`, with a stand-in for the process that starts the engines."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.probe.test_command import FOUND
from verl_ext.base.errors import ConfigError
from verl_ext.launch.command_line import compose
from verl_ext.probe.overrides import probe_overrides
from verl_ext.probe.sweep import (
    CHANGES,
    GroupGap,
    SweepResult,
    changes_of,
    exceeds_noise,
    layers_sentences,
    ranked_by_gap,
    sensitive_layers,
    sweep_sentence,
    with_change,
)
from verl_ext.upstream.fake_quantization import EVERYTHING

LAUNCH = ["recipe=cpu_smoke", "precision=bf16"]
CHANGED = {"rollout.max_num_seqs=1": {"k3": 2e-3}, "precision=fp32": {"k3": 1e-8}}  # of the first pair
SCRIPT = """
import json, pathlib, signal, sys
print("verl_ext: probe: sampling", flush=True)
overrides = sys.argv[1:]
found, pairs = json.loads({found!r}), {pairs!r}
found["pairs"][0] |= next((v for key, v in pairs.items() if any(key in o for o in overrides)), {{}})
if any("prefix" in o for o in overrides) and {fails}:
    print("verl_ext: error: prefix caching cannot be off", flush=True)
    sys.exit(1)
out = next(o for o in overrides if o.startswith("+probe_out="))
pathlib.Path(out.partition("=")[2]).write_text(json.dumps(found))
"""


@pytest.fixture
def sweep(run_probe):
    """sweep(*arguments, fails=False) -> exit code; the commands that were run are in sweep.ran."""

    def run(*arguments, fails=False, interrupted=None):
        script = SCRIPT.format(found=json.dumps(FOUND), pairs=CHANGED, fails=fails)
        return run_probe(script, "--no-page", *arguments, interrupted=interrupted)

    run.ran = run_probe.ran
    return run


def test_settings_are_ranked_by_the_gap_that_they_leave(sweep, capsys, tmp_path):
    assert sweep("--sweep", "fp32,one_at_a_time", "--json", *LAUNCH) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["k3"]) for one in found["sweep"]] == [("", 1e-3), ("fp32", 1e-8), ("one_at_a_time", 2e-3)]
    assert "precision=fp32" in sweep.ran[1] and "precision=bf16" not in sweep.ran[1]
    assert (tmp_path / "sweep" / "fp32" / "probe.json").exists()


def test_what_is_done_is_not_done_again_and_what_was_cut_short_is(sweep, capsys):
    arguments = ("--sweep", "fp32,one_at_a_time", *LAUNCH)
    assert sweep(*arguments, interrupted=2) == 130
    assert "continues" in capsys.readouterr().err
    assert sweep(*arguments) == 0
    assert len(sweep.ran) == 4  # the launch, fp32 cut short; fp32, one_at_a_time
    captured = capsys.readouterr()
    assert "done already" in captured.err and "fp32 leaves 0% of the gap" in captured.out
    assert sweep("--prompts", "4", *arguments) == 0
    assert len(sweep.ran) == 7  # another number of prompts is another measurement


def test_a_setting_that_the_engines_refuse_does_not_stop_the_others(sweep, capsys):
    assert sweep("--sweep", "no_prefix_cache", "--add", "mine=data.seed=3", *LAUNCH, fails=True) == 0
    out = capsys.readouterr().out
    assert "no_prefix_cache could not be measured: prefix caching cannot be off" in out
    assert "data.seed=3" in sweep.ran[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sweep", "bf61"), "--sweep=bf61"),
        (("--sweep", "no_quantization"), "--sweep no_quantization: this run already has this setting"),
        (("--add", "fp32=a=b"), "--add fp32: there is already a setting of this name"),
    ],
)
def test_a_setting_that_cannot_be_swept_is_one_line(sweep, capsys, arguments, said):
    assert sweep(*arguments, *LAUNCH) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not sweep.ran


def test_all_takes_what_fits_the_launch():
    cpu = {change.name for change in changes_of(compose(["recipe=cpu_smoke"]).config, ["all"], {})}
    gpu = {change.name for change in changes_of(compose(["recipe=qwen3_30b_a3b"]).config, ["all"], {})}
    assert {"fp32", "one_at_a_time", "no_prefix_cache"} <= cpu & gpu
    assert not cpu & {"graphs", "no_cascade", "attention_flashinfer", "tensor_parallel_1"}
    assert {"eager", "attention_flashinfer", "tensor_parallel_1"} <= gpu


def test_all_takes_what_the_engines_of_the_launch_know():
    """Megatron gets float32 only on CPU cores; changes of attention are for vLLM and FSDP only."""
    of_gpu, of_cpu = (
        {change.name: change.overrides for change in changes_of(compose(given).config, ["all"], {})}
        for given in (["recipe=qwen3_30b_a3b_megatron"], ["recipe=cpu_megatron_sglang"])
    )
    assert of_gpu["fp16"] == of_cpu["fp16"] == ("precision=fp16_megatron",) and "fp32" not in of_gpu
    assert not any("fsdp" in override or override == "precision=fp32" for override in of_cpu["fp32"])
    for of_rollout, part in ((of_gpu, "enable_prefix_caching"), (of_cpu, "sglang.disable_radix_cache")):
        assert part in of_rollout["no_prefix_cache"][0]
    assert "attention_flashinfer" in of_gpu and "training_sdpa" not in of_gpu
    assert not {"attention_flashinfer", "no_cascade", "training_sdpa"} & set(of_cpu)


def launch_of(change):
    """A launch whose engines know the change."""
    engine = next((name for name in ("megatron", "sglang") if name in change.overrides[0]), None)
    return [f"recipe=cpu_{engine}"] if engine else ["recipe=qwen3_30b_a3b", "precision=bf16"]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change.name} {change.overrides[0]}")
def test_each_change_composes_and_then_fits_no_more(change):
    given = launch_of(change)
    composed = compose(with_change(given, change))
    assert composed.config is not None and not composed.problems, composed
    with pytest.raises(ConfigError, match="already has this setting"):
        changes_of(composed.config, [change.name], {})


def test_a_sweep_says_what_matters_more_than_its_error():
    base = SweepResult("", k3=1e-3, k3_error=1e-4)
    same, less, more = (replace(base, name=name, k3=k3) for name, k3 in (("a", 1.1e-3), ("b", 1e-4), ("c", 4e-3)))
    failed = SweepResult("d", error="no")
    assert [exceeds_noise(one, base) for one in (same, less, more, failed)] == [False, True, True, False]
    assert sweep_sentence([base, same, failed]).startswith("No setting")
    said = sweep_sentence([base, same, less, more])
    assert "b leaves 10% of the gap" in said and "c makes it 4.0 times" in said
    assert [one.name for one in ranked_by_gap([base, failed, more, less])] == ["b", "", "c", "d"]


def test_a_setting_whose_values_are_not_finite_is_not_ranked_by_what_is_left(sweep, capsys, monkeypatch):
    monkeypatch.setitem(CHANGED, "precision=fp32", {"k3": 1e-8, "other_not_finite": 192, "not_finite": 192})
    assert sweep("--sweep", "fp32,one_at_a_time", *LAUNCH) == 0
    out = capsys.readouterr().out
    assert "fp32 could not be measured: 192 of 193 tokens have a log-probability of NaN or infinity on the" in out
    assert "fp32 leaves" not in out and "failed" in out


def test_a_sweep_of_a_launch_that_is_not_finite_says_what_is():
    base, broken = SweepResult("", error="NaN"), SweepResult("a", error="NaN")
    fine = SweepResult("fp32", k3=1e-8, k3_error=1e-9)
    assert "finite with fp32" in sweep_sentence([base, broken, fine])
    assert "finite" not in sweep_sentence([base, broken])
    assert [one.name for one in ranked_by_gap([base, broken, fine])] == ["fp32", "", "a"]
    assert not exceeds_noise(fine, base)


def groups(*excesses, base=1e-4, error=1e-6):
    """Layers that raise k3 by so much, and all of them."""
    layers = [GroupGap(f"layer {i}", base + x, error, (f"layers.{i}.mlp",)) for i, x in enumerate(excesses)]
    return [GroupGap("", base, error), GroupGap(EVERYTHING, base + sum(excesses), error), *layers]


def test_layers_that_stand_out_are_listed_for_the_quantization_config():
    found = groups(1e-4, 9e-4, 1e-4, 1e-4, 6e-4)
    assert [one.group for one in sensitive_layers(found)] == ["layer 1"]
    found = groups(1e-4, 9e-4, 1e-4, 1e-4, 1e-4, 1e-4, 9e-4)
    assert [one.group for one in sensitive_layers(found)] == ["layer 1", "layer 6"]
    assert '"ignored_layers": ["layers.1.mlp", "layers.6.mlp"]' in layers_sentences(found)[1]


def test_layers_that_are_alike_or_within_the_error_are_not_listed():
    assert sensitive_layers(groups(2e-4, 2.5e-4, 1.5e-4)) == []
    assert sensitive_layers(groups(0.0, 9e-7, 0.0, 0.0)) == []
    assert layers_sentences(groups(2e-4, 2.5e-4, 1.5e-4))[0].startswith("No layer stands out")


def test_a_layer_without_a_number_is_listed_first():
    found = [*groups(1e-4, 1e-4, 1e-4), GroupGap("layer 3", None, None)]
    assert [one.group for one in sensitive_layers(found)] == ["layer 3"]
    assert layers_sentences(found)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["actor_rollout_ref.model.lora_rank=8"], "LoRA"),
        (["actor_rollout_ref.rollout.quantization=fp8"], r"rollout\.quantization=null"),
    ],
)
def test_weights_that_are_not_sent_in_16_bits_cannot_be_swept(given, said):
    config = compose(["recipe=cpu_smoke", *given]).config
    with pytest.raises(ConfigError, match=said):
        probe_overrides(config, 8, Path(), layers="fp8")
