"""What is active and how it was hooked, proven on the started engines and printed once."""

from typing import Any, NamedTuple

from verl_ext.errors import HookError
from verl_ext.rollout import engine_report


class Feature(NamedTuple):
    name: str
    setting: str
    where: str


def actor_class(remote_class: Any) -> type:
    """The class behind `ray.remote(cls)`."""
    return remote_class.__ray_metadata__.modified_class.__ray_actor_class__


def verify(trainer: Any) -> list[Feature]:
    """Prove on the initialised trainer that each feature asked for is hooked, and describe it.

    Raises:
        HookError: a feature is not hooked.
    """
    stability = trainer.stability
    base = type(trainer).__bases__[1].__name__
    features = []
    if trainer.compares_engines:
        features.append(Feature("mismatch metrics", "vllm_kl/*", f"{base}._compute_advantage"))
    if stability.correction == "icepop":
        band = f"icepop, alpha {stability.icepop.alpha:g}, beta {stability.icepop.beta:g}"
        features.append(Feature("correction", band, "weights in rollout_is_weights"))
    if trainer.icepop_loss:
        features.append(Feature("policy loss", "icepop", "mismatch ratio in rollout_is_weights"))
    if stability.batch_skip.threshold is not None:
        rule = f"{stability.batch_skip.metric} > {stability.batch_skip.threshold:g}"
        features.append(Feature("batch skip", rule, f"{base}._update_actor, _update_critic"))
    if stability.router_agreement:
        features.append(_verify_routing(trainer))
    if stability.cascade_attention != "default":
        features.append(_verify_cascade(trainer))
    return features


def _verify_routing(trainer: Any) -> Feature:
    per_rank = trainer.actor_rollout_wg.routing_hooks()
    if len(set(per_rank)) != 1:
        raise HookError(f"the training ranks hooked different routers: {sorted(set(per_rank))}")
    name, count = per_rank[0]
    return Feature("router agreement", "compute_log_prob", f"{count} x {name} on {len(per_rank)} rank(s)")


def _verify_cascade(trainer: Any) -> Feature:
    wanted = trainer.stability.cascade_attention == "on"
    servers = [handle for manager in trainer._rollout_server_managers() for handle in manager.server_handles]
    running = [report["cascade_attention"] for server in servers for report in engine_report.fetch(server)]
    if not running:
        raise HookError("stability.cascade_attention: no vLLM worker answered; set stability.cascade_attention=default")
    if any(value != wanted for value in running):
        state = "on" if running[0] else "off"
        raise HookError(
            f"stability.cascade_attention={trainer.stability.cascade_attention}, but vLLM runs with it {state}: this "
            "engine or device does not support the setting; set stability.cascade_attention=default"
        )
    setting = trainer.stability.cascade_attention
    return Feature("cascade attention", setting, f"confirmed by {len(running)} vLLM worker(s)")


def print_table(features: list[Feature]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("feature", "setting", "where", title="verl_ext: active features", title_justify="left")
    for feature in features:
        table.add_row(*feature)
    # Ray prefixes each line with the process's name, so the terminal's own width would be too much.
    Console(width=100).print(table)
