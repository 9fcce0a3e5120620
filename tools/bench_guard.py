"""Measures the guard's cost per step: its judgement, compared with the measurement of the batch that it judges by.

    python tools/bench_guard.py [--trajectories 256] [--length 2048] [--rules 12] [--repeats 20]

Times one step of the guard (forecasts over full windows, RULES rules of which half are adaptive, one event written) and
`measure` on the batch, alternating. With --step SECONDS, it also prints the share of a training step of that length.
"""

import argparse
import random
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

import orjson
import torch
from measuring import seconds

from verl_ext.core.measure import measure
from verl_ext.core.tokens import Tokens
from verl_ext.guard.forecast import REMEMBERED
from verl_ext.guard.guard import Guard
from verl_ext.guard.rules import Rule
from verl_ext.guard.state import Boundary, Event
from verl_ext.trainer.logs import LineFile


def line(event: Event) -> bytes:
    return orjson.dumps(asdict(event)) + b"\n"


def build(rules: int) -> Guard:
    """Returns a guard of this many rules, with full windows."""
    chosen = [
        Rule(f"r{i}", f"signal/{i}", 8.0, zscore_window=64 if i % 2 else None, setting=f"rules.r{i}.above")
        for i in range(rules)
    ]
    guard = Guard(chosen, stop_after=10, boundary=Boundary(window=32), mask="correction/dropped")
    for step in range(1, 2 + REMEMBERED):
        one_step(guard, step)
    return guard


def one_step(guard: Guard, step: int) -> None:
    signals = {f"signal/{i}": random.gauss(0, 1) for i in range(len(guard.rules))}
    signals |= {"vllm_kl/k3": random.lognormvariate(-7, 0.3), "vllm_kl/log_ratio_abs_mean": 0.01}
    signals |= {"critic/score/mean": random.gauss(0.5, 0.1), "correction/dropped": random.lognormvariate(-6, 0.3)}
    guard.begin(step)
    foreseen, _ = guard.foresee(signals)
    guard.count(guard.judge(signals | foreseen).refusal is not None)
    guard.judge_late(signals | foreseen | {"actor/grad_norm": 1.0})
    guard.close()


def batch(trajectories: int, length: int) -> Tokens:
    lengths = torch.randint(length // 2, length + 1, (trajectories,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    l_infer = -torch.rand(int(offsets[-1])) * 5
    l_old = l_infer + 0.01 * torch.randn_like(l_infer)
    mask = torch.ones_like(l_infer, dtype=torch.bool)
    return Tokens(l_infer=l_infer, l_old=l_old, mask=mask, offsets=offsets, entropy=torch.rand_like(l_infer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rules", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--step", type=float, help="seconds of a training step")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    guard, tokens = build(arguments.rules), batch(arguments.trajectories, arguments.length)
    event = Event(1, "r", "signal/0", 1.0, 0.5, "warn", "signal/0=1 passes rules.r0.above=0.5")
    judged, measured = [], []
    with tempfile.TemporaryDirectory() as folder:
        log = LineFile(Path(folder) / "events.jsonl", resume=False)
        for repeat in range(arguments.repeats):
            judged.append(seconds(lambda step=1000 + repeat: (one_step(guard, step), log.write(line(event)))))
            measured.append(seconds(lambda: measure(tokens, {"icepop": {"alpha": 0.5, "beta": 5.0}})))
        log.close()
    ours, other = statistics.median(judged), statistics.median(measured)
    print(f"guard, {arguments.rules} rules: {1e3 * ours:.2f} ms per step")
    print(f"measure, {len(tokens.mask):,} tokens: {1e3 * other:.2f} ms; the guard is {ours / other:.3f} of it")
    if arguments.step:
        print(f"of a step of {arguments.step:g} s: {ours / arguments.step:.2%}")


if __name__ == "__main__":
    main()
