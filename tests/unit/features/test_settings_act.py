"""Each setting acts, or is refused: in every preset and kind of launch, one at a time is switched to another value.

What a run does by its settings is its `effects`: whatever trainer, workers, guard and engines are given.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import product

import pytest
from omegaconf import OmegaConf, open_dict

from tests.support.examples import slow_cases
from tests.support.problems import check_run, features_of
from verl_ext.base import methods
from verl_ext.base.errors import ConfigError
from verl_ext.core.advantages import ESTIMATORS
from verl_ext.features.feature import Need
from verl_ext.features.losses import LOSS, LOSSES
from verl_ext.features.stability import default_node, stability_config
from verl_ext.features.sync_canary import canary_settings
from verl_ext.features.table import FEATURES, apply_engine_settings, loss_settings, read_features, table_lines
from verl_ext.features.top_tokens import top_token_count
from verl_ext.features.verl_config import BYPASS
from verl_ext.launch.compose import stability_choices
from verl_ext.trainer.guard_actions import build_guard

SYNC = (
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.rollout.name=vllm",
    "algorithm.adv_estimator=grpo",
    "data.max_response_length=8192",  # for the punishment of dapo
)
SEPARATE = (*SYNC, "trainer.v1.trainer_mode=separate_async")
LAUNCHES = {"sync": SYNC, "separate_async": SEPARATE, "bypass": (*SYNC, f"{BYPASS}=true")}
ESTIMATOR = {"qae": "qae", "grpo_positive": "grpo_positive"}  # preset -> its own, instead of the launch's
NOT_MEASURED = ("stability.metrics=false", "stability.batch_skip.threshold=null")


def rule(name, action):
    return f"stability.guard.rules.{name}={{signal:vllm_kl/k3,above:1,action:{action}}}"


# Launches in which parts are on that no preset has, or off.
FURTHER = {
    "metrics": (*SYNC, "stability.metrics=true"),
    "one update a batch": (*SYNC, "stability=tis", "data.train_batch_size=256"),
    "a loss that measures nothing": (*SYNC, "stability=llds_loss", *NOT_MEASURED),
    "no canary": (*SEPARATE, "stability=icepop", "stability.sync_canary.trajectories=0"),
    "old rollouts": (*SEPARATE, "stability=opsm"),
    "a loss for old rollouts": (*SEPARATE, "stability=opsm_loss"),
    "rescoring": (*SEPARATE, "stability=icepop", "stability.rescoring.every=2"),
    "trajectories": (*SYNC, "stability=kpop", "stability.trajectories.per_step=2"),
    "fake quantization": (*SYNC, "stability=ipo", "stability.fake_quantization.format=int4"),
    "rules": (
        *(*SYNC, "stability=icepop", "trainer.save_freq=5"),
        *(rule("back", "rollback"), rule("narrow", "tighten"), rule("slow", "lower_lr")),
    ),
}
# Presets that have the settings which the others lack; with FURTHER, every setting acts in one.
COVERING = ("tis", "tis_sequence", "mis", "geo_mask", "m2po", "deepseek_v32", "r3", "icepop_loss", "opsm_loss")
COVERING += ("llds_loss", "qae", "grpo_positive", "score_centering", "zero_mismatch")
VALUES = {
    "stability.correction": ("kpop", "ipo"),
    "stability.filters": (["zero_variance"],),
    "stability.guard.rules": ({"r": {"signal": "vllm_kl/k3", "above": 0.2, "action": "warn"}},),
    "stability.plugins": (["json"],),
    "stability.denominator": ("kept", "full"),
    "stability.kl_denominator": ("old", "infer"),
    "stability.cascade_attention": ("off", "on"),
    "stability.reuse_log_probs": ("off", "on"),
    "stability.replay": ("R3", "R2"),
    "stability.sync_canary.trajectories": (12,),
    "stability.sync_check": ({}, {"every": 5}),
    "stability.batch_skip.metric": ("vllm_kl/k1",),
    "stability.guard.boundary.signal": ("vllm_kl/k1",),
    "stability.fake_quantization.format": ("fp4", "int8"),
    "stability.mis.weight": ("one", "ratio"),
    f"{LOSS}.base": ("gspo",),
    f"{LOSS}.gate": ("response",),
    f"{LOSS}.stale_only": (True,),
    "stability.geo_mask.high": (1.01,),
}
OFF = (False, 0, None, "off")  # where nothing is on, a run does what these ask for
SHARED = ("stability.metrics", "stability.router_agreement")  # on already where the gap is measured, and with R3
# Names settings and changes none; the launch writes the second, and reads the third (`start.check_versions`).
OTHER_SETTINGS = ("stability.expects", "stability.left_out", "stability.any_version")


def leaves(node: Mapping, prefix: str) -> Iterator[str]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}"


OF_LOSSES = {name: None for method in LOSSES.values() for name in ("base", *methods.defaults(method.settings))}
OF_ESTIMATORS = {name: methods.defaults(method.settings) for name, method in ESTIMATORS.items()}
SETTINGS = [
    *(one for one in leaves(default_node(), "stability") if one not in OTHER_SETTINGS),
    *leaves(OF_LOSSES, LOSS),
    *leaves(OF_ESTIMATORS, "algorithm"),
]


def other_value(setting, now):
    """Returns a valid value that is not the present one."""
    if setting in VALUES:
        return next(value for value in VALUES[setting] if value != now)
    if isinstance(now, bool):
        return not now
    if isinstance(now, int):
        return now + 2
    return 0.9 * now if now else 0.5


def effects(config):
    """Returns what the run does by its settings; None if it is verl's own."""
    stability = stability_config(config.stability)
    run = read_features(config, stability, read_model=False)
    check_run(run)
    if not run.demands:
        return None
    found = {
        "table": [(line.name, line.setting, line.at) for line in table_lines(run)],
        "needs": run.needs,
        "workers": loss_settings(run),
        "agent loop": [feature.agent_loop(run) for feature in FEATURES],
        "watch": stability.guard.slow_step_s,
        "batch": (stability.corrections(), stability.denominator, stability.filter_chain()),
        "top_tokens": (top_token_count(run), stability.score_centering),
        "plugins": stability.plugins,
        "canary": canary_settings(run) if canary_settings(run).trajectories else None,
        "trajectories": stability.trajectories if stability.trajectories.per_step else None,
        "rescoring": stability.rescoring if stability.rescoring.every else None,
    }
    if Need.MEASURED_BATCHES in run.needs:
        guard, settings = build_guard(stability), stability.guard
        found |= {"guard": (guard.rules, guard.stop_after, guard.boundary), "breakdown": stability.breakdown}
        of_actions = {
            "tighten": settings.tighten_factor,
            "lower_lr": settings.lower_lr,
            "rollback": (settings.max_rollbacks, settings.rollback_cooldown),
            "undo": settings.rollback_cooldown,
        }
        found |= {action: of_actions[action] for action in {one.action for one in guard.rules} & set(of_actions)}
    return found


