"""`make bench-view`: rl-view on a large journal, and what somebody who pages through a run costs its trainer.

Guarantee: the journal is generated (`benchmarks.view_journal`), the viewer is the command in a process of its own, and every page
comes over HTTP. Runs with and without readers alternate, so that both see the same machine.
"""

import argparse
import http.client
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import apsw
import numpy as np
import psutil

from benchmarks.view_journal import NUM_PROMPTS, word, write_journal
from benchmarks.wire import acknowledgements
from tools.journal.content import ContentReader
from tools.run_reader import RunReader
from tools.view.index.cache import place_of
from tools.view.index.decoder import find_decoder

_PAIRS, _ACK_S, _OFFERED_PER_S = 5, 8.0, 200.0
_READERS = {
    "alone": 0,
    "a_person": 4,
    "a_script": 20,
}  # pages per second; a person who holds a key down, without reading
_WARM_UP = 5


class Viewer:
    """The running command, asked over one connection."""

    def __init__(self, process: "subprocess.Popen[str]", url: str, start_s: float) -> None:
        self.process, self.start_s = process, start_s
        place = urlsplit(url)
        self._connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=60)
        self._cookie = ""
        self._connection.request("GET", f"{place.path}?{place.query}")
        answer = self._connection.getresponse()
        answer.read()
        self._cookie = (answer.getheader("set-cookie") or "").split(";")[0]

    def seconds(self, path: str) -> float:
        """How long the page takes; `RuntimeError` if it is none."""
        started = time.perf_counter()
        self._connection.request("GET", path, headers={"Cookie": self._cookie})
        answer = self._connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path} was answered with {answer.status}")
        return time.perf_counter() - started

    @property
    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]


@contextmanager
def viewing(run: Path, cache: Path) -> Iterator[Viewer]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "tools.view.cli", "--run", str(run)]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            url = re.search(r"http\S+", process.stdout.readline())[0]  # type: ignore[index]
            yield Viewer(process, url, time.perf_counter() - started)
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=1_000_000, help="of the journal (default: %(default)s)")
    parser.add_argument("--pages", type=int, default=300, help="pages of each kind (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/bench/view"), help="where the journal is, or is written"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench/view.json"), help="JSON file to write")
    parser.add_argument("--pairs", type=int, default=_PAIRS, help="with and without readers (default: %(default)s)")
    arguments = parser.parse_args()
    folder, cache = arguments.folder, arguments.folder / "cache"
    if not (folder / "run").exists():
        print(f"{arguments.groups} groups written in {write_journal(folder, arguments.groups):.0f} s", flush=True)
    shutil.rmtree(cache, ignore_errors=True)
    report = {
        "groups": arguments.groups,
        "load": os.getloadavg(),
        **_measure(folder / "run", cache, arguments.pages, arguments.groups),
    }
    report["acknowledgements"] = _pairs(arguments.pairs)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(json.dumps(report, indent=1))


def _measure(run: Path, cache: Path, num_pages: int, num_groups: int) -> dict[str, Any]:
    place = _place(run, cache)
    with viewing(run, cache) as viewer:
        first_s = viewer.seconds("/groups")
        result: dict[str, Any] = {"first_start_s": viewer.start_s, "first_page_ms": 1000 * first_s}
        result |= _built(place, viewer, _text_bytes(run))
        result["index_bytes"] = place.stat().st_size
    print(json.dumps(result), flush=True)
    result["journal_bytes"] = (run / "journal.sqlite").stat().st_size
    with viewing(run, cache) as viewer:
        result |= {"start_s": viewer.start_s, "list_page_ms": 1000 * viewer.seconds("/groups")}
        for name, paths in _pages(num_pages, num_groups).items():
            seconds = [viewer.seconds(path) for path in paths][_WARM_UP:]
            result[name] = {f"p{q}_ms": round(1000 * float(np.percentile(seconds, q)), 1) for q in (50, 90, 99)}
            print(name, result[name], flush=True)
        result["peak_bytes"] = viewer.peak_bytes
    return result


def _place(run: Path, cache: Path) -> Path:
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(cache)
    try:
        return place_of(run / "journal.sqlite")
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


