"""`make chaos HOURS=2`: all campaigns side by side on two cores, and one table at the end.

Each campaign runs in a process of its own. First it shows that it can fail: every bug of its list is planted,
and schedules are played until one of them finds it. Then schedules are played until time is up. A schedule
that finds something wrong says how to play it again, and the campaign goes on.

    python tests/campaigns/run.py --hours 2            all campaigns
    python tests/campaigns/run.py --only mirror --seed 7 --schedules 1     one schedule again
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path[0] = str(TESTS)

from campaigns.bug import Bug, Campaign, Tally  # noqa: E402

NAMES = ("node", "reader", "mirror", "cluster")
CORES = 2
STUCK_S = 1800.0
"""A schedule that takes longer never ends."""
LAST_SCHEDULES = 300
"""How many more schedules a bug gets that was not caught in its time."""
BUG_SHARE = 0.25
"""The share of the time for planted bugs."""


# a campaign, in its process


def _campaign(name: str) -> Campaign:
    from campaigns.registry import CAMPAIGNS

    return next(campaign for campaign in CAMPAIGNS if campaign.name == name)


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def _play(campaign: Campaign, seed: int) -> Tally:
    with _directory() as directory:
        return campaign.play(seed, directory)


def _catch(campaign: Campaign, bug: Bug, first: int, until: float) -> dict[str, Any]:
    """Play until a bug is found; schedules that are known to find it come last."""
    began, played, said, is_caught = time.monotonic(), 0, "", False
    for seed in chain(_while_there_is_time(first, until), [bug.seed], range(LAST_SCHEDULES)):
        played += 1
        try:
            with bug.plant():
                _play(campaign, seed)
        except Exception as error:  # noqa: BLE001 - what is planted may itself be broken, which is reported
            is_caught = isinstance(error, campaign.catches)
            text = str(error).splitlines()
            said = (text[0] if text else type(error).__name__)[:200]
            if not is_caught:
                said = f"{type(error).__name__}: {said}, which is no finding: is what is planted broken?"
            break
    return {
        "bug": bug.name,
        "schedules": played,
        "seconds": time.monotonic() - began,
        "is_caught": is_caught,
        "said": said,
        "seed": seed,
    }


def _while_there_is_time(first: int, until: float) -> Iterator[int]:
    for seed in count(first):
        if time.monotonic() >= until:
            return
        yield seed


def run_campaign(name: str, first: int, seconds: float, schedules: int | None, *, bugs: bool) -> int:
    """Report what happens as lines of JSON; return how many differences there were."""
    sys.unraisablehook = lambda _: None  # files that a kill left open warn when they are collected
    campaign = _campaign(name)
    began = time.monotonic()
    differences = 0
    if bugs and campaign.bugs:
        share = BUG_SHARE * seconds / len(campaign.bugs)
        for bug in campaign.bugs:
            caught = _catch(campaign, bug, first, time.monotonic() + share)
            differences += not caught["is_caught"]
            _say(caught)
    seed = first
    while schedules is not None or time.monotonic() < began + seconds:
        _say({"seed": seed})
        try:
            tally = _play(campaign, seed)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a difference
            differences += 1
            tally = Tally(schedules=1, differences=1)
            story = "".join(traceback.format_exception(error))
            again = f"make chaos CAMPAIGN={name} SEED={seed}"
            _say({"difference": story, "again": again})
        _say({"tally": asdict(tally)})
        seed += 1
        if schedules is not None and seed >= first + schedules:
            break
    _say({"end": differences})
    return differences


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


# all of them


@dataclass
class Running:
    """A campaign's process, and what it has said."""

    name: str
    process: subprocess.Popen[str]
    output: Path
    first: int
    place: int = 0
    seed: int | None = None
    is_over: bool = False
    last_word: float = field(default_factory=time.monotonic)
    tally: Tally = field(default_factory=Tally)
    bugs: list[dict[str, Any]] = field(default_factory=list)

    def listen(self) -> None:
        with self.output.open() as lines:
            lines.seek(self.place)
            while (line := lines.readline()).endswith("\n"):
                self.place = lines.tell()
                self.last_word = time.monotonic()
                self._take(line)

    def _take(self, line: str) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            return  # output of a library
        if not isinstance(said, dict):
            return
        if "tally" in said:
            self.tally += Tally(**said["tally"])
        elif "end" in said:
            self.is_over = True
        elif "bug" in said:
            self.bugs.append(said)
            print(f"{self.name}: {_bug_line(said)}", flush=True)
        elif "difference" in said:
            print(f"{self.name}, seed {self.seed}: WRONG\n{said['difference']}", flush=True)
            print(f"play it again: {said['again']}", flush=True)
        elif "seed" in said:
            self.seed = said["seed"]

    def say_how_it_ended(self) -> None:
        """Report it once, immediately: a campaign that is gone finds nothing for the rest of the night."""
        self.listen()
        if not self.is_over:
            self.is_over = True
            self.tally.differences += 1
            said = self.output.with_suffix(".err").read_text()[-2000:]
            print(f"{self.name} ended with {self.process.returncode}: WRONG\n{said}", flush=True)

    def end(self) -> None:
        """End the process, and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _bug_line(said: dict[str, Any]) -> str:
    how = f"{said['schedules']} schedules, {said['seconds']:.1f} s"
    what = "caught after" if said["is_caught"] else "NOT CAUGHT in"
    return f"{said['bug']}: {what} {how}, seed {said['seed']}: {said['said']}"


def run_all(names: list[str], first: int, seconds: float, *, bugs: bool) -> int:
    """Run campaigns and print the table at the end; return whether something was wrong."""
    # the campaigns are in sessions of their own, and would outlive us
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores)
    print(
        f"campaigns {', '.join(names)} for {seconds / 3600:g} h on cores {cores}, seeds from {first}",
        flush=True,
    )
    with _directory() as directory:
        running = [_start(name, first, seconds, directory, bugs=bugs) for name in names]
        try:
            _wait(running)
        finally:
            for campaign in running:
                campaign.end()
    print(_table(running))
    missed = sum(not said["is_caught"] for campaign in running for said in campaign.bugs)
    differences = sum(campaign.tally.differences for campaign in running)
    return 1 if missed or differences else 0


def _start(name: str, first: int, seconds: float, directory: Path, *, bugs: bool) -> Running:
    output = directory / f"{name}.jsonl"
    command = [sys.executable, str(Path(__file__)), "--child", name, "--seed", str(first)]
    command += ["--hours", str(seconds / 3600), *([] if bugs else ["--no-bugs"])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with output.open("w") as out, (directory / f"{name}.err").open("w") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, text=True, env=environment, start_new_session=True
        )
    # Linux divides the processor among sessions first, and asks how nice each of them is
    with contextlib.suppress(OSError):
        Path(f"/proc/{process.pid}/autogroup").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))
    return Running(name, process, output, first)


def _wait(running: list[Running]) -> None:
    told = time.monotonic()
    while any(campaign.process.poll() is None for campaign in running):
        time.sleep(0.5)
        for campaign in running:
            campaign.listen()
            silent_s = time.monotonic() - campaign.last_word
            if campaign.process.poll() is not None:
                campaign.say_how_it_ended()
            elif silent_s > STUCK_S:
                print(
                    f"{campaign.name}, seed {campaign.seed}: nothing for {silent_s:.0f} s: WRONG", flush=True
                )
                campaign.tally.differences += 1
                campaign.end()
        if time.monotonic() - told > 300:
            told = time.monotonic()
            print(_table(running), flush=True)
    for campaign in running:
        campaign.say_how_it_ended()


def _table(running: list[Running]) -> str:
    lines = [
        "",
        "| campaign | seeds | schedules | kills | frames | faults | differences | planted bugs caught |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for campaign in running:
        tally = campaign.tally
        caught = sum(said["is_caught"] for said in campaign.bugs)
        counts = (tally.schedules, tally.kills, tally.frames, tally.faults, tally.differences)
        cells = [campaign.name, f"{campaign.first} to {campaign.seed}", *(f"{count:,}" for count in counts)]
        lines.append(f"| {' | '.join(cells)} | {caught} of {len(campaign.bugs)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="campaigns of tests")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=None, help="the first one; a random one by default")
    parser.add_argument("--only", choices=NAMES, help="this campaign alone")
    parser.add_argument("--schedules", type=int, help="so many of --only, without bugs and in this process")
    parser.add_argument("--no-bugs", action="store_true", help="plant none")
    parser.add_argument("--child", choices=NAMES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    seconds = given.hours * 3600
    first = int.from_bytes(os.urandom(3), "big") * 1000 if given.seed is None else given.seed
    if given.child:
        return int(run_campaign(given.child, first, seconds, None, bugs=not given.no_bugs) > 0)
    if given.only and given.schedules:
        return int(run_campaign(given.only, first, seconds, given.schedules, bugs=False) > 0)
    return run_all([given.only] if given.only else list(NAMES), first, seconds, bugs=not given.no_bugs)


if __name__ == "__main__":
    sys.exit(main())
