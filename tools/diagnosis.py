"""Measures how often the diagnosis names the right cause: runs of the lab with one planted cause each.

    python tools/diagnosis.py run [--runs 8]     make the missing runs; 40 minutes of each core
    python tools/diagnosis.py judge              judge them, and print docs/diagnosis.md's tables
    python tools/diagnosis.py ask                print how much is found with the metrics that the report asks for

Each run of a cause has its own task, model, learning rate and severity, drawn by its number. The words of
the causes were chosen on the field cases, the set `development` and on the runs of `held_out` before FIRST. The tables
show the runs from FIRST on, on which no rule was chosen.
"""

import argparse
import json
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pages import table
from rich.console import Console

from verl_ext.diagnosis.causes import CAUSES
from verl_ext.diagnosis.judge import RunningDiagnosis, judge
from verl_ext.diagnosis.series import Readings
from verl_ext.lab.grid import Arm, GridCell, run_missing

STEPS = 150
FIRST = {"development": 0, "held_out": 72}  # the number of the first run that is judged
ROUNDING = tuple(cause.name for cause in CAUSES.values() if cause.harmless_if_close)
COMMON = (
    "+lab=grpo",
    "stability=none",
    "stability.metrics=true",
    "stability.breakdown=true",
    "stability.router_agreement=true",
    "stability.sync_canary.trajectories=8",
    f"trainer.total_training_steps={STEPS}",
)
LR = "actor_rollout_ref.actor.optim.lr"
# Learning rates for `sort`, where a run with 7e-4 or more loses up to half of its reward without any gap.
SLOW = ("4.0e-4", "3.0e-4")
REPLAY = "actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3"
# Settings in which runs differ, whatever their cause.
SETTINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "development": {
        "lab.task.name": ("prefix_sums", "reverse"),
        "lab.model.layers": ("2", "3"),
        "lab.model.experts": ("8", "16"),
        LR: ("1.0e-3", "5.0e-4"),
        "actor_rollout_ref.actor.ppo_mini_batch_size": ("8", "4"),
        "stability.sync_canary.every": ("1", "4"),
    },
    "held_out": {
        "lab.task.name": ("prefix_sums", "reverse", "sort"),
        "lab.model.layers": ("2", "3", "4"),
        "lab.model.experts": ("8", "12", "24"),
        LR: ("1.0e-3", "7.0e-4", "4.0e-4"),
        "actor_rollout_ref.actor.ppo_mini_batch_size": ("8", "4", "2"),
        "stability.sync_canary.every": ("1", "5"),
    },
}


@dataclass(frozen=True)
class Planted:
    """A planted cause.

    Attributes:
        cause: its name in `verl_ext.diagnosis`; "" for a sound run.
        regime: the lab's regime; "" for none.
        development, held_out: overrides of each severity, separated by blanks; drawn in turn. A setting without a dot
            is one of the regime's.
        always: overrides of all of its runs.
    """

    cause: str
    regime: str
    development: tuple[str, ...] = ("",)
    held_out: tuple[str, ...] = ("",)
    always: tuple[str, ...] = ()

    def overrides(self, which: str, number: int) -> tuple[str, ...]:
        severities = self.development if which == "development" else self.held_out
        drawn = severities[number % len(severities)].split()
        whole = (one if "." in one.partition("=")[0] else f"lab.{self.regime}.{one}" for one in drawn)
        return (*self.always, *whole)


def each(setting: str, *values: object) -> tuple[str, ...]:
    return tuple(f"{setting}={value}" for value in values)


