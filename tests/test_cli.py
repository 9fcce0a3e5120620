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


def test_importing_the_command_line_is_light():
    heavy = ("torch", "verl", "altair", "vl_convert", "jinja2", "numpy", "matplotlib", "rich")
    code = f"import sys, verl_ext.cli; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
