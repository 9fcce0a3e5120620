"""The tables of docs/plan.md, and its sample of the command's output; `python tools/pages.py` writes them."""

import contextlib
import csv
import io
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig
from pages import table

from verl_ext.base.errors import ConfigError
from verl_ext.launch.command_line import compose
from verl_ext.launch.models import FAMILIES
from verl_ext.plan import costs
from verl_ext.plan.command import print_plan
from verl_ext.plan.memory import plan_memory
from verl_ext.plan.scale import SMALL_SHARE, Plan, at_nodes, read_plan, scale_table
from verl_ext.plan.sizes import Sizes, planned_gpu
from verl_ext.plan.timing import plan_timing

GPU = "H100"
NODES = (8, 32, 128)
RECIPES = {"30B": "qwen3_30b_a3b", "235B": "qwen3_235b_a22b_megatron"}
PRESET = ("stability=moe",)
RUNS = Path(__file__).parent.parent / "docs" / "published_runs.csv"
STAGES = {"generation": "generation", "old log-probs": "old_log_prob", "update": "update", "step": "step"}
WITH_AGREEMENT = ("stability=icepop", "stability.router_agreement=true")  # with a replay it costs nothing more


def plans(recipe: str, overrides: tuple[str, ...] = PRESET) -> list[Plan]:
    """Plans a recipe on H100s, at every size of the page."""
    config = _config([f"recipe={recipe}", *overrides])
    return [read_plan(at_nodes(config, nodes, scale_batch=False), GPU, nodes) for nodes in NODES]


def sample_output() -> str:
    """Returns the first command of the page, with its output."""
    given = [f"recipe={RECIPES['30B']}", *PRESET]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_plan(read_plan(_config(given), GPU), GPU)
    return f"```\n$ verl-ext plan --gpu {GPU} {' '.join(given)}\n{printed.getvalue()}```"


def _config(given: list[str]) -> DictConfig:
    composed = compose(given)
    if composed.config is None or composed.problems:
        raise ConfigError.of(composed.problems)
    return composed.config


def agreement_table() -> str:
    """Tabulates the time that router agreement adds to a step: for all trajectories and a share of them, with verl's
    number of storage units and with TransferQueue's."""
    rows = [["model", "GPUs", "step, s", "storage units", "all trajectories", f"a share of {SMALL_SHARE}"]]
    for model, recipe in RECIPES.items():
        for plan in plans(recipe, WITH_AGREEMENT):
            for units in (plan.usage.units, costs.UNITS_A_NODE * plan.sizes.nodes):
                with_units = plan.with_usage(units=units)
                cells = []
                for share in (1.0, SMALL_SHARE):
                    seconds = with_units.with_usage(agreement_share=share).seconds_of(costs.AGREEMENT)
                    cells.append(f"{seconds:.2f} s, {plan.share(seconds):.2%}")
                rows.append([model, f"{plan.sizes.gpus:,}", f"{plan.step:,.0f}", str(units), *cells])
    return table(rows)


def sync_check_table() -> str:
    """Tabulates the seconds of a checked weight sync, and their share of the time if the sync of each Nth step is
    checked."""
    counts = (1, 10, 50)
    rows = [["model", "GPUs", "step, s", "a checked sync, s", *(f"every: {every}" for every in counts)]]
    for model, recipe in RECIPES.items():
        own = read_plan(_config([f"recipe={recipe}", *PRESET]), GPU)
        for plan in {each.sizes.gpus: each for each in (own, *plans(recipe))}.values():
            seconds = costs.checked_sync_seconds(plan.sizes)
            shares = (f"{plan.share(seconds / every):.2%}" for every in counts)
            rows.append([model, f"{plan.sizes.gpus:,}", f"{plan.step:,.0f}", f"{seconds:.1f}", *shares])
    return table(rows)


def one_pass_table() -> str:
    """Tabulates a step of recipes with one update a batch, with and without compute_log_prob."""
    rows = [["model", "GPUs", "old log-probs, s", "update, s", "step, s", "without, s", "ratio"]]
    for model, recipe in (RECIPES | {"GLM-4.5-Air": "glm45_air_megatron"}).items():
        given = [f"recipe={recipe}", *PRESET, "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}"]
        with_it, without = (
            read_plan(_config([*given, f"stability.reuse_log_probs={reuse}"]), GPU) for reuse in ("off", "on")
        )
        stages = with_it.timing.stages
        seconds = (stages["old log-probs"], stages["update"], with_it.step, without.step)
        ratio = without.step / with_it.step
        rows.append([model, f"{with_it.sizes.gpus:,}", *(f"{each:,.0f}" for each in seconds), f"{ratio:.2f}"])
    return table(rows)


@dataclass(frozen=True)
class Comparison:
    """A published run: stage -> seconds, planned and published, as far as they were published."""

    run: dict[str, str]
    fitted: bool
    fits: bool
    planned: dict[str, float]
    published: dict[str, float]

    def factor(self, stage: str) -> float | None:
        return self.planned[stage] / self.published[stage] if stage in self.published else None

    @property
    def share_errors(self) -> dict[str, float]:
        """Stage -> planned less published share, in points, of the stages that a run publishes; {} for one stage."""
        if len(self.published) < 2 or "step" in self.published:
            return {}
        sums = [sum(one[stage] for stage in self.published) for one in (self.planned, self.published)]
        return {
            stage: 100 * (self.planned[stage] / sums[0] - self.published[stage] / sums[1]) for stage in self.published
        }


