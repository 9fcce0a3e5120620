"""What is active and how it was hooked, proven on the started engines and printed once."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from verl_ext.base.errors import HookError
from verl_ext.launch.checks import loss_settings
from verl_ext.launch.features import AT_ROUTERS, CANARY, IN_WORKERS, Feature
from verl_ext.launch.routing_checks import sglang_returns_routing
from verl_ext.launch.sync_checks import MERGE, sends_adapter
from verl_ext.settings.fake_quantization import FakeQuantization
from verl_ext.trainer.active import Active
from verl_ext.trainer.logs import trajectories_path
from verl_ext.upstream import engine_report, sglang_routing

NAMED = 4  # in an error, of the names that vLLM did not take
# Feature in the loss -> whether what a worker tells of its loss has it: (its name or setting, what is told).
TOLD: dict[str, Callable[[str, dict[str, Any]], bool]] = {
    "policy loss": lambda setting, told: _name(setting) == told["policy_loss"]["loss_mode"],
    "correction": lambda setting, told: _name(setting) in told["corrections"],
    "score centering": lambda setting, told: told["centers"],
    "sampler's head": lambda setting, told: told["head"],
    "KL to the reference": lambda setting, told: setting == told["kl"],
    "undo": lambda setting, told: told["undo"],
    "after the update": lambda setting, told: bool(told["after_update"]),
    "mini-batch gate": lambda setting, told: bool(told["mini_batch"]),
    "mismatch metrics": lambda setting, told: told["first_pass"],
    "router shift": lambda setting, told: bool(told["router_shift"]),
}


class Engines(NamedTuple):
    """What was started: verl's worker group of the actor, and its managers of vLLM's servers."""

    workers: Any
    server_managers: Sequence[Any]


def _name(setting: str) -> str:
    """Of the method that a feature's setting describes."""
    return setting.partition(",")[0]


def actor_class(remote_class: Any) -> type:
    """The class behind `ray.remote(cls)`."""
    return remote_class.__ray_metadata__.modified_class.__ray_actor_class__


def verify(active: Active, trainer_class: type, engines: Engines) -> list[Feature]:
    """The features asked for, each with the place where it was found on the started engines.

    Raises:
        HookError: a feature is not hooked.
    """
    verls = next(cls.__name__ for cls in trainer_class.__mro__ if cls.__module__.startswith("verl."))
    found = [replace(feature, where=feature.where.replace("PPOTrainer", verls)) for feature in active.features]
    if active.our_loss:
        found = _in_the_loss(found, active, engines)
    if active.rescores:
        found = _placed(
            found, {"rescoring": f"copies of the weights on {len(engines.workers.kept_versions())} rank(s)"}
        )
    if active.sees_routing:
        where = _hooked_routers(engines)
        at_routers = {feature.name for feature in found if feature.where == AT_ROUTERS} - TOLD.keys()
        found = _placed(found, dict.fromkeys(at_routers, where))
    if sglang_returns_routing(active.config):
        _confirm_decoding(engines)
    places = {"trajectories": trajectories_path(active.config).name}
    if (cascade := active.stability.cascade_attention) != "default":
        places["cascade attention"] = _confirmed_cascade(cascade, engines)
    if active.stability.sync_canary.trajectories and sends_adapter(active.config):
        where = next(feature.where for feature in found if feature.name == CANARY)
        places[CANARY] = f"{where}; {_confirmed_adapter(engines)}"
    if (fake := active.stability.fake_quantization).active:
        places["fake quantization"] = _confirmed_rounding(fake, engines)
    return _placed(found, places)


def _placed(features: Sequence[Feature], places: dict[str, str]) -> list[Feature]:
    """With these places, by the features' names."""
    return [replace(feature, where=places.get(feature.name, feature.where)) for feature in features]


