"""Python processes that are forked from one with imports behind it (tools/prefork.py): a start in a moment."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests import ROOT

PREFORK = ROOT / "tools" / "prefork.py"
VARIABLES = ("PREFORK_ADDRESS", "PREFORK_PYTHON", "PREFORK_RAY")
# Of what verl and vLLM import, what is neither theirs nor ours, and takes its time.
LIBRARIES = ("torch", "tensordict", "ray", "datasets", "peft", "transformers.modeling_utils", "megatron.core", "hydra")
# For the workers of a cluster that counts its jobs itself: without Ray, which reads the job's number as it is imported.
WORKERS = (
    "torch",
    "tensordict",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "vllm.entrypoints.openai.api_server",
)


@dataclass(frozen=True)
class Forked:
    """A program that takes Python's arguments, and what has to be in its environment."""

    environment: dict[str, str]

    @property
    def python(self) -> str:
        return self.environment["PREFORK_PYTHON"]


def exported() -> Forked | None:
    """Returns the server that this process's environment already names."""
    return Forked({name: os.environ[name] for name in VARIABLES}) if VARIABLES[0] in os.environ else None


@contextlib.contextmanager
def forked(*options: str, environment: dict[str, str] | None = None, inside: Sequence[str] = ()) -> Iterator[Forked]:
    """Under prefork.py with these options, as long as the context. `inside` is a command that runs another one."""
    say = "; ".join(f"echo ${name}" for name in VARIABLES)
    command = [*inside, sys.executable, str(PREFORK), "--log", os.devnull, *options, "sh", "-c", f"{say}; exec cat"]
    with subprocess.Popen(
        command, env=os.environ | (environment or {}), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            yield Forked({name: server.stdout.readline().strip() for name in VARIABLES})
        finally:
            server.stdin.close()  # ends cat, and with it the server
