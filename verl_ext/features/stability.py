"""The `stability` node: validated when it is read, and parsed once into a frozen StabilityConfig.

Defaults are only in dataclasses: a feature's in its file, a method's next to its function.
`configs/stability/*.yaml` hold what a method changes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from importlib import import_module
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.base.errors import ConfigError, require_choice
from verl_ext.base.methods import Chosen, build, choose, defaults, require, require_known, require_one_of
from verl_ext.core.corrections import CORRECTIONS, Correction
from verl_ext.core.filters import BatchFilter, get_batch_filter
from verl_ext.features.fake_quantization import FakeQuantization
from verl_ext.features.guard import BATCH_SKIP, READ_BY, BatchSkip, GuardSettings, parse_rules
from verl_ext.features.heads import HeadSettings
from verl_ext.features.losses import AGREEMENT, EVERY_AGREEMENT, KL_DENOMINATORS
from verl_ext.features.rescoring import Rescoring
from verl_ext.features.sync_canary import SyncCanarySettings
from verl_ext.features.trajectories import TrajectoryDump
from verl_ext.features.verl_config import REPLAY_MODES
from verl_ext.guard.rules import Rule


@dataclass(frozen=True)
class Switches:
    """The settings that are not a method's.

    Attributes:
        denominator: `full` keeps tokens of weight 0 in the loss's divisor, as in IcePop's objective. `kept` takes them
            out of the mask, and so out of the divisor and of every other term of the loss.
        plugins: modules to import first. They register corrections, filters, losses and estimators of your own
            (docs/extend.md).
        expects: settings that the preset sets and does not work without, each with the value, or the list of values,
            that it may have. Another value stops the run; null expects nothing.
        left_out: overrides that the launch applied because the preset cannot work here as it is, each with the reason.
            The launch writes it.
        metrics: log `vllm_kl/*` each step, even if nothing else needs them. A correction, a filter, a threshold, a rule
            or dumped trajectories turn them on too.
        breakdown: log `vllm_kl/*` by probability, entropy, position and turn too. In every asynchronous mode they are
            logged by lag as well, whatever this is.
        batch_skip: when to skip the update of a batch.
        guard: rules on logged signals, and the guard's other actions.
        kl_denominator: the policy that `actor.kl_loss_type=unbiased` assumes sampled the tokens: `infer`, the rollout
            engine (the paper's), or `old`, the training engine before the update.
        router_agreement: compare the experts of `compute_log_prob` with those of the rollout. Turns on
            `rollout.enable_rollout_routing_replay`, which turns on `enable_return_routed_experts` of vLLM or SGLang.
        router_agreement_share: compare them in this share of the trajectories, above 0. The experts of the others are
            not sent to the workers (docs/routing.md#a-share-of-the-trajectories).
        replay: routing replay, on every training engine: `R2`, `R3` or `disabled`. null leaves the engine's own
            `router_replay.mode` as it is.
        head: the rollout's most likely tokens at each place.
        score_centering: subtract from each token's score its mean under the sampler, weighted as the token is; needs
            one update per step.
        rescoring: score a few trajectories again with the weights that sampled them (`separate_async`).
        trajectories: write a few trajectories per step, token by token, for the report.
        cascade_attention: vLLM's cascade attention: `on`, `off`, or `default`, the engine's own choice. It is checked
            against what vLLM's workers run with.
        sync_canary: check that weight syncs reach the rollout.
        fake_quantization: round the rollout's weights as a quantised rollout has them.
    """

    denominator: str = "full"
    plugins: list[str] = field(default_factory=list)
    expects: dict[str, Any] | None = None
    left_out: dict[str, str] | None = None
    metrics: bool = False
    breakdown: bool = True
    batch_skip: BatchSkip = field(default_factory=BatchSkip)
    guard: GuardSettings = field(default_factory=GuardSettings)
    kl_denominator: str = "infer"
    router_agreement: bool = False
    router_agreement_share: float = 1.0
    replay: str | None = None
    head: HeadSettings = field(default_factory=HeadSettings)
    score_centering: bool = False
    rescoring: Rescoring = field(default_factory=Rescoring)
    trajectories: TrajectoryDump = field(default_factory=TrajectoryDump)
    cascade_attention: str = "default"
    sync_canary: SyncCanarySettings = field(default_factory=SyncCanarySettings)
    fake_quantization: FakeQuantization = field(default_factory=FakeQuantization)

    def __post_init__(self) -> None:
        require_one_of(self, "denominator", ("full", "kept"))
        require_one_of(self, "kl_denominator", KL_DENOMINATORS)
        require_one_of(self, "cascade_attention", ("default", "on", "off"))
        if self.replay is not None:
            require_one_of(self, "replay", REPLAY_MODES)
        share = self.router_agreement_share
        require(self, "router_agreement_share", 0 < share <= 1, "must be above 0 and at most 1")


def _usual_text(value: Any) -> str:
    """Returns a default as an override has it; null for a group of settings, which takes its own defaults."""
    return "null" if is_dataclass(value) else json.dumps(value)


def _drops(chosen: Chosen[Correction]) -> bool:
    """Returns True if a correction may drop tokens; one whose registration only lets it weigh by the ratio may not."""
    method = chosen.method
    return method.drops or bool(method.as_mask) or not method.weighs_by_ratio(chosen.settings)


@dataclass(frozen=True)
class StabilityConfig(Switches):
    """Everything the plugin adds to a run; all of it is off by default.

    Attributes:
        correction: the name of a correction, or a list of names whose weights multiply.
        filters: batch filters, run in this order: a list of names, or a mapping from name to settings.
        rules: a mapping from a name to a rule of the guard. `batch_skip` is the first rule.
    """

    correction: tuple[Chosen[Correction], ...] = ()
    filters: tuple[Chosen[BatchFilter], ...] = ()
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_ratio()
        self._check_denominator()
        needing = {
            f"correction={one.name}": self.without(one.name)
            for one in self.in_update
            if "router_agreement" in one.method.reads
        }
        needing |= {
            f"filters.{one.name}": self.without_filter(one.name) for one in self.filters if one.method.needs_agreement
        }
        if needing and self.router_agreement_share < 1:
            raise ConfigError(f"stability.{next(iter(needing))} {self.needs_every_agreement}", fix=(EVERY_AGREEMENT,))
        if self.router_agreement_share < 1:
            needing[f"router_agreement_share={self.router_agreement_share:g}"] = (EVERY_AGREEMENT,)
        if not self.router_agreement:
            for setting, off in needing.items():
                raise ConfigError(f"stability.{setting} needs the routers' agreement", fix=(AGREEMENT,), gives_way=off)
        for rule in self.rules:
            self._check_rule(rule)
        self._check_guard()

    def _check_ratio(self) -> None:
        weigh = [chosen for chosen in self.correction if chosen.method.weighs_by_ratio(chosen.settings)]
        if len(weigh) < 2:
            return
        masks = [f"stability.{one.name}.{one.method.as_mask}" for one in weigh if one.method.as_mask]
        also = f" ({weigh[-1].name} can go with another: {masks[-1]})" if masks else ""
        raise ConfigError(
            f"stability.correction={list(self.correction_names)}: {' and '.join(one.name for one in weigh)} each weigh "
            "a token by its ratio, which would count twice",
            fix=tuple(masks) if len(masks) == len(weigh) - 1 else (),
            otherwise=f"keep one of them{also}",
        )

    def _check_denominator(self) -> None:
        if self.denominator == "full":
            return
        full = ("stability.denominator=full",)
        if inside := [chosen.name for chosen in self.in_update]:
            raise ConfigError(
                f"stability.denominator=kept cannot count what {' and '.join(inside)} drops inside the update",
                fix=full,
                otherwise="use stability.filters.off_policy_negative",
                gives_way=full,
            )
        if not any(_drops(chosen) for chosen in self.correction):
            raise ConfigError(
                "stability.denominator=kept counts what stability.correction keeps before the update, and "
                f"stability.correction={','.join(self.correction_names) or 'none'} drops nothing there",
                fix=full,
                otherwise="name a correction that drops tokens, such as icepop",
                gives_way=full,
            )

    def _check_guard(self) -> None:
        """Refuses a setting of the guard whose action no rule has."""
        usual, actions = GuardSettings(), {rule.action for rule in self.rules}
        for name, readers in READ_BY.items():
            if getattr(self.guard, name) != getattr(usual, name) and actions.isdisjoint(readers):
                raise ConfigError(
                    f"stability.guard.{name} is set, and no rule has action={' or '.join(readers)}; give a rule of "
                    "stability.guard.rules that action, or leave the setting out",
                    gives_way=(f"stability.guard.{name}={_usual_text(getattr(usual, name))}",),
                )

    def _check_rule(self, rule: Rule) -> None:
        where = f"stability.guard.rules.{rule.name}"
        if rule.action == "tighten":
            if not self.bands:
                raise ConfigError(
                    f"{where}: action=tighten narrows IcePop's band; name icepop in stability.correction, or choose "
                    "another action",
                    gives_way=(f"{where}.action=warn",),
                )
            for chosen in self.bands:
                (low, least), (high, most) = asdict(chosen.settings).items()
                if not least <= 1 <= most:
                    raise ConfigError(
                        f"{where}: action=tighten narrows the band towards 1, which lies outside "
                        f"stability.{chosen.name}.{low}={least:g} to {high}={most:g}"
                    )
        if rule.signal.startswith("router/") and not self.router_agreement:
            raise ConfigError(
                f"{where}: {rule.signal} needs the routers' agreement", fix=(AGREEMENT,), gives_way=(f"{where}=null",)
            )

    @property
    def needs_every_agreement(self) -> str:
        """The clause of an error about a feature that reads the agreement token by token."""
        return (
            "reads the routers' agreement of every token, and "
            f"stability.router_agreement_share={self.router_agreement_share:g} compares only some trajectories"
        )

    @property
    def correction_names(self) -> tuple[str, ...]:
        return tuple(chosen.name for chosen in self.correction)

    @property
    def asked_correction(self) -> str:
        """The corrections as an override."""
        return _correction_override(self.correction_names)

    def without(self, *names: str) -> tuple[str, ...]:
        """Returns the overrides that leave these corrections out, with their settings, which nothing else uses."""
        left_out = [chosen for chosen in self.correction if chosen.name in names]
        changed = [one.name for one in left_out if asdict(one.settings) != defaults(one.method.settings)]
        rest = _correction_override([name for name in self.correction_names if name not in names])
        return (rest, *(f"stability.{name}=null" for name in changed))

    def without_filter(self, name: str) -> tuple[str]:
        """Returns the override that leaves a filter out."""
        rest = {chosen.name: asdict(chosen.settings) for chosen in self.filters if chosen.name != name}
        return (f"stability.filters={json.dumps(rest) if rest else 'null'}",)

    @property
    def before_update(self) -> tuple[Chosen[Correction], ...]:
        """The corrections that the trainer applies."""
        return tuple(chosen for chosen in self.correction if not chosen.method.in_update)

    @property
    def in_update(self) -> tuple[Chosen[Correction], ...]:
        """The corrections that the workers' loss applies."""
        return tuple(chosen for chosen in self.correction if chosen.method.in_update)

    @property
    def bands(self) -> tuple[Chosen[Correction], ...]:
        """The corrections that keep tokens in a fixed band of k, as icepop does: their settings can be `narrowed`."""
        return tuple(chosen for chosen in self.correction if hasattr(chosen.settings, "narrowed"))

    def corrections(self, *, tightened: bool = False) -> dict[str, dict[str, Any]]:
        """Returns name -> settings of `before_update`, for `core.measure`.

        Args:
            tightened: with bands narrowed, in logarithms, by guard.tighten_factor.
        """
        found = {}
        for chosen in self.before_update:
            narrows = tightened and chosen in self.bands
            settings = chosen.settings.narrowed(self.guard.tighten_factor) if narrows else chosen.settings
            found[chosen.name] = asdict(settings)
        return found

    def filter_chain(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns name and settings of the batch filters, in order, for `core.filters`."""
        return [(chosen.name, asdict(chosen.settings)) for chosen in self.filters]


def stability_config(node: Any) -> StabilityConfig:
    """Returns the validated settings of a Hydra `stability` node, or of a plain mapping.

    Imports the modules of `plugins`.

    Raises:
        ConfigError: a value is out of range or not among the choices, or a setting is unknown or has no use.
    """
    given = _plain(node)
    given["plugins"] = _names("stability.plugins", given.get("plugins"))
    for module in given["plugins"]:
        if not module or module.startswith("."):
            raise ConfigError(f"stability.plugins={given['plugins']} must have the full names of modules")
        try:
            import_module(module)
        except ImportError as error:
            raise ConfigError(f"stability.plugins: {module} cannot be imported ({error})") from error
    if isinstance(cascade := given.get("cascade_attention"), bool):  # YAML reads a bare `on` and `off` so
        given["cascade_attention"] = "on" if cascade else "off"
    guard = given.get("guard")
    rules: tuple[Rule, ...] = ()
    if isinstance(guard, Mapping):  # `build` refuses another type
        given["guard"] = {name: value for name, value in guard.items() if name != "rules"}
        rules = parse_rules(guard.get("rules"))
    corrections = _corrections(given)
    filters = _chosen_filters(given.pop("filters", None))
    known = [*(one.name for one in fields(Switches)), "correction", "filters", *CORRECTIONS]
    require_known(given, known, "stability", "docs/settings.md lists all settings")
    switches = build(Switches, given, "stability")
    return StabilityConfig(
        **vars(switches),
        correction=corrections,
        filters=filters,
        rules=(*_batch_skip_rule(switches.batch_skip, rules), *rules),
    )


def default_node() -> dict[str, Any]:
    """Returns every setting with its default; the files of `configs/stability` start from it."""
    node = defaults(Switches)
    node["guard"]["rules"] = None
    methods = {name: defaults(method.settings) for name, method in CORRECTIONS.items()}
    return {"correction": "none", **methods, "filters": None, **node}


def _plain(node: Any) -> dict[str, Any]:
    plain = {} if node is None else node
    if OmegaConf.is_config(node):
        try:
            plain = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    if not isinstance(plain, Mapping):
        raise ConfigError(f"stability={plain} must be a mapping of its settings")
    return {str(name): value for name, value in plain.items()}


def _corrections(given: dict[str, Any]) -> tuple[Chosen[Correction], ...]:
    """Returns the corrections that `correction` names, with their settings; removes both from `given`."""
    wanted = given.pop("correction", "none")
    names = [name for name in _names("stability.correction", wanted) if name != "none"]
    for name in names:
        require_choice("stability.correction", name, ("none", *CORRECTIONS))
    if len(set(names)) < len(names):
        raise ConfigError(f"stability.correction={names} names a correction twice")
    settings = {name: given.pop(name) for name in CORRECTIONS if name in given}
    for name, values in settings.items():
        usual = defaults(CORRECTIONS[name].settings)
        changed = not isinstance(values, Mapping | None) or any(
            value != usual.get(key) for key, value in (values or {}).items()
        )
        if changed and name not in names:
            choose(CORRECTIONS[name], values, f"stability.{name}")
            raise ConfigError(
                f"stability.{name} is set, and stability.correction={wanted} does not use it",
                fix=(f"stability.{name}=null",),
                otherwise=f"add {name} to stability.correction",
            )
    return tuple(choose(CORRECTIONS[name], settings.get(name), f"stability.{name}") for name in names)


def _correction_override(names: Sequence[str]) -> str:
    """Returns the override that chooses these corrections."""
    if not names:
        return "stability.correction=none"
    return f"stability.correction={names[0] if len(names) == 1 else '[' + ','.join(names) + ']'}"


def _chosen_filters(given: Any) -> tuple[Chosen[BatchFilter], ...]:
    if not isinstance(given, Mapping):
        names = _names("stability.filters", given)
        if len(set(names)) < len(names):
            raise ConfigError(f"stability.filters={names} names a filter twice")
        given = {name: {} for name in names}
    return tuple(
        choose(get_batch_filter(str(name)), settings, f"stability.filters.{name}") for name, settings in given.items()
    )


def _names(setting: str, given: Any) -> list[str]:
    """Returns a name or a list of names as a list."""
    names = [given] if isinstance(given, str) else given or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{setting}={given} must be a name or a list of names")
    return list(names)


def _batch_skip_rule(skip: BatchSkip, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    if skip.threshold is None:
        return ()
    if any(rule.name == BATCH_SKIP for rule in rules):
        raise ConfigError(f"stability.guard.rules.{BATCH_SKIP}: the name is taken by stability.batch_skip")
    setting = f"stability.{BATCH_SKIP}.threshold"
    return (Rule(BATCH_SKIP, skip.metric, skip.threshold, action="skip", setting=setting),)
