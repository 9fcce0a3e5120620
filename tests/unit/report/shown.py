"""What a terminal shows of something that rich prints."""

import io
from typing import Any

from rich.console import Console, RenderableType


def printed(what: RenderableType, width: int = 80, encoding: str = "utf-8", **console: Any) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    Console(width=width, file=file, **console).print(what, crop=False)
    return file.buffer.getvalue().decode(encoding)
