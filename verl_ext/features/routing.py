"""Routing: compares the experts of both engines, in all trajectories or a share of them, and replays them.

torch, transformers and verl are imported inside the checks, because `verl-ext plan` needs only the settings.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_ext.base.errors import HookError, Problem, require_choice
from verl_ext.base.methods import described
from verl_ext.base.names import OLD_ROUTES, ROLLOUT_ROUTES
from verl_ext.features.feature import Demand, Engines, Feature, Idle, Need, RunFeatures, TableLine
from verl_ext.features.reuse import measured_late
from verl_ext.features.settings import AGREEMENT
from verl_ext.features.verl_config import (
    DISAGGREGATED,
    FSDP_REPLAY,
    MODEL,
    MTP,
    REPLAY,
    REPLAY_MODES,
    ROLLOUT,
    ROLLOUTS,
    SGLANG_ARGUMENTS,
    compares_in_update,
    drafts,
    hf_config_of,
    replay_mode,
    replay_setting,
    replays_here,
    rollout_name,
    strategy_of,
    trusts_code,
    verls_replay_setting,
)
from verl_ext.routing.engines import ACTOR, ENGINES, HOOKED

RETURNED = f"{ROLLOUT}.enable_rollout_routing_replay"
SHARE = "stability.router_agreement_share"
LOAD_BALANCE = f"{ROLLOUT}.moe_load_balance_metrics_interval"
DRAFTED = f"{MTP}.enable_rollout"
SGLANG_NEEDS = {  # setting -> the value that SGLang's routed experts need, and the problem with another value
    f"{ROLLOUT}.skip_tokenizer_init": (True, "verl then imports their decoder from a module that SGLang has moved"),
    DISAGGREGATED: (False, "the decoding server has no routing of the prompt, which another server processed"),
    DRAFTED: (False, "the draft model's routing overwrites the model's, in SGLang before 0.5.15"),
    f"{SGLANG_ARGUMENTS}.enable_hierarchical_cache": (False, "KV entries come back from the host without routing"),
}
REPLAYS = {"R2": "R2: update_actor as compute_log_prob", "R3": "R3: both as the rollout"}


def reads_routes(run: RunFeatures) -> bool:
    """Returns True if we read the experts that the rollout chose."""
    replayed = replays_here(run.config) and replay_mode(run.config) == "R3"
    return run.stability.router_agreement or replayed


def replayed_field(config: DictConfig) -> str | None:
    """Returns the field of the batch whose routing the update replays."""
    if replay_mode(config) == "disabled":
        return None
    return OLD_ROUTES if replays_here(config) and replay_mode(config) == "R2" else ROLLOUT_ROUTES


def needs(run: RunFeatures) -> Iterator[Demand]:
    """Yields the demands of the comparison, and of a replay that is ours or set by `stability.replay`."""
    if _compares(run):
        yield Demand("stability.router_agreement", frozenset({Need.HOOKED_ROUTERS, Need.COMPARED_ROUTERS}))
    if replays_here(run.config):
        yield Demand(replay_setting(run.config), frozenset({Need.HOOKED_ROUTERS}))
    elif replay_mode(run.config) != "disabled" and OmegaConf.select(run.config, REPLAY):
        yield Demand(REPLAY)


def _compares(run: RunFeatures) -> bool:
    """Returns True if the experts of both engines are compared.

    R3 that is ours always compares them: the agreement is 1 if the rollout's experts are really used.
    """
    in_update = Need.MEASURED_IN_UPDATE in run.needs and compares_in_update(run.config)
    return reads_routes(run) and (in_update or not measured_late(run))


def problems(run: RunFeatures) -> Iterator[Problem]:
    """Checks what agreement and replay need. verl itself checks what else its replay needs on Megatron."""
    config, agreement = run.config, run.stability.router_agreement
    setting, mode, strategy = replay_setting(config), replay_mode(config), strategy_of(config)
    require_choice(setting, mode, REPLAY_MODES)
    if (verls := verls_replay_setting(config)) != FSDP_REPLAY and OmegaConf.select(config, FSDP_REPLAY) in ("R2", "R3"):
        yield Problem(
            f"{FSDP_REPLAY} is for FSDP, and {ACTOR}.strategy={strategy}; leave it out and set {REPLAY}, which is for "
            "every engine"
        )
    if (named := OmegaConf.select(config, verls) or "disabled") not in ("disabled", mode):
        yield Problem(
            f"{REPLAY}={mode} and {verls}={named} ask for different replays",
            fix=(f"{REPLAY}={named}",),
            leave_out=(f"{REPLAY}=null",),
        )
    reads = run.read_model and (agreement or mode != "disabled")
    model = hf_config_of(config.actor_rollout_ref.model) if reads else None
    asked = {f"{setting}={mode}": (f"{setting}=disabled", mode)} if mode != "disabled" else {}
    asked |= {AGREEMENT: ("stability.router_agreement=false", "")} if agreement else {}
    for switch, (off, replay) in asked.items():
        ours = (off,) if off.startswith("stability.") else ()
        for problem in _routes_problems(run, switch, off, model, replay):
            yield replace(problem, leave_out=ours)
    if not agreement and mode != "R3" and sglang_returns_routing(config):  # the user asked for the experts
        yield from _sglang_problems(config, f"{RETURNED}=true", f"{RETURNED}=false")
    if run.stability.router_agreement_share < 1:
        yield from _share_problems(config, run.stability.router_agreement_share)


def _routes_problems(run: RunFeatures, asked: str, off: str, model: Any, replay: str) -> Iterator[Problem]:
    """Yields a problem for each thing that the agreement needs, or a replay, and that the run lacks.

    Args:
        asked, off: the setting that switches it on, and the override that leaves it out.
        model: the model's transformers config; None skips its checks.
        replay: R2 or R3; "" for the agreement.
    """
    config, strategy = run.config, strategy_of(run.config)
    if strategy not in ENGINES:
        yield Problem(
            f"{asked} has no adapter for {ACTOR}.strategy={strategy} (it has: {', '.join(ENGINES)})", fix=(off,)
        )
        return
    if strategy not in HOOKED or (strategy == "veomni" and replay):  # verl refuses a replay of padded batches
        yield from _packed_problems(config, asked, off)
    if replay != "R2":
        yield from _rollout_problems(config, asked, off)
    if model is not None:
        yield from _experts_problems(config, model, asked, off, replay)


def _share_problems(config: DictConfig, share: float) -> Iterator[Problem]:
    """Yields features that read the routing of all trajectories: only a share of it reaches the workers."""
    whole = (f"{SHARE}=1",)
    if (mode := replay_mode(config)) != "disabled":
        yield Problem(
            f"{SHARE}={share:g} leaves trajectories without routing, which {replay_setting(config)}={mode} replays",
            fix=whole,
        )
        return
    if (interval := OmegaConf.select(config, LOAD_BALANCE) or 0) > 0:
        yield Problem(
            f"{SHARE}={share:g} leaves trajectories without routing, and {LOAD_BALANCE}={interval} would count their "
            "tokens for expert 0",
            fix=(f"{LOAD_BALANCE}=0",),
            otherwise=f"set {whole[0]}",
        )


def _packed_problems(config: DictConfig, asked: str, off: str) -> Iterator[Problem]:
    """Yields a problem for padded batches on Megatron, and for a replay of them on VeOmni.

    verl 0.9.1 records and replays packed tokens. On Megatron without packing, `set_router_replay_data` gives most
    tokens the experts of another token if all answers are equally long, and raises otherwise.
    """
    if not config.actor_rollout_ref.model.use_remove_padding:
        yield Problem(
            f"{asked} needs packed tokens on {ACTOR}.strategy={strategy_of(config)}",
            fix=("actor_rollout_ref.model.use_remove_padding=true",),
            otherwise=f"set {off}",
        )
    if OmegaConf.select(config, f"{ACTOR}.megatron.pad_to_length"):
        yield Problem(
            f"{asked} does not work with {ACTOR}.megatron.pad_to_length=true: verl finds no token's experts",
            fix=(f"{ACTOR}.megatron.pad_to_length=false",),
            otherwise=f"set {off}",
        )


def _rollout_problems(config: DictConfig, asked: str, off: str) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    if (engine := ROLLOUTS.get(rollout.name)) is None:
        yield Problem(
            f"{asked} reads the routed experts of vLLM or SGLang, not {ROLLOUT}.name={rollout.name}",
            fix=(f"{ROLLOUT}.name=vllm",),
            otherwise=f"set {off}",
        )
        return
    if rollout.pipeline_model_parallel_size > 1:
        yield Problem(
            f"{asked} needs {engine} without pipeline parallelism, and {ROLLOUT}.pipeline_model_parallel_size="
            f"{rollout.pipeline_model_parallel_size}",
            fix=(f"{ROLLOUT}.pipeline_model_parallel_size=1",),
            otherwise=f"set {off}",
        )
    if rollout.name == "sglang":
        yield from _sglang_problems(config, asked, off)


def sglang_returns_routing(config: DictConfig) -> bool:
    return rollout_name(config) == "sglang" and bool(OmegaConf.select(config, RETURNED))


def _sglang_problems(config: DictConfig, asked: str, off: str) -> Iterator[Problem]:
    """Yields settings under which SGLang's routing is missing, unreadable or not that of the model that sampled.

    Source: SGLang 0.5.12, which verl 0.9.1 pins, and verl/workers/rollout/sglang_rollout.
    """
    for setting, (needed, why) in SGLANG_NEEDS.items():
        is_on = drafts(config) if setting == DRAFTED else bool(OmegaConf.select(config, setting))
        if is_on != needed:
            yield Problem(
                f"{asked} cannot use SGLang's routed experts with {setting}={str(is_on).lower()}: {why}",
                fix=(f"{'++' * setting.startswith(SGLANG_ARGUMENTS)}{setting}={str(needed).lower()}",),
                otherwise=f"set {off}",
            )


def _experts_problems(config: DictConfig, hf_config: Any, asked: str, off: str, replay: str) -> Iterator[Problem]:
    model = config.actor_rollout_ref.model
    from verl_ext.routing.choices import check_replayable, probe_choices
    from verl_ext.routing.engines import EXPERT_COUNTS, first_of

    if not first_of(hf_config.get_text_config(), EXPERT_COUNTS):
        yield Problem(
            f"{asked} needs a mixture of experts, and actor_rollout_ref.model.path={model.path} is a dense model",
            fix=(off,),
        )
        return
    if replay != "R2" and config.actor_rollout_ref.rollout.name == "sglang":
        yield from sglang_model_problems(hf_config.get_text_config(), model.path, asked, off)
    try:
        if replay and replays_here(config):
            check_replayable(hf_config)
        if strategy_of(config) in HOOKED:
            probe_choices(hf_config, trust_remote_code=trusts_code(model))
    except HookError as error:
        yield from error.problems


def sglang_model_problems(text_config: Any, path: str, asked: str, off: str) -> Iterator[Problem]:
    if not hasattr(text_config, "num_experts_per_tok"):
        yield Problem(
            f"{asked} needs num_experts_per_tok in the model's config, which gives SGLang the number of experts to "
            f"return, and {MODEL}.path={path} has none",
            fix=(off,),
        )


def apply(run: RunFeatures) -> None:
    """Makes the rollout return its experts, and sets verl's replay mode; verl then builds its settings."""
    config = run.config
    if reads_routes(run) or replay_mode(config) == "R3":
        OmegaConf.update(config, RETURNED, True)
    if (mode := replay_mode(config)) != "disabled":
        OmegaConf.update(config, verls_replay_setting(config), mode, force_add=True)
    if replays_here(config):
        node = OmegaConf.select(config, verls_replay_setting(config).removesuffix(".mode"))
        with open_dict(node):
            node.setdefault("_target_", "verl.workers.config.EngineRouterReplayConfig")


