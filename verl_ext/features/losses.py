"""Our policy losses, and the unbiased KL to the reference.

A loss's settings are flat in verl's `actor.policy_loss`, next to `loss_mode` and `base`. verl is not imported, so that
a launch and doctor can check the settings without it. Written for verl 0.9.1.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

import verl_ext.core.losses  # noqa: F401 (to register them)
from verl_ext.base.errors import ConfigError, Problem
from verl_ext.base.methods import ConfiguredMethod, choose, defaults, described
from verl_ext.core.losses import LOSSES, Loss
from verl_ext.features.feature import Demand, Feature, Idle, Need, RunFeatures, TableLine
from verl_ext.features.settings import AGREEMENT, EVERY_AGREEMENT
from verl_ext.features.verl_config import ACTOR, age_problems, strategy_of
from verl_ext.routing.engines import ENGINES

LOSS = f"{ACTOR}.policy_loss"
EXTERNAL_LIB = "actor_rollout_ref.model.external_lib"
VERLS_TARGET = "verl.workers.config.PolicyLossConfig"
TARGET = "verl_ext.workers.loss_config.build_loss_config"  # verl calls it in every process that builds its ActorConfig
VERLS_SETTINGS = (
    "_target_",
    "loss_mode",
    "clip_cov_ratio",
    "clip_cov_lb",
    "clip_cov_ub",
    "kl_cov_ratio",
    "ppo_kl_coef",
    "dro_beta",
    "rollout_correction",
)
BASES = (
    *("vanilla", "gspo", "cispo", "sapo", "geo_mean", "clip_cov"),
    *("dppo_kl", "dppo_tv", "dro", "geo_mean_weighted", "gpg", "kl_cov"),
)
WITHOUT_RATIO = ("gpg",)  # verl's losses without l_old: -log pi_theta A
UNBIASED = "unbiased"  # our value of actor.kl_loss_type
VERLS_KL = (f"{ACTOR}.kl_loss_type=low_var_kl",)  # leaves it out


def chosen_loss(policy_loss: Mapping[str, Any]) -> ConfiguredMethod[Loss]:
    """Returns our loss that `loss_mode` names, with its validated settings.

    Raises:
        ConfigError: a setting is unknown, missing or out of range.
    """
    own = {name: value for name, value in policy_loss.items() if name not in (*VERLS_SETTINGS, "base")}
    return choose(LOSSES[policy_loss["loss_mode"]], own, LOSS)


def reads_k(loss_mode: str) -> bool:
    """Returns True if the policy loss itself computes the tokens' weights from the mismatch ratio k, as icepop does."""
    return loss_mode in LOSSES and "k" in LOSSES[loss_mode].reads


def own_settings() -> list[str]:
    """Returns the names of all settings of our losses."""
    return [name for method in LOSSES.values() for name in defaults(method.settings)]


def base_of(policy_loss: Mapping[str, Any]) -> str:
    return policy_loss.get("base", "vanilla")


def require_base(base: str, known: Collection[str] = BASES) -> None:
    if base not in known:
        raise ConfigError(f"{LOSS}.base={base} cannot be built upon; choose one of: {sorted(known)}")


def loss_mode(config: DictConfig) -> str:
    return OmegaConf.select(config, f"{LOSS}.loss_mode") or "vanilla"


def loss_has_ratio(config: DictConfig) -> bool:
    """Returns True if the policy loss, or its `base`, weighs by r. A user's own loss counts as one that does."""
    node = OmegaConf.select(config, LOSS) or {}
    mode = node.get("loss_mode")
    return (base_of(node) if mode in LOSSES else mode) not in WITHOUT_RATIO


def foreign_loss(config: DictConfig) -> str:
    """Returns why the workers cannot run our loss around verl's, as a clause; "" if they can.

    Source: with distillation, `actor_worker` of verl/workers/engine_workers.py (0.9.1) has `distillation_ppo_loss`.
    """
    if (strategy := strategy_of(config)) not in ENGINES:
        return f"they have no adapter for {ACTOR}.strategy={strategy} (they have: {', '.join(ENGINES)})"
    if OmegaConf.select(config, "distillation.enabled"):
        return "distillation.enabled=true gives them a loss of its own"
    return ""


def uses_unbiased_kl(config: DictConfig) -> bool:
    actor = config.actor_rollout_ref.actor
    return bool(actor.get("use_kl_loss")) and actor.get("kl_loss_type") == UNBIASED


def needs(run: RunFeatures) -> Iterator[Demand]:
    needed = frozenset({Need.ROLLOUT_LOG_PROBS, Need.OUR_LOSS})
    if (name := loss_mode(run.config)) in LOSSES:
        measured = {Need.MEASURED_BATCHES} if reads_k(name) else set()
        yield Demand(f"{LOSS}.loss_mode={name}", needed | measured)
    if uses_unbiased_kl(run.config):
        yield Demand(f"{ACTOR}.kl_loss_type={UNBIASED}", needed, VERLS_KL)