def _built(place: Path, viewer: Viewer, text_bytes: float) -> dict[str, float]:
    """Waits until the index has everything."""
    started, cpu = time.monotonic(), psutil.Process(viewer.process.pid).cpu_times()
    rows_s = 0.0
    while True:
        time.sleep(0.5)
        with suppress(apsw.Error), closing(apsw.Connection(str(place), flags=apsw.SQLITE_OPEN_READONLY)) as db:
            ((rows, texts),) = db.execute(
                "SELECT (SELECT max(seq) FROM groups), (SELECT value FROM facts WHERE name = 'texts')"
            ).fetchall()
            ((total,),) = db.execute("SELECT count(*) FROM groups").fetchall()
            if rows and texts and not rows_s:
                rows_s = time.monotonic() - started
            if rows_s and texts == rows:
                break
    seconds = time.monotonic() - started - rows_s
    now = psutil.Process(viewer.process.pid).cpu_times()
    num_bytes = int(str(total)) * text_bytes
    return {
        "rows_s": rows_s, "texts_s": seconds, "text_bytes": num_bytes, "text_mb_per_s": num_bytes / seconds / 1e6,
        "cpu_s": now.user + now.system - cpu.user - cpu.system, "build_peak_bytes": viewer.peak_bytes,
    }  # fmt: skip


def _text_bytes(run: Path) -> float:
    """Mean of what is searched of a group, over the first few hundred."""
    with closing(RunReader(run).journal()) as reader:
        decoder, problem = find_decoder(reader.facts())
        assert decoder is not None, problem
        contents = ContentReader(reader)
        groups = [content.group for row in reader.rows_between(1, 300) if (content := contents.read(row))]
    sequences = [[g.prompt_ids, *(g.completion_ids[record] for record in g.records)] for g in groups]
    return float(np.mean([sum(len(t) + 1 for t in decoder.texts([ids.tolist() for ids in one])) for one in sequences]))


def _pages(count: int, num_groups: int) -> dict[str, list[str]]:
    """Kinds of pages, each with as many different ones, of a random state each."""
    rng = random.Random(0)
    sorts = ("arrival", "reward", "tokens", "version", "step")

    def fields() -> dict[str, Any]:
        found: dict[str, Any] = {"sort": rng.choice(sorts), "order": rng.choice(("ascending", "descending"))}
        if rng.random() < 0.5:
            found["state"] = rng.choice(("trained", "no_signal", "quarantined"))
        if rng.random() < 0.5:
            found["producer"] = f"producer-{rng.randrange(9)}"
        if rng.random() < 0.3:
            found["truncated"] = rng.choice(("yes", "no"))
        if rng.random() < 0.3:
            found["reward"] = rng.choice(("0.25:0.5", "2:3", ":0.1"))
        low = rng.randrange(60_000)
        if rng.random() < 0.3:
            found[rng.choice(("version", "step"))] = f"{low}:{low + 10 ** rng.randrange(1, 5)}"
        if rng.random() < 0.2:
            found["at"] = f"{rng.choice((0.25, 100.0, 3000.0))},{rng.randrange(10**6)}"
        return found

    def listed(**more: Any) -> str:
        return f"/groups?{urlencode(fields() | more)}"

    return {
        "filtered_and_sorted": [listed() for _ in range(count)],
        "of_a_prompt": [listed(prompt=rng.randrange(NUM_PROMPTS)) for _ in range(count)],
        "searched_common": [listed(q=word(rng.randrange(100))) for _ in range(count)],
        "searched_rare": [listed(q=f"{word(rng.randrange(30_000))} {word(rng.randrange(1000))}") for _ in range(count)],
        "group": [
            f"/group?id={n // NUM_PROMPTS}-{n % NUM_PROMPTS}-0-1-bench" for n in rng.sample(range(num_groups), count)
        ],
    }


def _pairs(count: int) -> dict[str, list[float]]:
    """The 99th percentile of acknowledgements, in ms, of alternating runs. The reader is no thread of the trainer."""
    processes = multiprocessing.get_context("spawn")
    found: dict[str, list[float]] = {f"{name}_p99_ms": [] for name in _READERS}
    for _ in range(count):
        for name, pages_per_s in _READERS.items():
            with tempfile.TemporaryDirectory(prefix="bench-view-", dir="runs/bench") as scratch:
                stopped = processes.Event()
                reader = processes.Process(target=_read, args=(Path(scratch), stopped, pages_per_s))
                if pages_per_s:
                    reader.start()
                acks = acknowledgements(Path(scratch), 1, _OFFERED_PER_S, _ACK_S)
                stopped.set()
                if pages_per_s:
                    reader.join()
            found[f"{name}_p99_ms"].append(round(1000 * float(np.percentile(acks.latency_s, 99)), 2))
    return found


def _read(folder: Path, stopped: Event, pages_per_s: float) -> None:
    """Pages through the run as soon as it has a journal."""
    while not (folder / "journal.sqlite").exists() and not stopped.wait(0.1):
        pass
    with viewing(folder, folder / "cache") as viewer:
        pages = itertools.cycle(("/groups", "/groups?sort=tokens&state=ready"))
        while not stopped.wait(1 / pages_per_s):
            viewer.seconds(next(pages))


if __name__ == "__main__":
    main()
