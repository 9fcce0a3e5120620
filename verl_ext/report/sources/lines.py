"""A line of a log as the program printed it, and the progress bars in it.

Launchers and loggers put a process, a rank, a time, a level and a place in the code in front of a line, often several
of them. All readers see the line without these.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

ANSI = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")
CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
TIME = rf"""(?:
    (?:\d{{4}}[-/.]?\d\d[-/.]?\d\d|\d\d[-/.]\d\d(?:[-/.]\d{{2,4}})?)[ T_-]+{CLOCK}(?:Z|\s?[+-]\d\d:?\d\d|\ UTC)?
    |(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\ +\d{{1,2}}\ (?:\d{{4}}\ )?{CLOCK}
    |{CLOCK}
)"""
LEVEL = r"(?:ERROR|CRITICAL|FATAL|WARNING|WARN|INFO|DEBUG|SUCCESS|TRACE)"
FRONT = re.compile(
    rf"""\s*(?:
    (?P<process>\([^()\n]{{1,80}}\bpid=\d+[^()\n]{{0,80}}\))    # Ray, vLLM
    |\((?:raylet|autoscaler)[^()\n]{{0,40}}\)
    |\[pod/[\w./-]+\]                                           # kubectl logs --prefix
    |[\w.-]+-\d+\s+\|(?=\s)                                     # docker compose
    |(?:stdout|stderr)\ [FP](?=\s)                              # containerd
    |\[(?:rank|default|Rank\ )\d+\]:?|\[\d+,\d+\]<std(?:out|err)>:?|\d{{1,4}}:(?=\s)     # torchrun, mpirun, srun
    |[a-z][\w.]*-[\w.-]*\d:(?=\s+[A-Za-z])                      # pdsh: the node
    |\[?[IWEF]\d{{3,4}}\ {CLOCK}[^\]\n]{{0,80}}\]                 # glog
    |\[{TIME}[^\]\n]{{0,40}}\]:?                                # a time and what a logger adds to it
    |\(?{TIME}\)?(?:\s[\w.-]+\s[\w./@-]+\[\d+\])?:?(?=\s|$)     # a time, or that of syslog and journald
    |\[?\d{{10}}(?:\d{{3}}|\.\d+)?\]?(?=\s)                     # seconds or milliseconds since 1970
    |(?:[\w.]{{1,60}}\ (?:-\ )?)?\[?{LEVEL}\]?(?:\ \d\d-\d\d\ {CLOCK})?(?:\ \[[^\]\n]{{1,80}}\])?
        (?::[\w.]+:|:?\ {{0,4}}(?=\s|$))
    |\[?[\w./<>-]+(?:\.(?:py|cc|cpp|rs)|:[\w.<>]+):\d+\]?:?(?=\s)           # a place in the code
    )(?:\s[|-](?=\s))?\s?""",
    re.VERBOSE,
)
MOST_FRONTS = 12
LONGEST_TITLE = 200  # characters in front of a bar
# A bar of tqdm: `Train epoch [1/1]: 99%|###| 127/128 [23:32<00:06, 6.63s/it, pg=-0.07, rm=0.5]`; Colab shows no `|`.
BAR = re.compile(
    r"\d{1,3}%(?:\|[^|\r\n]{0,400}\||(?=\s))\s*(\d{1,9}(?:\.\d{1,3})?k?)/(\d{1,9}(?:\.\d{1,3})?k?)\s\["
    r"[^\],\r\n]{1,60}(?:,\s*([^\],\r\n]{1,40}))?(?:,\s([^\]\r\n]{1,2000}))?\]"
)
CUT_WIDTHS = range(40, 400)  # characters: of terminals
FEWEST_CUT = 3
STEPS_TITLE = re.compile(r"(?i)(?:step|train|progress|iter|epoch|episode)[^|%]{0,40}$")
SLOW = re.compile(r"\d\d+(?:\.\d+)?s/it$")  # ten seconds or more, as steps take


@dataclass(frozen=True)
class Bar:
    """A progress bar as it was printed once.

    Attributes:
        title: what its line has in front of it.
        rate: such as 6.63s/it.
        numbers: names with numbers behind the rate.
        end: the place in the text behind it.
    """

    title: str
    at: int
    total: int
    rate: str
    numbers: str
    end: int

    @property
    def is_of_steps(self) -> bool:
        """Whether it is the bar of a run's steps: its title says so, or it has none and its steps are slow."""
        return bool(STEPS_TITLE.search(self.title) or (not self.title.strip() and SLOW.search(self.rate)))


def bars_in(text: str) -> Iterator[Bar]:
    for found in BAR.finditer(text):
        before = text[max(found.start() - LONGEST_TITLE, 0) : found.start()].replace("\r", "\n")
        at, total = (int(float(each.rstrip("k")) * (1000 if each.endswith("k") else 1)) for each in found.group(1, 2))
        yield Bar(before.rpartition("\n")[2], at, total, found[3] or "", found[4] or "", found.end())


def front_before(text: str, line: str) -> re.Pattern[str]:
    """Returns what matches the front of a line before a text in it, with any numbers: an unknown logger's, say."""
    return re.compile(re.sub(r"\d+", r"\\d+", re.escape(line[: line.index(text)])))


def without_colours(text: bytes) -> bytes:
    return ANSI.sub(b"", text) if b"\x1b" in text else text


def plain(line: bytes) -> str:
    """Returns a line as text, without colours."""
    return without_colours(line).decode("utf-8", errors="replace")


def printed(line: bytes) -> str:
    """Returns what the program printed: a line without what launchers and loggers put in front."""
    return split_front(plain(line))[1]


def split_front(line: str) -> tuple[str, str]:
    """Returns which process wrote a line, "" if nothing in front of it says so, and what it printed."""
    process, at = "", 0
    for _ in range(MOST_FRONTS):
        if (found := FRONT.match(line, at)) is None:
            break
        process, at = found["process"] or process, found.end()
    return process, line[at:]


def uncut(text: str) -> tuple[str, int] | None:
    """Returns a text whose lines a terminal has cut, with whole lines, and the width; None if nothing looks cut.

    Lines look cut if several have the same length and none is longer. Tables have such lines too, so both texts are to
    be tried.
    """
    lines = [line.rstrip("\r") for line in text.split("\n")]
    width = max(map(len, lines))
    if width not in CUT_WIDTHS or sum(len(line) == width for line in lines) < FEWEST_CUT:
        return None
    return "".join(line if len(line) == width else f"{line}\n" for line in lines), width
