"""The documentation's site is built without a warning, a broken link or a request to another host."""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests import ROOT
from tools.site_pages import linked, outside

ADDRESS = "https://host.example/owner/name"
PAGES = {"guard.md", "README.md", "recipes/README.md", "recipes/slurm/README.md", "collapse.png"}


@pytest.mark.parametrize(
    ("origin", "link", "on_site"),
    [
        ("docs/extend.md", "[a](guard.md#rules)", "[a](guard.md#rules)"),
        ("docs/extend.md", "[a](#here)", "[a](#here)"),
        ("docs/extend.md", "[a](https://other.example/x)", "[a](https://other.example/x)"),
        ("docs/extend.md", "[a](../README.md)", "[a](README.md)"),
        ("docs/extend.md", "[a](../recipes)", "[a](recipes/README.md)"),
        ("README.md", "![a](docs/collapse.png)", "![a](collapse.png)"),
        ("README.md", "[a](docs/guard.md#rules)", "[a](guard.md#rules)"),
        ("recipes/README.md", "[a](slurm)", "[a](slurm/README.md)"),
        ("recipes/slurm/README.md", "[a](../../docs/guard.md)", "[a](../../guard.md)"),
        ("recipes/slurm/README.md", "[a](run.sbatch)", f"[a]({ADDRESS}/blob/HEAD/recipes/slurm/run.sbatch)"),
        ("docs/extend.md", "[a](../verl_ext/core)", f"[a]({ADDRESS}/tree/HEAD/verl_ext/core)"),
        ("docs/extend.md", "```\n[a](../README.md)\n```\n", "```\n[a](../README.md)\n```\n"),
    ],
)
def test_links_of_the_repository_become_those_of_the_site(origin, link, on_site):
    assert linked(link, origin, PAGES, ADDRESS) == on_site


def test_without_an_address_a_link_to_code_is_its_text():
    assert linked("see [the Step](../verl_ext/trainer/step.py).", "docs/a.md", PAGES, "") == "see the Step."


def test_a_link_to_nothing_is_left_for_mkdocs_to_report():
    assert linked("[a](../verl_ext/gone.py)", "docs/a.md", PAGES, ADDRESS) == "[a](../verl_ext/gone.py)"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    if not find_spec("material"):
        pytest.skip("mkdocs-material is not installed: pip install '.[dev]', or bash tools/setup_cpu.sh")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return folder


def test_the_site_has_every_page(site):
    pages = [*outside(), *(file.name for file in (ROOT / "docs").glob("*.md"))]
    for page in pages:
        place = page.removesuffix(".md").removesuffix("README").strip("/")
        assert (site / place / "index.html").exists(), page


def test_the_site_asks_no_other_host(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img)[^>]*\ssrc=\"?([^\s\">]+)", page.read_text(encoding="utf-8"))
        loaded += re.findall(r"<link[^>]*rel=\"?stylesheet[^>]*href=\"?([^\s\">]+)", page.read_text(encoding="utf-8"))
        assert not [address for address in loaded if re.match(r"(?:https?:)?//", address)], page
