"""Teachers: their log-probs of a group, which servers can teach, and what becomes of a lease while one cannot."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from producer.engine_contract import Completion
from producer.groups import Episode, LeaseFailure, Record, group_message
from producer.metrics import ProducerMetrics
from producer.rollouts.prompts import PromptFormat
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.wire.messages import Group
from slipstream_extras.engine_server.teachers import TeacherPool, Vocabulary
from tests.scripted_trainer import lease
from tests.scripted_vllm_server import END, VOCABULARY, ScriptedVllmServer, refusal
from tests.unit.producer.cancellation import cancel_at_each_wait
from tests.unit.producer.loop import asynchronous
from tests.unit.slipstream_extras.engine_server.running import servers

PROMPT = [5, 6, 7]
COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.rewards.pool._FIRST_PAUSE_S", 0.001)


class Letters:
    """A tokenizer that knows as many characters as the scripted server's."""

    all_special_tokens = ("<end>",)

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(VOCABULARY)}

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + token) for token in ids)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [0] * add_special_tokens + [2 + ord(each) % (VOCABULARY - 2) for each in text]

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens=True)}


class Scene:
    """Teachers `t0`, `t1`, ... on these servers."""

    def __init__(
        self, folder: Path, started: list[ScriptedVllmServer], column: str | None, top_k: int = 0, **section: Any
    ) -> None:
        teachers = [{"name": f"t{n}", "url": server.url} | section for n, server in enumerate(started)]
        values: dict[str, Any] = {
            "run_dir": str(folder / "run"),
            "model": {"path": "small"},
            "dataset": {"path": "unused"},
            "rewards": {"functions": [{"function": "unused:reward"}]},
            "sampling": {"max_completion_length": 6},
            "teachers": teachers,
            "distillation": {"teacher_column": column}
            | ({"mode": "divergence", "top_k": top_k} if top_k else {"mode": "advantage"}),
        }
        values["teachers"] = section.get("teachers", values["teachers"])
        self.registry = CollectorRegistry()
        metrics = ProducerMetrics(self.registry, teachers=[f"t{n}" for n in range(len(started))])
        self.pool = TeacherPool(RunConfig.model_validate(values), metrics)

    def value(self, name: str, teacher: str = "t0") -> float | None:
        return self.registry.get_sample_value(f"rl_producer_teacher_{name}", {"teacher": teacher})

    async def logprobs(self, group: Group, **changes: Any) -> list[float]:
        return np.frombuffer((await self.pool.scores(lease(7, **changes), group))["teacher_logprobs"], "<f4").tolist()


@asynccontextmanager
async def scene(
    folder: Path, count: int = 1, *, column: str | None = None, flags: dict[str, Any] | None = None, **section: Any
) -> AsyncIterator[tuple[Scene, list[ScriptedVllmServer]]]:
    async with servers(count, **flags or {}) as started:
        found = Scene(folder, started, column, **section)
        try:
            yield found, started
        finally:
            await found.pool.close()


def group_of(*episodes: Episode) -> Group:
    return group_message("7.0", list(episodes), np.zeros((len(episodes), 1), "f4"), 6, 0.0, 0.0)


def one_group() -> Group:
    """Two completions."""
    said = [Completion(ids, [-0.5] * len(ids), False, [3] * len(ids)) for ids in ([8, 9, END], [10])]
    return group_of(*(Episode.of(PROMPT, each) for each in said))


def expected(server: ScriptedVllmServer, token_ids: list[int]) -> list[float]:
    """The server's log-probs of what stands behind the prompt."""
    places = range(len(PROMPT), len(token_ids))
    return [float(server.logprobs(server.flags.model, token_ids[:n], 1.0)[token_ids[n]]) for n in places]


@asynchronous
async def test_each_token_has_the_log_prob_that_its_teacher_gives_it(tmp_path: Path) -> None:
    async with scene(tmp_path) as (found, [server]):
        await found.pool.read_with(Letters())
        server.asked.clear()
        values = await found.logprobs(one_group())
        assert values == pytest.approx(
            [*expected(server, [*PROMPT, 8, 9, END]), *expected(server, [*PROMPT, 10])], abs=1e-6
        )
        assert server.asked == {COMPLETIONS: 2}, "one request for each completion"
        assert found.value("seconds_count") == 2
        assert found.value("failures_total") == 0


