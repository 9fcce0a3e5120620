"""The ablations of docs/lab.md: the lab's regimes with one thing changed at a time.

python recipes/ablations/run.py            do the missing runs in .lab/ablations, add them to docs/lab/ablations.json
python recipes/ablations/run.py stale      only these families
python recipes/ablations/run.py --list     print the commands
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from verl_ext.diagnosis.names import K3
from verl_ext.lab.grid import METRICS
from verl_ext.report.load import read_run

ROOT = Path(__file__).parents[2]
OUT, KEPT = ROOT / ".lab" / "ablations", ROOT / "docs" / "lab" / "ablations.json"
SEEDS = "20,21"
LAGS = (4, 8, 16, 32)
LR, MINI_BATCH = (f"actor_rollout_ref.actor.{name}" for name in ("optim.lr", "ppo_mini_batch_size"))
BATCH, LENGTH = "data.train_batch_size", "data.max_response_length"
R3_TIS = "r3+tis=stability=r3 stability.correction=tis stability.batch_skip.threshold=null"
R3_SEQUENCE = "r3+tis_sequence=stability=r3 stability.correction=tis_sequence stability.batch_skip.threshold=null"
CENTERED = "stability.score_centering=true stability.batch_skip.threshold=null"
TIS_C, ICEPOP_C, R3_C = (f"{name}+centering=stability={name} {CENTERED}" for name in ("tis", "icepop", "r3"))
R3_TIS_C = f"r3+tis+centering=stability=r3 stability.correction=tis {CENTERED}"
LOW = "low_side=stability=icepop stability.icepop.beta=1e9 stability.batch_skip.threshold=null"
HIGH = "high_side=stability=icepop stability.icepop.alpha=1e-9 stability.batch_skip.threshold=null"


class Ablation(NamedTuple):
    """One grid of the lab, which differs from the first of its family in `changed`."""

    family: str
    changed: str
    overrides: tuple[str, ...] = ()


class Family(NamedTuple):
    """The settings that all grids of a family share."""

    regime: str
    variants: str
    add: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    steps: int = 200
    seeds: str = SEEDS


FAMILIES = {
    "late": Family("stale", "none,opsm", steps=600),
    "stale": Family("stale", "none,opsm,tis,icepop"),
    "quantized": Family("quantized+bf16", "none,r3,tis", (R3_TIS,), (f"{LR}=3e-3",)),
    "both": Family(
        "stale+quantized+bf16",
        "none,opsm,tis,tis_sequence,icepop,ipo,m2po,dppo_tv,r3,moe",
        (R3_TIS, R3_SEQUENCE),
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
    overrides = {text.split("=")[0]: text for text in (*family.overrides, *each.overrides)}
    given = ["--seeds", family.seeds, "--steps", str(family.steps), "--variants", family.variants, *added]
    return ["verl-ext", "lab", family.regime, *given, "--out", str(out(each).relative_to(ROOT)), *overrides.values()]


def kept(each: Ablation, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of the results that the page's table needs.

    Each variant has the final rewards by seed, null if the guard ended the run early, and the steps of its collapses;
    in the family "boundary" also the mean of k3 by seed, up to a collapse.
    """

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
        if (file := out(each) / "results.json").exists():
            results[each.family, each.changed] = kept(each, json.loads(file.read_text(encoding="utf-8")))
    in_order = [results[each.family, each.changed] for each in ABLATIONS if (each.family, each.changed) in results]
    KEPT.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
