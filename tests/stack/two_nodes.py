"""Two nodes of a Ray cluster on one machine, each in a network namespace of its own, and a cable between them."""

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.stack.running import CPU, MARK, processes
from tests.support.forking import WORKERS, Forked, forked

CABLE = "veth0"  # the name of its end in either namespace
ADDRESSES = ("10.213.0.1", "10.213.0.2")
PORT = 6379


class Nodes:
    """The nodes of a cluster whose processes bear `mark`; the first has Ray's head."""

    def __init__(self, mark: str, folder: Path):
        self.mark, self.folder = mark, folder
        self.names = [f"verl{mark[:6]}{number}" for number in (0, 1)]
        # Where each node's processes come from: the server of one network cannot be reached from another.
        self.forked: list[Forked] = []
        self._servers = contextlib.ExitStack()

    def inside(self, number: int, *command: str) -> list[str]:
        """Returns the command that runs `command` on a node."""
        address = ADDRESSES[number]
        variables = (f"VLLM_HOST_IP={address}", f"RAY_ADDRESS={ADDRESSES[0]}:{PORT}", f"GLOO_SOCKET_IFNAME={CABLE}")
        return ["ip", "netns", "exec", self.names[number], "env", *variables, *command]

    def cable(self, state: str) -> None:
        """Pulls the cable ("down"), or puts it back ("up")."""
        _ip("-n", self.names[0], "link", "set", CABLE, state)

    def number_of(self, process: psutil.Process) -> int:
        """Returns the number of the node that a process runs on."""
        namespaces = [Path("/run/netns", name).stat().st_ino for name in self.names]
        return namespaces.index(Path(f"/proc/{process.pid}/ns/net").stat().st_ino)

    def raylet(self, number: int) -> psutil.Process:
        raylets = [process for process in processes(self.mark) if process.name() == "raylet"]
        (found,) = (process for process in raylets if self.number_of(process) == number)
        return found

    def start(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        _ip("-n", self.names[0], "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", self.names[1])
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                _ip("-n", name, "link", "set", device, "up")
        read = CPU | {"TORCH_COMPILE_DISABLE": "1", MARK: self.mark}  # the first is of the recipe, read by torch
        for number in (0, 1):
            server = forked("--preload", ",".join(WORKERS), environment=read, inside=self.inside(number))
            self.forked.append(self._servers.enter_context(server))
        # A folder of its own: what Ray notes in the usual one would have every other run join this cluster.
        head = ("--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir=/tmp/ray_{self.mark[:8]}")
        for number, role in enumerate((head, (f"--address={ADDRESSES[0]}:{PORT}",))):
            resources = (f"--node-ip-address={ADDRESSES[number]}", "--num-cpus=16", "--num-gpus=1")
            ray = (sys.executable, "-m", "ray.scripts.scripts", "start", *role, *resources, "--disable-usage-stats")
            subprocess.run(
                self.inside(number, *ray),
                cwd=self.folder,
                env=os.environ | CPU | self.forked[number].environment | {MARK: self.mark, "RAY_AUTH_MODE": "disabled"},
                check=True,
                capture_output=True,
            )

    def remove(self) -> None:
        self._servers.close()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    """Makes the nodes, and removes them afterwards; before that, the caller ends their processes by the mark."""
    nodes = Nodes(uuid.uuid4().hex, folder)
    try:
        try:
            nodes.start()
        except FileNotFoundError as error:
            pytest.skip(f"no network namespaces here: {error}")
        except subprocess.CalledProcessError as error:
            if "ray.scripts.scripts" in error.cmd:
                raise
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield nodes
    finally:
        nodes.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
