import argparse
import errno
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest

from verl_ext import __version__
from verl_ext.base.errors import UserError
from verl_ext.cli import main

COMMANDS = ("doctor", "plan", "probe", "submit", "report", "compare", "lab")


@pytest.mark.parametrize("arguments", [["--help"], ["report", "--help"], ["compare", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 0
    assert (arguments[:-1] or ["report"])[0] in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0 and capsys.readouterr().out == f"verl-ext {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["submit"]])
def test_without_a_command_or_a_verb_they_are_listed_with_a_line_each(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    lines = capsys.readouterr().out.splitlines()
    names = ["run", "status", "logs", "stop", "resume"] if arguments else COMMANDS
    assert exit.value.code == 2
    assert all(any(re.match(rf"    {name} +\w+", line) for line in lines) for name in names)


@pytest.mark.parametrize("arguments", [["report"], ["no such command"], ["report", "run", "--", "a=b"]])
def test_wrong_usage_exits_with_two_and_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["docto"], "doctor"),
        (["submit", "rn"], "run"),
        (["doctor", "--stict"], "--strict"),
        (["submit", "logs", "1", "--folow=2"], "--follow"),
        (["--verson"], "--version"),
    ],
)
def test_a_misspelt_command_or_option_gets_the_similar_one(arguments, near, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"; similar: {near}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "start"), [(["help"], "usage: verl-ext ["), (["help", "plan"], "usage: verl-ext plan")]
)
def test_help_may_be_asked_for_as_a_command(words, start, capsys):
    with pytest.raises(SystemExit) as exit:
        main(words)
    assert exit.value.code == 0 and capsys.readouterr().out.startswith(start)


ARGUMENTS = {"report": ["run"], "compare": ["run", "run"], "submit": ["run", "--run-dir", "/run"], "lab": ["stale"]}


def _rich_on_a_closed_pipe():
    try:
        raise BrokenPipeError
    except BrokenPipeError:
        raise SystemExit(1)  # noqa: B904 (as rich does)


def _raised(error):
    def run():
        raise error

    return run


ENDS = {  # what ends a command: how, the exit code, words of the line on stderr (none: there is no line)
    "Ctrl-C": (_raised(KeyboardInterrupt()), 130, ()),
    "a closed pipe": (_raised(BrokenPipeError(errno.EPIPE, "Broken pipe")), 141, ()),
    "a closed pipe, found by rich": (_rich_on_a_closed_pipe, 141, ()),
    "a full disk": (_raised(OSError(errno.ENOSPC, "No space left on device")), 2, ("No space left", "free some")),
    "a folder of someone else": (
        _raised(PermissionError(errno.EACCES, "Permission denied", "/some/folder")),
        2,
        ("/some/folder: Permission denied", "name another place"),
    ),
    "an error of the user": (_raised(UserError("a=1 is wrong", ("a=2",))), 2, ("a=1 is wrong; set a=2",)),
    "a missing package": (_raised(ModuleNotFoundError("", name="altair")), 2, ("pip install", "altair")),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_ends_in_one_line_or_none(command, end, monkeypatch, capsys):
    run, code, words = ENDS[end]
    before = argparse.ArgumentParser.parse_known_args

    def parse(self, *arguments):
        found, rest = before(self, *arguments)
        found.run = lambda arguments: run()
        return found, rest

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    assert main([command, *ARGUMENTS.get(command, [])]) == code
    captured = capsys.readouterr()
    resumed = end == "Ctrl-C" and command in ("lab", "probe")  # the same command continues
    assert captured.out == "" and captured.err.count("\n") == int(bool(words) or resumed)
    assert all(word in captured.err for word in words) and f"verl-ext {command}: " * bool(words) in captured.err


@contextmanager
def closed_pipe():
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@contextmanager
def full_disk():
    with open("/dev/full", "wb") as full:
        yield full


PROGRAM = "import sys; from verl_ext.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("output", "code", "lines"), [(closed_pipe, 141, 0), (full_disk, 2, 1)])
@pytest.mark.parametrize("arguments", [["lab", "--list"], ["plan", "recipe=qwen3_30b_a3b"]], ids=lambda words: words[0])
def test_an_output_that_takes_nothing(arguments, output, code, lines, unbuffered, libraries):
    with output() as out:
        found = subprocess.run(
            [libraries.python, "-c", PROGRAM, *arguments],
            env={**os.environ, **libraries.environment, "PYTHONUNBUFFERED": unbuffered},
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (found.returncode, found.stderr.count("\n")) == (code, lines), found.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_what_its_exit_codes_mean(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    codes = capsys.readouterr().out.partition("exit code: ")[2].partition("\n\n")[0].split("; ")
    assert [int(re.match(r"\s*(\d+)", code)[1]) for code in codes if code[:1].isdigit()][-3:] == [2, 130, 141]


ENGINES = ("torch", "transformers", "verl", "vllm", "ray")
IMPORTS = """
import contextlib, io, json, sys
from verl_ext.cli import main
def there(names): return [name for name in names if name in sys.modules]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main(["--version"])  # imports what every command imports
seen, printed = {"the command line": there(ENGINES + PAGES)}, {}
for name, arguments in COMMANDS.items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(arguments)
    seen[name], printed[name] = there(ENGINES), [code, out.getvalue()]
print(json.dumps([seen, printed]))
"""


@pytest.mark.slow
def test_what_needs_no_engine_imports_none():
    """Runs all commands in one interpreter, those that need least first."""
    commands = {
        "doctor of the installation": ["doctor", "--json"],
        "plan": ["plan", "--json", "recipe=qwen3_30b_a3b", "stability=icepop"],
        "plan on Megatron": ["plan", "--json", "recipe=qwen3_30b_a3b_megatron", "stability=guard"],
        "doctor of a run": ["doctor", "--json", "--gpu=H100", "recipe=qwen3_30b_a3b_megatron", "stability=icepop"],
        "doctor of a loss": ["doctor", "--json", "--gpu=H100", "recipe=qwen3_30b_a3b", "stability=icepop_loss"],
    }
    pages = ("altair", "vl_convert", "jinja2", "numpy", "matplotlib", "rich")
    code = f"ENGINES, PAGES, COMMANDS = {ENGINES}, {pages}, {commands}\n{IMPORTS}"
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    seen, printed = json.loads(out)
    assert seen == {name: [] for name in ("the command line", *commands)}
    _, findings = printed.pop("doctor of the installation")
    assert {finding["check"] for finding in json.loads(findings)} >= {"packages", "plugins"}
    for name in ("doctor of a run", "doctor of a loss"):
        _, findings = printed.pop(name)
        levels = {(finding["level"], finding["check"]) for finding in json.loads(findings)}
        assert levels >= {("ok", "hooks"), ("ok", "verl's validation"), ("ok", "sizes")}
    assert all(code == 0 and json.loads(plan)["fits"] for code, plan in printed.values())
