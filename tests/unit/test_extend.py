"""The modules and causes that docs/extend.md shows, run by the commands under them; and its tables."""

import copy
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from unittest import mock

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests import ROOT
from tests.support.problems import check_run
from verl_ext.base.errors import ConfigError, errors_of
from verl_ext.core.advantages import ESTIMATORS
from verl_ext.core.corrections import CORRECTIONS
from verl_ext.core.filters import BATCH_FILTERS, FilterBatch, apply_filters
from verl_ext.core.loss_batch import FIELDS, LossBatch, LossChange
from verl_ext.core.losses import LOSSES
from verl_ext.core.measure import measure
from verl_ext.core.tokens import Tokens
from verl_ext.diagnosis.causes import ENTRY_POINTS, LEAST, WORDS, tomllib
from verl_ext.features.feature import Need
from verl_ext.features.fit import fit_run
from verl_ext.features.stability import stability_config
from verl_ext.features.table import apply_engine_settings, problems_of, read_features, table_lines
from verl_ext.features.verl_config import BYPASS
from verl_ext.workers.losses import provide

PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
MODULES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, flags=re.DOTALL))
(PRESET,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
COMMANDS = re.findall(r"```bash\n(python -m verl_ext\.main_ppo .*?)```", PAGE, flags=re.DOTALL)

# Three responses of 1, 2 and 3 tokens.
TOKENS = Tokens(
    l_infer=torch.full((6,), -3.0),
    l_old=torch.tensor([0.1, 1.0, 9.0, 0.5, 2.0, 1.0]).log() - 3.0,
    mask=torch.ones(6, dtype=torch.bool),
    offsets=torch.tensor([0, 1, 3, 6]),
)


@pytest.fixture
def launched(tmp_path, monkeypatch, compose) -> Iterator[Callable]:
    """launched(module) -> the config of the page's command with that module, which passes the checks of a launch."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    for name, code in MODULES.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)

    def launch(module):
        (command,) = [text for text in COMMANDS if module in text]
        config = compose(*shlex.split(command.replace("\\\n", ""))[3:-1])  # between main_ppo and the dots
        check_run(read_features(config, stability_config(config.stability), read_model=False))
        return config

    with ExitStack() as registries:
        for registry in (CORRECTIONS, BATCH_FILTERS, LOSSES, ESTIMATORS, POLICY_LOSS_REGISTRY, ADV_ESTIMATOR_REGISTRY):
            registries.enter_context(mock.patch.dict(registry))
        yield launch
    for name in MODULES:
        sys.modules.pop(name, None)


def test_the_correction(launched):
    corrections = stability_config(launched("my_correction").stability).corrections()
    assert corrections == {"two_sided": {"low": 0.25, "high": 3.0}}
    found = measure(TOKENS, corrections)
    torch.testing.assert_close(found.weight, torch.tensor([0.25, 1.0, 3.0, 0.5, 2.0, 1.0]))
    shares = [found.metrics[f"correction/two_sided/{side}"] for side in ("low", "high")]
    assert shares == pytest.approx([1 / 6, 1 / 6])
    assert CORRECTIONS["two_sided"].function(torch.tensor([math.nan])).weight.item() == 0


def run_in(folder, command):
    """Runs a command of the page in a folder, which is on Python's path only if the command puts it there."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    words = shlex.split(command.replace("PYTHONPATH=.", f"env PYTHONPATH=.:{ROOT}"))
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)


def test_the_correction_is_tested_and_tried_in_the_lab_as_shown(tmp_path):
    for name in ("my_correction", "test_my_correction"):
        (tmp_path / f"{name}.py").write_text(MODULES[name])
    tested, tried = re.findall(r"```bash\n((?:PYTHONPATH=\. pytest|verl-ext lab) .*)\n", PAGE)
    assert "2 passed" in run_in(tmp_path, tested).stdout
    done = run_in(tmp_path, f"{tried.replace('--seeds 5', '--seeds 1')} --steps 3 --no-page")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / ".lab" / "stale" / "results.json").read_text())
    assert "mine" in [each["name"] for each in results["variants"]]


