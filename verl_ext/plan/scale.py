"""The same run on machines of several sizes: what a step takes, what the plugin adds, and which setting would help."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from verl_ext.errors import ConfigError
from verl_ext.plan import rates
from verl_ext.plan.asked import UNITS, WORKERS, Asked, read_asked
from verl_ext.plan.costs import AGREEMENT, Cost, plan_costs, units_wanted
from verl_ext.plan.memory import Memory, plan_memory
from verl_ext.plan.sizes import Sizes, read_sizes, readable
from verl_ext.plan.timing import Timing, plan_timing

SMALL_SHARE = 0.05  # of the trajectories, enough to see the routers drift
WORTH = 0.1  # of the plugin's seconds: what a setting must save to be named
MOST_REMEDIES = 3


@dataclass(frozen=True)
class Remedy:
    """A setting, and what the plugin takes of a step with it and those before it."""

    setting: str
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Everything that is computed of one run at one size."""

    sizes: Sizes
    memory: Memory
    timing: Timing
    asked: Asked
    mean_response: float

    @property
    def fits(self) -> bool:
        return self.memory.fits(self.sizes)

    @property
    def generation(self) -> float:
        return self.timing.stages.get("generation", 0.0)

    @property
    def step(self) -> float:
        """Seconds without the plugin."""
        return sum(self.timing.stages.values())

    @property
    def costs(self) -> list[Cost]:
        return plan_costs(self.sizes, self.asked, self.mean_response, self.generation)

    @property
    def on(self) -> list[Cost]:
        return [cost for cost in self.costs if cost.on]

    @property
    def seconds(self) -> float:
        """That the plugin adds."""
        return sum(cost.waited for cost in self.on)

    @property
    def largest(self) -> Cost | None:
        return max(self.on, key=lambda cost: cost.waited, default=None)

    @property
    def units_wanted(self) -> int:
        return units_wanted(self.sizes, self.asked, self.costs, self.generation, self.step)

    def share(self, seconds: float) -> float:
        """Of the step without the plugin."""
        return seconds / self.step if self.step else 0.0

    def seconds_of(self, feature: str) -> float:
        return sum(cost.waited for cost in self.on if cost.feature == feature)

    def but(self, **changes: Any) -> "Plan":
        """With other settings of the plugin or of TransferQueue."""
        return replace(self, asked=replace(self.asked, **changes))

    def remedies(self) -> list[Remedy]:
        """The settings that help, the one that helps most first; each on top of those before it."""
        found: list[Remedy] = []
        now = self
        while len(found) < MOST_REMEDIES:
            setting, then = min(now._choices(), key=lambda choice: choice[1].seconds, default=("", now))
            if then.seconds >= (1 - WORTH) * now.seconds:  # 0 too, of 0
                break
            found.append(Remedy(setting, then.seconds))
            now = then
        return found

    def _choices(self) -> list[tuple[str, "Plan"]]:
        asked, found = self.asked, []
        if asked.compares and asked.replay == "disabled" and asked.agreement_share > SMALL_SHARE:
            setting = f"stability.router_agreement_share={SMALL_SHARE}"
            found.append((setting, self.but(agreement_share=SMALL_SHARE)))
        if asked.replay != "disabled":
            found.append((f"{asked.replay_setting}=disabled", self.but(replay="disabled")))
        if asked.simple and self.units_wanted > asked.units:
            found.append((f"{UNITS}={self.units_wanted}", self.but(units=self.units_wanted)))
        if asked.measures and asked.signs:
            found.append(("stability.breakdown=false", self.but(signs=False)))
        if any(cost.waited for cost in self.on if cost.hidden):
            more = 2 * asked.workers
            found.append((f"{WORKERS}={more}", self.but(workers=more)))
        return found


def read_plan(
    config: DictConfig, gpu: str, nodes: int | None = None, model: str | None = None, mean_response: float | None = None
) -> Plan:
    """Of a composed config, which is changed where `nodes` is given.

    Raises:
        ConfigError: it cannot be planned.
    """
    sizes = read_sizes(config, gpu, nodes, model)
    mean = _mean_response(mean_response, sizes)
    memory = plan_memory(sizes)
    return Plan(sizes, memory, plan_timing(sizes, memory, mean), read_asked(config), mean)


def at_nodes(config: DictConfig, nodes: int, *, scale_batch: bool) -> DictConfig:
    """A copy for so many machines.

    Args:
        scale_batch: trajectories a GPU stay what they are, in the batch and in each mini-batch.

    Raises:
        ConfigError: that is no whole number of prompts.
    """
    config = copy.deepcopy(config)
    if not scale_batch or nodes < 1:
        return config
    with readable():
        before = config.trainer.nnodes
        for node, name in ((config.data, "train_batch_size"), (config.actor_rollout_ref.actor, "ppo_mini_batch_size")):
            given = node[name]
            if type(given) is not int or type(before) is not int or before < 1 or given * nodes % before:
                raise ConfigError(
                    f"--scale-batch: {name}={given} for {nodes} machines instead of {before} is no number"
                )
            node[name] = given * nodes // before
    return config


def _mean_response(given: float | None, sizes: Sizes) -> float:
    if given is None:
        return sizes.response / 2
    if not 0 < given <= sizes.response:
        limit = f"data.max_response_length={sizes.response}"
        raise ConfigError(f"--mean-response={given:g} must be above 0 and at most {limit}")
    return given


def scale_table(plans: Sequence[Plan]) -> list[list[str]]:
    """Header and a row for each size."""
    compares = any(plan.asked.compares for plan in plans)
    header = ["GPUs", "step, s", "plugin, s", "share", *["router agreement, s"] * compares, "largest", "what helps"]
    rows = [header]
    for plan in plans:
        gpus = f"{plan.sizes.gpus:,}"
        if not plan.fits:
            rows.append([gpus, "does not fit", *[""] * (len(header) - 2)])
            continue
        largest = f"{plan.largest.name}, {plan.largest.waited:.1f} s" if plan.largest else ""
        helps = "; ".join(
            f"{one.setting}: {one.seconds:.1f} s ({plan.share(one.seconds):.1%})" for one in plan.remedies()
        )
        numbers = [f"{plan.step:,.0f}", f"{plan.seconds:.1f}", f"{plan.share(plan.seconds):.1%}"]
        numbers += [f"{plan.seconds_of(AGREEMENT):.1f}"] * compares
        rows.append([gpus, *numbers, largest, helps])
    return rows


def units_line(plan: Plan) -> str:
    """Whether the storage units are too few; "" where they are not."""
    wanted, units = plan.units_wanted, plan.asked.units
    if not plan.asked.simple or units >= wanted:
        return ""
    least = rates.UNITS_A_NODE * plan.sizes.nodes
    why = (
        f"TransferQueue asks for {rates.UNITS_A_NODE} a machine" if wanted == least else "transfers would wait for them"
    )
    return f"{UNITS}={units} is low for {plan.sizes.nodes} machines ({why}): set it to {wanted}"
