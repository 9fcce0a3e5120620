"""A line of a log as the program printed it, and the progress bars in it.

Launchers and loggers put a process, a rank, a time, a level and a place in the code in front of a line, often several
of them. All readers see the line without these.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

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
    |wandb:(?=\s)|>(?=[\s>])                                      # W&B, a quotation
    |\[?\d{{10}}(?:\d{{3}}|\.\d+)?\]?(?=\s)                     # seconds or milliseconds since 1970
    |(?:[\w.]{{1,60}}\ (?:-\ )?)?\[?{LEVEL}\]?(?:\ \d\d-\d\d\ {CLOCK})?(?:\ \[[^\]\n]{{1,80}}\])?
        (?::[\w.]+:|:?\ {{0,4}}(?=\s|$))
    |\[?[\w./<>-]+(?:\.(?:py|cc|cpp|rs)|:[\w.<>]+):\d+\]?:?(?=\s)           # a place in the code
    )(?:\s[|-](?=\s))?\s?""",
    re.VERBOSE,
)
# The beginning of a line as it was printed: a front, an object, a row of a table, a bar, a part of a traceback. An
# empty line ends one too.
BEGINNING = re.compile(
    rf"""\s*(?:[{{|│]|$|(?:\w[\w ]{{0,40}}:\s*)?\d{{1,3}}%\||Traceback|File\ "|During\ handling
    |[\w.]+(?:Error|Exception)\b)|{FRONT.pattern}""",
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
LONG, MOSTLY = 0.9, 0.7  # share of the width, and of such long lines
PADDING = re.compile(r" {2,}\r?$|\r$")  # what a terminal fills a line with
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


def uncut(text: str) -> tuple[str, str] | None:
    """Returns a text with whole lines, and which ones go on, if a terminal seems to have cut its lines, or an e-mail to
    have wrapped them at words; else None. Tables have such lines too, so both texts are to be tried.

    Lines look cut if several have the same length and none is longer. They look wrapped if most of the long ones have
    no room for the next one's first word; cut ones have none either, but most of them have one length.
    """
    lines = [PADDING.sub("", line) for line in text.split("\n")]
    width = max(map(len, lines))
    cut = [len(line) == width for line in lines]
    at_words = max((len(line) for line in lines if " " in line.strip()), default=0)  # a long word is not wrapped
    pairs = pairwise([*lines, ""])
    wrapped = [not BEGINNING.match(two) and len(one) + len(two.split()[0]) >= at_words for one, two in pairs]
    are_long = sum(len(line) >= LONG * at_words for line in lines)
    if width in CUT_WIDTHS and sum(cut) >= max(FEWEST_CUT, MOSTLY * sum(wrapped)):
        go_on, glue, which = cut, "", f"lines of {width} characters"
    elif at_words in CUT_WIDTHS and sum(wrapped) >= max(FEWEST_CUT, MOSTLY * are_long):
        go_on, glue, which = wrapped, " ", f"lines of up to {at_words} characters"
    else:
        return None
    return "".join(line + (glue if on else "\n") for line, on in zip(lines, go_on, strict=True)), which