def test_the_doctor_checks_a_launch_with_the_correction_as_shown(tmp_path):
    (tmp_path / "my_correction.py").write_text(MODULES["my_correction"])
    (checked,) = re.findall(r"```bash\n(verl-ext doctor .*) \.\.\.\n", PAGE)
    done = run_in(tmp_path, f"{checked} --json actor_rollout_ref.rollout.name=vllm trainer.device=cpu")
    found = [each for each in json.loads(done.stdout) if each["check"] == "hooks"]
    assert {each["level"] for each in found} == {"ok"}
    assert any("two_sided, low 0.25, high 4" in each["found"] for each in found)


def test_the_rule_on_its_metric_is_one_of_the_guard(launched, compose):
    launched("my_correction")
    (rule,) = re.findall(r"`stability\.guard\.rules='(.*?)'`", PAGE)
    config = compose("stability.correction=two_sided", f"stability.guard.rules={rule}")
    stability = stability_config(config.stability)
    assert [one.signal for one in stability.rules if one.name == "capped"] == ["correction/two_sided/high"]
    check_run(read_features(config, stability, read_model=False))


def test_the_correction_that_cuts_and_drops(launched):
    corrections = stability_config(launched("my_capped_mask").stability).corrections()
    assert corrections == {"capped_mask": {"cap": 3.0, "far": 10.0}}
    tokens = replace(TOKENS, l_old=torch.tensor([0.05, 1.0, 9.0, 0.5, 20.0, 1.0]).log() - 3.0)
    found = measure(tokens, corrections)
    torch.testing.assert_close(found.weight, torch.tensor([0.0, 1.0, 3.0, 0.5, 0.0, 1.0]))
    assert found.metrics["correction/dropped"] == pytest.approx(2 / 6)
    assert CORRECTIONS["capped_mask"].function(torch.tensor([math.nan])).weight.item() == 0


@pytest.mark.parametrize("override", [f"{BYPASS}=true", "stability.denominator=kept"])
def test_what_drops_decides(launched, compose, override):
    for module, name, refused in (("my_correction", "two_sided", 1), ("my_capped_mask", "capped_mask", 0)):
        launched(module)
        config = compose(f"stability.correction={name}", override)
        run = read_features(config, stability_config(config.stability), read_model=False)
        assert len(errors_of(problems_of(run))) == refused, name


def test_an_own_correction_in_the_place_of_tis_in_moe(launched, compose):
    launched("my_correction")
    rows = re.findall(r"^\| (`sync`|`colocate_async`.*?) \| `(.*?)` \|$", PAGE, re.MULTILINE)
    shown = {mode.strip("`"): words.split() for modes, words in rows for mode in modes.split(", ")}

    def chosen(mode, words):
        run = ("stability=moe", "actor_rollout_ref.rollout.name=vllm", f"trainer.v1.trainer_mode={mode}", *words)
        return fit_run(compose(*run), run, read_model=False).stability.correction_names

    both = ("two_sided", "opsm")
    assert {mode: chosen(mode, words) for mode, words in shown.items()} == {
        "sync": ("two_sided",),
        "colocate_async": both,
        "separate_async": both,
    }
    with pytest.raises(ConfigError, match="stale_only"):
        chosen("sync", shown["separate_async"])


def test_the_mask(launched):
    config = launched("my_mask")
    corrections = stability_config(config.stability).corrections()
    assert corrections == {"near": {"delta": 0.3}}
    torch.testing.assert_close(measure(TOKENS, corrections).weight, torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 1.0]))
    assert CORRECTIONS["near"].function(torch.tensor([math.nan]), delta=0.3).weight.item() == 0
    config.stability.near.delta = 0
    with pytest.raises(ConfigError, match=r"stability\.near\.delta=0 must be above 0"):
        stability_config(config.stability)


def test_the_preset_of_the_mask(launched, compose, tmp_path):
    launched("my_mask")
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "near.yaml").write_text(PRESET)
    (loading,) = re.findall(r"`(hydra\.searchpath=\S+ \+preset=near)`", PAGE)
    stability = stability_config(compose(*loading.replace("/shared/presets", str(tmp_path)).split()).stability)
    assert stability.corrections() == {"near": {"delta": 0.3}}
    assert stability.batch_skip.threshold == 0.1 and stability.plugins == ["my_mask"]


def test_the_filter(launched):
    config = launched("my_filter")
    chain = stability_config(config.stability).filter_chain()
    assert chain == [("at_least", {"length": 8})]
    batch = FilterBatch(
        tokens=TOKENS,
        keys=["u_0_0", "u_1_0", "u_2_0"],
        rewards_B=torch.zeros(3),
        advantages_N=torch.zeros(6),
        responses_N=torch.zeros(6, dtype=torch.int64),
        max_response_length=4,
        eos_ids=frozenset({0}),
    )
    found = apply_filters(batch, [("at_least", {"length": 2})])
    assert found.keep_N.tolist() == [False, True, True, True, True, True]
    assert found.metrics["filter/at_least/dropped_tokens"] == pytest.approx(1 / 6)


