#!/usr/bin/env -S python3 -IS
"""Stands in for Python: the server of prefork.py runs these arguments.

This process sends its arguments, environment, folder and open files, gets the id of the process that was forked for it,
and waits for that process. Then it ends with the same exit code, or by the same signal. If it is killed, so is the
forked process. It starts a dozen times per run, so it imports nothing that takes a while.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
from array import array

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LENGTH = 8  # bytes of the number that gives a request's length


def client(address: str, arguments: list[str]) -> int:
    """Has the server run `python ARGUMENTS` instead of this process; returns the exit code."""
    files = inheritable_files()
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "umask": os.umask(0)}
    body = json.dumps(request | {"files": files}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{address}")
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))
        connection.sendmsg([len(body).to_bytes(LENGTH, "big")], [rights])
        connection.sendall(body)
        answers = connection.makefile("r")
        if process := int(answers.readline() or 0):
            for number in PASSED_ON:
                signal.signal(number, lambda number, frame: pass_on(number, process))
        status = int(answers.readline() or -signal.SIGKILL)  # no answer: the server is gone, and its children with it
    if status < 0:  # killed by a signal: so is this process
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def die_with_the_raylet() -> None:
    """Makes this process end with the raylet that started it, if the server has imported Ray: Ray's libraries were
    loaded in the server, so a worker would watch the server as its raylet."""
    parent = os.getppid()
    if not os.environ.get("PREFORK_RAY") or str(parent) != os.environ.get("RAY_RAYLET_PID"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # gone already
        os._exit(1)


def pass_on(number: int, process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def inheritable_files() -> list[int]:
    """Returns the open files that a program would get through exec."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the file of this listing is closed
            if not fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                found.append(int(name))
    return sorted(found)


if __name__ == "__main__":
    die_with_the_raylet()
    sys.exit(client(os.environ["PREFORK_ADDRESS"], sys.argv[1:]))