def sizes_of_run(run: dict[str, str]) -> Sizes:
    """Returns the sizes of a row of docs/published_runs.csv."""

    def count(name: str) -> int:
        return int(run[name] or 0)

    megatron, offload = run["engine"] == "megatron", run["offload"] == "1"
    counts = ("gpus", "tensor", "pipeline", "context", "expert", "ulysses", "micro_tokens", "prompt", "response")
    return Sizes(
        shape=FAMILIES[run["model"]],
        gpu=planned_gpu(run["gpu"])[1],
        rollout_gpus=count("gpus"),
        shared=True,
        megatron=megatron,
        expert_tensor=1 if count("expert") > 1 else count("tensor"),
        param_offload=offload,
        optimizer_offload=offload,
        cpu_adam=float(run["cpu_adam"]),
        recompute=tuple(run["recompute"].split()),
        fused=run["fused"] == "1",
        float32_head=False,
        compute_bytes=2,
        shards=count("shards") or count("gpus"),
        micro_rows=0,
        mean_prompt=float(run["mean_prompt"]),
        mean_response=float(run["mean_response"]),
        sequences=count("prompts") * count("n"),
        updates=count("prompts") // count("mini"),
        epochs=1,
        reference=run["reference"] == "1",
        rollout_tensor=count("rollout_tensor"),
        rollout_data=1,
        rollout_bytes=2,
        cache_bytes=2,
        utilization=float(run["utilization"]),
        max_num_seqs=1024,
        **{name: count(name) for name in counts},
    )


def comparisons() -> list[Comparison]:
    """Plans every run of docs/published_runs.csv; the first, third, ... are those that the rates were fitted to."""
    found = []
    with RUNS.open(encoding="utf-8") as file:
        for number, run in enumerate(csv.DictReader(file)):
            sizes = sizes_of_run(run)
            memory = plan_memory(sizes)
            planned = {**plan_timing(sizes, memory).stages}
            planned["step"] = sum(planned.values())
            published = {stage: float(run[column]) for stage, column in STAGES.items() if run[column]}
            if run["filters"] == "1":  # several batches are generated for a step, and their number is not published
                published.pop("generation", None)
            if "update" in published:
                published.pop("step", None)
            found.append(Comparison(run, number % 2 == 0, memory.fits(sizes), planned, published))
    return found


def runs_table() -> str:
    rows = [["run", "run with", "mean response", "generation", "old log-probs", "update", "step", "share", "half"]]
    for one in comparisons():
        run, cells = one.run, []
        for stage in STAGES:
            factor = one.factor(stage)
            cells.append(f"{one.planned[stage]:,.0f} / {one.published[stage]:,.0f} = {factor:.2f}" if factor else "")
        errors = one.share_errors.values()
        ways = {
            "TP": "tensor",
            "rollout TP": "rollout_tensor",
            "PP": "pipeline",
            "CP": "context",
            "EP": "expert",
            "SP": "ulysses",
        }
        layout = " ".join(f"{way} {run[name]}" for way, name in ways.items() if run[name] != "1")
        rows.append(
            [
                f"[{run['run']}]({run['source']})",
                f"{run['model']}, {run['gpus']} {run['gpu']}, {run['engine']} {layout}",
                f"{run['mean_response']} ({run['lengths']})",
                *cells,
                f"{max(errors, key=abs):+.0f}" if errors else "",
                "fit" if one.fitted else "test",
            ]
        )
    return table(rows)


def judged_table() -> str:
    """Tabulates, for both halves: runs within a factor of 1.6, and the largest error of a share."""
    rows = [["half", *(f"{stage}, within 1.6" for stage in STAGES), "shares within 12 points", "does not fit"]]
    for half, fitted in (("fit", True), ("test", False)):
        ones = [one for one in comparisons() if one.fitted == fitted]
        cells = []
        for stage in STAGES:
            factors = [factor for one in ones if (factor := one.factor(stage))]
            near = sum(1 / 1.6 <= factor <= 1.6 for factor in factors)
            cells.append(f"{near} of {len(factors)}")
        errors = [max(map(abs, one.share_errors.values())) for one in ones if one.share_errors]
        cells.append(f"{sum(error <= 12 for error in errors)} of {len(errors)}")
        rows.append([half, *cells, str(sum(not one.fits for one in ones))])
    return table(rows)


def rates_table() -> str:
    rows = [
        ["", "writes", "reads"],
        ["a client, GB/s", f"{costs.CLIENT_PUT}", f"{costs.CLIENT_GET}"],
        ["a storage unit, GB/s", f"{costs.UNIT_PUT}", f"{costs.UNIT_GET}"],
        ["a row of a field, us of a client", f"{costs.VALUE_PUT_US:g}", f"{costs.VALUE_GET_US:g}"],
    ]
    return table(rows)


def small_sizes() -> str:
    return table(scale_table(plans(RECIPES["30B"])))


def large_sizes() -> str:
    return table(scale_table(plans(RECIPES["235B"])))
