"""The runs of docs/lab.md: whole grids, and the lab's regimes with one thing changed at a time.

python -m recipes.ablations.run            do the missing runs in .lab/ablations, and add them to docs/lab
python -m recipes.ablations.run stale      only these families
python -m recipes.ablations.run --list     print the commands

A whole grid is kept with every seed, in a file of its own, docs/lab/GRID.json; the others in docs/lab/ablations.json.
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from recipes.ablations.results import keep
from verl_ext.diagnosis.names import K1, K3
from verl_ext.lab.grid import METRICS
from verl_ext.lab.summary import NONE, START_STEPS
from verl_ext.lab.table import RESULTS
from verl_ext.report.load import read_run

ROOT = Path(__file__).parents[2]
OUT, LAB = ROOT / ".lab" / "ablations", ROOT / "docs" / "lab"
KEPT = LAB / "ablations.json"
SEEDS = "20,21"
LAGS = (4, 8, 16, 32)
LR, MINI_BATCH = (f"actor_rollout_ref.actor.{name}" for name in ("optim.lr", "ppo_mini_batch_size"))
BATCH, LENGTH = "data.train_batch_size", "data.max_response_length"
SKIPLESS = "stability.batch_skip.threshold=null"
AGREEMENT, TRUNCATED = "router/agreement", "lab.truncated"
KLS = {"k3": K3, "k1": K1}
CENTERED = f"stability.score_centering=true {SKIPLESS}"
TIS_C, ICEPOP_C, R3_C = (f"{name}+centering=stability={name} {CENTERED}" for name in ("tis", "icepop", "r3"))
R3_TIS_C = f"r3+tis+centering=stability=r3 stability.correction=tis {CENTERED}"
LOW = f"low_side=stability=icepop stability.icepop.beta=1e9 {SKIPLESS}"
HIGH = f"high_side=stability=icepop stability.icepop.alpha=1e-9 {SKIPLESS}"


class Ablation(NamedTuple):
    """One grid of the lab, which differs from the first of its family in `changed`.

    Attributes:
        metrics: a title -> the metric whose mean over the first steps is kept, of the runs without a method.
    """

    family: str
    changed: str
    overrides: tuple[str, ...] = ()
    metrics: Mapping[str, str] = MappingProxyType({})


class Family(NamedTuple):
    """The settings that all grids of a family share.

    Attributes:
        grid: the name of a whole grid's file; None for an ablation.
        plugins: the module with its own methods.
    """

    regime: str
    variants: str
    add: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    steps: int = 200
    seeds: str = SEEDS
    grid: str | None = None
    plugins: str | None = None


def replay(correction: str, *more: str) -> str:
    """Returns the variant R3 with a correction, for --add."""
    given = " ".join((f"stability.correction={correction}", *more, SKIPLESS))
    return f"r3+{correction}=stability=r3 {given}"


def rounded(bits: int, answer: int) -> tuple[str, ...]:
    """Returns the gap of the kernels alone: fresh weights, answers of so many tokens, and an engine that rounds."""
    task = ("lab.task.name=any_of", "lab.task.digits=4", f"lab.task.answer={answer}", f"{LENGTH}={answer + 1}")
    start = ("lab.warm_up.batch=16", "lab.warm_up.reward=0.3", f"{BATCH}=4", f"{MINI_BATCH}=4")
    return (f"lab.kernels.bits={bits}", *task, *start)


GRIDS = "10-17"  # the seeds of whole grids, on which no setting was chosen
WIDE = "stability.geo_mask.low=0.9 stability.geo_mask.high=1.1"
GEO_WIDE = f"geo_wide=stability=geo_mask {WIDE} {SKIPLESS}"
R3_OPSM = replay("opsm", "stability.opsm.delta=0.1")
ESS = tuple(f"{name}=stability=tis_sequence stability.correction={name} {SKIPLESS}" for name in ("ess_seq", "ess_ones"))
CLIP = "actor_rollout_ref.actor.clip_ratio"
DRPO = (
    "drpo=stability=none algorithm.rollout_correction.bypass_mode=true "
    f"actor_rollout_ref.actor.policy_loss.loss_mode=drpo {CLIP}_low=0.15 {CLIP}_high=0.15 {CLIP}_c=10000.0"
)
TOKEN_MEAN = f"icepop_token_mean=stability=icepop {SKIPLESS} actor_rollout_ref.actor.loss_agg_mode=token-mean"
KERNELS = (*rounded(3, 256), f"{LR}=3e-3")
SHORT_KERNELS = (*rounded(4, 64), "stability.breakdown=true")
BY_KERNELS = (
    "none,icepop,tis,moe,r3,mis,geo_mask,kpop,opsm",
    ("rounded_head=stability=none lab.kernels.head=true",),
)
DENSE = ("lab.model.experts=1", "lab.model.top_k=1", "lab.model.expert_hidden=64")

FAMILIES = {
    "old_weights": Family(
        "stale",
        "none,tis,tis_sequence,icepop,glm5,kpop,mis,opsm,r3,bypass,llds_loss,qae,guard,moe,ipo,m2po,dppo_tv",
        (
            *(replay(each) for each in ("tis", "tis_sequence", "mis")),
            *(R3_OPSM, GEO_WIDE),
            f"icepop+geo_wide=stability=none stability.correction=[icepop,geo_mask] {WIDE}",
            "skip=stability=none stability.batch_skip.threshold=0.1",
        ),
        steps=300,
        seeds=GRIDS,
        grid="stale",
    ),
    "fp4": Family(
        "quantized+bf16",
        "none,tis,icepop,kpop,mis,opsm,r3,bypass,guard,ipo,m2po,dppo_tv",
        (*(replay(each) for each in ("tis", "icepop", "tis_sequence")), R3_OPSM, GEO_WIDE),
        (f"{LR}=3e-3",),
        steps=300,
        seeds=GRIDS,
        grid="quantized",
    ),
    "kernels": Family("kernels", *BY_KERNELS, KERNELS, steps=120, seeds=GRIDS, grid="kernels"),
    "candidates": Family(
        "stale",
        "none,dppo_tv,tis_sequence,opsm",
        (*ESS, DRPO),
        steps=300,
        seeds=GRIDS,
        grid="candidates",
        plugins="recipes.ablations.candidates",
    ),
    "means": Family("stale", "none,icepop", (TOKEN_MEAN,), steps=300, seeds=GRIDS, grid="means"),
    "bits": Family("kernels", *BY_KERNELS, KERNELS, steps=120, seeds="10-12"),
    "top_p": Family("truncated", "none", steps=30, seeds="10,11"),
    "depth": Family("kernels", "none", (), SHORT_KERNELS, steps=20, seeds="10,11"),
    "late": Family("stale", "none,opsm", steps=600),
    "stale": Family("stale", "none,opsm,tis,icepop"),
    "quantized": Family("quantized+bf16", "none,r3,tis", (replay("tis"),), (f"{LR}=3e-3",)),
    "both": Family(
        "stale+quantized+bf16",
        "none,opsm,tis,tis_sequence,icepop,ipo,m2po,dppo_tv,r3,moe",
        (replay("tis"), replay("tis_sequence")),
        seeds="20-27",
    ),
    # Which side of the band matters: tokens that the training engine finds less likely than the rollout, or more.
    "sides": Family("quantized+bf16", "none,icepop", (LOW, HIGH), (f"{LR}=3e-3",)),
    "others": Family("stale", "none,geo_mask,seq_mask_tis,deepseek_v32,filters,grpo_positive,icepop_loss,opsm_loss"),
    "centering": Family("stale", "none,opsm,tis,icepop,score_centering", (TIS_C, ICEPOP_C), seeds="30,31,32,33"),
    "centering_fp4": Family(
        "quantized+bf16",
        "none,r3,tis,icepop,score_centering",
        (TIS_C, R3_C, R3_TIS_C),
        (f"{LR}=3e-3",),
        seeds="30,31",
    ),
    "truncated": Family("truncated", "none,tis,icepop,mis"),
    # How large a gap is before runs without a correction come apart, and what that depends on.
    "boundary": Family("stale", "exact", tuple(f"lag_{lag}=lab.stale.lag={lag}" for lag in LAGS), seeds="40,41,42"),
    # Four updates per step: only then does l_theta differ from l_old, on which llds_loss and r2 depend.
    "updates": Family(
        "stale",
        "none,opsm,r2,r3,llds_loss",
        overrides=(f"{BATCH}=16", f"{MINI_BATCH}=4", "lab.stale.lag=4"),
    ),
}
ABLATIONS = (
    *(Ablation(family, "whole") for family, each in FAMILIES.items() if each.grid),
    Ablation("bits", "1 significant bit", ("lab.kernels.bits=1",)),
    *(
        Ablation(
            "top_p", f"{top_p}" + ", known" * known, (f"{TRUNCATED}.top_p={top_p}", f"{TRUNCATED}.known={known}"), KLS
        )
        for known in (False, True)
        for top_p in (0.95, 0.9, 0.8, 0.7)
    ),
    *(
        Ablation(
            "depth",
            f"{layers} layers" + ", dense" * dense,
            (f"lab.model.layers={layers}", *DENSE * dense),
            {
                "k3": K3,
                "routers agree": AGREEMENT,
                "first layer": f"{AGREEMENT}/layer_00",
                "last layer": f"{AGREEMENT}/layer_{layers - 1:02d}",
            },
        )
        for layers in (2, 4, 8, 12)
        for dense in (False, True)
    ),
    Ablation("late", "8 updates old", ("lab.stale.lag=8",)),
    Ablation("late", "16 updates old, from a reward of 0.2", ("lab.stale.lag=16", "lab.warm_up.reward=0.2")),
    Ablation("updates", "four updates a step"),
    Ablation("truncated", "top_p=0.9", ("lab.truncated.top_p=0.9",)),
    Ablation("truncated", "top_p=0.9, known", ("lab.truncated.top_p=0.9", "lab.truncated.known=true")),
    Ablation("centering", "32 updates old"),
    Ablation("centering_fp4", "fp4, the routers too"),
    Ablation("stale", "32 updates old"),
    Ablation("stale", "8 updates old", ("lab.stale.lag=8",)),
    Ablation("stale", "half the learning rate", (f"{LR}=5e-4",)),
    Ablation("stale", "answers half as long", ("lab.task.digits=8", f"{LENGTH}=12")),
    Ablation("stale", "32 experts, top-8", ("lab.model.experts=32", "lab.model.expert_hidden=8", "lab.model.top_k=8")),
    Ablation("quantized", "fp4, the routers too"),
    Ablation("quantized", "fp4, the routers not", ("lab.quantized.router=false",)),
    Ablation("quantized", "a third of the learning rate", (f"{LR}=1e-3",)),
    Ablation("quantized", "fp8", ("lab.quantized.format=fp8",)),
    Ablation("both", "32 updates old and fp4, the routers too"),
    Ablation("sides", "fp4, the routers too"),
    Ablation("others", "32 updates old"),
    Ablation("boundary", "as the lab has it"),
    Ablation("boundary", "1 layer", ("lab.model.layers=1",)),
    Ablation("boundary", "4 layers", ("lab.model.layers=4",)),
    Ablation("boundary", "batch of 4 prompts", (f"{BATCH}=4", f"{MINI_BATCH}=4")),
    Ablation("boundary", "batch of 16 prompts", (f"{BATCH}=16", f"{MINI_BATCH}=16")),
    Ablation("boundary", "answers half as long", ("lab.task.digits=8", f"{LENGTH}=12")),
    Ablation("boundary", "answers twice as long", ("lab.task.digits=32", f"{LENGTH}=36")),
    Ablation("boundary", "half the learning rate", (f"{LR}=5e-4",)),
    Ablation("boundary", "twice the learning rate", (f"{LR}=2e-3",)),
)


def out(each: Ablation) -> Path:
    return OUT / each.family / "".join(letter if letter.isalnum() else "_" for letter in each.changed)


def command(each: Ablation) -> list[str]:
    family = FAMILIES[each.family]
    added = [part for text in family.add for part in ("--add", text)]
    added += ["--plugins", family.plugins] if family.plugins else []
    overrides = {text.split("=")[0]: text for text in (*family.overrides, *each.overrides)}
    given = ["--seeds", family.seeds, "--steps", str(family.steps), "--variants", family.variants, *added]
    return ["verl-ext", "lab", family.regime, *given, "--out", str(out(each).relative_to(ROOT)), *overrides.values()]


def kept(each: Ablation, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of the results that the page's table needs.

    Each variant has the final rewards by seed, null if the guard ended the run early, and the steps of its collapses;
    in the family "boundary" also the mean of k3 by seed, up to a collapse; and the metrics of the first steps.
    """

    def at_start(metric: str) -> float | None:
        runs = (read_run(out(each) / NONE / f"seed{seed}" / METRICS) for seed in found["seeds"])
        levels = [series.values[:START_STEPS].mean() for run in runs if (series := run.get(metric)) is not None]
        return float(fmean(levels)) if levels else None

    def mean_k3(variant: dict[str, Any], seed: str) -> float:
        series = read_run(out(each) / variant["name"] / f"seed{seed}" / METRICS).metrics[K3].finite()
        return float(series.values[series.steps < variant["collapsed"]["at"].get(seed, math.inf)].mean())

    return {
        "family": each.family,
        "changed": each.changed,
        "command": shlex.join(command(each)),
        "steps": found["steps"],
        "seeds": found["seeds"],
        "variants": [
            {
                "name": variant["name"],
                "final": {seed: run["final"] for seed, run in variant["runs"].items()},
                "collapsed": variant["collapsed"]["at"],
            }
            | ({"k3": {seed: mean_k3(variant, seed) for seed in variant["runs"]}} if each.family == "boundary" else {})
            for variant in found["variants"]
        ],
        **({"start": {title: at_start(metric) for title, metric in each.metrics.items()}} if each.metrics else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help=f"{', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--list", action="store_true", help="only print the commands")
    parser.add_argument("--jobs", help="runs at a time, as for verl-ext lab")
    given = parser.parse_args()
    if unknown := {*given.family} - {*FAMILIES}:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(FAMILIES)}")
    chosen = [each for each in ABLATIONS if not given.family or each.family in given.family]
    if given.list:
        print("\n".join(shlex.join(command(each)) for each in chosen))
        return
    tool = Path(sys.executable).with_name("verl-ext")
    for each in chosen:
        print(f"ablations: {each.family}, {each.changed}", flush=True)
        jobs = ["--jobs", given.jobs] if given.jobs else []
        subprocess.run([tool, *command(each)[1:], "--no-page", *jobs], cwd=ROOT, check=True)
    results = {(one["family"], one["changed"]): one for one in json.loads(KEPT.read_text(encoding="utf-8"))}
    for each in ABLATIONS:
        if not (file := out(each) / RESULTS).exists():
            continue
        if grid := FAMILIES[each.family].grid:
            keep(out(each), LAB / f"{grid}.json")
        else:
            results[each.family, each.changed] = kept(each, json.loads(file.read_text(encoding="utf-8")))
    in_order = [results[each.family, each.changed] for each in ABLATIONS if (each.family, each.changed) in results]
    KEPT.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
