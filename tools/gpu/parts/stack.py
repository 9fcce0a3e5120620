"""The whole stack on one GPU: `verl-ext doctor` against it, and a few steps of a real run with vLLM."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu.record import Place, Record

ROOT = Path(__file__).parents[3]
OVERRIDES = (
    "recipe=cpu_smoke",
    "stability=icepop",
    "stability.router_agreement=true",
    "stability.sync_check={every:1}",
    "trainer.device=cuda",
    "trainer.total_training_steps=3",
)


def run(record: Record, place: Place) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with record.trying("doctor"):
            doctor = _python("-m", "verl_ext.cli", "doctor")
            record.check(
                "verl-ext doctor finds no error", doctor.returncode == 0, (doctor.stdout + doctor.stderr)[-3000:]
            )
        with record.trying("a run of three steps with vLLM"):
            _python("recipes/make_assets.py", "cpu_smoke", "--out", folder)
            metrics = Path(folder, "metrics.jsonl")
            overrides = [*OVERRIDES, f"assets={folder}", f"hydra.run.dir={folder}/hydra"]
            ran = _python("-m", "verl_ext.main_ppo", *overrides, VERL_FILE_LOGGER_PATH=str(metrics))
            record.check("it ends well", ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:])
            steps = [json.loads(line)["data"] for line in metrics.read_text(encoding="utf-8").splitlines()]
            for name in ("vllm_kl/k3", "router/agreement", "sync/wrong_tensors"):
                record.figure(name, [step[name] for step in steps if name in step], "")


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