TASK, ENTROPY = "lab.task.name", "actor_rollout_ref.actor.entropy_coeff"
NOISY = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "lab.grader.noise=0.2")
PLANTED: dict[str, Planted] = {
    "sound": Planted("", ""),
    "sound_noisy": Planted("", "", always=NOISY),
    "two_precisions": Planted("two_precisions", "bf16"),
    "quantized": Planted(
        "quantized",
        "quantized",
        (*each("format", "fp4", "fp8", "int4"), "router=false"),
        ("group=16", "format=fp8 router=false", "format=int4"),
    ),
    "old_weights": Planted("old_weights", "stale", each("lag", 8, 32), each("lag", 6, 12, 24, 48)),
    "lost_sync": Planted("lost_sync", "missed_sync", each("update", 0, 30, 60), each("update", 0, 20, 45, 75)),
    "partial_sync": Planted(
        "partial_sync",
        "partial_sync",
        ("layers=1", "layers=-1 names=up+down"),
        ("layers=2", "layers=1 names=up+down+router", "layers=-1 names=qkv+out"),
    ),
    "scaled_update": Planted(
        "scaled_update", "scaled_update", each("scale", 2.0, 0.5), each("scale", 1.5, 0.3, 3.0, 0.6)
    ),
    "router_dtype": Planted("two_precisions", "router_dtype"),  # metrics do not show which part has another dtype
    "router_bias": Planted("router_bias", "router_bias", each("scale", 0.5, 1.0), each("scale", 0.3, 0.7, 1.5)),
    "wrong_weights": Planted(
        "wrong_weights",
        "wrong_weights",
        ("", "layer=1", "kind=neighbour"),
        ("", "layer=1", "layer=1 kind=neighbour"),
    ),
    "temperature": Planted(
        "temperature", "wrong_temperature", each("temperature", 1.3, 0.8), each("temperature", 1.15, 0.7, 1.5, 0.9)
    ),
    "truncated": Planted(
        "truncated", "truncated", ("", "top_p=1.0 top_k=2"), (*each("top_p", 0.95, 0.8), "top_p=1.0 top_k=3")
    ),
    "raw_log_probs": Planted(
        "raw_log_probs", "raw_log_probs", each("temperature", 1.3, 0.8), each("temperature", 1.15, 0.7, 1.5, 0.9)
    ),
    "leak": Planted("leak", "packed_leak"),
    "positions": Planted("positions", "positions_off", each("places", 1), each("places", 1, 2)),
    "respelled": Planted("respelled", "respelled", each("share", 0.01, 0.003), each("share", 0.005, 0.02, 0.002)),
    "wrong_routes": Planted("wrong_routes", "misrouted", always=(REPLAY,)),
    "experts_dead": Planted("experts_dead", "router_collapse", each("rate", 0.05, 0.03), each("rate", 0.1, 0.04, 0.06)),
    "learning_rate": Planted("learning_rate", "", each(LR, "1.0e-2"), each(LR, "2.0e-2", "7.0e-3", "1.2e-2")),
    "entropy_collapse": Planted(
        "entropy_collapse",
        "",
        each(f"{TASK}=prefix_sums {ENTROPY}", -10, -30),
        tuple(f"{TASK}={task} {ENTROPY}={factor}" for factor in (-15, -50) for task in ("prefix_sums", "sort")),
        # A model that knows the answers only gets better by being certain. On `reverse`, even a little warm-up leads to
        # that: its reward rises to 1, and nothing is wrong.
        ("lab.warm_up.reward=0.15",),
    ),
    "hacked_reward": Planted(
        "hacked_reward",
        "",
        ("lab.grader.length=1.0",),
        # With the learning rates that are drawn for `sort`, answers may not have grown by the end.
        (f"lab.grader.length=0.7 {LR}=1.0e-3", f"lab.grader.length=2.0 {LR}=7.0e-4"),
        ("data.max_response_length=48",),
    ),
    "noisy_reward": Planted("noisy_reward", "", each("lab.grader.noise", 0.8, 1.0), each("lab.grader.noise", 0.9, 1.0)),
    "no_signal": Planted("no_signal", "", always=("lab.grader.constant=true",)),
}


def rounds(number: int, planted: Planted) -> bool:
    """Returns True if the engines of this run also round differently, as any two real engines do.

    Blocks of four runs of a cause alternate, so that each severity is planted with and without it.
    """
    return planted.cause not in ROUNDING and number // 4 % 2 == 1


def cells(which: str, runs: int, names: list[str]) -> Iterator[tuple[str, GridCell]]:
    """Yields (name, run) of each planted cause; the first run of every cause comes before the second of any."""
    first = 0 if which == "development" else 1000
    for number in range(FIRST[which], FIRST[which] + runs):
        for name in names:
            draw = random.Random(f"{which} {name} {number}")
            planted = PLANTED[name]
            settings = {setting: draw.choice(values) for setting, values in SETTINGS[which].items()}
            own = dict(override.split("=", 1) for override in planted.overrides(which, number))
            if (settings | own)["lab.task.name"] == "sort":
                settings[LR] = draw.choice(SLOW)
            rounding = "bf16" if rounds(number, planted) else ""
            regimes = filter(None, (rounding, planted.regime))
            drawn = [f"{setting}={value}" for setting, value in (settings | own).items()]
            overrides = (*COMMON, *drawn, f"lab.regimes=[{','.join(regimes)}]")
            yield name, GridCell(Arm(f"{name}/{number}", overrides), first + number, STEPS)


