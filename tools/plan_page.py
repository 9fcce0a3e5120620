"""Rewrites the parts of docs/plan.md that follow from the code: `python tools/plan_page.py docs/plan.md`.

Tables, and a sample of the command's output, are between the comments <!-- NAME --> and <!-- /NAME -->.
"""

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from verl_ext.base.errors import ConfigError
from verl_ext.launch.command_line import compose
from verl_ext.plan import costs
from verl_ext.plan.command import print_plan
from verl_ext.plan.scale import SMALL_SHARE, Plan, at_nodes, read_plan, scale_table

GPU = "H100"
NODES = (8, 32, 128)
RECIPES = {"30B": "qwen3_30b_a3b", "235B": "qwen3_235b_a22b_megatron"}
PRESET = ("stability=moe",)
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


def agreement_table() -> list[list[str]]:
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
    return rows


def rates_table() -> list[list[str]]:
    return [
        ["", "writes", "reads"],
        ["a client, GB/s", f"{costs.CLIENT_PUT}", f"{costs.CLIENT_GET}"],
        ["a storage unit, GB/s", f"{costs.UNIT_PUT}", f"{costs.UNIT_GET}"],
        ["a row of a field, us of a client", f"{costs.VALUE_PUT_US:g}", f"{costs.VALUE_GET_US:g}"],
    ]


def parts() -> dict[str, str]:
    """Returns name -> Markdown."""
    found = {model: plans(recipe) for model, recipe in RECIPES.items()}
    made = {"rates": rates_table(), "agreement": agreement_table()}
    made |= {f"sizes {model}": scale_table(sizes) for model, sizes in found.items()}
    return {"sample": sample_output()} | {name: markdown(rows) for name, rows in made.items()}


def markdown(rows: Sequence[Sequence[str]]) -> str:
    header, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *body))


def main(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name, part in parts().items():
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        text = f"{before}{start}{part}\n{end}{after}" if end else text
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
