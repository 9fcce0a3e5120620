"""How the processes of a log ended: the error at the root of it, or the words of whoever killed them."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from verl_ext.base.printable import printable
from verl_ext.guard.state import Event
from verl_ext.report.run import ENDED
from verl_ext.report.sources.lines import bars_in, front_before, plain, printed, split_front
from verl_ext.report.sources.numbers import SUMMARY, step_counts

ERROR_CHARACTERS = 200  # characters of the error
KEPT_BYTES = 4 << 20  # bytes behind the last row
REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
TRACEBACK = "Traceback (most recent call last)"
LONGEST = 4000  # bytes of a line that are looked at
NEAR_LINES = 6  # lines at the end of a text, where an error without a traceback counts too
LINES_ABOVE = 20  # lines above a traceback that may tell its root
# What bash prints in other languages -> the number of its signal.
TRANSLATED = {"已杀死": 9, "已终止": 15, "已中止": 6, "段错误": 11, "Getötet": 9, "Speicherzugriffsfehler": 11}
TRANSLATED |= {"Processus arrêté": 9, "Erreur de segmentation": 11, "Violación de segmento": 11, "強制終了": 9}
# What a line must have to be looked at; bytes, because most lines of a log have none of it.
SIGNS = re.compile(
    rb"Traceback|Error|Exception|Interrupt|[Kk]illed|KILL|CANCELLED|oom|OOM|fault|Bus error|[Ee]xit|Watchdog|Abort|SIG"
    + b"".join(b"|" + word.encode() for word in TRANSLATED)
    + rb"|arly stopp"
    rb"|Terminated|Signal|what\(\):|TERM_|evicted|Evicted|low on|Illegal instr|inal validation|it/s|s/it"
    rb"|File \"|atal error|method '|Assertion|watchdog|c10d|NCCL WARN|TCPStore|ibv|mlx5|ProcessGroup"
)
EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b(?:\([\w., ]*\))?(?:: .*|$)"
    r"|asyncio\.exceptions\.CancelledError|.*\bCUDA [Ee]rror: out of memory|.*: block: \[.*Assertion .* failed"
)
# The last line of a traceback may have another name: one with a module, or with another end.
RAISED = re.compile(
    r"(?:(?:[A-Za-z_]\w*\.)+[A-Z]\w*|Exception|[A-Z]\w*(?:Timeout|Expired|Iteration|Failure|Failed))(?::\s.*|:?$)"
)
CUT_OFF = "a traceback whose last line is missing"
WORDLESS = re.compile(rf"(?:[\w.]+:?|{CUT_OFF})$")  # an error that says nothing but its name
# Told without a traceback, or before one that may be cut off.
ANNOUNCED = re.compile(
    r".*\b(?:encountered a fatal error|[Ff]atal error in \w+|method '\w+' failed"
    r"|(?:failed|error)\b.{0,300}\b[A-Z]\w*(?:Error|Exception): )"
)
# A failure as a logger, Ray or an exception reports it, which may be the root of an error below it; prose and counts of
# failures have the same words. And lines that report less.
FAILURE = re.compile(
    r"\b(?:ERROR|CRITICAL|FATAL)\b|^\W*[\w.]*(?:Error|Exception)\b: |\b[Ww]orkers?\b.{0,80}\b(?:died|killed|crashed)\b"
)
HARMLESS = re.compile(r"\b(?:INFO|DEBUG|WARN\w*)\b|\w*Warning\b|(?i:retry|fall\w* ?back)|Error executing job")
OUTSIDE, OWN, STUCK, FOLLOWS = 3, 2, 1, 0  # ranks: an earlier one is the root of a later one
# The names that shell, Slurm, Python and OpenMPI give to the signals that end a process, and their numbers.
SIGNALS = {
    "Killed": ("a kill (SIGKILL)", 9),
    "Aborted": ("an abort (SIGABRT)", 6),
    "Segmentation fault": ("a segmentation fault", 11),
    "Bus error": ("a bus error", 7),
    "Illegal instruction": ("an illegal instruction", 4),
    "Terminated": ("a termination (SIGTERM)", 15),
    "SIGINT": ("its user (SIGINT)", 2),
}
NAMED = "|".join((*SIGNALS, *TRANSLATED))
SIGNAL = re.compile(
    rf"(?:^|line \d+: +\d+ |task [\d,-]+: |Fatal Python error: |Signal: )({NAMED})"
    r"(?:\s*$|\s+\((?:core dumped|核心已转储)\)|\s+\(\d+\)|(?<=d)\s{2,}|\s*:|\s+(?=python|torchrun|bash|ray))"
    r"|(?:Signal |exitcode *: -|Signals\.SIG\w+: |got signal: )(\d+)\b|exit(?:ed with)?(?: exit)? ?code:? (1[2-5]\d)\b"
)
MONITOR, DIED = "Ray's memory monitor", "a worker of Ray that died or was killed without a word"
BROKEN, WATCHDOG = "a broken connection between processes: {0}", "a timeout of NCCL (the watchdog)"
# What killed a process from outside, in the words of Slurm, Ray, Kubernetes, PBS, LSF and the kernel.
KILLS = [
    (re.compile(pattern), what, rank)
    for pattern, what, rank in (
        (r"slurmstepd: .*CANCELLED .*DUE TO TIME LIMIT", "Slurm's time limit", OUTSIDE),
        (r"slurmstepd: .*CANCELLED .*DUE TO (PREEMPTION|NODE FAILURE)", "Slurm, {0}", OUTSIDE),
        (r"slurmstepd: .*\*\*\* (?:JOB|STEP) .*CANCELLED", "a cancelled Slurm job", STUCK),
        (r"(?i)slurmstepd: .*oom.?kill|OOM Killed|oom-kill:\w+=|memory: Killed process", "the OOM killer", OUTSIDE),
        (r"OOMKilled", "Kubernetes' OOM killer", OUTSIDE),
        (r"node was low on resource: ([\w-]+)", "Kubernetes, which evicted the pod for lack of {0}", OUTSIDE),
        (r"PBS: job killed: (walltime|mem|vmem|cput)", "PBS's limit of {0}", OUTSIDE),
        (r"TERM_(RUNLIMIT|MEMLIMIT|PREEMPT|CPULIMIT)", "LSF, {0}", OUTSIDE),
        (r"node running low on memory|ray\.exceptions\.OutOfM|[1-9] Workers .*memory pressure", MONITOR, OUTSIDE),
        (r"worker died or was killed while executing a task", DIED, FOLLOWS),
        (r"Watchdog caught collective operation timeout|watchdog (?:got stuck for|hang\b)", WATCHDOG, STUCK),
        (
            r"^(?=.*(?:ProcessGroup|c10d|NCCL WARN|TCPStore|\bibv|mlx5|RPC Error))"
            r"(?=.*(?:timed? ?out|got stuck|failed with error|completion with error|Connection reset))(.*)",
            BROKEN,
            STUCK,
        ),
    )
]
NONE = re.compile(r"\W{0,4}0\b")  # behind a kill: a count of such
# Errors that only report that another process is gone, or pass on another's error: the cause is an earlier line.
FOLLOWING = re.compile(
    r"SystemExit|asyncio\.exceptions\.CancelledError|(?:ray\.exceptions\.)?(?:ActorDiedError|ActorUnavailableError"
    r"|WorkerCrashedError|OwnerDiedError|RayTaskError)|torch\.distributed\.elastic|ChildFailedError"
    r"|\w*(?:BrokenPipe|ConnectionReset|Connection)Error|subprocess\.CalledProcessError"
    r"|(?:[\w.]+\.)?(?:DistBackendError|EngineDeadError)"
    r"|.*(?:Connection (?:closed|reset) by peer|NCCL communicator was)"
)
FINISHED = re.compile(
    rf"inal validation metrics|Training Progress: 100%|{SUMMARY}['\"]:|arly stopping (?:at|after) (?:step|epoch|iter)"
)
HANDLED = 2  # times that a process, or the whole run, went on after an error which it handles
WORKERS = "(workers)"  # any of them: of a line that several have, Ray prints one, so errors are also known by place
ALIKE = 40  # characters by which an error is known again, digits aside
# Errors that no process goes on with, and those whose words do not tell one from another.
FATAL = re.compile(r"[Oo]ut ?[Oo]f ?[Mm]emory|CUDA|NCCL|RayTaskError|^[\w.]+$|a broken connection")
SURE = re.compile(r"(?i)out ?of ?memory|: block: \[")  # in errors that no answer of a model looks like
RESTARTED = re.compile(rb"Started a local Ray instance|to existing Ray cluster|Resuming from|Training from scratch")
GOES_ON = re.compile(r"[\w\"'<\[(/]")  # words behind a line that ends with a colon
# What to do about a log that ends without a word.
SILENT = "if it still runs, `py-spy dump` of its processes; else dmesg (OOM killer) and the scheduler's log"
BARS_BEHIND = 3  # bars of its process behind an error; one is printed again when a process ends
IGNORED = "Exception ignored in"  # Python's words for an error in a destructor
# What belongs to a traceback; rich draws a box around it.
CHAIN = re.compile(
    r"[\s│╭╰]|$|Traceback|Exception (?:ignored|in thread)|During handling of|The above exception|Process \w+:|File \""
)
FRAME = re.compile(
    r"(?:File \"([^\"]+)\", line (\d+)|(?<![\w./-])([\w./-]{1,300}\.py):(\d+)(?= in ))(?:,? in )?\W?(\w+)?"
)
HEADLESS = re.compile(r"\s*File \"[^\"]+\", line \d+, in \S")  # a traceback whose beginning is cut off
OTHERS = 3  # other lines of its process, after which a traceback without a last line is given up
SHORT = 200  # lines of a text without rows that counts as the end of a log as a whole
# A phase of a step, and the functions, remote methods, processes and bars that run in it.
PHASES = (
    (
        "the weight sync",
        r"update_weights?\b|load_weights|sync_weights|sync_model|receive_weights|wake_up|resume_memory"
        r"|update_named_param|model_update|cumem",
    ),
    ("a checkpoint", r"save_checkpoint|save_model|save_pretrained|load_checkpoint"),
    ("the log-probs", r"log_?probs?\b|log_probs?_|_logps|infer_batch|ReferenceModel"),
    (
        "the update",
        r"backward|update_actor|update_policy|ppo_train|training_step|train_step|train_batch|train_mini|Train_epoch",
    ),
    ("the critic's update", r"update_critic|CriticModel"),
    (
        "the rollout",
        r"generate|^Generating|rollout_loop|EngineCore|execute_model|prefix cache|LLMRayActor|[Vv]llmGen|vLLM\w*Server",
    ),
    ("the reward", r"compute_score|reward_fn|compute_rewards?\b|RewardLoop"),
)
LONGEST_SAID = 120  # characters of a logger's line that may name the phase
# What tells the call that failed behind its error: Ray's name of a task, or a worker group's.
CALL = re.compile(r"\bray::[\w.]+\(|'s function \w+: exception")
NESTED = "RayTaskError"  # is printed above the one that it passes on
OF_PROCESS = re.compile(r" \(pid=\d+.*")  # behind Ray's name of a task
# What Ray says of an actor that died.
ACTOR = re.compile(r"^class_name: (\S+)|The actor (?:is dead|died) because (.*?)(?:\. |\.?$)")
# What PyTorch's watchdog says of a collective: rank, number, kind, milliseconds.
COLLECTIVE = re.compile(r"\[Rank (\d+)\] Watchdog caught .*?\bSeqNum=(\d+), OpType=(\w+).*? ran for (\d+) millisec")
MOST_COLLECTIVES, MOST_RANKS = 3, 8  # that are named
PACKAGES = {  # of trainers, as names.toml calls these
    "verl": "verl",
    "trl": "TRL",
    "slime": "slime",
    "miles": "miles",
    "nemo_rl": "NeMo-RL",
    "openrlhf": "OpenRLHF",
    "areal": "AReaL",
    "skyrl_train": "SkyRL",
    "prime_rl": "prime-rl",
    "swift": "ms-swift",
}
# In another folder than these, such as EasyR1, a package verl is a fork.
OF_VERL = r"(?:(?:site|dist)-packages|verl[\w.-]*|_ray_pkg_\w+)/(?=verl/)"
OF_PACKAGE = re.compile(rf"/(?:{OF_VERL}|(?!verl/))({'|'.join(PACKAGES)})/(?:[\w-]+/){{0,9}}\w+\.py".encode())
LAST_LINES = 2000  # that are looked at for a step in words
FEWEST_STEPS = 10  # of a run; what has fewer may be the parts of its start
EPOCH = re.compile(r"(?i)\bepoch\W{0,3}(\d{1,6})\s?/\s?(\d{1,6})\W{0,3}$")  # that the steps count within
LATER_STEP = re.compile(rb"(?i)(?<!total )(?<!max )\b(?:step|iteration)[ :=#]{1,9}(?:[2-9]|[1-9]\d)\b")
BEGAN = re.compile(rb"(?i)Started a local Ray|Ray cluster|from scratch|Loading|initiali[sz]|\b0%\|")


@dataclass(frozen=True)
class Error:
    """What ended a process.

    Attributes:
        what: in words.
        rank: OUTSIDE to FOLLOWS.
        phase: of a step, "" if it is not known.
        place: in the code, as `_Traceback.place`; "" if no frame shows it.
        is_a_sign: whether others may follow it, and the process may go on: it counts near the end only.
        at: the number of the line where it begins, from 0: that of its traceback, if it has one.
    """

    what: str
    rank: int
    phase: str = ""
    place: str = ""
    is_a_sign: bool = False
    at: int = field(default=0, compare=False)

    @property
    def kind(self) -> str:
        """What is alike in the same error elsewhere."""
        return self.place or self.what if self.what == CUT_OFF else re.sub(r"\d+", "", self.what)[:ALIKE]

    @property
    def said(self) -> str:
        """The words, with the place if they say nothing."""
        return self.what + (self.place if WORDLESS.match(self.what) else "")


def phase_of(texts: Sequence[str]) -> str:
    """Returns the phase that the last of these lines names that names any; "" if none does."""
    found = [phase for text in texts for phase, words in PHASES if re.search(words, text)]
    return "the update" if found[-1:] == ["the log-probs"] and "the update" in found else "".join(found[-1:])


class _Traceback:
    """The frames that a process has printed last, and whether the last line of their traceback is still to come."""

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        self.frames: list[re.Match[str]] = []
        self.open = self.ignored = False
        self.at = 0
        self._others = 0  # lines since the last frame

    def begin(self, at: int, *, ignored: bool) -> None:
        ignored = ignored or self.ignored  # Python's words come before the traceback
        self.end()
        self.open, self.ignored, self.at = True, ignored, at

    def add(self, said: str) -> None:
        """Adds a line that is not the last one of a traceback."""
        if found := FRAME.search(said):
            self.frames.append(found)
            self._others = 0
        elif not CHAIN.match(said):
            self._others += 1
            if self._others == OTHERS:
                self.end()

    def phase(self, told: str = "") -> str:
        """Returns the phase of the deepest frame that has one. Log-probs are also computed in the update."""
        return phase_of([*(each.string for each in self.frames), told])

    @property
    def place(self) -> str:
        """`, in FILE, line 3, in FUNCTION`, of the deepest frame; "" without one."""
        if not self.frames:
            return ""
        file, line, short, at, function = self.frames[-1].groups()
        return f", in {file or short}, line {line or at}" + (f", in {function}" if function else "")

    def cut_off(self) -> Error:
        """Returns the error of a traceback without its last line."""
        return Error(CUT_OFF, FOLLOWS, self.phase(), self.place, at=self.at)


class Search:
    """The errors that may have ended the processes of a text.

    An error no longer counts if its process goes on: Ray's with any line, the driver with bars, because others print
    behind its end. Such errors are counted, because a worker that handles them may be silent at the end of the text.
    After the run had finished, only a traceback or a kill counts, but not an error that Python ignores. Without a
    traceback, an error counts near the end only, because answers of models and handled errors look alike.

    Args:
        survived: process and kind of an error -> how many times the process went on after it; "" is the run. It grows.
        whole: the text has no row before it. All of a short one is near the end.
    """

    def __init__(self, text: bytes, survived: Counter[tuple[str, str]], *, whole: bool = False) -> None:
        self._survived = survived
        self._found: list[tuple[str, Error]] = []  # process, error
        self._traces: defaultdict[str, _Traceback] = defaultdict(_Traceback)  # by process
        self._waits: dict[int, tuple[int, str, int]] = {}  # rank -> its first collective: number, kind, milliseconds
        self._called = ""  # the phase of the first call that is said to have failed
        self._actor: dict[int, str] = {}  # of ACTOR: the class of the first actor that died, and why it did
        self._traced = self._finished = False
        self._bars = 0
        self._front = re.compile("")  # of an unknown logger
        self._lines = text.splitlines()
        near_from = 0 if whole and len(self._lines) <= SHORT else _near_from(self._lines)
        for number, line in enumerate(self._lines):
            signs = SIGNS.search(line) is not None
            if signs or self._found or any(trace.open for trace in self._traces.values()):
                self._add(number, plain(line[:LONGEST]), signs, near=number >= near_from)

    def _add(self, number: int, line: str, signs: bool, *, near: bool) -> None:
        """Looks at a line; `signs` is whether it may have an error, `near` whether it is near the end of the text."""
        process, said = split_front(REPEATED.sub("", line))
        if signs and TRACEBACK in said:
            self._front = front_before(TRACEBACK, said)
        said = self._front.sub("", said, count=1) if self._front.match(said) else said
        trace, bars = self._traces[process], list(bars_in(said))
        behind = said[bars[-1].end :].strip() if bars else ""  # an error is printed into the line of a bar
        bare = behind or said.strip()
        error = _error_of(bare) if signs else None
        if waits := COLLECTIVE.search(line):
            wait = int(waits[2]), waits[3], int(waits[4])
            self._waits[int(waits[1])] = min(wait, self._waits.get(int(waits[1]), wait))
        elif self._found and not self._called and CALL.search(bare):
            self._called = phase_of([bare])
        elif self._found and (told := ACTOR.search(bare)):
            self._actor.setdefault(told.lastindex or 0, told[told.lastindex or 0])
        if error is None and trace.open and RAISED.match(said):
            error = _raised(bare)
        if error is not None and error.what.endswith(":"):
            following = "".join(printed(each[:LONGEST]).strip() for each in self._lines[number + 1 : number + 2])
            if GOES_ON.match(following):
                error = replace(error, what=f"{error.what} {_cut_short(following)}")
        if FINISHED.search(said):
            self._found, self._traced, self._finished = [], False, True
            self._traces.clear()
        elif signs and (IGNORED in said or TRACEBACK in said or (not trace.open and HEADLESS.match(said))):
            self._traced = True
            trace.begin(number, ignored=self._finished and IGNORED in said)
            trace.add(said)
        elif error is not None:
            if not trace.ignored and self._counts(error, bare, near):
                phase = "" if error.rank == OUTSIDE else trace.phase(bare)
                if NESTED in error.what and self._found and NESTED in self._found[-1][1].what:
                    self._found.pop()
                at = trace.at if trace.open else number
                self._found.append((process, replace(error, phase=phase, place=trace.place, at=at)))
                self._bars = 0
            trace.end()
        elif not process and bars:
            self._bars += 1
            if self._bars >= BARS_BEHIND:
                self._goes_on([each for each in self._found if not each[0] and each[1].rank != OUTSIDE])
                self._traced = trace.open = False
        else:
            trace.add(said)
            if process and not CHAIN.match(said):
                self._goes_on([each for each in self._found if each[0] == process and not FATAL.search(each[1].what)])

    def _goes_on(self, errors: Iterable[tuple[str, Error]]) -> None:
        """Removes and counts errors that were not the end of their processes."""
        gone = set(errors)
        self._found = [each for each in self._found if each not in gone]
        for process, error in gone:
            if error.rank == OWN and not FATAL.search(error.what):
                self._survived[process, error.kind] += 1
                self._survived[process and WORKERS, error.place] += 1

    def run_goes_on(self) -> None:
        """Counts the errors that are left as survived by the run, one of each kind."""
        self._goes_on({error.kind: ("", error) for _, error in self._found}.values())

    def _is_handled(self, process: str, error: Error) -> bool:
        """Returns True if the run goes on with such errors, or, for an error of a worker, if some worker does."""
        counts = (times for (who, kind), times in self._survived.items() if kind == error.kind and (process or not who))
        return max(counts, default=0) >= HANDLED

    def _counts(self, error: Error, said: str, near: bool) -> bool:
        if self._finished:
            return error.rank == OUTSIDE or (error.rank == OWN and self._traced)
        return near or (not error.is_a_sign and (error.rank != OWN or self._traced or SURE.search(said) is not None))

    def root(self) -> Error | None:
        """Returns the first of the errors with the highest rank, with what other lines say of it."""
        cut_off = [(of, trace.cut_off()) for of, trace in self._traces.items() if trace.open and not trace.ignored]
        errors = [(of, error) for of, error in (*self._found, *cut_off) if not self._is_handled(of, error)]
        if not errors:
            return None
        process, root = max(errors, key=lambda each: each[1].rank)
        later = next((each.what for of, each in errors if of == process and not WORDLESS.match(each.what)), "")
        if WORDLESS.match(root.what) and later and any(b"bove exception" in line for line in self._lines[root.at :]):
            root = replace(root, what=f"{later.rstrip('.')}, after {root.what}")
        if root.what == WATCHDOG and self._waits:
            root = replace(root, what=f"{WATCHDOG}: {self._waiting()}")
        if "ActorDiedError" in root.what and self._actor:
            died = [root.what.partition(":")[0], *(self._actor[part] for part in sorted(self._actor))]
            root = replace(root, what=_cut_short(": ".join(died)))
        elif root.rank == FOLLOWS or (WORDLESS.match(root.what) and not root.place):
            root = self._told_above(root)
        if root.rank == OWN and not root.phase:  # its traceback may come behind it, or the call that it ended
            root = replace(root, phase=self._called or next((each.phase for _, each in cut_off if each.phase), ""))
        if not root.phase:
            phase = phase_of([process]) if root.rank != OUTSIDE else ""
            root = replace(root, phase=phase or phase_above(self._lines[: root.at + 1]))
        return root

    def _told_above(self, root: Error) -> Error:
        """Returns an error with the words of the nearest line above it that reports a failure, if one says more."""
        for line in reversed(self._lines[max(root.at - LINES_ABOVE, 0) : root.at]):
            said = split_front(text := plain(line[:LONGEST]))[1]
            fails = (FAILURE.search(said) or FAILURE.search(text)) and not HARMLESS.search(text)
            above = _error_of(said.strip()) or (Error(_cut_short(said), OWN) if fails else None)
            if above is None or CHAIN.match(said) or NESTED in said:
                continue
            if above.rank > FOLLOWS or WORDLESS.match(root.what):
                return replace(
                    above, what=f"{above.what.rstrip('.')}, before {root.said}", phase=root.phase, at=root.at
                )
        return root

    def _waiting(self) -> str:
        """Describes the collectives that ranks waited in: `ranks 0, 1 in ALLREDUCE 305, for 600 s`."""
        ranks = defaultdict[tuple[int, str], list[int]](list)
        for rank, (number, kind, _) in sorted(self._waits.items()):
            ranks[number, kind].append(rank)
        said = []
        for (number, kind), those in sorted(ranks.items())[:MOST_COLLECTIVES]:
            more = f" and {len(those) - MOST_RANKS} more" if len(those) > MOST_RANKS else ""
            few = ", ".join(map(str, those[:MOST_RANKS])) + more
            said.append(f"rank{'s' * (len(those) > 1)} {few} in {kind} {number}")
        longest = max(wait[2] for wait in self._waits.values()) // 1000
        return f"{'; '.join(said)}, for {longest} s"


def phase_above(lines: Sequence[bytes]) -> str:
    """Returns the phase at the end of these lines, by the last open bar or logger's line near it that names one."""
    texts: list[str] = []
    for line in (plain(each[:LONGEST]) for each in lines[-NEAR_LINES:]):
        texts += [bar.title.replace(" ", "_") for bar in bars_in(line) if bar.at < bar.total]
        texts += [said] if len(said := split_front(line)[1]) < min(len(line), LONGEST_SAID) else []
    return phase_of(texts)