Metrics = dict[str, list[tuple[int, float]]]
VERLS = ("training/", "critic/", "actor/", "response_length/")  # what verl 0.9.1 logs by itself
ALSO_VERLS = ("vllm_kl/k1", "vllm_kl/k3")  # as rollout_corr/kl and rollout_corr/k3_kl


def read_metrics(file: Path) -> Metrics:
    """Returns the finite readings of each metric."""
    found: Metrics = defaultdict(list)
    for line in file.read_text().splitlines():
        row = json.loads(line)
        for name, value in row["data"].items():
            if isinstance(value, int | float) and math.isfinite(value):
                found[name].append((row["step"], float(value)))
    return found


def plain(metrics: Metrics) -> Metrics:
    """Returns the metrics that verl logs for the same run without the plugin, with algorithm.rollout_correction on."""
    return {name: found for name, found in metrics.items() if name.startswith(VERLS) or name in ALSO_VERLS}


def named_at(metrics: Metrics) -> tuple[list[tuple[int, str]], int]:
    """Returns the causes that a run names while it runs, by step, and its number of steps."""
    by_step: dict[int, dict[str, float]] = defaultdict(dict)
    for name, found in metrics.items():
        for step, value in found:
            by_step[step][name] = value
    watching, reported = RunningDiagnosis(), []
    for step in sorted(by_step):
        if watching.add(step, by_step[step]) is not None:
            reported.append((step, watching.reported))
    return reported, len(by_step)


@dataclass(frozen=True)
class Judged:
    """The diagnosis of one run.

    Attributes:
        found: the causes that are named at its end, the likeliest first.
        plain: the same from verl's metrics only.
        reports: (step, cause) as the run reported them while it ran.
        steps: the number of steps of the run.
        onset: the step from which the planted cause acts.
        rounds: whether the engines also round differently.
    """

    found: list[str]
    plain: list[str]
    reports: list[tuple[int, str]]
    steps: int
    onset: int
    rounds: bool


def causes_named(metrics: Metrics, planted: Planted) -> list[str]:
    """Returns the causes that a report names; without harmless rounding, unless rounding is what was planted."""
    suspects = judge(Readings.of_pairs(metrics)).suspects
    return [each.cause.name for each in suspects if not each.harmless or planted.cause in ROUNDING]


def judge_run(folder: Path, planted: Planted) -> Judged:
    metrics = read_metrics(folder / "metrics.jsonl")
    found, without = (causes_named(known, planted) for known in (metrics, plain(metrics)))
    return Judged(found, without, *named_at(metrics), onset_of(folder), rounds(int(folder.parent.name), planted))


def folders_of(name: str, which: str, out: Path) -> list[Path]:
    """Returns the finished runs of a row that are judged."""
    finished = sorted((out / which / name).glob("*/seed*/done.json"))
    return [file.parent for file in finished if int(file.parents[1].name) >= FIRST[which]]


def is_right(cause: str, found: list[str], places: int) -> bool:
    """Checks that the cause is among the first `places` that were named; for a sound run, that none was named."""
    return cause in found[:places] if cause else not found


