"""What the report's pages have in common: one file each, with everything in it."""

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from jinja2.environment import TemplateStream
from markupsafe import Markup

from verl_ext.printable import printable
from verl_ext.report.files import written_whole
from verl_ext.report.run import MOST_MESSAGE

TEMPLATES = Path(__file__).parent / "templates"
BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")


@lru_cache
def template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=_finalized,
    )
    return environment.get_template(name)


def _finalized(value: Any) -> Any:
    """Of what a template writes: text that is not markup may quote anything."""
    return printable(value, MOST_MESSAGE) if type(value) is str else value


def script_json(value: object) -> Markup:
    """JSON that can stand in a script element, whatever the strings in it hold: no `</script>`, no `<!--`.

    What is not visible stands as its escape, so that the page's source can be read, and shows what is there.
    """
    text = orjson.dumps(value).decode().replace("<", r"\u003c")
    return Markup(text if text.isprintable() else BEYOND_ASCII.sub(_visible, text))


def _visible(found: re.Match) -> str:
    return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]


def source(name: str) -> Markup:
    """A style sheet or a script of the templates."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def write(page: TemplateStream, file: Path) -> None:
    """In one step: a page that is open while it is written again must not be seen half."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file) as out:
        page.dump(out, encoding="utf-8")