def _in_the_loss(features: Sequence[Feature], active: Active, engines: Engines) -> list[Feature]:
    """Install the workers' loss, and see from what they tell that all of it is there."""
    per_rank = engines.workers.configure_loss(loss_settings(active.config, active.stability))
    for feature in features:
        in_workers = IN_WORKERS in feature.where or feature.where == AT_ROUTERS
        proof = TOLD.get(feature.name) if in_workers else None
        if proof and not all(proof(feature.setting, told) for told in per_rank):
            raise HookError(f"{feature.name} ({feature.setting}) is switched on, and a worker's loss does without it")
    where = f"worker_loss on {len(per_rank)} rank(s)"
    placed = [replace(feature, where=feature.where.replace(IN_WORKERS, where)) for feature in features]
    return _placed(placed, {"router shift": f"{per_rank[0]['router_shift']} routers"})


def _hooked_routers(engines: Engines) -> str:
    per_rank = engines.workers.routing_hooks()
    if len(set(per_rank)) != 1:
        raise HookError(f"the training ranks hooked different routers: {sorted(set(per_rank))}")
    name, count = per_rank[0]
    return f"{count} x {name} on {len(per_rank)} rank(s)"


def _confirmed_cascade(setting: str, engines: Engines) -> str:
    """By how many of vLLM's workers."""
    wanted = setting == "on"
    running = _reported("cascade_attention", engines)
    if not running:
        raise HookError(
            "stability.cascade_attention: no vLLM worker answered", fix=("stability.cascade_attention=default",)
        )
    if any(value != wanted for value in running):
        state = "on" if running[0] else "off"
        raise HookError(
            f"stability.cascade_attention={setting}, but vLLM runs with it {state}: this "
            "engine or device does not support the setting",
            fix=("stability.cascade_attention=default",),
        )
    return f"confirmed by {len(running)} vLLM worker(s)"


def _confirmed_adapter(engines: Engines) -> str:
    """How many modules of the model have weights of the LoRA: the first sync is over by now."""
    told = _reported("adapter", engines)
    for report in told or [None]:
        if not report or not report["adapters"]:
            raise HookError("the model is trained as a LoRA, and a vLLM worker was sent no adapter", fix=(MERGE,))
        if unused := report["unused"]:
            raise HookError(
                f"vLLM has no modules for {len(unused)} names of the LoRA, such as {', '.join(unused[:NAMED])}: it "
                "would sample without them",
                fix=(MERGE,),
                otherwise="leave them out of actor_rollout_ref.model.target_modules",
            )
    return f"{told[0]['used']} modules with the LoRA in {len(told)} vLLM worker(s)"


def _confirmed_rounding(asked: FakeQuantization, engines: Engines) -> str:
    """How many weights of each kind each of vLLM's workers has rounded: the first sync is over by now."""
    told = _reported("fake_quantization", engines)
    for report in told or [None]:
        if report is None or report["settings"] != asdict(asked):
            raise HookError(
                f"stability.fake_quantization.format={asked.format}, but a vLLM worker loads with {report}",
                fix=("stability.fake_quantization.format=none",),
            )
        for kind, count in report["rounded"].items():
            if count == 0:
                raise HookError(
                    f"stability.fake_quantization rounds {kind} weights, and vLLM was given none that is known as one",
                    fix=("stability.fake_quantization.format=none",),
                )
    counts = ", ".join(f"{count} {kind}" for kind, count in told[0]["rounded"].items())
    return f"{counts} weights in {len(told)} vLLM worker(s)"


def _confirm_decoding(engines: Engines) -> None:
    if not all(sglang_routing.fetch(server) for server in _servers(engines)):
        raise HookError(
            "an SGLang server returns routed experts as text, which verl cannot read: VERL_USE_EXTERNAL_PLUGINS, where "
            "set, has to name verl_ext"
        )


def _reported(name: str, engines: Engines) -> list[Any]:
    """By each of vLLM's workers."""
    return [report[name] for server in _servers(engines) for report in engine_report.fetch(server)]


def _servers(engines: Engines) -> list[Any]:
    return [handle for manager in engines.server_managers for handle in manager.server_handles]


def print_table(features: list[Feature]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("feature", "setting", "where", title="verl_ext: active features", title_justify="left")
    for feature in features:
        table.add_row(
            *map(Text, (feature.name, feature.setting, feature.where))
        )  # Text: brackets in a rule's name or signal are no markup
    # Ray prefixes each line with the process's name, so the terminal's own width would be too much.
    Console(width=100).print(table)
