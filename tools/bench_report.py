"""Times `verl-ext report` on a long run: the whole command, compared with pandas, which only reads the same file.

    python tools/bench_report.py [--steps 10000] [--metrics 500] [--repeats 3]
    python tools/bench_report.py --console [--repeats 3]

`--console` reads 100 MB of verl's console output, in which one line of ten has metrics, compared with `grep -c` on the
same file. It also prints how much memory reading took, and how much it took for half of the file.

The run has every metric that a figure draws, 48 layers of router agreement, a mark of the guard in every 50th step, and
other metrics up to the requested number. Each repeat starts both in new processes, one after the other.
"""

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from measuring import alternating, print_times, ratio

from verl_ext.base.names import BUCKETS

LAYERS = 48
READING = "only pandas.read_json"
PANDAS = "import sys, pandas; pandas.read_json(sys.argv[1], lines=True)"
DRAWN = (
    *("critic/score/mean", "val-core/math/acc/mean@1", "vllm_kl/k1", "vllm_kl/k3", "vllm_kl/prob_diff_max"),
    *("vllm_kl/prob_diff_mean", "correction/dropped", "correction/dropped_low", "correction/dropped_high"),
    *("correction/entropy_dropped", "correction/entropy_kept", "router/agreement", "response_length/mean"),
    *("response_length/max", "response_length/clip_ratio", "actor/entropy", "actor/pg_clipfrac", "actor/grad_norm"),
    *("timing_s/step", "timing_s/gen", "timing_s/old_log_prob", "timing_s/update_actor", "timing_s/update_weights"),
    *(f"vllm_kl/k3/{axis}/{name}" for axis in ("prob", "position") for name in BUCKETS[axis]),
    *(f"router/agreement/layer_{layer:02d}" for layer in range(LAYERS)),
)


def write_run(file: Path, steps: int, metrics: int) -> None:
    """Writes a run whose values are noise; k3 grows slowly."""
    names = [*DRAWN, *(f"other/metric_{i:03d}" for i in range(metrics - len(DRAWN) - 1))][: metrics - 1]
    draw = random.Random(0)
    with file.open("w") as out:
        for step in range(1, steps + 1):
            data = {name: 0.5 * math.exp(draw.gauss(0, 0.1)) for name in names}
            data["vllm_kl/k3"] = 1e-4 * math.exp(3 * step / steps + draw.gauss(0, 0.3))
            data["guard/skipped"] = int(step % 50 == 0)
            out.write(json.dumps({"step": step, "data": data}) + "\n")


def write_console(file: Path, size: int) -> None:
    """Writes what verl prints: a row of 120 metrics a step, and lines of other processes and a progress bar between."""
    names = [*DRAWN, *(f"timing_s/other_{i:02d}" for i in range(120 - len(DRAWN)))][:120]
    draw = random.Random(0)
    step = 0
    with file.open("w") as out:
        while out.tell() < size:
            step += 1
            for _ in range(9):
                out.write(f"\x1b[36m(WorkerDict pid={draw.randrange(9999)})\x1b[0m INFO: {'generated text ' * 30}\n")
            row = " - ".join(f"{name}:np.float64({0.5 * math.exp(draw.gauss(0, 0.1))})" for name in names)
            out.write(f"Training Progress: {step}it\r(TaskRunner pid=7) step:{step} - {row}\n")


READ = """
import resource, sys, time
from pathlib import Path
from verl_ext.report.load import read_run
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begun = time.perf_counter()
run = read_run(Path(sys.argv[1]))
taken = time.perf_counter() - begun
print(taken, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, len(run.steps))
"""


def time_console(repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole, half = Path(folder) / "run.log", Path(folder) / "half.log"
        write_console(whole, 100_000_000)
        write_console(half, 50_000_000)
        taken: dict[str, list[float]] = {"read": [], "grep -c": []}
        memory = {}
        for _ in range(repeats):
            for file in (half, whole):
                done = subprocess.run([sys.executable, "-c", READ, file], check=True, capture_output=True, text=True)
                time_s, memory[file.stem], steps = map(float, done.stdout.split())
            taken["read"].append(time_s)
            begun = time.perf_counter()  # its output is read: for /dev/null, grep stops at the first line
            subprocess.run(["grep", "-c", "step:[0-9]* - ", whole], check=True, capture_output=True)
            taken["grep -c"].append(time.perf_counter() - begun)
    read, grep = (statistics.median(times) for times in taken.values())
    print(
        f"100 MB of console output, {steps:.0f} steps: {read:.2f} s, "
        f"{read / grep:.0f} times what grep -c takes ({grep:.3f} s)"
    )
    print(f"memory: {memory['run']:.0f} MiB; for half of the file {memory['half']:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--metrics", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--console", action="store_true", help="read verl's console output instead")
    arguments = parser.parse_args()
    if arguments.console:
        time_console(arguments.repeats)
        return
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "run.jsonl", Path(folder) / "report"
        write_run(file, arguments.steps, arguments.metrics)
        verl_ext = [sys.executable, "-m", "verl_ext.cli", "report", str(file), "--out", str(out)]
        print(f"{arguments.steps} steps x {arguments.metrics} metrics, {file.stat().st_size / 1e6:.0f} MB")
        commands = {
            "verl-ext report": verl_ext,
            "with PNG files": [*verl_ext, "--pictures"],
            "only text": [*verl_ext, "--no-page"],
            READING: [sys.executable, "-c", PANDAS, str(file)],
        }
        calls = {
            name: partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
            for name, command in commands.items()
        }
        times = alternating(calls, arguments.repeats, warm_up=0)
        page = (out / "report.html").stat().st_size
    print_times(times, {"ratio": {name: f"{ratio(times, name, READING):.1f}" for name in times}})
    print(f"the page has {page / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
