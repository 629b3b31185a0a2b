"""Who is let in, and what every page says of a whole run, an empty one and a damaged one."""

import asyncio
import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import apsw
import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from protocol.runtime.http_server import ConnectionLimiter, Server, listen
from replay.journal.writer import Journal
from slipstream.cli import run
from slipstream_extras.view.index import steps
from slipstream_extras.view.index.cache import place_of
from slipstream_extras.view.server import run_pages
from slipstream_extras.view.server.app import POLICY, _serve, application
from slipstream_extras.view.server.viewer import Viewer
from tests.unit.slipstream_extras.view.indexing import index_whole

REPOSITORY = Path(__file__).parents[4]
TOKEN = "t" * 43
BASE = "http://127.0.0.1:8000"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def client_of(place: Path, token: str | None = TOKEN) -> TestClient:
    result = TestClient(application(Viewer(place), TOKEN), BASE, raise_server_exceptions=False)
    if token is not None:
        result.get(f"/?token={token}", follow_redirects=False)
    return result


@pytest.fixture
def client(written_run: Path, written_index: Path, cache: None) -> TestClient:
    place = place_of(written_run / "journal.sqlite")
    place.parent.mkdir(parents=True)
    shutil.copy(written_index, place)
    return client_of(written_run)


PAGES = (
    "/", "/?by=time&minutes=0", "/live", "/worth", "/numbers", "/data", "/data?by=time",
    "/steps", "/steps/5", "/groups", "/groups?q=apple&sort=reward&order=ascending", "/policies",
    "/group?id=0-3-0-1-s", "/group?id=2-8-0-1-s&colour=advantage", "/group?id=0-3-0-1-s&colour=advantage",
    "/group?id=0-3-0-1-s&colour=version&raw=1&sort=reward", "/prompts/3", "/prompts/999", "/compare",
    "/compare?a=0:5&b=20:25&prompt=1", "/compare?a=0:5&held=0", "/keys", "/static/view.css",
)  # fmt: skip
PARTS = ("/live", "/worth", "/numbers", "/data", "/static")  # of pages


@pytest.mark.parametrize("path", PAGES)
def test_every_page_answers_and_forbids_what_it_does_not_need(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["cache-control"] == "no-store"
    assert "<script>document" not in answer.text
    assert 'onerror="' not in answer.text
    assert 'style="' not in answer.text  # which the policy forbids


def test_the_token_opens_and_leaves_the_address(written_run: Path, cache: None) -> None:
    client = client_of(written_run, None)
    assert client.get("/").status_code == 403
    assert client.get("/static/view.css").status_code == 403
    assert client.get("/?token=wrong").status_code == 403
    assert client.get("/?token=").status_code == 403
    answer = client.get(f"/groups?q=a&token={TOKEN}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/groups?q=a")
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=strict" in answer.headers["set-cookie"]
    assert client.get("/groups").status_code == 200
    answer = client.get(f"//evil.example/?token={TOKEN}", follow_redirects=False)
    assert not answer.headers.get("location", "").startswith("//")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example"}, 421), ({"host": "127.0.0.1.evil.example:8000"}, 421), ({"host": "["}, 421),
        ({"host": ""}, 421), ({"origin": "http://evil.example"}, 403), ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403), ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403), ({"origin": BASE}, 200), ({"host": "localhost:9000"}, 200),
        ({"host": "[::1]:9000"}, 200), ({"sec-fetch-site": "same-origin"}, 200),
    ],
)  # fmt: skip
def test_other_names_and_origins_are_refused(client: TestClient, headers: dict[str, str], code: int) -> None:
    assert (
        client.get(
            "/keys", headers={"cookie": "; ".join(f"{k}={v}" for k, v in client.cookies.items()), **headers}
        ).status_code
        == code
    )


def test_only_get(client: TestClient) -> None:
    assert [client.request(method, "/groups").status_code for method in ("POST", "PUT", "DELETE", "OPTIONS")] == [
        405
    ] * 4