def agent_loop(run: RunFeatures) -> dict[str, Any]:
    turns = bool(OmegaConf.select(run.config, RETURNED)) and run.config.actor_rollout_ref.rollout.name in ROLLOUTS
    return {"narrow": reads_routes(run), "share": run.stability.router_agreement_share, "turns": turns}


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if _compares(run):
        share = run.stability.router_agreement_share
        at = "update_actor" if measured_late(run) else "compute_log_prob"
        setting = described(at, {"share": share} if share < 1 else {})
        yield TableLine("router agreement", setting, "{routers}")
    mode = replay_mode(run.config)
    setting = "R3: update_actor as the rollout" if measured_late(run) else REPLAYS.get(mode, mode)
    if replays_here(run.config):
        yield TableLine("routing replay", setting, "{routers}")
    elif mode != "disabled" and OmegaConf.select(run.config, REPLAY):
        yield TableLine("routing replay", setting, "verl's training engine")


def prove(run: RunFeatures, engines: Engines) -> None:
    """Raises HookError if an SGLang server returns experts that verl cannot decode."""
    from verl_ext.upstream import sglang_server

    returns = sglang_returns_routing(run.config)
    if returns and not all(sglang_server.decodes_routing(server) for server in engines.servers):
        raise HookError(
            "an SGLang server returns routed experts as text, which verl cannot read: if VERL_USE_EXTERNAL_PLUGINS "
            "is set, it must name verl_ext"
        )


def idle(run: RunFeatures) -> Iterator[Idle]:
    if not _compares(run):
        yield Idle("router/*", "the experts of the engines are not compared", (AGREEMENT,))
    if replay_mode(run.config) == "disabled":
        yield Idle("*/*own_agreement", "no routing is replayed")


ROUTING = Feature(needs, problems, apply, agent_loop, lines=lines, prove=prove, idle=idle)
