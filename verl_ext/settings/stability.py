"""The `stability` settings, validated when built. Defaults stand in dataclasses only, here and in the modules of the
corrections', the filters' and the guard's settings; `configs/stability/*.yaml` hold what a method changes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from verl_ext.errors import ConfigError, require_choice
from verl_ext.guard.rules import Rule
from verl_ext.settings.corrections import METHODS, GeoMask, IcePop, KPop, Mis, Opsm, Tis, TisSequence
from verl_ext.settings.guard import BatchSkip, GuardSettings
from verl_ext.settings.trajectories import TrajectoryDump

AGREEMENT = "stability.router_agreement=true"
CASCADE_ATTENTION = ("default", "on", "off")
DENOMINATORS = ("full", "kept")
FSDP_REPLAY = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"  # verl's own name; its FSDP config leaves it out
KL_DENOMINATORS = ("infer", "old")
UNBIASED = "unbiased"  # our actor.kl_loss_type, beside verl's
YAML_BOOLEANS = {"True": "on", "False": "off"}  # what YAML makes of a bare `on` and `off`
BATCH_SKIP = "batch_skip"
IN_THE_LOSS = "opsm"  # the one correction that needs the policy being updated


@dataclass
class StabilityConfig:
    """Everything the plugin adds to a run; all of it is off by default.

    Attributes:
        correction: weight on the policy-gradient loss: `none`, a name, or a list of names whose weights multiply.
        tis ... opsm: the settings of each correction.
        denominator: `full` keeps tokens of weight 0 in the loss's divisor, as in IcePop's objective; `kept` takes them
            out of the mask, and so out of every term of the loss and its divisor.
        filters: batch filters, a list of names or a mapping from name to settings, run in this order.
        plugins: modules to import first, which register corrections or filters of your own.
        metrics: log `vllm_kl/*` each step; whatever reads them turns it on as well (corrections, filters, the guard, a
            dump of trajectories).
        breakdown: log them by probability, entropy, position and turn too.
        batch_skip: when to refuse a batch.
        guard: rules on other signals, and what else can be done about a batch or a run.
        kl_denominator: what actor.kl_loss_type=unbiased takes the tokens to be sampled from: `infer`, the rollout
            engine (the paper's), or `old`, the training engine before the update.
        router_agreement: compare the experts that training and rollout chose.
        trajectories: write a few trajectories a step, token by token, for the report.
        cascade_attention: vLLM's cascade attention; `default` leaves the engine's own choice.
    """

    correction: Any = "none"
    tis: Tis = field(default_factory=Tis)
    tis_sequence: TisSequence = field(default_factory=TisSequence)
    icepop: IcePop = field(default_factory=IcePop)
    kpop: KPop = field(default_factory=KPop)
    mis: Mis = field(default_factory=Mis)
    geo_mask: GeoMask = field(default_factory=GeoMask)
    opsm: Opsm = field(default_factory=Opsm)
    denominator: str = "full"
    filters: Any = None
    plugins: list[str] = field(default_factory=list)
    metrics: bool = False
    breakdown: bool = True
    batch_skip: BatchSkip = field(default_factory=BatchSkip)
    guard: GuardSettings = field(default_factory=GuardSettings)
    kl_denominator: str = "infer"
    router_agreement: bool = False
    trajectories: TrajectoryDump = field(default_factory=TrajectoryDump)
    cascade_attention: str = "default"

    def __post_init__(self) -> None:
        for module in self.plugins:
            try:
                import_module(module)
            except ImportError as error:
                raise ConfigError(f"stability.plugins: {module} cannot be imported ({error})") from error
        require_choice("stability.denominator", self.denominator, DENOMINATORS)
        require_choice("stability.kl_denominator", self.kl_denominator, KL_DENOMINATORS)
        self.cascade_attention = YAML_BOOLEANS.get(self.cascade_attention, self.cascade_attention)
        require_choice("stability.cascade_attention", self.cascade_attention, CASCADE_ATTENTION)
        self._check_corrections()
        if "low_agreement" in dict(self.filter_chain()) and not self.router_agreement:
            raise ConfigError("stability.filters.low_agreement needs the routers' agreement", fix=(AGREEMENT,))
        self._check_guard()

    def _check_corrections(self) -> None:
        names = self.correction_names
        if set(names) - set(METHODS):  # of a plugin's, or not known: only their registry, which needs torch, tells
            from verl_ext.core.corrections import CORRECTIONS

            for name in names:
                require_choice("stability.correction", str(name), ("none", *CORRECTIONS, IN_THE_LOSS))
        if len(set(names)) < len(names):
            raise ConfigError(f"stability.correction={list(names)} names a correction twice")
        for name, settings in METHODS.items():
            if name not in names and getattr(self, name) != settings():
                raise ConfigError(
                    f"stability.{name} is set, and stability.correction={self.correction} does not use it; add {name} "
                    "there, or leave the setting out"
                )
        if self.denominator == "kept" and not set(names) - {IN_THE_LOSS}:
            raise ConfigError(
                "stability.denominator=kept counts what stability.correction keeps before the update, and "
                f"stability.correction={self.correction} drops nothing there",
                fix=("stability.denominator=full",),
                otherwise="name a correction (for opsm, stability.filters.off_policy_negative does the same before the "
                "update)",
            )
        by_ratio = [name for name in names if name in ("tis", "tis_sequence", "icepop", "kpop")]
        if "mis" in names and self.mis.weight == "ratio":
            by_ratio.append("mis")
        if len(by_ratio) > 1:
            raise ConfigError(
                f"stability.correction={list(names)}: {' and '.join(by_ratio)} each weigh a token by its ratio, which "
                "would count twice",
                fix=("stability.mis.weight=one",) if by_ratio[1:] == ["mis"] else (),
                otherwise="keep one of them (mis can go with another: stability.mis.weight=one)",
            )
        if IN_THE_LOSS in names:
            if self.opsm.delta is None:
                raise ConfigError(
                    "stability.correction=opsm needs stability.opsm.delta, in nats a token",
                    fix=("stability.opsm.delta=0.1",),
                    otherwise="another value",
                )
            if self.denominator == "kept":
                raise ConfigError(
                    "stability.denominator=kept cannot count what opsm drops inside the update",
                    fix=("stability.denominator=full",),
                    otherwise="use stability.filters.off_policy_negative",
                )

    @property
    def correction_names(self) -> tuple[str, ...]:
        """The corrections by name, in order; () for `none`."""
        given = _names("stability.correction", self.correction)
        return tuple(name for name in given if name != "none")

    def corrections(self) -> dict[str, dict[str, Any]]:
        """Name -> settings of the corrections that the trainer applies, for `core.measure`."""
        return {
            name: asdict(getattr(self, name)) if hasattr(self, name) else {}
            for name in self.correction_names
            if name != IN_THE_LOSS
        }

    def tightened(self) -> dict[str, dict[str, Any]]:
        """`corrections()` with IcePop's band narrowed, in logarithms, by guard.tighten_factor."""
        factor = self.guard.tighten_factor
        band = {"alpha": self.icepop.alpha**factor, "beta": self.icepop.beta**factor}
        return self.corrections() | {"icepop": band}

    def filter_chain(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and settings of the batch filters, in order, for `core.filters`."""
        if not self.filters:
            return []
        from verl_ext.settings.filters import parse_filters  # not above: it needs torch

        if isinstance(self.filters, Mapping):
            return parse_filters(self.filters)
        names = _names("stability.filters", self.filters)
        if len(set(names)) < len(names):
            raise ConfigError(f"stability.filters={names} names a filter twice")
        return parse_filters({name: {} for name in names})

    def _check_guard(self) -> None:
        for rule in self.rules():
            if rule.action == "tighten":
                if "icepop" not in self.correction_names:
                    raise ConfigError(
                        f"stability.guard.rules.{rule.name}: action=tighten narrows IcePop's band; name icepop in "
                        "stability.correction, or choose another action"
                    )
                if not self.icepop.alpha <= 1 <= self.icepop.beta:
                    raise ConfigError(
                        f"stability.guard.rules.{rule.name}: action=tighten narrows the band towards 1, which lies "
                        f"outside stability.icepop.alpha={self.icepop.alpha:g} to beta={self.icepop.beta:g}"
                    )
            if rule.signal.startswith("router/") and not self.router_agreement:
                raise ConfigError(
                    f"stability.guard.rules.{rule.name}: {rule.signal} needs the routers' agreement", fix=(AGREEMENT,)
                )

    def rules(self) -> list[Rule]:
        """Of the guard: batch_skip first, then stability.guard.rules."""
        rules = self.guard.parse_rules()
        if self.batch_skip.threshold is None:
            return rules
        if any(rule.name == BATCH_SKIP for rule in rules):
            raise ConfigError(f"stability.guard.rules.{BATCH_SKIP}: the name is taken by stability.batch_skip")
        setting = f"stability.{BATCH_SKIP}.threshold"
        rule = Rule(BATCH_SKIP, self.batch_skip.metric, self.batch_skip.threshold, action="skip", setting=setting)
        return [rule, *rules]

    @property
    def needs_log_probs(self) -> bool:
        """Whether anything compares the rollout's log-probabilities with the training engine's."""
        guards = self.batch_skip.threshold is not None or self.guard.active
        return bool(self.metrics or self.correction_names or self.filters or guards or self.trajectories.per_step)

    @property
    def active(self) -> bool:
        return self.needs_log_probs or self.router_agreement or self.cascade_attention != "default"


def _names(setting: str, given: Any) -> list[str]:
    """A name or a list of names as a list."""
    names = [given] if isinstance(given, str) else given or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{setting}={given} must be a name or a list of names")
    return list(names)


def stability_config(node: Any) -> StabilityConfig:
    """The validated dataclass of a Hydra `stability` node.

    Raises:
        ConfigError: a value is out of range or not among the choices.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(StabilityConfig), node))
    except OmegaConfBaseException as error:
        raise ConfigError(f"stability.{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, StabilityConfig)
    return config