@pytest.mark.parametrize(
    ("path", "code", "says"),
    [
        ("/group?id=gone", 404, "retention has deleted it"), ("/group", 404, "not in the journal"),
        ("/group?id=0-3-0-1-s&colour=red", 400, "colour: expected one of"), ("/groups?step=x", 400, "step: expected"),
        ("/steps/100000", 404, "holds no groups of step 100000"), ("/steps?where=x", 400, "where: expected"),
        ("/compare?a=x", 400, "a: expected"), ("/nowhere", 404, ""), ("/static/../app.py", 404, ""),
        ("/?minutes=x", 400, "minutes: expected"), (f"/steps/{'9' * 19}", 404, ""), (f"/prompts/{'9' * 5000}", 404, ""),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said(client: TestClient, path: str, code: int, says: str) -> None:
    answer = client.get(path)
    assert answer.status_code == code
    assert says in answer.text


def test_the_list_leads_to_groups_and_these_to_their_neighbours(client: TestClient) -> None:
    listed = re.findall(r'href="/group\?(id=[^"]*)"', client.get("/groups?state=trained&sort=reward").text)
    ids = [re.match(r"id=([^&]*)", link).group(1) for link in listed]  # type: ignore[union-attr]
    assert len(ids) > 20
    page = client.get(f"/group?id={ids[0]}&state=trained&sort=reward").text
    assert f"id={ids[1]}" in re.search(r'<a rel="next"[^>]*>', page).group(0)  # type: ignore[union-attr]
    assert 'rel="prev"' not in page
    plain = re.findall(r'href="/group\?id=([^"&]*)', client.get("/groups").text)
    assert f"id={plain[1]}" in re.search(r'<a rel="next"[^>]*>', client.get(f"/group?id={plain[0]}").text).group(0)  # type: ignore[union-attr]


def test_advantages_are_a_colour_where_spans_have_rewards(client: TestClient) -> None:
    rewarded, plain = (client.get(f"/group?id=2-{prompt}-0-1-s&colour=advantage").text for prompt in (8, 9))
    # Rewards 0, 0.5, 1 and three times -1: mean -0.25, sample deviation sqrt(3.875 / 5). The second completion's are 0.5 and -1,
    # with gamma 0.5 worth (0.75 - 0.5 · 0.75) / 0.8804 and -0.75 / 0.8804. Its own advantage in step 18 is 1 / 18.
    cells = [("1", "0.500", "0.426", "0.481"), ("2", "-1.000", "-0.852", "-0.796")]
    found = re.findall(
        r'<th scope="row">(\d)</th><td class="n">([^<]*)</td><td class="n">([^<]*)</td><td class="n">([^<]*)</td>',
        rewarded,
    )
    assert found[:2] == cells
    assert {kind for kind in ("p1", "n2", "l5") if f'<span class="{kind}" title' in rewarded} == {"p1", "n2"}
    assert {kind for kind in ("p1", "n2", "l5") if f'<span class="{kind}" title' in plain} == {"l5"}
    assert "data-reward" not in plain


def test_a_group_has_the_credit_of_the_start_that_trained_it(run: Path, cache: None) -> None:
    given, per_step = ('{"unit": "given"}', '{"unit": "per_step", "gamma": 0.5, "outcome_weight": 1.0}')
    for history, advantage in (([[0, per_step], [17, given]], "+0.5000"), ([[0, per_step], [18, given]], "+0.4815")):
        with closing(Journal(run / "journal.sqlite")) as journal:
            journal.note_facts({"credit": given, "credits": json.dumps(history)})
        page = (
            client_of(run).get("/group?id=2-8-0-1-s&colour=advantage").text
        )  # of step 18; the second completion's first span
        assert f"advantage {advantage}" in page


def test_a_teacher_is_a_colour_where_one_was_asked(client: TestClient) -> None:
    taught, plain = (client.get(f"/group?id=2-{prompt}-0-1-s&colour=teacher").text for prompt in (7, 9))
    # Token i of a completion has log-prob -i / 8: the teacher's -1 is 0.875 below that of the second one, and the same at 8.
    assert re.search(r'<span class="n2" title="[^"]*log-prob -0\.1250[^"]*teacher&#39;s -1\.0000', taught)
    assert re.search(r'<span class="a0" title="[^"]*log-prob -1\.0000', taught)
    assert re.search(r'<span class="p2" title="[^"]*log-prob -2\.5000', taught)
    assert (">teacher</a>" in taught, ">teacher</a>" in plain) == (True, False)


def test_the_newest_attempt_at_a_prompt_has_the_colour_of_its_credit(client: TestClient) -> None:
    rewarded, plain = (client.get(f"/prompts/{prompt}").text for prompt in (8, 9))
    assert '<span class="n2" title' in rewarded
    assert "data-reward" in rewarded
    assert '<span class="l5" title' in plain


@pytest.mark.parametrize("path", [path for path in PAGES if not path.startswith(PARTS)])
def test_a_shared_page_needs_nothing_else(client: TestClient, path: str) -> None:
    answer = client.get(path, params=[*parse_qsl(urlsplit(path).query), ("share", "1")])
    assert answer.headers["content-disposition"].startswith('attachment; filename="run')
    assert 'href="/' not in answer.text
    assert 'src="/' not in answer.text
    assert "content=\"default-src 'none'; img-src data:;" in html.unescape(answer.text)
    assert answer.text.count("<script>") == 3  # what the policy allows by its digest
    assert "uPlot" in answer.text


def test_before_the_run_begins_pages_say_what_to_do(tmp_path: Path, cache: None) -> None:
    (tmp_path / "run").mkdir()
    client = client_of(tmp_path / "run")
    assert "There is no journal here yet" in client.get("/groups").text
    assert "No step was taken yet" in client.get("/steps").text
    assert "No step was taken yet" in client.get("/").text
    assert "no such file" in client.get("/policies").text
    Journal(tmp_path / "run" / "journal.sqlite").close()
    assert "No group was accepted yet" in client.get("/groups").text
    assert "No policy was published yet" in client.get("/policies").text


def test_loss_and_gradient_are_those_of_the_step(client: TestClient) -> None:
    assert (
        "<p>loss -0.08333 · gradient norm 0.5 · entropy 0.08333 · effective sample size 0.99</p>"
        in client.get("/steps/12").text
    )
    assert "gradient norm" not in client.get("/steps/9").text
    (found,) = [chart for chart in client.get("/data?minutes=0").json() if chart["title"] == "Loss"]
    values = found["curves"][0]["values"]
    assert values[:12] == [*[None] * 10, -1 / 11, -1 / 12]


def test_the_charts_of_a_minute_read_the_steps_of_a_minute(
    client: TestClient, written_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, int]] = []

    def times_since(db: apsw.Connection, since: float) -> list[dict[str, Any]]:
        found = steps.times_since(db, since)
        asked.append((since, len(found)))
        return found

    with closing(apsw.Connection(str(place_of(written_run / "journal.sqlite")))) as db:
        db.execute("UPDATE steps SET t = t + 60 * step")
    monkeypatch.setattr(run_pages, "times_since", times_since)
    monkeypatch.setitem(run_pages._DEFAULT_MINUTES, "time", 1)
    for path in ("/data?by=time&minutes=0", "/data?by=time", "/data"):
        assert client.get(path).status_code == 200
    [(first, every), (later, some)] = asked
    assert first < later
    assert (every, some) == (22, 1)


def test_a_run_that_has_ended_says_how(client: TestClient, run: Path) -> None:
    assert "The last step that it told of is 22" in client.get("/live").text
    (run / "trainer.json").write_text('{"finished": true, "steps": 24}')
    assert "The run finished at step 24" in client_of(run).get("/live").text
    (run / "trainer.json").write_text('{"finished": false, "steps": 24}')
    assert re.search("The run stopped at step 24.*--resume goes on", client_of(run).get("/live").text)


def test_a_missing_reward_says_why(client: TestClient) -> None:
    text = client.get("/group?id=0-10-0-1-s").text
    assert re.findall(r"correct <em>none([^<]*)</em>", text) == [
        ", and no reason is recorded", ": the episode failed: the game hung",
        ": timeout: did not return within &lt;b&gt;5&lt;/b&gt; seconds",
    ]  # fmt: skip


def test_advantages_are_those_that_the_journal_has(client: TestClient) -> None:
    text = client.get("/steps/12").text
    assert "advantages 0.250 0.333 0.417 </td>" in text, "of the second group of three completions"
    assert "It began with policy version 11. It made version 12, published" in text
    assert "-1.250" not in client.get("/steps/1").text


def test_groups_are_listed_with_what_they_say(client: TestClient, run: Path) -> None:
    text = client.get("/groups").text
    assert "How many pears are 31 and 2?" in text
    assert "&lt;script&gt;" in client.get("/groups?prompt=3").text
    assert "<script>document" not in client.get("/groups?prompt=3").text
    with closing(apsw.Connection(str(run / "journal.sqlite"))) as db:
        db.execute("UPDATE bodies SET frame = x'00' WHERE seq = 120")
    damaged = client_of(run).get("/groups")
    assert damaged.status_code == 200
    assert damaged.text.count("How many") == text.count("How many") - 1


def test_the_run_page_leads_to_groups_worth_reading(client: TestClient) -> None:
    found = re.findall(r'<a href="/group\?id=([^"]+)">([^<]+)</a>', client.get("/worth").text)
    assert [why for _, why in found] == ["Highest spread", "Longest", "Worst"]  # none is solved or stale
    assert len({lease_id for lease_id, _ in found}) == 3
    for lease_id, _ in found:
        assert client.get(f"/group?id={lease_id}").status_code == 200


def test_two_runs_are_compared(client: TestClient, written_run: Path, written_index: Path, run: Path) -> None:
    with closing(Journal(run / "journal.sqlite")) as journal, journal.transaction() as db:
        db.execute("UPDATE groups SET reward = 0 WHERE prompt_id = 1")
        db.execute("INSERT INTO facts VALUES('dataset_digest', 'other')")
    index_whole(Viewer(run).run, place_of(run / "journal.sqlite"))
    both = TestClient(application(Viewer(written_run), TOKEN, Viewer(run)), BASE, raise_server_exceptions=False)
    both.get(f"/?token={TOKEN}")
    text = both.get("/compare?prompt=1").text
    assert "Gained: 1 prompts" in text
    assert "Lost: 0 prompts" in text
    assert "have other datasets" in text
    assert text.count('class="completion"') == 6  # of both runs
    (data,) = re.findall(r'id="data">(.*?)</script>', text)
    charts = {chart["title"]: chart for chart in json.loads(data)}
    assert [len(chart["curves"]) for chart in charts.values()] == [2] * len(charts)
    assert charts["Held-out score"]["x"] == [4, 12]
    alone = both.get("/compare?with=this").text
    assert "have other datasets" not in alone
    assert 'id="charts"' not in alone


def test_held_out_answers_of_two_versions_are_compared(client: TestClient, run: Path) -> None:
    """See `tests.view_run.held_out`."""
    text = client.get("/compare?a=0:4&b=5:&held=1").text
    assert "Answers of version 4 before and 12 after, by score: 7 prompts are scored in both, 2 did not change." in text
    assert re.findall(r"<h3>(Lost|Gained): (\d+)", text)[:2] == [("Lost", "2"), ("Gained", "3")]
    assert re.findall(r'held=(\d+)">side', text) == ["0", "1", "4", "5", "6"]
    assert "Held-out prompt 1, before and after" in text
    assert re.findall(r"<h3>(before|after): version ([^,]*), ([^<]*)</h3>", text) == [
        ("before", "4-5", "1.000"), ("after", "12-13", "0.000"),
    ]  # fmt: skip
    assert text.count('class="completion"') == 6
    assert "How many pears are 1 and 2?" in text
    assert client.get("/compare?a=0:4&b=5:&held=5").text.count("Its text was not kept") == 2
    assert (
        "are kept. Those of the newest 8 evaluations and of the best are: versions 4, 12."
        in client.get("/compare?a=0:3").text
    )
    folder = run / "held-out"
    (folder / "version-4-step-4.answers").rename(folder / "version-16-step-16.answers")
    assert "Answers of version 12 before and 16 after" in client_of(run).get("/compare").text, (
        "unless others are asked for"
    )
    shutil.rmtree(folder)
    text = client_of(run).get("/compare").text
    assert (
        "No answers of both ranges are kept. Those of the newest 8 evaluations and of the best are, if the run" in text
    )


@pytest.mark.long
def test_without_an_index_lists_without_filters_and_groups_are_there(written_run: Path, cache: None) -> None:
    client = client_of(written_run)
    first = client.get("/groups")
    assert first.text.count('href="/group?id=') == 50
    after = re.search(r'rel="next"[^>]*href="([^"]*)"', first.text).group(1)  # type: ignore[union-attr]
    assert client.get(after.replace("&amp;", "&")).text.count('href="/group?id=') == 50
    assert "The index is being built: 0 %" in client.get("/groups?state=trained").text
    assert client.get("/group?id=0-3-0-1-s").status_code == 200
    assert client.get("/steps").status_code == 200


def test_a_group_that_is_damaged_and_a_tokenizer_that_is_gone(run: Path, cache: None) -> None:
    with closing(Journal(run / "journal.sqlite")) as journal, journal.transaction() as db:
        db.execute("UPDATE bodies SET frame = x'00' WHERE seq = 4")
        db.execute("UPDATE facts SET value = '/gone' WHERE name = 'model_path'")
    client = client_of(run)
    assert "is damaged (checksum)" in client.get("/group?id=0-3-0-1-s").text
    assert "Token ids instead of text: /gone has no tokenizer.json here" in client.get("/group?id=0-4-0-1-s").text


def test_a_file_that_is_no_journal_is_said(tmp_path: Path, cache: None) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"no database " * 100)
    answer = client_of(tmp_path).get("/groups")
    assert answer.status_code == 404
    assert "is not a journal" in answer.text