def problems(run: RunFeatures) -> Iterator[Problem]:
    """Checks the settings and inputs of our loss; refuses settings of our losses if another loss is chosen."""
    node: Any = OmegaConf.to_container(OmegaConf.select(run.config, LOSS), resolve=True)
    name, target = node.get("loss_mode"), str(node.get("_target_"))
    if overridden := [*_overridden_problems(name, target, node)]:
        yield from overridden
    elif name in LOSSES:
        yield from _own_loss_problems(run, name, target, node)
    elif target == VERLS_TARGET:
        yield from _unused_setting_problems(name, node)
    yield from _kl_problems(run)


def _overridden_problems(name: Any, target: str, node: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields a problem for an override that replaces a preset's loss, such as that of `stability=icepop_loss`."""
    if target != TARGET:
        return
    own = {ours: set(defaults(method.settings)) for ours, method in LOSSES.items()}
    with_settings = next((ours for ours, settings in own.items() if settings and settings <= set(node)), None)
    ours = name if name in LOSSES else with_settings
    if ours in (None, name):
        return
    # Our losses build upon others, not upon each other. `name` may be any text of the user's.
    is_base = str(name).isidentifier() and name not in (*LOSSES, "bypass_mode")
    yield Problem(
        f"{LOSS}.loss_mode={name} overrides the loss {ours}, whose settings are set and which builds upon {LOSS}.base",
        fix=(f"{LOSS}.loss_mode={ours}", *([f"{LOSS}.base={name}"] if is_base else [])),
    )


def _unused_setting_problems(name: Any, node: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields the settings of our losses that a loss of verl has: its settings class would raise a stack trace."""
    owners = {"base": next(iter(LOSSES))}
    owners |= {setting: ours for ours, method in LOSSES.items() for setting in defaults(method.settings)}
    for setting, ours in owners.items():
        if setting in node:
            yield Problem(
                f"{LOSS}.{setting} is for the losses of verl_ext, such as {ours}, and {LOSS}.loss_mode={name} does not "
                "use it",
                otherwise="leave it out",
            )


def _own_loss_problems(run: RunFeatures, name: str, target: str, node: Mapping[str, Any]) -> Iterator[Problem]:
    stability, asked = run.stability, f"{LOSS}.loss_mode={name}"
    if target not in (VERLS_TARGET, TARGET):
        yield Problem(
            f"{asked} needs the class that builds its settings, and {LOSS}._target_={target} is another class",
            fix=(f"{LOSS}._target_={TARGET}",),
            otherwise="leave it out",
        )
        return
    chosen = chosen_loss(node)
    reads = chosen.method.reads
    if getattr(chosen.settings, "stale_only", False):
        yield from age_problems(run.config, f"{LOSS}.stale_only=true", (f"{LOSS}.stale_only=false",))
    if not (stability.plugins or OmegaConf.select(run.config, EXTERNAL_LIB)):  # these may register a base of their own
        require_base(base_of(node))
    if "router_agreement" in reads and not stability.router_agreement:
        yield Problem(f"{asked} needs the routers' agreement", fix=(AGREEMENT,))
    if "router_agreement" in reads and stability.router_agreement_share < 1:
        yield Problem(f"{asked} {stability.needs_every_agreement}", fix=(EVERY_AGREEMENT,))


def _kl_problems(run: RunFeatures) -> Iterator[Problem]:
    actor = run.config.actor_rollout_ref.actor
    if actor.get("kl_loss_type") == UNBIASED and not actor.get("use_kl_loss"):
        yield Problem(
            f"{ACTOR}.kl_loss_type={UNBIASED} does nothing without a KL loss",
            fix=(f"{ACTOR}.use_kl_loss=true",),
            leave_out=VERLS_KL,
        )


def apply(run: RunFeatures) -> None:
    """Makes verl build the settings of our loss, and import the user's plugins in every worker."""
    if loss_mode(run.config) in LOSSES:
        OmegaConf.update(run.config, f"{LOSS}._target_", TARGET)
    if run.stability.plugins:
        modules = OmegaConf.select(run.config, EXTERNAL_LIB) or []
        modules = [modules] if isinstance(modules, str) else modules
        OmegaConf.update(run.config, EXTERNAL_LIB, list(dict.fromkeys([*modules, *run.stability.plugins])))


def loss_settings(run: RunFeatures) -> dict[str, Any]:
    return {"kl_denominator": run.stability.kl_denominator}


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if (name := loss_mode(run.config)) in LOSSES:
        node = OmegaConf.select(run.config, LOSS)
        settings = {key: node.get(key, usual) for key, usual in defaults(LOSSES[name].settings).items()}
        yield TableLine(
            "policy loss",
            described(name, {"base": base_of(node), **settings}),
            "{loss}",
            in_loss=lambda found: found["policy_loss"]["loss_mode"] == name,
        )
    if uses_unbiased_kl(run.config):
        setting = f"{UNBIASED}, over l_{run.stability.kl_denominator}"
        yield TableLine("KL to the reference", setting, "{loss}", in_loss=lambda found: found["kl"] == setting)


def idle(run: RunFeatures) -> Iterator[Idle]:
    if not uses_unbiased_kl(run.config):
        switch = (f"{ACTOR}.kl_loss_type={UNBIASED}", f"{ACTOR}.use_kl_loss=true")
        yield Idle("", "it acts only with the unbiased KL", switch, ("kl_denominator",))


POLICY_LOSS = Feature(needs, problems, apply, loss_settings=loss_settings, lines=lines, idle=idle)