@asynchronous
async def test_what_was_shown_has_none_and_every_record_is_scored_with_its_own_history(tmp_path: Path) -> None:
    first, second = Record.of(PROMPT), Record.of([*PROMPT, 20])
    first.sampled(Completion([8], [-0.5], False, [3]))
    first.show([21, 22])
    first.sampled(Completion([9], [-0.5], False, [3]))
    second.sampled(Completion([11], [-0.5], False, [3]))
    group = group_of(Episode(3, [first, second]), Episode.of(PROMPT, Completion([12], [-0.5], False, [3])))
    async with scene(tmp_path) as (found, [server]):
        await found.pool.read_with(Letters())
        values = await found.logprobs(group)
        own = expected(server, [*PROMPT, 8, 21, 22, 9])
        wanted = [own[0], 0, 0, own[3], 0, expected(server, [*PROMPT, 20, 11])[1], *expected(server, [*PROMPT, 12])]
        assert values == pytest.approx(wanted, abs=1e-6)


def rows(data: bytes, kind: str, k: int) -> np.ndarray:
    return np.frombuffer(data, kind).reshape(-1, k)


@asynchronous
async def test_each_sampled_token_has_the_likeliest_tokens_in_its_place(tmp_path: Path) -> None:
    record = Record.of(PROMPT)
    record.sampled(Completion([8], [-0.5], False, [3]))
    record.show([21])
    record.sampled(Completion([9, END], [-0.5] * 2, False, [3] * 2))
    async with scene(tmp_path, top_k=4) as (found, [server]):
        await found.pool.read_with(Letters())
        fields = await found.pool.scores(lease(7), group_of(Episode(3, [record])))
        said = [*PROMPT, 8, 21, 9, END]
        in_places = [server.logprobs(server.flags.model, said[:n], 1.0) for n in range(3, 7)]
    wanted = [np.argsort(-each)[:4] for each in in_places]
    assert rows(fields["teacher_top_ids"], "<i4", 4).tolist() == [
        wanted[0].tolist(), [-1] * 4, wanted[2].tolist(), wanted[3].tolist()
    ]  # fmt: skip
    values = [np.zeros(4) if place == 1 else each[wanted[place]] for place, each in enumerate(in_places)]
    np.testing.assert_allclose(rows(fields["teacher_top_logprobs"], "<f4", 4), values, atol=1e-6)
    own = [each[token] * (token != 21) for each, token in zip(in_places, said[3:], strict=True)]
    np.testing.assert_allclose(np.frombuffer(fields["teacher_logprobs"], "<f4"), own, atol=1e-6)


class FewerLetters(Letters):
    """A tokenizer that does not know the server's last tokens."""

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(VOCABULARY - 15)}


@asynchronous
async def test_a_likely_token_that_the_policy_does_not_have_is_left_out(tmp_path: Path) -> None:
    async with scene(tmp_path, top_k=VOCABULARY - 15, flags={"max_logprobs": VOCABULARY}) as (found, _):
        await found.pool.read_with(FewerLetters())
        fields = await found.pool.scores(lease(7), one_group())
    ids = rows(fields["teacher_top_ids"], "<i4", VOCABULARY - 15)
    values = rows(fields["teacher_top_logprobs"], "<f4", VOCABULARY - 15)
    assert ids.max() <= VOCABULARY - 16
    assert (ids == -1).any()
    assert ((values == 0) == (ids == -1)).all()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"characters": VOCABULARY - 3}, "another tokenizer"),
        ({"vocabulary": VOCABULARY - 1}, f"does not score token {VOCABULARY - 1}"),
        ({"max_model_len": 7}, "--max-model-len"),
        ({"api_key": "secret"}, r"teachers\.0\.key_file"),
    ],
)
@asynchronous
async def test_a_server_that_cannot_teach_ends_the_start(tmp_path: Path, flags: dict[str, Any], said: str) -> None:
    async with scene(tmp_path, flags=flags) as (found, _):
        with pytest.raises(ConfigError, match=said):
            await found.pool.read_with(Letters())