def print_tables(which: str, out: Path) -> None:
    """Prints the tables of docs/diagnosis.md: by planted cause, which cause came first, and how soon it was named."""
    runs = {
        name: [judge_run(folder, planted) for folder in folders_of(name, which, out)]
        for name, planted in PLANTED.items()
    }
    titles = ("planted", "runs", "first", "with rounding besides", "first two", "otherwise", "reported after")
    rows = [(*titles, "verl's metrics only")]
    for name, judged in runs.items():
        cause = PLANTED[name].cause
        wrong = Counter(
            run.found[0] if run.found else "not known" for run in judged if not is_right(cause, run.found, 1)
        )
        reported = [[step - run.onset for step, named in run.reports if named == cause] for run in judged]
        delays = [steps[0] for steps in reported if steps]
        first, two = (sum(is_right(cause, run.found, places) for run in judged) for places in (1, 2))
        rounding = [is_right(cause, run.found, 1) for run in judged if run.rounds]
        row = (
            name,
            str(len(judged)),
            str(first),
            f"{sum(rounding)} of {len(rounding)}" if rounding else "",
            str(two),
            ", ".join(f"{other} {count}" for other, count in wrong.items()),
            f"{median(delays):.0f} steps" if delays else "",
            str(sum(is_right(cause, run.plain, 1) for run in judged)),
        )
        rows.append(row)
    print(table(rows))
    faulty = [(PLANTED[name].cause, run) for name in runs if PLANTED[name].cause for run in runs[name]]
    sound = [run for name in runs if not PLANTED[name].cause for run in runs[name]]
    if faulty:
        print(f"\nOf {len(faulty)} runs with a cause, it comes")
        for known, named in (("all metrics", "found"), ("verl's metrics only", "plain")):
            one, two = (sum(is_right(cause, getattr(run, named), n) for cause, run in faulty) for n in (1, 2))
            shares = f"first in {one} ({one / len(faulty):.1%}), among the first two in {two} ({two / len(faulty):.1%})"
            print(f"- from {known}: {shares}")
        for known, besides in (("engines that are equal otherwise", False), ("rounding besides", True)):
            right = [is_right(cause, run.found, 1) for cause, run in faulty if run.rounds == besides]
            print(f"- with {known}: first in {sum(right)} of {len(right)}")
    if sound:
        alarms, steps = sum(len(run.reports) for run in sound), sum(run.steps for run in sound)
        accused, plainly = (sum(bool(getattr(run, named)) for run in sound) for named in ("found", "plain"))
        print(
            f"\nOf {len(sound)} sound runs, {accused} have a cause named at the end, {plainly} by verl's metrics only."
        )
        print(f"They reported {alarms} causes in {steps} steps: {1000 * alarms / steps:.2g} per 1,000.")


def onset_of(folder: Path) -> int:
    """Returns the step from which the planted cause acts: for a sync that is lost, the last update that arrived."""
    overrides = json.loads((folder / "done.json").read_text())["settings"]["overrides"]
    return next((int(each.rpartition("=")[2]) for each in overrides if each.startswith("lab.missed_sync.update")), 0)


# Setting that the report asks for -> the beginnings of the names of the metrics that it adds.
MEASURES = {
    "stability.metrics=true": ("vllm_kl/", "reward/"),
    "stability.breakdown=true": ("vllm_kl/k1/prob/", "vllm_kl/k3/prob/"),
    "stability.router_agreement=true": ("router/",),
    "stability.sync_canary.trajectories=8": ("sync/",),
}


def follow(whole: Metrics) -> tuple[Metrics, list[str]]:
    """Returns verl's own metrics, with those that the report asks for one after another, and the settings for these."""
    known, asked = plain(whole), list[str]()
    while (question := judge(Readings.of_pairs(known)).question) is not None and question.setting not in asked:
        known |= {name: found for name, found in whole.items() if name.startswith(MEASURES[question.setting])}
        asked.append(question.setting)
    return known, asked


def ask(which: str, out: Path) -> None:
    """Prints how often the cause comes first: from verl's metrics, with those that the report asks for, from all."""
    right, settings, runs = Counter[str](), 0, 0
    for name, planted in PLANTED.items():
        for folder in folders_of(name, which, out):
            whole = read_metrics(folder / "metrics.jsonl")
            known, asked = follow(whole)
            runs, settings = runs + 1, settings + len(asked)
            for title, metrics in (("verl's own", plain(whole)), ("and those asked for", known), ("all", whole)):
                right[title] += is_right(planted.cause, causes_named(metrics, planted), 1)
    shares = ((title, f"{count} of {runs} ({count / runs:.1%})") for title, count in right.items())
    print(table([("metrics", "cause first, or none named in a sound run"), *shares]))
    print(f"\n{settings / runs:.1f} settings are asked for in a run.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "judge", "ask"))
    parser.add_argument("--set", choices=tuple(SETTINGS), default="held_out")
    parser.add_argument("--runs", type=int, default=8, help="runs per cause (default: %(default)s)")
    parser.add_argument("--causes", help="names, with commas between them (default: all)")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--out", type=Path, default=Path(".diagnosis"))
    given = parser.parse_args()
    if given.what != "run":
        {"judge": print_tables, "ask": ask}[given.what](given.set, given.out)
        return 0
    names = given.causes.split(",") if given.causes else list(PLANTED)
    wanted = [cell for _, cell in cells(given.set, given.runs, names)]
    result = run_missing(wanted, given.out / given.set, given.jobs, Console(stderr=True))
    for cell, error in result.failed.items():
        print(f"{cell}: {error}", file=sys.stderr)
    return int(bool(result.failed))


if __name__ == "__main__":
    sys.exit(main())