def _near_from(lines: Sequence[bytes]) -> int:
    """Returns the number of the first line near the end, from 0; what W&B prints at its end is not counted."""
    left = NEAR_LINES
    for number in range(len(lines) - 1, -1, -1):
        left -= b"wandb:" not in lines[number]
        if not left:
            return number
    return 0


def _error_of(line: str) -> Error | None:
    for pattern, what, rank in KILLS:
        if (found := pattern.search(line)) and not NONE.match(line, found.end()):
            is_a_sign = what in (BROKEN, DIED)
            groups = (each if is_a_sign else each.lower() for each in found.groups() if each)
            return Error(_cut_short(what.format(*groups)), rank, is_a_sign=is_a_sign)
    if EXCEPTION.match(line):
        return _raised(line)
    if found := SIGNAL.search(line):
        return _signal(found)
    if line.startswith("what():"):  # what a C++ exception says that nothing caught
        return Error(_cut_short(line.removeprefix("what():").strip()), STUCK)
    if ANNOUNCED.match(line):
        return Error(_cut_short(line), FOLLOWS, is_a_sign=True)
    return None


def _cut_short(text: str) -> str:
    """Returns the beginning of an error's text, up to a whole word."""
    said = printable(text, most=None)
    return said if len(said) <= ERROR_CHARACTERS else said[:ERROR_CHARACTERS].rpartition(" ")[0] + " ..."


