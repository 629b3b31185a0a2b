"""`slipstream view` in a real browser."""

import json
import re
import signal
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import apsw
import pytest

from slipstream.journal.content import ContentReader
from slipstream.run_reader import RunReader
from slipstream_extras.view.pages.group import SURPRISE
from tests.integration.browser import browser, console, drawn, texts, until, viewed
from tests.integration.runs import Run
from tests.tools import give_up, require
from tests.view_run import HOSTILE, write_run

AXE = "axe-core@4.14.1"
PAGES = (
    "/", "/?by=time&minutes=0", "/steps", "/steps/5", "/steps/12", "/groups", "/groups?q=apples&sort=reward",
    "/group?id=2-3-0-1-s", "/group?id=2-3-0-1-s&colour=version", "/group?id=0-8-0-1-s&colour=advantage", "/prompts/3",
    "/policies", "/compare?a=0:5&b=20:29&prompt=1", "/compare?a=0:4&b=5:&held=1", "/keys", "/groups?step=x",
)  # fmt: skip

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def driver(downloads: Path) -> Iterator[Any]:
    with browser(downloads) as result:
        result.set_script_timeout(120)  # axe computes for seconds
        yield result


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("view"))


@pytest.fixture(scope="module")
def url(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    cache = tmp_path_factory.mktemp("cache")
    with viewed(run, cache) as (found, _):
        yield found


@pytest.fixture
def base(driver: Any, url: str) -> str:
    """Of a browser that has the token, and an index that is whole."""
    driver.get(url)
    result = url.partition("/?")[0]

    def is_whole() -> bool:
        driver.get(f"{result}/groups?q=apples&truncated=yes")
        return "being built" not in driver.page_source

    until(is_whole, "the index")
    console(driver)
    return result


def press(driver: Any, keys: str) -> None:
    driver.find_element("tag name", "body").send_keys(keys)


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    require("npm", "npm")
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "pack", AXE, "--silent", "--pack-destination", str(folder)]
    try:
        subprocess.run(command, check=True, timeout=120, capture_output=True)
    except subprocess.SubprocessError as error:
        give_up(f"npm cannot fetch {AXE}: {error}")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        source = archive.extractfile("package/axe.min.js")
        assert source is not None
        return source.read().decode()