def test_the_table_of_a_filters_fields_has_all_of_them():
    shown = {
        name.split(".")[0]
        for cell in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
        for name in re.findall(r"`(\w+)", cell)
    }
    assert {one.name for one in fields(FilterBatch)} <= shown
    assert {one.name for one in fields(LossChange)} | set(FIELDS) <= shown


def launched_loss(config):
    """The page's loss as the workers have it: (its verl function, verl's ActorConfig)."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.utils.config import omega_conf_to_dataclass

    from verl_ext.workers.losses import register_losses

    stability = stability_config(config.stability)
    assert Need.OUR_LOSS in read_features(config, stability).needs, "else the loss finds nothing to read"
    apply_engine_settings(read_features(config, stability))
    assert config.actor_rollout_ref.model.external_lib == ["my_loss"], "verl imports it in each worker"
    register_losses()  # as the worker's loss does
    OmegaConf.update(config, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 1)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    return get_policy_loss_fn(actor.policy_loss.loss_mode), actor


# Of three tokens, the second one is unlikely.
L_INFER = torch.tensor([[-1.0, -9.0, -2.0]])
ADVANTAGES = torch.tensor([[1.0, 10.0, 100.0]])


def test_the_loss(launched):
    loss, actor = launched_loss(launched("my_loss"))
    assert asdict(actor.policy_loss.settings) == {"least": 0.02}
    zeros, mask = torch.zeros(1, 3), torch.ones(1, 3)
    with provide(LossBatch(zeros, zeros, ADVANTAGES, mask.bool(), l_infer=L_INFER)):
        value, metrics = loss(
            old_log_prob=zeros,
            log_prob=zeros,
            advantages=ADVANTAGES,
            response_mask=mask,
            loss_agg_mode="token-mean",
            config=actor,
            rollout_is_weights=torch.tensor([[1.0, 1.0, 0.5]]),
        )
    assert value == pytest.approx(-(1 + 0 + 50) / 3)
    assert metrics["actor/likely_tokens/dropped"] == pytest.approx(1 / 3)


def test_a_setting_of_the_loss_is_checked_by_name_and_type(compose, launched):
    config = launched("my_loss")
    for name, value, message in (
        ("least", "much", "policy_loss.least=much must be a number"),
        ("most", 1, "policy_loss.most is not known; its settings are: least"),
    ):
        changed = copy.deepcopy(config)
        OmegaConf.update(changed, f"actor_rollout_ref.actor.policy_loss.{name}", value, force_add=True)
        with pytest.raises(ConfigError, match=message):
            check_run(read_features(changed, stability_config(changed.stability), read_model=False))


def test_the_estimator(launched):
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    from verl_ext.features.advantages import register_estimators

    config = launched("my_estimator")
    assert [feature.setting for feature in table_lines(read_features(config, stability_config(config.stability)))] == [
        "against_the_batch, scale 0.5"
    ]
    register_estimators()  # as our trainer does
    estimate = get_adv_estimator_fn(config.algorithm.adv_estimator)
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 3.0]]), torch.tensor([[1, 1], [1, 0]])
    found, _ = estimate(token_level_rewards=rewards, response_mask=mask, index=["u", "v"], config=config.algorithm)
    assert found.tolist() == [[-0.5, -0.5], [0.5, 0.0]]


# ------------------------------------------------------------------------------------------------- causes of one's own

(CAUSE,) = re.findall(r"```toml\n# (grader_slow)\.toml\n(.*?)```", PAGE, flags=re.DOTALL)
(FINDING,) = re.findall(r"```python\n# my_causes/__init__\.py\n(.*?)```", PAGE, flags=re.DOTALL)
(LINE,) = re.findall(r"```toml\n(grader_timeouts = .*?\n)```", PAGE)
(PROJECT,) = re.findall(r"```toml\n# pyproject\.toml\n(.*?)```", PAGE, flags=re.DOTALL)
(REPORT,) = re.findall(r"```bash\nverl-ext (report .*?)\n```", PAGE)


@pytest.fixture
def run_file(tmp_path):
    """A run whose reward falls while its answers grow, and whose grader times out on one answer in ten."""
    noise = 0.01 * np.random.default_rng(0).normal(size=60)
    metrics = {
        "critic/score/mean": np.interp(np.arange(60), [0, 20, 30, 60], [0.3, 0.8, 0.8, 0.5]) + noise,
        "response_length/mean": np.linspace(500, 1000, 60) * (1 + noise),
        "grader/timeouts": np.full(60, 0.1),
    }
    file = tmp_path / "run.jsonl"
    rows = [{"step": i + 1, **{name: float(values[i]) for name, values in metrics.items()}} for i in range(60)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def python(*arguments, path=()):
    """Runs Python in a process of its own, with these folders on its path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def report(run_file):
    """report(words, path=FOLDERS) -> the JSON of that command."""

    def report(words, path=()):
        named = {"RUN": run_file, "grader_slow.toml": run_file.parent / "grader_slow.toml"}
        found = python("-m", "verl_ext.cli", *(named.get(word, word) for word in words), "--json", path=path)
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)

    return report