@asynchronous
async def test_a_server_that_returns_fewer_likely_tokens_ends_the_start(tmp_path: Path) -> None:
    async with scene(tmp_path, top_k=21) as (found, _):
        with pytest.raises(ConfigError, match=r"distillation\.top_k.*allowed: 20.*--max-logprobs 21"):
            await found.pool.read_with(Letters())


@asynchronous
async def test_more_likely_tokens_than_the_vocabulary_has_are_never_asked_for(tmp_path: Path) -> None:
    """vLLM 0.32's engine ends over such a request ("selected index k out of range")."""

    class Few(Letters):
        def get_vocab(self) -> dict[str, int]:
            return {letter: number for number, letter in enumerate("abcdefg")}

    async with scene(tmp_path, top_k=8) as (found, [server]):
        with pytest.raises(ConfigError, match=r"distillation\.top_k: 8 .*7"):
            await found.pool.read_with(Few())
        assert not server.asked


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize"])
@asynchronous
async def test_what_is_no_vllm_server_ends_the_start(tmp_path: Path, path: str) -> None:
    async with scene(tmp_path) as (found, [server]):
        server.answers[path].append(lambda: web.json_response({"detail": "Not Found"}, status=404))
        with pytest.raises(ConfigError, match=r"teachers\.0\.url"):
            await found.pool.read_with(Letters())


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize", COMPLETIONS])
@pytest.mark.parametrize("status", [500, 503])
@asynchronous
async def test_a_server_that_fails_at_the_start_is_checked_later(tmp_path: Path, path: str, status: int) -> None:
    async with scene(tmp_path) as (found, [server]):
        server.answers[path].append(lambda: refusal(status, "it starts"))
        await found.pool.read_with(Letters())
        server.flags.characters = 9
        with pytest.raises(LeaseFailure, match="another tokenizer"):
            await found.logprobs(one_group())


@asynchronous
async def test_a_key_is_sent(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    key.chmod(0o600)
    async with scene(tmp_path, flags={"api_key": "secret"}, key_file=str(key)) as (found, _):
        await found.pool.read_with(Letters())
        assert len(await found.logprobs(one_group())) == 4


@asynchronous
async def test_a_teacher_that_is_down_fails_its_leases_until_it_is_back_and_fits(tmp_path: Path) -> None:
    async with scene(tmp_path, retries=2) as (found, [server]):
        await server.kill()
        await found.pool.read_with(Letters())  # the producer starts nevertheless
        with pytest.raises(LeaseFailure) as failure:
            await found.logprobs(one_group())
        assert failure.value.reason == "generation_failed"
        assert server.url in failure.value.detail
        assert found.value("failures_total") in (1, 2)
        await server.restart(characters=9)
        with pytest.raises(LeaseFailure, match="another tokenizer"):
            await found.logprobs(one_group())
        await server.restart(characters=VOCABULARY - 2)
        assert all(value < 0 for value in await found.logprobs(one_group()))


@asynchronous
async def test_a_request_that_fails_is_tried_again(tmp_path: Path) -> None:
    async with scene(tmp_path, retries=2) as (found, [server]):
        await found.pool.read_with(Letters())
        answers = server.answers[COMPLETIONS]
        answers += [lambda: refusal(500, "out of memory"), lambda: refusal(503, "busy"), lambda: refusal(503, "busy")]
        values = await found.logprobs(one_group())
        assert values == pytest.approx(
            [*expected(server, [*PROMPT, 8, 9, END]), *expected(server, [*PROMPT, 10])], abs=1e-6
        )
        assert found.value("seconds_count") == 5
        assert found.value("failures_total") == 0


@asynchronous
async def test_a_teacher_that_hangs_is_given_up(tmp_path: Path) -> None:
    async def hang() -> None:
        await asyncio.sleep(60)

    async with scene(tmp_path, timeout_s=0.5, retries=1) as (found, [server]):
        await found.pool.read_with(Letters())
        server.answers[COMPLETIONS] += [hang] * 8
        with pytest.raises(LeaseFailure, match="in time"):
            await found.logprobs(one_group())


def without_the_last(body: dict[str, Any]) -> None:
    body["choices"][0]["prompt_logprobs"].pop()


def with_value(value: float) -> Callable[[dict[str, Any]], None]:
    def spoil(body: dict[str, Any]) -> None:
        for entry in body["choices"][0]["prompt_logprobs"][-1].values():
            entry["logprob"] = value

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [without_the_last, *map(with_value, (math.nan, math.inf, -math.inf, 0.5, 1e300, "low", None))],
)
@asynchronous
async def test_what_are_no_log_probs_is_a_failure_at_once(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None]
) -> None:
    async with scene(tmp_path, retries=2) as (found, [server]):
        await found.pool.read_with(Letters())
        server.spoil = spoil
        with pytest.raises(LeaseFailure) as failure:
            await found.logprobs(one_group())
        assert failure.value.reason == "generation_failed"
        assert found.value("seconds_count") in (1, 2), "no request was repeated"


