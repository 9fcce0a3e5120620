"""The process of one part: python -m gpu.part MODULE LINES [--device cuda] [--tiny]

MODULE has `run(record, place)`; what it records goes to the file LINES.
"""

import argparse
from importlib import import_module
from pathlib import Path

from gpu import without_ray
from gpu.record import Place, Record


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("lines", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    without_ray.install()
    with arguments.lines.open("a", encoding="utf-8") as out:
        import_module(arguments.module).run(Record(out), Place(arguments.device, arguments.tiny))


if __name__ == "__main__":
    main()
