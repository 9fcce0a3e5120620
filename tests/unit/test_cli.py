import json
import subprocess
import sys

import pytest

from verl_ext import __version__
from verl_ext.cli import main


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


@pytest.mark.parametrize(
    "arguments", [[], ["report"], ["compare"], ["no such command"], ["report", "run", "--", "a=b"]]
)
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
    ],
)
def test_a_misspelt_command_or_option_gets_the_similar_one(arguments, near, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"; similar: {near};" in capsys.readouterr().err


ENGINES = ("torch", "transformers", "verl", "vllm", "ray")
IMPORTS = """
import contextlib, io, json, sys
from verl_ext.cli import main
def there(names): return [name for name in names if name in sys.modules]
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
