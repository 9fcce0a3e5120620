"""What can go wrong with the settings about expert routing, found before Ray starts.

torch, transformers and verl are imported where a check needs them: `verl-ext plan` asks for settings alone.
"""

from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_ext.base.errors import ConfigError, require_choice
from verl_ext.base.names import OLD_ROUTES, ROLLOUT_ROUTES
from verl_ext.launch.bypass import bypasses
from verl_ext.launch.models import check_folder
from verl_ext.launch.rollouts import ROLLOUTS
from verl_ext.launch.sglang_checks import check_sglang_model, check_sglang_routing
from verl_ext.routing.engines import ACTOR, ENGINES, HOOKED
from verl_ext.settings.config import FSDP_REPLAY, StabilityConfig

ROLLOUT = "actor_rollout_ref.rollout"
RETURNED = f"{ROLLOUT}.enable_rollout_routing_replay"
SHARE = "stability.router_agreement_share"
LOAD_BALANCE = f"{ROLLOUT}.moe_load_balance_metrics_interval"
MODES = ("disabled", "R2", "R3")


def _strategy(config: DictConfig) -> str:
    return OmegaConf.select(config, f"{ACTOR}.strategy") or "fsdp"


def replay_setting(config: DictConfig) -> str:
    """verl's name of the replay mode on this run's engine."""
    return f"{ENGINES.get(_strategy(config), ENGINES['fsdp']).settings}.router_replay.mode"


def replay_mode(config: DictConfig) -> str:
    return OmegaConf.select(config, replay_setting(config)) or "disabled"


def replays_here(config: DictConfig) -> bool:
    """Whether routing is replayed by us; on Megatron and VeOmni verl does it."""
    return _strategy(config) in HOOKED and replay_mode(config) != "disabled"


def reads_routes(config: DictConfig, stability: StabilityConfig) -> bool:
    """Whether we read which experts the rollout chose."""
    return stability.router_agreement or (replays_here(config) and replay_mode(config) == "R3")


def compares_routing(config: DictConfig, stability: StabilityConfig) -> bool:
    """Whether the experts of both engines are compared, in compute_log_prob; with R3 always: 1 wherever the rollout's
    are really used."""
    return reads_routes(config, stability) and not bypasses(config)


def returns_turns(config: DictConfig) -> bool:
    """Whether each turn of an agent loop brings routing that the process of the agent loop can hold."""
    rollout = config.actor_rollout_ref.rollout
    return bool(OmegaConf.select(config, RETURNED) and rollout.name == "vllm" and rollout.multi_turn.enable)


def replayed_field(config: DictConfig) -> str | None:
    """The field of the batch whose routing the update replays."""
    if replay_mode(config) == "disabled":
        return None
    return OLD_ROUTES if replays_here(config) and replay_mode(config) == "R2" else ROLLOUT_ROUTES


def check_routing(config: DictConfig, agreement: bool, read_model: bool = True) -> None:
    """Checks what agreement and replay need; what else verl's own replay needs, on Megatron and VeOmni, verl checks."""
    setting, mode, strategy = replay_setting(config), replay_mode(config), _strategy(config)
    require_choice(setting, mode, MODES)
    if setting != FSDP_REPLAY and OmegaConf.select(config, FSDP_REPLAY):
        raise ConfigError(f"{FSDP_REPLAY} is for FSDP, and {ACTOR}.strategy={strategy}; leave it out and set {setting}")
    if agreement:
        asked, off = "stability.router_agreement=true", "stability.router_agreement=false"
    elif mode != "disabled":
        asked, off = f"{setting}={mode}", f"{setting}=disabled"
    else:
        _check_returned(config)
        return
    if strategy not in ENGINES:
        raise ConfigError(
            f"{asked} has no adapter for {ACTOR}.strategy={strategy} (it has: {', '.join(ENGINES)})", fix=(off,)
        )
    if agreement and strategy not in HOOKED:
        _check_recording(config, asked, off)
    if agreement or mode == "R3":
        _check_rollout(config, asked, off)
    else:
        _check_returned(config)
    if read_model and (agreement or strategy in HOOKED):
        _check_model(config, asked, off, read_routers=strategy in HOOKED)


def check_share(config: DictConfig, share: float) -> None:
    """What reads the routing of all trajectories, where only that of a share travels."""
    whole = (f"{SHARE}=1",)
    if (mode := replay_mode(config)) != "disabled":
        raise ConfigError(
            f"{SHARE}={share:g} leaves trajectories without routing, which {replay_setting(config)}={mode} replays",
            fix=whole,
        )
    if (interval := OmegaConf.select(config, LOAD_BALANCE) or 0) > 0:
        raise ConfigError(
            f"{SHARE}={share:g} leaves trajectories without routing, and {LOAD_BALANCE}={interval} would count them "
            "for expert 0",
            fix=(f"{LOAD_BALANCE}=0",),
            otherwise=f"set {whole[0]}",
        )


def apply_routing(config: DictConfig, stability: StabilityConfig) -> None:
    """Set what the features consist of."""
    if reads_routes(config, stability) or replay_mode(config) == "R3":
        OmegaConf.update(config, RETURNED, True)
    if replays_here(config):
        node = OmegaConf.select(config, replay_setting(config).removesuffix(".mode"))
        with open_dict(node):
            node.setdefault("_target_", "verl.workers.config.EngineRouterReplayConfig")