def spoilt_top(body: dict[str, Any], change: Callable[[dict[str, Any], str], None]) -> None:
    """Change the entry of the last place whose token is not that of the prompt."""
    entries = body["choices"][0]["prompt_logprobs"][-1]
    change(entries, next(token for token in entries if token != str(body["choices"][0]["prompt_token_ids"][-1])))


@pytest.mark.parametrize(
    "change",
    [
        lambda entries, token: entries.clear(),
        lambda entries, token: [entries.pop(one) for one in list(entries)[1:3]],
        lambda entries, token: entries.update(
            {"28": {"logprob": -1.0}, "29": {"logprob": -1.0}, "30": {"logprob": -1.0}}
        ),
        lambda entries, token: entries.update({"one": entries.pop(token)}),
        lambda entries, token: entries.update({"-1": entries.pop(token)}),
        lambda entries, token: entries.update({"9" * 20: entries.pop(token)}),
        lambda entries, token: entries[token].update(logprob=0.5),
        lambda entries, token: entries[token].update(logprob=-1e300),
    ],
)
@asynchronous
async def test_what_are_no_likely_tokens_is_a_failure_at_once(
    tmp_path: Path, change: Callable[[dict[str, Any], str], None]
) -> None:
    async with scene(tmp_path, retries=2, top_k=4) as (found, [server]):
        await found.pool.read_with(Letters())
        server.spoil = lambda body: spoilt_top(body, change)
        with pytest.raises(LeaseFailure) as failure:
            await found.pool.scores(lease(7), one_group())
        assert failure.value.reason == "generation_failed"
        assert found.value("seconds_count") in (1, 2), "no request was repeated"


@asynchronous
async def test_a_completion_that_a_teacher_refuses_is_the_prompts_own_failure(tmp_path: Path) -> None:
    async with scene(tmp_path, retries=2) as (found, [server]):
        await found.pool.read_with(Letters())
        server.answers[COMPLETIONS] += [lambda: refusal(400, "too long"), lambda: refusal(400, "too long")]
        with pytest.raises(LeaseFailure, match="too long") as failure:
            await found.logprobs(one_group())
        assert failure.value.reason == "reward_failed"


@asynchronous
async def test_an_attempt_at_a_request_is_cancelled_at_every_wait(tmp_path: Path) -> None:
    async with scene(tmp_path, concurrency=1, retries=1) as (found, [server]):
        await found.pool.read_with(Letters())
        [teacher] = found.pool._teachers.values()
        vocabulary = Vocabulary.of(Letters())

        async def fail_once() -> None:
            server.answers[COMPLETIONS].clear()
            server.answers[COMPLETIONS].append(lambda: refusal(500, "no memory"))
            teacher._model = None

        def check() -> None:
            assert not teacher._places.locked()

        waits = await cancel_at_each_wait(lambda: teacher.score(vocabulary, [*PROMPT, 8], 3), check, fail_once)
        assert waits >= 5, "the check, the request, the pause, and both again"