def given_to_verl(config):
    config = copy.deepcopy(config)
    apply_engine_settings(features_of(config, read_model=False))
    return {name: OmegaConf.to_container(config[name]) for name in ("actor_rollout_ref", "algorithm")}


@pytest.fixture(scope="module", autouse=True)
def quick_conversion():
    """Converts a value once: that is most of the time that a config takes to be read."""
    verls, converted = methods._converted, {}

    def quick(hint, value, setting):
        key = (hint, repr(value), setting)
        if key not in converted:
            converted[key] = verls(hint, value, setting)
        return converted[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(methods, "_converted", quick)
        yield


@pytest.fixture
def launched(compose, with_fixes):
    """launched(overrides...) -> a config that passes our checks, with the fixes of their errors."""

    def run(*overrides):
        config = compose(*overrides)
        effects(config)
        return config

    return lambda *overrides: with_fixes(run, *overrides)[0]


@contextmanager
def changed(config, setting, value):
    """Context in which the config has another value."""
    parent, _, name = setting.rpartition(".")
    if OmegaConf.select(config, parent) is None:  # null, or a method's settings that nobody has set
        OmegaConf.update(config, parent, {}, force_add=True)
    node = OmegaConf.select(config, parent)
    before = OmegaConf.to_container(node)
    with open_dict(node):
        node[name] = value
        yield
        if name in before:
            node[name] = before[name]
        else:
            del node[name]


def silent_settings(config):
    """Returns the settings that can be changed without an effect and without an error, and those that act."""
    before, verls, silent, acting = effects(config), cache(partial(given_to_verl, copy.deepcopy(config))), [], []
    for setting in SETTINGS:
        if before is None and setting.startswith(LOSS):
            continue  # the run is verl's own, and so is the error for a setting that verl's loss does not know
        now = OmegaConf.select(config, setting)
        value = other_value(setting, OmegaConf.to_container(now) if OmegaConf.is_config(now) else now)
        with changed(config, setting, value):
            try:
                acts = effects(config) != before or (before is not None and given_to_verl(config) != verls())
            except ConfigError:
                continue
        if acts:
            acting.append(setting)
        elif value not in OFF and not (setting in SHARED and before is not None):
            silent.append(f"{setting}={value}")
    return silent, acting


@pytest.mark.parametrize(("launch", "preset"), slow_cases(product(LAUNCHES, stability_choices())))
def test_no_setting_is_without_an_effect_and_without_an_error(launched, launch, preset):
    overrides = [one for one in LAUNCHES[launch] if not (preset in ESTIMATOR and "adv_estimator" in one)]
    silent, _ = silent_settings(launched(*overrides, f"stability={preset}"))
    assert silent == []


def test_each_setting_acts_in_some_launch(launched):
    acting = set()
    for overrides in (*FURTHER.values(), *((f"stability={preset}", *SYNC[:2]) for preset in COVERING)):
        silent, found = silent_settings(launched(*overrides))
        assert silent == [], overrides
        acting |= set(found)
    assert set(SETTINGS) == acting