def install(folder, cause):
    """Puts the page's package with a cause into a folder, as pip does. Returns the groups of its entry points."""
    package, project = folder / "my_causes", tomllib.loads(PROJECT)
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FINDING)
    (package / "grader_slow.toml").write_text(cause)
    assert [*package.glob(*project["tool"]["setuptools"]["package-data"]["my_causes"])]
    about = folder / "my_causes-1.0.dist-info"
    about.mkdir()
    named = "Name: {name}\nVersion: {version}\n".format(**project["project"])
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\n{named}")
    groups = project["project"]["entry-points"]
    lines = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items())
    (about / "entry_points.txt").write_text("".join(lines))
    return list(groups)


def test_the_cause(report, tmp_path):
    name, text = CAUSE
    (tmp_path / f"{name}.toml").write_text(text)
    verdict, written = report(shlex.split(REPORT)), tomllib.loads(text)
    assert [verdict["causes"][0][key] for key in ("id", "title", "check")] == [name, written["title"], written["check"]]
    assert written["try"] in verdict["next"][0]["do"].split()


def test_the_package_of_causes(report, tmp_path):
    assert install(tmp_path / "installed", CAUSE[1] + LINE) == [ENTRY_POINTS]
    verdict = report(["report", "RUN"], path=[tmp_path / "installed"])
    (found,) = [each for each in verdict["findings"] if each["id"] == "grader_timeouts"]
    assert verdict["causes"][0]["id"] == CAUSE[0] and found["text"] in verdict["causes"][0]["for"]
    assert "10%" in found["text"]
    assert report(["report", "RUN"])["causes"] == [], "without the package"


WATCHED = """
from verl_ext.diagnosis.judge import LOOK_EVERY, LOOKS, RunningDiagnosis

diagnosis = RunningDiagnosis()
told = [diagnosis.add(step, {"grader/timeouts": 0.1}) for step in range(1, LOOK_EVERY * LOOKS + 1)]
print(told[-1].cause.name, *(sign.finding.mark for sign in told[-1].evidence))
"""


def test_a_guarded_run_knows_the_package_from_its_first_look(tmp_path):
    by_its_finding = re.sub("^only_with.*\n", "", CAUSE[1], flags=re.MULTILINE)
    install(tmp_path / "installed", by_its_finding + LINE)
    found = python("-c", WATCHED, path=[tmp_path / "installed"])
    assert found.stdout.split() == ["grader_slow", "grader_timeouts.many"], found.stderr


def test_a_package_with_a_mistake_is_named_in_one_line(run_file, tmp_path):
    install(tmp_path / "installed", CAUSE[1] + LINE.replace("many", "masses"))
    found = python("-m", "verl_ext.cli", "report", run_file, "--json", path=[tmp_path / "installed"])
    assert found.returncode == 2 and found.stderr.count("\n") == 1
    assert "grader_slow.toml" in found.stderr and "masses" in found.stderr


def test_the_table_of_words_has_their_points():
    (row,) = re.findall(r"^\| word \|(.*)\|\n\|.*\n\| points.*?\|(.*)\|$", PAGE, re.MULTILINE)
    shown, points = ([cell.strip() for cell in cells.split("|")] for cells in row)
    assert dict(zip(shown, map(float, points), strict=True)) == WORDS
    assert f"named from {LEAST:g} points on" in PAGE