@asynchronous
async def test_requests_at_once_are_bounded(tmp_path: Path) -> None:
    inside, most = 0, 0

    async def watch() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1

    async with scene(tmp_path, concurrency=2) as (found, [server]):
        await found.pool.read_with(Letters())
        server.answers[COMPLETIONS] += [watch] * 6
        await asyncio.gather(*(found.logprobs(one_group()) for _ in range(3)))
    assert most == 2


@asynchronous
async def test_a_lease_that_is_taken_back_leaves_no_request_behind(tmp_path: Path) -> None:
    async with scene(tmp_path, concurrency=1, retries=1) as (found, [server]):
        await found.pool.read_with(Letters())
        [teacher] = found.pool._teachers.values()

        async def fail_once() -> None:
            server.answers[COMPLETIONS].clear()
            server.answers[COMPLETIONS].append(lambda: refusal(500, "no memory"))

        def check() -> None:
            assert not teacher._places.locked()
            assert [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "Teacher.score"] == []

        group = one_group()
        assert await cancel_at_each_wait(lambda: found.pool.scores(lease(7), group), check, fail_once) >= 1


@asynchronous
async def test_the_column_of_a_row_names_its_teacher(tmp_path: Path) -> None:
    async with scene(tmp_path, 2, column="expert") as (found, started):
        await found.pool.read_with(Letters())
        for server in started:
            server.asked.clear()
        await found.logprobs(one_group(), columns={"expert": "t1"})
        assert [server.asked[COMPLETIONS] for server in started] == [0, 2]
        for columns in ({"expert": "nobody"}, {}, {"expert": ["t1"]}):
            with pytest.raises(LeaseFailure, match="t0, t1") as failure:
                await found.logprobs(one_group(), columns=columns)
            assert failure.value.reason == "bad_prompt"


@asynchronous
async def test_the_policy_teaches_beside_servers_where_the_row_says_so(tmp_path: Path) -> None:
    async def score(token_ids: list[int], version: int) -> list[float]:
        return [-token / 100 for token in token_ids[1:]]

    async with servers(1) as [server]:
        teachers = [{"name": "t0", "url": server.url}, {"name": "self", "prompt": "{answer}"}]
        found = Scene(tmp_path, [], "who", teachers=teachers)
        await found.pool.read_with(Letters())
        found.pool.use_engine(PromptFormat(Letters(), 64, {}), score)
        assert await found.logprobs(one_group(), columns={"answer": "2", "who": "self"}) == pytest.approx(
            [-0.08, -0.09, -END / 100, -0.1]
        )
        assert await found.logprobs(one_group(), columns={"who": "t0"}) == pytest.approx(
            [*expected(server, [*PROMPT, 8, 9, END]), *expected(server, [*PROMPT, 10])], abs=1e-6
        )
        with pytest.raises(LeaseFailure, match="t0, self"):
            await found.logprobs(one_group(), columns={"who": "nobody"})
        await found.pool.close()


@asynchronous
async def test_weights_choose_the_teacher_of_a_prompt_alike_on_every_producer(tmp_path: Path) -> None:
    async with servers(2) as started:
        pools = [Scene(tmp_path, started, None).pool for _ in range(2)]
        for pool in pools:
            pool._sections["t0"] = pool._sections["t0"].model_copy(update={"weight": 3.0})
        leases = [msgspec.structs.replace(lease(number), attempt=number % 3) for number in range(400)]
        chosen = [[pool._of(each) for each in leases] for pool in pools]
        for pool in pools:
            await pool.close()
    assert chosen[0] == chosen[1]
    assert 260 < Counter(chosen[0])["t0"] < 340


def test_a_probe_has_tokens_from_all_of_the_vocabulary() -> None:
    found = Vocabulary.of(Letters())
    assert found.largest == VOCABULARY - 1
    assert all(Letters().decode([token]) in found.text for token in range(VOCABULARY))
    assert "<end>" in found.text
    assert len(found.token_ids) == len(found.text)
    assert json.loads(json.dumps(found.text)) == found.text