def serious_violations(driver: Any, **options: Any) -> list[Any]:
    """Of the page that is open, which has axe."""
    done = "const done = arguments[1]; axe.run(arguments[0]).then((found) => done(found.violations))"
    found = driver.execute_async_script(done, {"resultTypes": ["violations"]} | options)
    return [
        (one["id"], [node["html"][:200] for node in one["nodes"][:3]])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def test_every_page_is_accessible_and_leaves_the_console_empty(driver: Any, base: str, axe: str) -> None:
    def prefer(scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    for page in PAGES:
        driver.get(f"{base}{page}")
        if page.partition("?")[0] == "/":
            until(lambda: driver.find_elements("css selector", "#charts .uplot"), "the charts")
            until(lambda: driver.find_elements("css selector", "#worth li, #numbers .facts"), "the live parts")
        driver.execute_script(axe)
        prefer("light")
        assert serious_violations(driver) == [], page
        prefer("dark")
        assert serious_violations(driver, runOnly=["color-contrast"]) == [], page  # nothing else changes
        messages = console(driver)
        assert [message for message in messages if "400 (Bad Request)" not in message] == [], page
        assert bool(messages) == (page == "/groups?step=x")  # the browser itself tells of that


def test_no_page_scrolls_sideways_on_a_telephone(driver: Any, base: str) -> None:
    narrow = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    try:
        for page in PAGES:
            driver.get(f"{base}{page}")
            if page.partition("?")[0] == "/":
                until(lambda: driver.find_elements("css selector", "#numbers .facts"), "the numbers")
            assert driver.execute_script("return document.documentElement.scrollWidth") <= 400, page
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_charts_stand_side_by_side_and_follow_the_width(driver: Any, base: str) -> None:
    lefts = "return [...document.querySelectorAll('.chart')].map((one) => Math.round(one.getBoundingClientRect().left))"

    def columns(width: int) -> int:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(f"{base}/")
        until(lambda: len(drawn(driver)) > 4, "the charts")
        return len(set(driver.execute_script(lefts)))

    try:
        assert [columns(width) for width in (1400, 1000, 400)] == [3, 2, 1]
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_hostile_completion_is_a_text(driver: Any, base: str) -> None:
    driver.get(f"{base}/group?id=2-3-0-1-s")
    (shown,) = [text for text in texts(driver, ".turn.assistant pre") if "script" in text]
    assert shown == HOSTILE.replace("\u202e", "\\u202e")
    assert driver.title == "Group 2-3-0-1-s · run"
    assert driver.find_elements("css selector", "img, main script") == []
    driver.get(f"{base}/policies")
    assert "<i>the probe differs</i>" in driver.find_element("tag name", "main").text
    assert console(driver) == []


def expected_spans(run: Path, lease_id: str, completion: int) -> list[tuple[str, str]]:
    """Class and hover text of each token, worked out from the journal's numbers."""
    with closing(RunReader(run).journal()) as reader:
        row = reader.row(lease_id)
        assert row is not None
        content = ContentReader(reader).read(row)
    assert content is not None
    group, tokens = content.group, content.group.records[completion]
    result = []
    for token, logprob, version, sampled in zip(
        group.completion_ids[tokens].tolist(), group.logprobs[tokens].tolist(), group.versions[tokens].tolist(),
        group.is_sampled[tokens].tolist(), strict=True,
    ):  # fmt: skip
        kind = "unscored" if logprob != logprob else f"l{sum(-logprob > bound for bound in SURPRISE)}"
        says = f"log-prob {logprob:.4f}, version {version}" if sampled else "not sampled"
        result.append((kind if sampled else "masked", f"id {token} … {says}"))
    return result


def test_the_colours_of_tokens_are_those_of_the_journal(driver: Any, base: str, run: Path) -> None:
    driver.get(f"{base}/group?id=2-4-0-1-s&raw=1")
    script = """return [...document.querySelectorAll(`[data-completion="2"] pre span`)].map((span) => [span.className, span.title,
        getComputedStyle(span).backgroundColor])"""
    found = driver.execute_script(script)
    expected = expected_spans(run, "2-4-0-1-s", 1)
    assert [kind for kind, _, _ in found] == [kind for kind, _ in expected]
    for (_, title, _), (_, says) in zip(found, expected, strict=True):
        start, end = says.split(" … ")
        assert title.startswith(f"{start} ")
        assert title.endswith(f", {end}")
    assert {kind for kind, _ in expected} >= {"masked", "l2", "l3", "l4", "l5", "l6"}
    colours = {kind: colour for kind, _, colour in found}
    assert len(set(colours.values())) == len(colours)  # each class has a colour of its own
    assert {(kind, colour) for kind, _, colour in found} == set(colours.items())


def test_keys_page_search_and_open(driver: Any, base: str, run: Path) -> None:
    with closing(apsw.Connection(str(run / "journal.sqlite"), flags=apsw.SQLITE_OPEN_READONLY)) as db:
        every = [group for (group,) in db.execute("SELECT lease_id FROM groups ORDER BY seq DESC").fetchall()]
        sql = "SELECT lease_id FROM groups WHERE prompt_id % 10 = 1 ORDER BY seq DESC"
        pears = [group for (group,) in db.execute(sql).fetchall()]  # their words are those of the prompt
    driver.get(f"{base}/groups")
    ids = "table.groups td:first-child"
    assert texts(driver, ids) == every[:50]
    press(driver, "j")
    until(lambda: texts(driver, ids) == every[50:100], "the next page")
    press(driver, "k")
    until(lambda: texts(driver, ids) == every[:50], "the page before")
    press(driver, "/")
    driver.switch_to.active_element.send_keys('"the pears"\n')
    until(lambda: texts(driver, ids) == pears, "the search")
    press(driver, "\n")
    until(lambda: driver.title.startswith(f"Group {pears[0]}"), "the first group")
    press(driver, "j")
    until(lambda: driver.title.startswith(f"Group {pears[1]}"), "the next group of the list")
    press(driver, "r")
    until(lambda: "raw=1" in driver.current_url, "the raw text")
    assert "<think>" in texts(driver, "[data-completion] pre")[0]


def test_zooming_one_chart_zooms_all_and_is_in_the_url(driver: Any, base: str) -> None:
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver import ActionChains

    def zoomed() -> list[str]:
        """The charts before. They are drawn anew when the index has read more, also under the mouse; then it tries again."""
        before = drawn(driver)
        with suppress(StaleElementReferenceException):
            over = driver.find_elements("css selector", "#charts .u-over")[1]
            driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
            ActionChains(driver).move_to_element(over).click_and_hold().move_by_offset(80, 0).release().perform()
        return before if "#zoom=" in driver.current_url else []

    driver.get(f"{base}/")
    until(lambda: driver.find_elements("css selector", "#charts .u-over"), "the charts")
    before = until(zoomed, "the zoom")
    after = drawn(driver)
    assert len(after) == len(before) > 4
    assert all(one != other for one, other in zip(before, after, strict=True))
    driver.refresh()
    until(lambda: drawn(driver) == after, "the same zoom")


def test_the_page_follows_a_run_to_its_end(driver: Any, start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(trainer={"max_steps": 5000})
    run.producer()
    trainer = run.trainer()
    run.wait_for_step(2)
    with viewed(Path(run.config.run_dir), tmp_path / "cache") as (url, _):
        driver.get(url)

        def step() -> int:
            [found] = re.findall(r"step ([\d,]+) of 5,000", " ".join(texts(driver, "#now"))) or ["0"]
            return int(found.replace(",", ""))

        first = until(step, "the step")
        before = until(lambda: drawn(driver), "the charts")
        until(lambda: step() > first, "the next step")
        until(lambda: drawn(driver) != before, "the next point of the charts")
        trainer.process.send_signal(signal.SIGTERM)
        assert trainer.end() == 0, trainer.last_words
        stopped = f"The run stopped at step {run.steps[-1]['step']}"
        until(lambda: stopped in " ".join(texts(driver, "main")), "the end")
        assert console(driver) == []


def test_a_shared_page_works_as_a_file(driver: Any, base: str, downloads: Path, tmp_path: Path) -> None:
    driver.get(f"{base}/")
    driver.find_element("link text", "Share").click()
    file = until(lambda: next(iter(downloads.glob("*.html")), None), "the file")
    kept = tmp_path / "kept.html"
    file.rename(kept)
    driver.get(kept.as_uri())
    until(lambda: len(drawn(driver)) > 4, "the charts of the file")
    assert "Run run" in driver.find_element("tag name", "main").text
    assert console(driver) == []


def test_every_page_can_be_kept_as_a_file(driver: Any, base: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.html"
    ask = "const done = arguments[1]; fetch(arguments[0]).then((answer) => answer.text()).then(done)"

    def words() -> set[str]:
        lines = driver.find_element("tag name", "main").text.splitlines()
        return {line for line in lines if not line.startswith("seen ")}  # that is the time of the page

    for page in PAGES:
        text = driver.execute_async_script(ask, f"{base}{page}{'&' if '?' in page else '?'}share=1")
        kept.write_text(text, encoding="utf-8")
        console(driver)
        driver.get(kept.as_uri())
        found = words()
        assert len(found) > 1
        assert console(driver) == [], page
        driver.get(f"{base}{page}")
        until(lambda found=found: found <= words(), f"the words of {page}, which may be asked for later")


@contextmanager
def other_page() -> Iterator[str]:
    """A page of another origin on this host."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>other</title>")

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_another_page_of_this_host_reads_nothing(driver: Any, base: str) -> None:
    """It is of the same site, so that the browser sends the cookie along."""
    ask = """const done = arguments[1]; fetch(arguments[0], {credentials: "include", mode: "no-cors"})
        .then((answer) => done(answer.type), (error) => done("refused"))"""
    with other_page() as url:
        driver.get(url)
        assert driver.execute_async_script(ask, f"{base}/data") == "refused"
        frame = "const frame = document.createElement('iframe'); frame.src = arguments[0]; document.body.append(frame)"
        driver.execute_script(frame, f"{base}/groups")
        messages = until(lambda: console(driver), "the refusal")
        assert any(
            "403" in message or "frame" in message.lower() or "blocked" in message.lower() for message in messages
        )
        assert "journal" not in json.dumps(messages)
