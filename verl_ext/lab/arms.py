"""The configs of an experiment's arms, and the run of one arm with one seed."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_ext.base.errors import ConfigError, GuardStopError
from verl_ext.base.methods import build, choose, defaults, require_method
from verl_ext.base.names import EVENTS
from verl_ext.core.corrections import CORRECTIONS
from verl_ext.features.fit import fit_run
from verl_ext.features.table import apply_engine_settings
from verl_ext.features.verl_config import BYPASS
from verl_ext.lab.grid import METRICS, Arm
from verl_ext.lab.regimes import REGIMES, Regimes, regimes_named
from verl_ext.lab.training import Setup, Training
from verl_ext.lab.warm_up import LabSettings, warm_up
from verl_ext.launch.compose import PRIMARY, VERL_CONFIGS, prepare, stability_choices
from verl_ext.trainer.logs import LineFile

WARM_UPS = "warm-ups"  # a folder next to the arms' folders
MEASURED = (
    *("stability.metrics=true", "stability.breakdown=false", "stability.router_agreement=true"),
    "stability.reuse_log_probs=off",
)

# Variants with overrides of their own.
VARIANTS: dict[str, tuple[str, ...]] = {
    "none": ("stability=none",),
    "bypass": ("stability=none", f"{BYPASS}=true"),
    "dppo_tv": ("stability=dppo_tv", "stability.batch_skip.threshold=null"),
}
# Presets of the guard. Other presets are used without their batch skip, which would hide the effect of their method.
KEEP_SKIP = ("guard",)
# Settings of verl and of ours that the lab does not support -> the value that switches them off.
ABSENT_SETTINGS: dict[str, Any] = {
    "algorithm.filter_groups.enable": False,
    "algorithm.use_kl_in_reward": False,
    "algorithm.rollout_correction.rollout_is": None,
    "algorithm.rollout_correction.rollout_rs": None,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.rollout.top_p": 1,
    "actor_rollout_ref.rollout.top_k": -1,
    "reward.reward_manager.name": "naive",
    "stability.rescoring.every": 0,
    "stability.trajectories.per_step": 0,
    "stability.cascade_attention": "default",
    "stability.float32_head": False,
    "stability.reuse_log_probs": "off",
}

ConfigStore.instance().store(
    group="lab",
    name="_schema",
    node={
        "regimes": [],
        **defaults(LabSettings),
        **{name: defaults(regime.settings) for name, regime in REGIMES.items()},
    },
)


def variants() -> tuple[str, ...]:
    """Returns the variants that need no overrides from the user."""
    return (*VARIANTS, *(name for name in stability_choices() if name not in VARIANTS))


def arms_of(
    regime: str, names: Sequence[str], added: Mapping[str, str], overrides: Sequence[str], steps: int | None = None
) -> list[Arm]:
    """Returns the arms of an experiment: `exact`, and each variant under the regime.

    Args:
        regime: a name of REGIMES, or several with + between them.
        names: variants: files of configs/stability, VARIANTS, or corrections with + between them.
        added: the user's own variants: name -> overrides, separated by blanks.
        overrides: overrides of all arms.

    Raises:
        ConfigError: a name is not known, or a setting cannot work in the lab.
    """
    wrong = ",".join(regimes_named(regime))
    common = (*MEASURED, *overrides, *([f"trainer.total_training_steps={steps}"] if steps else []))
    wanted = {"exact": VARIANTS["none"]} | {name: _overrides_of(name) for name in names if name != "exact"}
    for name, text in added.items():
        # Without a preset, the variant starts from `none`.
        presets = any(word.startswith("stability=") for word in text.split())
        wanted[name] = (*(() if presets else VARIANTS["none"]), *text.split())
    arms = [
        Arm(name, ("+lab=grpo", given[0], *common, *given[1:], f"lab.regimes=[{'' if name == 'exact' else wrong}]"))
        for name, given in wanted.items()
    ]
    for arm in arms:
        setup_of(arm, 0)
    return arms


def setup_of(arm: Arm, seed: int, folder: Path | None = None) -> Setup:
    """Composes and checks the arm's config as for a run.

    Raises:
        ConfigError: a setting cannot work.
    """
    config = _compose(arm.overrides)
    with open_dict(config):
        config.trainer.default_local_dir = str((folder or Path()) / "checkpoints")
    names = regimes_named("+".join(config.lab.regimes) or "exact")
    if modes := {REGIMES[name].trainer_mode for name in names} - {"sync"}:
        (config.trainer.v1.trainer_mode,) = modes
    for setting, value in ABSENT_SETTINGS.items():
        if (given := OmegaConf.select(config, setting)) != value:
            raise ConfigError(f"{setting}={given} is not supported in the lab", fix=(f"{setting}={_yaml(value)}",))
    features = fit_run(config, arm.overrides, read_model=False)
    apply_engine_settings(features)
    node = OmegaConf.to_container(config.lab, resolve=True)
    node.pop("regimes")
    settings = {name: node.pop(name) for name in REGIMES}
    regimes = Regimes(tuple(choose(REGIMES[name], settings[name], f"lab.{name}") for name in names))
    return Setup(features, build(LabSettings, node, "lab"), regimes, seed)


def run_arm(arm: Arm, seed: int, folder: Path, on_step: Callable[[int], None]) -> None:
    """Trains, and writes metrics.jsonl in the form of verl's file logger, the guard's events, and console.log.

    Args:
        folder: OUT/<arm>/seed<k>. All arms share the warm-up weights, which are also in OUT.
        on_step: called with the number of each finished step.

    Raises:
        ConfigError: a setting cannot work.
    """
    torch.set_num_threads(1)
    setup = setup_of(arm, seed, folder)
    folder.mkdir(parents=True, exist_ok=True)
    length = setup.config.data.max_response_length
    training = Training(setup, warm_up(setup.lab, length, seed, folder.parents[1] / WARM_UPS))
    metrics = folder / METRICS
    with (
        metrics.open("wb") as file,
        (folder / "console.log").open("w") as console,
        contextlib.redirect_stdout(console),
        contextlib.closing(LineFile(metrics.with_suffix(EVENTS), resume=False)) as events,
    ):
        training.actions.log_to(events)
        try:
            for step in range(1, setup.config.trainer.total_training_steps + 1):
                file.write(orjson.dumps({"step": step, "data": training.step(step)}) + b"\n")
                on_step(step)
        except GuardStopError as error:
            print(f"verl_ext: {error}")


def _compose(overrides: Sequence[str]) -> DictConfig:
    try:
        with initialize_config_dir(str(VERL_CONFIGS), version_base=None):
            return compose(PRIMARY, prepare(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(" ".join(str(error).partition("\nConfig search path:")[0].split())) from error


def _overrides_of(name: str) -> tuple[str, ...]:
    if name in VARIANTS:
        return VARIANTS[name]
    if name in stability_choices():
        return (f"stability={name}", *(() if name in KEEP_SKIP else ("stability.batch_skip.threshold=null",)))
    parts = name.split("+")
    for part in parts:
        require_method("--variants", part, (*variants(), *CORRECTIONS) if len(parts) == 1 else CORRECTIONS)
    return ("stability=none", f"stability.correction=[{','.join(parts)}]")


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower()