def test_a_damaged_index_and_a_folder_that_goes_meanwhile_are_said(
    client: TestClient, written_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place_of(written_run / "journal.sqlite").write_bytes(b"no database " * 100)
    answer = client.get("/groups")
    assert answer.status_code == 503
    assert "it is built again" in answer.text
    assert client.get("/groups").status_code == 200

    def gone(self: Viewer) -> None:
        raise FileNotFoundError(2, "No such file or directory", "checkpoints")

    monkeypatch.setattr(Viewer, "index", gone)
    answer = client.get("/steps/5")
    assert answer.status_code == 404
    assert "checkpoints" in answer.text


def test_a_bug_is_said_and_ends_nothing(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(Viewer, "index", lambda self: 1 / 0)
        assert client.get("/steps").status_code == 500
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert client.get("/groups").status_code == 200


def test_a_signal_in_the_middle_of_a_request_ends_the_server() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await PlainTextResponse("answered")(scope, receive, send)

    answers: list[bytes] = []

    async def ask(place: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(place.rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answers.append(await reader.read())
        writer.close()

    async def serve_once() -> None:
        asked: list[asyncio.Task[None]] = []
        limiter = ConnectionLimiter(5.0, 5.0, 8, on_refused=lambda reason: None)

        def say(place: str) -> None:
            asked.append(asyncio.ensure_future(ask(place)))

        with listen("127.0.0.1", 0, "--port", "--port") as door:
            await asyncio.wait_for(_serve(Server(app, limiter), door, say), 30)
        await asked[0]

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        asyncio.run(serve_once())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert answers[0].endswith(b"answered")


@pytest.mark.long
def test_the_run_is_not_written_to(run: Path, cache: None) -> None:
    def contents() -> dict[str, bytes]:
        files = [path for path in run.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal"))]
        return {str(path): path.read_bytes() for path in files}

    before = contents()
    client = client_of(run)
    for path in PAGES:
        client.get(path)
    index_whole(Viewer(run).run, run.parent / "index.sqlite")
    assert contents() == before


@pytest.mark.long
def test_the_server_needs_neither_torch_nor_vllm() -> None:
    heavy = ("torch", "vllm", "transformers", "pandas")
    code = f"import sys, slipstream_extras.view.server.app; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--run", "/nowhere"], 78, "no daemon has worked there"), ([], 78, "no daemon has worked there"),
        (["--run", "run", "--compare", "."], 78, "--compare .: no daemon"), (["--port", "70000"], 2, "--port"),
        (["--run", "run", "--tokenizer", "/nowhere"], 78, "it has no tokenizer.json"),
    ],
)  # fmt: skip
def test_a_wrong_call_says_what_is_wrong(
    arguments: list[str],
    code: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "metrics").mkdir(parents=True)
    assert run(["view", *arguments]) == code
    assert says in capsys.readouterr().err
