"""Copy a run's console to a file and show what a person wants to see of it: progress, our lines, errors.

COMMAND 2>&1 | python tools/progress.py LOGFILE

If the output is not a terminal but a log, it gets the lines with metrics too, which `verl-ext report` can read.
"""

import re
import signal
import sys
from pathlib import Path

RAY_PREFIX = re.compile(r"^(\x1b\[\d+m)?\([^)]*pid=\d+[^)]*\)(\x1b\[0m)? ")
SHOWN = re.compile(r"Training Progress|verl_ext: |^interrupted: |^[┏┃┡│└]")
METRICS = re.compile(r"step:\d+ - ")


def main(path: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides when it ends; read its output to the end
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as log:
        for line in sys.stdin:
            log.write(line)
            log.flush()
            plain = RAY_PREFIX.sub("", line)
            if SHOWN.search(plain) or (METRICS.search(plain) and not sys.stdout.isatty()):
                print(plain, end="", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
