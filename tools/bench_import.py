"""Measures what the plugin adds to `import verl`, which every process of a run pays.

    python tools/bench_import.py [--rounds 15]

Alternates fresh interpreters with and without the plugin and prints the medians and their difference.
"""

import argparse
import os
import statistics
import subprocess
import sys

CODE = "import time; start = time.perf_counter(); import verl; print(time.perf_counter() - start)"


def seconds(plugins: str, platform: str | None) -> float:
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": plugins}
    environment.pop("VERL_PLATFORM", None)
    if platform:
        environment["VERL_PLATFORM"] = platform
    result = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    return float(result.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="interpreters of each kind (default: %(default)s)")
    rounds = parser.parse_args().rounds
    kinds = {"only verl": ("none", None), "with verl_ext": ("verl_ext", None), "... on CPU cores": ("verl_ext", "cpu")}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for index in range(rounds + 1):
        for name, kind in kinds.items():
            elapsed = seconds(*kind)
            if index:  # the first round warms the disk's cache
                times[name].append(elapsed)
    base = statistics.median(times["only verl"])
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:<18}{median:7.3f} s   {median - base:+.3f} s   ratio {median / base:.3f}")


if __name__ == "__main__":
    main()