def check_router_shift(config: DictConfig, loss_mode: str, read_model: bool = True) -> None:
    """How routers shift is read from the scores of a transformers model's routers, whole sequences at a time."""
    actor = config.actor_rollout_ref.actor
    asked, otherwise = f"{ACTOR}.policy_loss.loss_mode={loss_mode}", "choose another loss_mode"
    if actor.strategy not in HOOKED:
        raise ConfigError(
            f"{asked} has no adapter for {ACTOR}.strategy={actor.strategy} (it has: {', '.join(HOOKED)})",
            otherwise=otherwise,
        )
    # verl reads the size from either place.
    places = ("fsdp_config.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size")
    sizes = {f"{ACTOR}.{place}": OmegaConf.select(actor, place) or 1 for place in places}
    if (ranks := max(sizes.values())) > 1:
        raise ConfigError(
            f"{asked} cannot gather the routers' scores over {ACTOR}.ulysses_sequence_parallel_size={ranks}",
            fix=tuple(f"{place}=1" for place, size in sizes.items() if size > 1),
            otherwise=otherwise,
        )
    if read_model and (hf_config := hf_config_of(config.actor_rollout_ref.model)) is not None:
        from verl_ext.routing.choices import probe_choices
        from verl_ext.routing.router_shift import check_outputs

        probe_choices(hf_config, check_outputs, trust_remote_code=_trusted(config.actor_rollout_ref.model))


def _check_recording(config: DictConfig, asked: str, off: str) -> None:
    """Where verl records for us, on Megatron and VeOmni."""
    if replay_mode(config) == "R3":
        raise ConfigError(
            f"{asked} has nothing to measure with {replay_setting(config)}=R3: verl makes the training engine use the "
            "rollout's experts and does not say which it would have chosen",
            fix=(off,),
        )
    if not config.actor_rollout_ref.model.use_remove_padding:
        raise ConfigError(
            f"{asked} needs packed tokens on {ACTOR}.strategy={_strategy(config)}",
            fix=("actor_rollout_ref.model.use_remove_padding=true",),
            otherwise=f"set {off}",
        )
    if OmegaConf.select(config, f"{ACTOR}.megatron.pad_to_length"):
        raise ConfigError(
            f"verl cannot record routing with {ACTOR}.megatron.pad_to_length=true",
            fix=(f"{ACTOR}.megatron.pad_to_length=false",),
            otherwise=f"set {off}",
        )


def _check_rollout(config: DictConfig, asked: str, off: str) -> None:
    rollout = config.actor_rollout_ref.rollout
    if (engine := ROLLOUTS.get(rollout.name)) is None:
        raise ConfigError(
            f"{asked} reads the routed experts of vLLM or SGLang, not {ROLLOUT}.name={rollout.name}",
            fix=(f"{ROLLOUT}.name=vllm",),
            otherwise=f"set {off}",
        )
    if rollout.pipeline_model_parallel_size > 1:
        raise ConfigError(
            f"{asked} needs {engine} without pipeline parallelism, and {ROLLOUT}.pipeline_model_parallel_size="
            f"{rollout.pipeline_model_parallel_size}",
            fix=(f"{ROLLOUT}.pipeline_model_parallel_size=1",),
            otherwise=f"set {off}",
        )
    if rollout.name == "sglang":
        check_sglang_routing(config, asked, off)


def sglang_returns_routing(config: DictConfig) -> bool:
    return OmegaConf.select(config, f"{ROLLOUT}.name") == "sglang" and bool(OmegaConf.select(config, RETURNED))


def _check_returned(config: DictConfig) -> None:
    """Checks the rollout where the user has it return its experts and nothing of ours reads them."""
    if sglang_returns_routing(config):
        check_sglang_routing(config, f"{RETURNED}=true", f"{RETURNED}=false")


def _check_model(config: DictConfig, asked: str, off: str, read_routers: bool) -> None:
    model = config.actor_rollout_ref.model
    hf_config = hf_config_of(model)
    if hf_config is None:
        return
    from verl_ext.routing.choices import check_replayable, probe_choices
    from verl_ext.routing.engines import EXPERT_COUNTS, first_of

    if not first_of(hf_config.get_text_config(), EXPERT_COUNTS):
        raise ConfigError(
            f"{asked} needs a mixture of experts, and actor_rollout_ref.model.path={model.path} is a dense model",
            fix=(off,),
        )
    if config.actor_rollout_ref.rollout.name == "sglang":
        check_sglang_model(hf_config.get_text_config(), model.path, asked, off)
    if replays_here(config):
        check_replayable(hf_config)
    if read_routers:
        probe_choices(hf_config, trust_remote_code=_trusted(model))


def hf_config_of(model: DictConfig) -> Any:
    """The model's transformers config; None where this machine cannot read it (a remote path, or no network)."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model.path, trust_remote_code=_trusted(model))
    except OSError:
        return None
    except ValueError as error:
        check_folder(model)
        raise ConfigError(
            f"actor_rollout_ref.model.path={model.path} has a config that transformers cannot read by itself: the "
            "architecture is not known to this version, or comes with code of its own, which "
            "actor_rollout_ref.model.trust_remote_code allows"
        ) from error


def _trusted(model: DictConfig) -> bool:
    return bool(model.get("trust_remote_code"))
