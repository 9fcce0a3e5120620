"""A run at one size or several: the time of a step, the plugin's part, and settings that would help."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from verl_ext.base.errors import ConfigError
from verl_ext.plan.costs import AGREEMENT, UNITS_A_NODE, Cost, plan_costs, units_wanted
from verl_ext.plan.memory import Memory, plan_memory
from verl_ext.plan.sizes import UNITS, WORKERS, Sizes, Usage, as_config_errors, read_sizes, read_usage
from verl_ext.plan.timing import Timing, plan_timing

SMALL_SHARE = 0.05  # of the trajectories, enough to see the routers drift
WORTH = 0.1  # share of the plugin's seconds that a setting must save to be listed
MOST_REMEDIES = 3


@dataclass(frozen=True)
class Remedy:
    """A setting that helps, and the plugin's seconds per step with this setting and the remedies listed before it."""

    setting: str
    seconds: float


@dataclass(frozen=True)
class Plan:
    """All results for one run at one size."""

    sizes: Sizes
    memory: Memory
    timing: Timing
    usage: Usage

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
        return plan_costs(self.sizes, self.usage, self.generation)

    @property
    def on(self) -> list[Cost]:
        return [cost for cost in self.costs if cost.on]

    @property
    def seconds(self) -> float:
        """Seconds that the plugin adds."""
        return sum(cost.waited for cost in self.on)

    @property
    def largest(self) -> Cost | None:
        return max(self.on, key=lambda cost: cost.waited, default=None)

    @property
    def units_wanted(self) -> int:
        return units_wanted(self.sizes, self.usage, self.costs, self.generation, self.step)

    def share(self, seconds: float) -> float:
        """Returns the seconds as a share of the step without the plugin."""
        return seconds / self.step if self.step else 0.0

    def seconds_of(self, feature: str) -> float:
        return sum(cost.waited for cost in self.on if cost.feature == feature)

    def with_usage(self, **changes: Any) -> "Plan":
        """Returns the plan with other settings of the plugin or of TransferQueue."""
        return replace(self, usage=replace(self.usage, **changes))

    def remedies(self) -> list[Remedy]:
        """Returns the settings that help, the most helpful first; each is computed with the previous ones applied."""
        found: list[Remedy] = []
        now = self
        while len(found) < MOST_REMEDIES:
            setting, then = min(now._choices(), key=lambda choice: choice[1].seconds, default=("", now))
            if then.seconds >= (1 - WORTH) * now.seconds:  # also if both are 0
                break
            found.append(Remedy(setting, then.seconds))
            now = then
        return found

    def _choices(self) -> list[tuple[str, "Plan"]]:
        """Returns settings that may help and give up no protection: with some of them, less is measured."""
        usage, found = self.usage, []
        if usage.compares and usage.replay == "disabled" and usage.agreement_share > SMALL_SHARE:
            setting = f"stability.router_agreement_share={SMALL_SHARE}"
            found.append((setting, self.with_usage(agreement_share=SMALL_SHARE)))
        if usage.simple and self.units_wanted > usage.units:
            found.append((f"{UNITS}={self.units_wanted}", self.with_usage(units=self.units_wanted)))
        if usage.measures and usage.signs:
            found.append(("stability.breakdown=false", self.with_usage(splits=False, signs=False)))
        if any(cost.waited for cost in self.on if cost.hidden):
            more = 2 * usage.workers
            found.append((f"{WORKERS}={more}", self.with_usage(workers=more)))
        return found


def read_plan(
    config: DictConfig,
    gpu: str,
    nodes: int | None = None,
    model: str | None = None,
    *,
    mean_prompt: float | None = None,
    mean_response: float | None = None,
) -> Plan:
    """Plans a composed config, and writes `nodes` into it if given.

    Args:
        mean_prompt, mean_response: tokens; None for GUESSED_MEAN of the limits.

    Raises:
        ConfigError: the config cannot be planned.
    """
    sizes = read_sizes(config, gpu, nodes, model, mean_prompt=mean_prompt, mean_response=mean_response)
    memory, usage = plan_memory(sizes), read_usage(config)
    return Plan(sizes, memory, plan_timing(sizes, memory, one_pass=usage.one_pass), usage)


def at_nodes(config: DictConfig, nodes: int, *, scale_batch: bool) -> DictConfig:
    """Returns a copy of the config for this number of machines.

    Args:
        scale_batch: keep the trajectories per GPU, in the batch and in each mini-batch.

    Raises:
        ConfigError: the batch is not a whole number of prompts.
    """
    config = copy.deepcopy(config)
    if not scale_batch or nodes < 1:
        return config
    with as_config_errors():
        before = config.trainer.nnodes
        for node, name in ((config.data, "train_batch_size"), (config.actor_rollout_ref.actor, "ppo_mini_batch_size")):
            given = node[name]
            if type(given) is not int or type(before) is not int or before < 1 or given * nodes % before:
                raise ConfigError(
                    f"--scale-batch: {name}={given} for {nodes} machines instead of {before} is not a whole number"
                )
            node[name] = given * nodes // before
    return config


def scale_table(plans: Sequence[Plan]) -> list[list[str]]:
    """Returns the header and a row for each size."""
    compares = any(plan.usage.compares for plan in plans)
    agreement = ["router agreement, s"] if compares else []
    header = ["GPUs", "step, s", "plugin, s", "share", *agreement, "largest", "what helps"]
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
        if compares:
            numbers.append(f"{plan.seconds_of(AGREEMENT):.1f}")
        rows.append([gpus, *numbers, largest, helps])
    return rows


def units_line(plan: Plan) -> str:
    """Returns a line that asks for more storage units; "" if there are enough."""
    wanted, units = plan.units_wanted, plan.usage.units
    if not plan.usage.simple or units >= wanted:
        return ""
    least = UNITS_A_NODE * plan.sizes.nodes
    why = f"TransferQueue recommends {UNITS_A_NODE} per machine" if wanted == least else "transfers would wait for them"
    return f"{UNITS}={units} is low for {plan.sizes.nodes} machines ({why}): set it to {wanted}"
