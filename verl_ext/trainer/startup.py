"""What is active and how it was hooked, proven on the started engines and printed once."""

from typing import Any, NamedTuple

from verl_ext.errors import HookError
from verl_ext.guard.rules import Rule
from verl_ext.launch.checks import needs_our_loss
from verl_ext.launch.routing_checks import replay_mode, replays_here
from verl_ext.methods import described
from verl_ext.settings.config import UNBIASED
from verl_ext.settings.estimators import estimator_of
from verl_ext.settings.losses import LOSSES
from verl_ext.settings.stability import BATCH_SKIP
from verl_ext.trainer.logs import trajectories_path
from verl_ext.upstream import engine_report

OUR_FIELDS = ("base", "alpha", "beta", "delta", "coef", "gate", "floor")  # of a policy loss, worth a line in the table

REPLAYS = {"R2": "R2: update_actor as compute_log_prob", "R3": "R3: both as the rollout"}


WHERE = {
    "warn": "log and event log",
    "tighten": "the band of icepop",
    "skip": "in place of the update",
    "rollback": "end of the step",
    "stop": "before the next step",
}


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
    base = next(cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("verl."))
    features = []
    if trainer.compares_engines:
        features.append(Feature("mismatch metrics", "vllm_kl/*", f"{base}._compute_advantage"))
    for chosen in stability.before_update:
        features.append(Feature("correction", str(chosen), "weights in rollout_is_weights"))
    if stability.denominator == "kept":
        features.append(Feature("denominator", "kept tokens", "response_mask and loss_mask"))
    for chosen in stability.filters:
        features.append(Feature("batch filter", str(chosen), "response_mask and loss_mask"))
    if needs_our_loss(trainer.config, stability):
        features += _verify_loss(trainer)
    if estimator := estimator_of(trainer.config):
        features.append(Feature("advantages", str(estimator), f"{base}._compute_advantage"))
    if stability.batch_skip.threshold is not None:
        skip = f"{stability.batch_skip.metric} > {stability.batch_skip.threshold:g}"
        features.append(Feature("batch skip", skip, f"{base}._update_actor, _update_critic"))
    for rule in stability.rules:
        if rule.name == BATCH_SKIP:
            continue
        features.append(Feature("guard rule", f"{rule.name}: {_bound(rule)}", WHERE[rule.action]))
    if (dump := stability.trajectories).per_step:
        often = "a step" if dump.every == 1 else f"every {dump.every} steps"
        features.append(Feature("trajectories", f"{dump.per_step} {often}", trajectories_path(trainer.config).name))
    if stability.router_agreement or replays_here(trainer.config):
        features += _verify_routing(trainer)
    if stability.cascade_attention != "default":
        features.append(_verify_cascade(trainer))
    return features


def _bound(rule: Rule) -> str:
    sign = ">" if rule.side == "above" else "<"
    unit = "" if rule.zscore_window is None else f" sd of {rule.zscore_window}"
    return f"{rule.action} at {rule.signal} {sign} {rule.bound:g}{unit}"


def _verify_loss(trainer: Any) -> list[Feature]:
    """Install the workers' loss, and describe what of it is ours."""
    per_rank = trainer.configure_loss()
    active = per_rank[0]
    where = f"worker_loss on {len(per_rank)} rank(s)"
    features = []
    if (loss := dict(active["policy_loss"]))["loss_mode"] in LOSSES:
        ours = {name: value for name, value in loss.items() if name in OUR_FIELDS}
        features.append(Feature("policy loss", described(loss["loss_mode"], ours), where))
    for name, settings in active["corrections"].items():
        features.append(Feature("correction", described(name, settings), where))
    if active["kl"] and active["kl"].startswith(UNBIASED):
        features.append(Feature("KL to the reference", active["kl"], where))
    if active["mini_batch"]:
        features.append(
            Feature("mini-batch gate", described("refuse past", active["mini_batch"]), f"optimizer_step, {where}")
        )
    if active["router_shift"]:
        features.append(Feature("router shift", "compute_log_prob, update_actor", f"{active['router_shift']} routers"))
    return features


def _verify_routing(trainer: Any) -> list[Feature]:
    per_rank = trainer.actor_rollout_wg.routing_hooks()
    if len(set(per_rank)) != 1:
        raise HookError(f"the training ranks hooked different routers: {sorted(set(per_rank))}")
    name, count = per_rank[0]
    where = f"{count} x {name} on {len(per_rank)} rank(s)"
    features = []
    if trainer.stability.router_agreement:
        features.append(Feature("router agreement", "compute_log_prob", where))
    if replays_here(trainer.config):
        features.append(Feature("routing replay", REPLAYS[replay_mode(trainer.config)], where))
    return features


def _verify_cascade(trainer: Any) -> Feature:
    wanted = trainer.stability.cascade_attention == "on"
    servers = [handle for manager in trainer._rollout_server_managers() for handle in manager.server_handles]
    running = [report["cascade_attention"] for server in servers for report in engine_report.fetch(server)]
    if not running:
        raise HookError(
            "stability.cascade_attention: no vLLM worker answered", fix=("stability.cascade_attention=default",)
        )
    if any(value != wanted for value in running):
        state = "on" if running[0] else "off"
        raise HookError(
            f"stability.cascade_attention={trainer.stability.cascade_attention}, but vLLM runs with it {state}: this "
            "engine or device does not support the setting",
            fix=("stability.cascade_attention=default",),
        )
    setting = trainer.stability.cascade_attention
    return Feature("cascade attention", setting, f"confirmed by {len(running)} vLLM worker(s)")


def print_table(features: list[Feature]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("feature", "setting", "where", title="verl_ext: active features", title_justify="left")
    for feature in features:
        table.add_row(*map(Text, feature))  # Text: brackets in a rule's name or signal are no markup
    # Ray prefixes each line with the process's name, so the terminal's own width would be too much.
    Console(width=100).print(table)
