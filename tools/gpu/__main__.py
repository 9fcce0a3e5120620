"""python -m gpu, as `bash tools/gpu.sh` starts it."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from gpu.parts import PARTS
from gpu.results import DONE, FAILED, TIMEOUT, KitError, load, machine
from gpu.runner import run_parts

EPILOG = "parts, most valuable first:\n" + "\n".join(
    f"  {name:8} {part.title}; at most {part.seconds:.0f} s" for name, part in PARTS.items()
)
DRY_PATIENCE = 10  # factor of a dry run's time limits: others may use the CPU too


def say(text: str) -> None:
    print(f"gpu: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Returns the exit code: 0, 1 if a part failed, 2 if nothing could be run."""
    parser = argparse.ArgumentParser(
        prog="bash tools/gpu.sh",
        description="Measure on one GPU what one GPU can run of verl_ext; writes results.json and results.html. A "
        "second run continues with the parts that are not done.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="run only these (default: all)")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--dry", action="store_true", help="on a CPU, at tiny sizes, in Triton's interpreter")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the GPU too")
    parser.add_argument("--minutes", type=float, default=9, help="the budget of this run (default: %(default)g)")
    parser.add_argument("--again", action="store_true", help="discard the results that are there")
    options = parser.parse_args()
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"no such part: {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    file = options.out / "results.json"
    try:
        here = machine(options.dry) | {"sizes": "tiny" if options.dry or options.tiny else "full"}
        if options.again:
            file.unlink(missing_ok=True)
        results = load(file, here)
    except KitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    patience = DRY_PATIENCE if options.dry else 1
    parts = {name: replace(part, seconds=part.seconds * patience) for name, part in PARTS.items()}
    names = [name for name in PARTS if not options.parts or name in options.parts]
    run_parts(
        parts,
        names,
        results,
        options.out,
        dry=options.dry,
        tiny=options.dry or options.tiny,
        seconds=options.minutes * 60 * patience,
        say=say,
    )
    states = [results["parts"][name]["state"] for name in names]
    say(f"{states.count(DONE)} of {len(names)} parts done; {options.out / 'results.html'}")
    return 1 if {FAILED, TIMEOUT} & set(states) else 0


if __name__ == "__main__":
    sys.exit(main())