def _raised(line: str) -> Error:
    """Returns the error of a traceback's last line."""
    if line.startswith("KeyboardInterrupt"):
        return Error("its user (KeyboardInterrupt)", OWN)
    line = OF_PROCESS.sub("", line) if NESTED in line else line
    return Error(_cut_short(line), FOLLOWS if FOLLOWING.match(line) else OWN)


def _signal(found: re.Match[str]) -> Error | None:
    number = int(found[2] or 0) or TRANSLATED.get(found[1], 0) or int(found[3] or 128) - 128
    names = ((what, its) for name, (what, its) in SIGNALS.items() if name == found[1] or its == number)
    what, its = next(names, (f"signal {number}", number))
    if found[3]:
        what += f" (exit code {found[3]})"
    return Error(what, FOLLOWS if its == SIGNALS["Terminated"][1] else STUCK)


class Ends:
    """Looks for the ends of a log's processes.

    An error ends a process if no row of a later step follows: either none at all, or the steps go back, because the run
    was started again. So only the text that follows such a row is examined. An error that later steps followed HANDLED
    times, without a restart, or that a worker went on after as often, is one that the run goes on with, such as an
    answer's that a reward cannot read.

    Attributes:
        tail: what follows the last newline, if it has no row.
    """

    def __init__(self) -> None:
        self.tail = b""
        self._rows = 0
        self._step: int | None = None
        self._usual = 1  # steps from the row before the last one to the last
        self._found: tuple[tuple[int, int, str], ...] = ()  # (rows before it, step, how it ended)
        self._behind: list[bytes] = []  # the text after the last row
        self._size = 0
        self._survived: Counter[tuple[str, str]] = Counter()  # as for `Search`

    def row(self, step: int, validates: bool = False, torn: bool = False) -> None:
        """Notes a row of a step. A row that only validates may belong to the step before it; what was printed so far is
        behind a row that is torn."""
        if torn:
            self._rows, self._step = self._rows + 1, step
            return
        behind = b"".join(self._behind)
        self._usual = max(step - (self._step or 0), 1)
        if self._step is not None and (step < self._step or (step == self._step and not validates)):
            self._found = (*self._found, *self._look(behind))
        elif TRACEBACK.encode() in (text := RESTARTED.split(behind)[-1]):
            Search(text, self._survived).run_goes_on()
        self._rows, self._step = self._rows + 1, step
        if self._size:
            self._behind, self._size = [], 0

    def add(self, text: bytes) -> None:
        """Notes text without a row. If there is much of it, only its beginning and its end are kept."""
        self._behind.append(text)
        self._size += len(text)
        if self._size > 2 * KEPT_BYTES:
            kept = b"".join(self._behind)
            self._behind = [kept[: KEPT_BYTES // 2], b"\n", kept[-KEPT_BYTES // 2 :]]
            self._size = KEPT_BYTES + 1

    @property
    def _text(self) -> bytes:
        """What was printed behind the last row."""
        return b"".join([*self._behind, self.tail])

    def events(self, rows: range) -> tuple[Event, ...]:
        """Returns the ends that are behind one of these rows; with no rows, the end of a log without any."""
        return tuple(
            Event(step, ENDED, "", None, None, ENDED, how)
            for before, step, how in (*self._found, *self._look(self._text))
            if before - 1 in rows or not (before or rows)
        )

    def trainer(self) -> str:
        """Returns the trainer whose code is in most frames behind the last row; "" if none is known."""
        found = Counter(OF_PACKAGE.findall(self._text))
        return PACKAGES[found.most_common(1)[0][0].decode()] if found else ""

    def notes(self, every: int) -> tuple[str, ...]:
        """Returns a note on the log's end, if it shows one, and no error: the run finished, or the log ends before the
        bar of its steps does.

        Args:
            every: steps from one row without a step to the next: a bar that is further from the last row than rows
                are from each other counts something else.
        """
        text = self._text
        shown = progress(text)
        at, total = shown or (0, 0)
        finished = FINISHED.search(plain(text)) or (shown is not None and at == total == self._step)
        ends_early = self._step is not None and at != total and 0 <= at - self._step <= max(every, self._usual)
        if not (finished or ends_early) or self._look(text):
            return ()
        if finished:
            return ("the run finished",)
        phase = phase_above(text.splitlines())
        where = f" (in {phase})" if phase else ""
        return (f"the log ends at step {at} of {total}, and without an error{where}; {SILENT}",)

    def _look(self, text: bytes) -> tuple[tuple[int, int, str], ...]:
        """Returns how the process of the last row ended, if it did, by the text behind it."""
        if (error := Search(text, self._survived.copy(), whole=self._step is None).root()) is None:
            return ()
        phase = f" in {error.phase}" if error.phase else ""
        return ((self._rows, self._step or 0, f"ended{_when(self._step, text)}{phase} by {error.said}"),)


def progress(text: bytes) -> tuple[int, int] | None:
    """Returns the step that a text ends at, and the run's total: by its last progress bar of steps that has begun, else
    by words, `Epoch 2/5 step 2/12`; None if it shows neither."""
    if bars := [bar for bar in bars_in(plain(text)) if bar.is_of_steps and bar.at]:
        return bars[-1].at, bars[-1].total
    for line in map(plain, reversed(text.splitlines()[-LAST_LINES:])):
        for count in (each for each in step_counts(line[:LONGEST]) if int(each[2] or 0) >= FEWEST_STEPS):
            at, total = map(int, count.groups())
            epoch = EPOCH.search(line[: count.start()])
            return (at + total * (int(epoch[1]) - 1), total * int(epoch[2])) if epoch else (at, total)
    return None


def _when(step: int | None, text: bytes) -> str:
    """Returns at which step the text ended, with a blank in front; "" if it does not show that."""
    if step is not None:
        return f" at step {step}"
    if (found := progress(text)) and found[0] != found[1]:
        return f" at about step {found[0]} of {found[1]}"
    return " before its first step" if BEGAN.search(text) and not LATER_STEP.search(text) else ""
