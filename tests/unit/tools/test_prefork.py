"""tools/prefork.py: processes that are forked behave as those that Python starts."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests import ROOT

PREFORK = [sys.executable, str(ROOT / "tools" / "prefork.py"), "--preload", "decimal"]


@pytest.fixture(scope="module")
def server():
    """The environment of a command under prefork.py."""
    command = subprocess.Popen(
        [*PREFORK, "sh", "-c", "echo $PREFORK_ADDRESS; echo $PREFORK_PYTHON; exec sleep 1000"],
        stdout=subprocess.PIPE,
        text=True,
    )
    address, program = (command.stdout.readline().strip() for _ in range(2))
    yield os.environ | {"PREFORK_ADDRESS": address, "PREFORK_PYTHON": program}
    command.kill()
    command.wait()


def python(server, *arguments, **options):
    return subprocess.run(
        [server["PREFORK_PYTHON"], *arguments],
        **{"env": server, "capture_output": True, "text": True, "timeout": 60} | options,
    )


def test_arguments_environment_folder_and_streams_are_the_callers(server, tmp_path):
    code = (
        "import os, sys; print(sys.argv, os.environ['X'], os.getcwd(), sys.stdin.read()); print('e', file=sys.stderr)"
    )
    ran = python(server, "-c", code, "a", "b", env=server | {"X": "1"}, cwd=tmp_path, input="said")
    assert (ran.stdout, ran.stderr, ran.returncode) == (f"['-c', 'a', 'b'] 1 {tmp_path} said\n", "e\n", 0)


def test_what_the_server_imported_is_there(server):
    code = "import sys; print('decimal' in sys.modules, 'fractions' in sys.modules)"
    assert python(server, "-c", code).stdout == "True False\n"


def test_scripts_and_modules_run_as_main(server, tmp_path):
    script = tmp_path / "one.py"
    script.write_text("import two, sys\nif __name__ == '__main__': print(two.X, sys.argv[1:], __file__)")
    (tmp_path / "two.py").write_text("X = 2")
    assert python(server, "-u", str(script), "-x").stdout == f"2 ['-x'] {script}\n"
    assert python(server, "-m", "one", "y", cwd=tmp_path).stdout == f"2 ['y'] {script}\n"
    elsewhere = server | {"PYTHONPATH": str(tmp_path)}
    assert python(server, "-c", "import two; print(two.X)", env=elsewhere).stdout == "2\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('why')", 1),
        ("raise ValueError", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os; os._exit(3)", 3),
    ],
)
def test_it_ends_as_its_process_did(server, code, expected):
    assert python(server, "-c", code).returncode == expected


def test_each_is_a_process_group_of_its_own(server):
    """Ray's raylet kills the group of a worker that has ended."""
    code = "import os, signal; os.killpg(os.getpgrp(), signal.SIGKILL)"
    assert python(server, "-c", code).returncode == -signal.SIGKILL
    assert python(server, "-c", "print(1)").stdout == "1\n"


def test_exit_handlers_run_and_threads_are_waited_for(server):
    code = (
        "import atexit, threading, time; atexit.register(print, 'last');"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()"
    )
    assert python(server, "-c", code).stdout == "thread\nlast\n"


def test_other_open_files_keep_their_numbers(server):
    reading, writing = os.pipe()
    code = f"import os; os.write({writing}, b'through')"
    assert python(server, "-c", code, pass_fds=[writing]).returncode == 0
    assert os.read(reading, 100) == b"through"
    os.close(reading)
    os.close(writing)


def test_multiprocessing_starts_its_processes_the_same_way(server, tmp_path):
    script = tmp_path / "pool.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "def there(_): return 'decimal' in sys.modules\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(2) as pool: print(pool.map(there, range(3)))\n"
    )
    assert python(server, str(script)).stdout == "[True, True, True]\n"


def test_random_numbers_differ_between_its_children(server):
    draws = {python(server, "-c", "import random; print(random.random())").stdout for _ in range(2)}
    assert len(draws) == 2


SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"


def sleeping(server):
    client = subprocess.Popen([server["PREFORK_PYTHON"], "-c", SLEEP], env=server, stdout=subprocess.PIPE, text=True)
    return client, psutil.Process(int(client.stdout.readline()))


def gone(process):
    """Waits at most 20 seconds until the process has ended; a zombie counts as ended, whoever has to reap it."""
    deadline = time.monotonic() + 20
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_client_ends_its_process(server, number):
    client, process = sleeping(server)
    client.send_signal(number)
    assert client.wait(20) == -number
    assert gone(process)


def test_the_server_and_all_its_processes_end_with_the_command():
    script = f'"$PREFORK_PYTHON" -c "{SLEEP}" & exec sleep 1000'
    command = subprocess.Popen([*PREFORK, "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    process = psutil.Process(int(command.stdout.readline()))
    server = process.parent()
    assert server.ppid() == command.pid
    command.kill()
    command.wait()
    assert gone(process) and gone(server)


@pytest.mark.parametrize(
    ("raylet", "ray", "ends"), [("$$", "imported", True), ("1", "imported", False), ("$$", "", False)]
)
def test_a_process_that_a_raylet_started_ends_with_it_if_the_server_has_ray(server, raylet, ray, ends):
    start = f'RAY_RAYLET_PID={raylet} PREFORK_RAY={ray} "$PREFORK_PYTHON" -c "$0" & wait'
    parent = subprocess.Popen(["sh", "-c", start, SLEEP], env=server, stdout=subprocess.PIPE, text=True)
    process = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    if ends:
        assert gone(process)
    else:  # as it would without prefork.py; a worker that imports Ray itself watches its raylet
        time.sleep(0.2)
        assert process.is_running()
        process.kill()


@pytest.mark.parametrize("forked", [True, False])
def test_a_worker_of_ray_is_forked_where_the_runtime_environment_asks_for_it(server, tmp_path, forked):
    """Ray's own script does the same for another Python."""
    script = tmp_path / "default_worker.py"
    script.write_text("import os, sys; print(sys.argv[1:], os.environ['X'], os.environ['Y'], 'decimal' in sys.modules)")
    program = server["PREFORK_PYTHON"] if forked else sys.executable
    context = json.dumps({"py_executable": program, "env_vars": {"X": "1", "Y": "${X}${NOWHERE}2"}})
    command = [sys.executable, str(ROOT / "tools" / "prefork_worker.py"), str(script), "--node-ip-address=a b"]
    command += [f"--serialized-runtime-env-context={context}", "--language=PYTHON"]
    ran = subprocess.run(command, env=server, capture_output=True, text=True, timeout=60)
    assert ran.stdout == f"['--node-ip-address=a b'] 1 12 {forked}\n", ran.stderr


def test_the_daemons_of_a_cluster_are_forked(server):
    """The server's child has imported Ray, but nothing of it is started."""
    code = f"""
import sys
import ray._private.services as services
sys.path.insert(0, {str(ROOT / "tools")!r})
import prefork
prefork.fork_daemons(services)
agent = services._build_python_executable_command_memory_profileable("agent", "", True)
said = services.start_ray_process(
    [sys.executable, "-c", "import sys; sys.exit(7 + ('decimal' in sys.modules))"], "log_monitor", fate_share=False
)
program = services.start_ray_process(["sh", "-c", "exit 3"], "gcs_server", fate_share=False)
print(agent[0], agent[1:], said.process.wait(), program.process.wait())
"""
    ran = python(server, "-c", code)
    assert ran.stdout == f"{server['PREFORK_PYTHON']} ['-u'] 8 3\n", ran.stderr
