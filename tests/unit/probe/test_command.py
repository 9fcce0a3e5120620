"""`verl-ext probe`, with a stand-in for the process that starts the engines."""

import json
import sys
from dataclasses import asdict

import pytest

from tests.unit.probe.test_readings import PLACES, pairs_of
from verl_ext import cli
from verl_ext.probe import process

FOUND = {
    "tokens": 193,
    "dtype": "float32",
    "pairs": [
        {**asdict(pair), "by_probability": {"0-0.01": 1e-3, "0.9-": 1e-5}} for pair in pairs_of(1e-3, 1e-9, 1e-3, 1e-5)
    ],
    "places": [asdict(place) for place in PLACES],
}


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """probe(*arguments, says=lines, found=FOUND) -> exit code; the commands that were run are in probe.ran."""
    ran = []

    def run(*arguments, says=(), found=FOUND):
        written = "" if found is None else f"open({str(tmp_path / 'probe.json')!r}, 'w').write({json.dumps(found)!r})"
        script = "\n".join([*(f"print({line!r}, flush=True)" for line in says), written])

        def follow(given, console, tell):
            ran.append(given)
            return followed([sys.executable, "-c", script], console, tell)

        monkeypatch.setattr(process, "follow", follow)
        return cli.main(["probe", "--out", str(tmp_path), *arguments])

    followed = process.follow
    run.ran = ran
    return run


def test_it_shows_which_pair_holds_the_gap_and_what_to_try(probe, capsys, tmp_path):
    assert probe("recipe=cpu_smoke", says=["verl_ext: probe: sampling", "of a library"]) == 0
    out = capsys.readouterr().out
    assert "99% of the gap is routing" in out and "next: stability=r3" in out
    assert "the same 193 tokens" in out and "training, the rollout's" in out and "0.attention" in out
    assert "of a library" in (tmp_path / "console.log").read_text()
    (given,) = probe.ran
    assert given[1:3] == ["-m", "verl_ext.probe.main"] and "recipe=cpu_smoke" in given
    assert given.index("recipe=cpu_smoke") < given.index("actor_rollout_ref.rollout.n=1")


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
    told = json.loads(capsys.readouterr().out)
    assert told["pairs"] == FOUND["pairs"] and told["verdict"]["cause"] == "routing"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompts", "0", "recipe=cpu_smoke"], "--prompts=0 must be at least 1"),
        (["recipe=moonlight_16b_a3b_megatron"], "actor.strategy=fsdp2, and this run has megatron"),
        (["recipe=cpu_smoke", "actor_rollout_ref.rollout.name=sglang"], "this run samples with sglang"),
        (["recipe=nothing"], "recipe/nothing"),
        (["recipe=cpu_smoke", "stability.plugins=[mine]"], "would be imported; --trust imports it"),
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


def test_engines_that_end_without_a_word_leave_a_console(probe, capsys):
    assert probe("recipe=cpu_smoke", says=["Killed"], found=None) == 2
    assert "everything they said: " in capsys.readouterr().err


def test_a_dense_model_is_probed_without_its_routing(tmp_path):
    from transformers import Qwen3Config

    from verl_ext.doctor.composed import compose
    from verl_ext.probe.command import probe_overrides

    Qwen3Config().save_pretrained(tmp_path)
    dense = compose(["recipe=cpu_smoke", f"actor_rollout_ref.model.path={tmp_path}"])[0]
    assert not any("router" in override for override in probe_overrides(dense, 8, tmp_path))
