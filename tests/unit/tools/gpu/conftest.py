"""A kit of parts made up for the test, run as the real ones are."""

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from gpu import results as file_of_results
from gpu.parts import Part
from gpu.runner import run_parts

from tests import ROOT

MODULES = {
    "good": """
        def run(record, place):
            record.case = "1x2"
            record.check("equal", True)
            record.figure("copy", [3.0, 1.0, 2.0], "ms")
            record.figure("captured / not", [1.5, 1.25], "x", at_most=1.03)
            record.figure("bandwidth", [0.5], "share", note="of 4,800 GB/s")
            record.note(f"ran on {place.device}")
    """,
    "raises": """
        def run(record, place):
            record.figure("before", [1.0], "ms")
            raise ValueError("the kernel <b>broke</b>")
    """,
    "sleeps": """
        import time
        def run(record, place):
            record.figure("before", [1.0], "ms")
            time.sleep(600)
    """,
    "wrong": """
        def run(record, place):
            with record.trying("first"):
                raise RuntimeError("in one case alone")
            with record.trying("second"):
                record.check("weights", False, "3 of 8 differ")
    """,
}


@pytest.fixture
def kit(tmp_path, monkeypatch) -> Callable[..., SimpleNamespace]:
    """kit({name: settings of a Part}) -> its files. Names are from MODULES; a second call continues the first."""
    for name, code in MODULES.items():
        lines = [line[8:] for line in code.splitlines()]
        (tmp_path / f"made_{name}.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT / "tools", ROOT, tmp_path))))
    folder, here = tmp_path / "results", {"gpu": "a made-up GPU", "torch": "1.2.3"}

    def run(parts, seconds=60.0):
        made = {
            name: Part(**{"title": name, "seconds": 30.0, "module": f"made_{name}"} | s) for name, s in parts.items()
        }
        results = file_of_results.load(folder / "results.json", here)
        said = []
        run_parts(made, [*made], results, folder, dry=True, tiny=True, seconds=seconds, say=said.append)
        return SimpleNamespace(
            parts=file_of_results.load(folder / "results.json", here)["parts"],
            page=(folder / "results.html").read_text(encoding="utf-8"),
            folder=folder,
            said=said,
        )

    return run
