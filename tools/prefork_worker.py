"""Starts a worker of Ray through the server of prefork.py, instead of Ray's setup_worker.py.

    python prefork_worker.py SCRIPT [OPTION ...] --serialized-runtime-env-context=JSON --language=PYTHON

The raylet of a run that prefork.py forked starts each worker with this script. Ray's own script imports all of Ray
before it becomes the runtime environment's Python: 0.3 s of processor time, a dozen times per run. It is still used for
any other Python.
"""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

from prefork_client import client, die_with_the_raylet

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main(arguments: list[str]) -> int:
    context = json.loads(next((each.removeprefix(CONTEXT) for each in arguments if each.startswith(CONTEXT)), "{}"))
    if context.get("py_executable") != os.environ["PREFORK_PYTHON"] or context.get("command_prefix"):
        ray = importlib.util.find_spec("ray")
        assert ray is not None and ray.origin is not None
        setup_worker = Path(ray.origin).parent / "_private" / "workers" / "setup_worker.py"
        os.execv(sys.executable, [sys.executable, str(setup_worker), *arguments])
    for name, value in (context.get("env_vars") or {}).items():  # as `update_envs` of ray._private.utils
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    die_with_the_raylet()
    return client(
        os.environ["PREFORK_ADDRESS"], [each for each in arguments if not each.startswith((CONTEXT, LANGUAGE))]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
