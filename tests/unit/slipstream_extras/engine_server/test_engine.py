"""Groups and policies on scripted servers: exact while all is well, and never wrong when it is not."""

import asyncio
import logging
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from producer.engine_contract import Adapter, AdapterRefusedError, Completion
from producer.groups import LeaseFailure
from producer.policies.loader import DownloadedPolicy
from protocol.http_client import ServerLostError
from protocol.wire.adapter_blob import AdapterBlob, pack
from protocol.wire.messages import PolicyInfo
from slipstream_extras.engine_server import engine as engine_module
from slipstream_extras.engine_server import engine as servers_module
from slipstream_extras.engine_server import folder as adapter_folder
from slipstream_extras.engine_server.engine import ServerEngine
from slipstream_extras.engine_server.folder import PREFIX, client_folder
from tests.policies import received_probe, registry_of
from tests.scripted_vllm_server import ScriptedVllmServer, refusal
from tests.unit.producer.loop import asynchronous, until
from tests.unit.slipstream_extras.engine_server.running import (
    PROBE,
    PROMPT,
    ROWS,
    SAMPLING,
    adapter,
    check_exact,
    probe_of,
    publish,
    running,
    servers,
)


async def generate(engine: ServerEngine, policy: Adapter) -> list[Completion]:
    return await engine.generate(PROMPT, SAMPLING, policy)


@asynchronous
async def test_tokens_logprobs_and_probe_are_those_of_the_policy(tmp_path: Path) -> None:
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        policies = [adapter(tmp_path, version) for version in (1, 2)]
        for policy in policies:
            assert await publish(engine, policy) == pytest.approx(probe_of(server, policy), abs=1e-9)
        for policy in policies:
            check_exact(server, policy, await generate(engine, policy))


@asynchronous
async def test_scores_are_those_of_the_policy_and_come_of_another_try_where_one_fails(tmp_path: Path) -> None:
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        policies = [adapter(tmp_path, version) for version in (1, 2)]
        for policy in policies:
            await publish(engine, policy)
        server.answers["/v1/completions"] = deque([lambda: refusal(502, "engine trouble")])
        for policy in policies:
            assert await engine.score(PROBE, policy) == pytest.approx(probe_of(server, policy), abs=1e-9)


@asynchronous
async def test_every_parameter_of_sampling_is_given_so_that_no_default_of_the_server_applies(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    async with servers() as started, running(tmp_path, started) as engine:
        policy = adapter(tmp_path, 1)
        await publish(engine, policy)
        choice = started[0]._choice
        started[0]._choice = lambda body, index: asked.append(body) or choice(body, index)  # type: ignore[method-assign]
        await generate(engine, policy)
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    neutral |= {
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "ignore_eos": False,
        "temperature": 0.7,
        "max_tokens": 6,
        "n": 3,
    }
    assert neutral.items() <= asked[0].items()


@asynchronous
async def test_what_is_discarded_is_unloaded_at_once_and_its_files_go_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_TIDY_EVERY_S", 0.01)
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        policies = [adapter(tmp_path, version) for version in (1, 2)]
        for policy in policies:
            await publish(engine, policy)
        await engine.weights.discard(policies[0])
        (name,) = server.adapters
        assert name.startswith(f"{PREFIX}")
        assert "-v2-" in name
        folder = Path(server.adapters[name]).parent
        assert {entry.name for entry in folder.iterdir()} == {"alive", "v1", "v2"}
        monkeypatch.setattr(servers_module, "LINGER_S", 0.0)
        await until(lambda: {entry.name for entry in folder.iterdir()} == {"alive", "v2"})
    assert server.adapters == {}, "what is left at the end is unloaded, too"
    assert list((tmp_path / "adapters").iterdir()) == []


@pytest.mark.long
@asynchronous
async def test_a_killed_server_is_waited_for_visibly_and_gets_what_is_needed_under_new_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        old, new = adapter(tmp_path, 1), adapter(tmp_path, 2)
        await publish(engine, old)
        server.is_open.clear()
        group = asyncio.create_task(generate(engine, old))
        await until(lambda: server.waiting)
        await server.kill()
        await until(engine.outage)
        late = asyncio.create_task(generate(engine, old))
        publishing = asyncio.create_task(publish(engine, new))
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in (group, late, publishing))
        engine.check_alive()
        await server.start()
        for task in (group, late):
            check_exact(server, old, await task)
        assert await publishing == pytest.approx(probe_of(server, new), abs=1e-9)
        check_exact(server, new, await generate(engine, new))
        assert len(set(server.names)) == len(server.names), "every load has a name of its own"
        assert len(server.adapters) == 2
    assert "; waiting for it (0 s)" in caplog.text
    assert "is ready, with 2 policies" in caplog.text


@asynchronous
async def test_an_adapter_that_somebody_unloads_is_loaded_again(tmp_path: Path) -> None:
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        policy = adapter(tmp_path, 1)
        await publish(engine, policy)
        server.adapters.clear()
        check_exact(server, policy, await generate(engine, policy))
        (name,) = server.adapters
        assert server.names.count(name) == 1


@pytest.mark.long
@pytest.mark.parametrize("removed", ["v1", "v1/adapter_config.json", "v1/adapter_model.safetensors", "."])
@asynchronous
async def test_files_that_somebody_removes_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: str
) -> None:
    monkeypatch.setattr("slipstream_extras.engine_server.engine._TIDY_EVERY_S", 0.01)
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        policy = adapter(tmp_path, 1)
        await publish(engine, policy)
        place = (engine.weights.folder.path / removed).resolve()
        place.unlink() if place.is_file() else shutil.rmtree(place)
        await server.restart()
        async with asyncio.timeout(10):
            check_exact(server, policy, await generate(engine, policy))
        with client_folder(str(tmp_path / "adapters"), None) as other:
            assert other.dead_clients() == []


@pytest.mark.long
@pytest.mark.parametrize("status", [500, 502, 504])
@asynchronous
async def test_a_request_that_fails_is_made_again_and_given_up_after_some_tries(tmp_path: Path, status: int) -> None:
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        policy = adapter(tmp_path, 1)
        await publish(engine, policy)
        server.answers["/v1/completions"] = deque([lambda: refusal(status, "engine trouble")])
        check_exact(server, policy, await generate(engine, policy))

        def spoiled(answer: dict[str, Any]) -> None:
            if len(answer["choices"]) == SAMPLING.num_generations:
                raise web.HTTPInternalServerError(text="engine trouble")

        server.spoil = spoiled
        with pytest.raises(LeaseFailure, match=r"5 times.*engine trouble") as caught:
            await generate(engine, policy)
        assert caught.value.reason == "generation_failed"
        server.spoil = lambda answer: None
        check_exact(server, policy, await generate(engine, policy))


@asynchronous
async def test_a_busy_server_is_asked_later_and_then_the_lease_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_BUSY_S", (0.001, 0.01))
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        policy = adapter(tmp_path, 1)
        await publish(engine, policy)
        busy = [lambda: refusal(429, "queue is full"), lambda: refusal(503, "later", **{"Retry-After": "7"})]
        server.answers["/v1/completions"] = deque(busy)
        check_exact(server, policy, await generate(engine, policy))
        assert engine.outage() is None
        server.answers["/v1/completions"] = deque(busy * 4)
        with pytest.raises(LeaseFailure, match="is busy: later") as caught:
            await generate(engine, policy)
        assert caught.value.reason == "returned", "nothing is wrong with the prompt"


@asynchronous
async def test_what_vllm_refuses_is_the_prompt_s_own(tmp_path: Path) -> None:
    async with servers() as started, running(tmp_path, started) as engine:
        policy = adapter(tmp_path, 1)
        await publish(engine, policy)
        started[0].answers["/v1/completions"] = deque([lambda: refusal(400, "Token id 80000 is out of vocabulary")])
        with pytest.raises(LeaseFailure, match="vLLM refused: Token id 80000") as caught:
            await generate(engine, policy)
        assert caught.value.reason == "generation_failed"
        assert engine.outage() is None


def _first(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["choices"][0]


LIES = {
    "another model": lambda answer: answer.update(model="other"),
    "another prompt": lambda answer: _first(answer).update(prompt_token_ids=[1]),
    "no prompt": lambda answer: _first(answer).update(prompt_token_ids=None),
    "a completion less": lambda answer: answer["choices"].pop(),
    "two of one index": lambda answer: _first(answer).update(index=1),
    "no tokens": lambda answer: _first(answer).update(token_ids=[]),
    "a token too many": lambda answer: _first(answer)["token_ids"].append(3),
    "a token that no vocabulary has": lambda answer: _first(answer)["token_ids"].__setitem__(0, 2**31),
    "a negative token": lambda answer: _first(answer)["token_ids"].__setitem__(0, -1),
    "no log-probs": lambda answer: _first(answer).update(logprobs=None),
    "one log-prob missing": lambda answer: _first(answer)["logprobs"]["token_logprobs"].__setitem__(0, None),
    "one is no number": lambda answer: _first(answer)["logprobs"]["token_logprobs"].__setitem__(0, float("nan")),
    "another end": lambda answer: _first(answer).update(finish_reason="repetition"),
    "cut": lambda answer: _first(answer).update(finish_reason="abort"),
    "longer than asked": lambda answer: (
        _first(answer).update(token_ids=[3] * 7),
        _first(answer)["logprobs"].update(token_logprobs=[-1.0] * 7),
    ),
    "another form": lambda answer: answer.update(choices=7),
}


@pytest.mark.long
@asynchronous
async def test_an_answer_that_is_wrong_is_no_group(tmp_path: Path) -> None:
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        policy = adapter(tmp_path, 1)
        await publish(engine, policy)
        for lie, spoil in LIES.items():
            told: list[str] = []

            def once(answer: dict[str, Any], lie: str = lie, spoil: Any = spoil, told: list[str] = told) -> None:
                if len(answer["choices"]) == SAMPLING.num_generations and not told:
                    spoil(answer)
                    told.append(lie)

            server.spoil = once
            check_exact(server, policy, await generate(engine, policy))
            assert told == [lie]


@asynchronous
async def test_a_server_that_hangs_is_noticed(tmp_path: Path) -> None:
    async with servers() as started, running(tmp_path, started, answer_timeout_s=0.2) as engine:
        started[0].answers["/health"] = deque([lambda: asyncio.sleep(60)])
        await until(engine.outage)
        assert "does not answer /health in time" in str(engine.outage())
        await until(lambda: engine.outage() is None)


@asynchronous
async def test_a_request_that_is_slow_to_leave_a_server_is_told_once(tmp_path: Path) -> None:
    async with servers() as started, running(tmp_path, started) as engine:
        [server], may_leave = engine.servers.all, asyncio.Event()

        async def stay() -> None:
            async with server.working(1):
                try:
                    await asyncio.sleep(60)
                finally:
                    await may_leave.wait()

        slow = asyncio.create_task(stay())
        for _ in range(2):
            await until(lambda: server.is_ready)
            await started[0].kill()
            await until(lambda: not server.is_ready)
            await started[0].start()
        await until(lambda: server.is_ready)
        engine.check_alive()
        may_leave.set()
        with pytest.raises(ServerLostError):
            await slow


@asynchronous
async def test_requests_in_a_server_that_is_gone_go_to_another_one(tmp_path: Path) -> None:
    """Its host lost power: connections say nothing."""
    async with servers(2) as started, running(tmp_path, started, answer_timeout_s=5.0) as engine:
        policy = adapter(tmp_path, 1)
        await publish(engine, policy)
        gone, other = engine.servers.all
        server = next(one for one in started if one.url == gone.url)
        server.is_open.clear()
        group = asyncio.create_task(generate(engine, policy))
        await until(lambda: server.waiting)
        server.answers["/health"] = deque([lambda: refusal(500, "dead")] * 1000)
        check_exact(server, policy, await group)
        assert engine.servers.ready == [other]
        assert gone.in_flight == other.in_flight == 0


@pytest.mark.long
@asynchronous
async def test_a_server_that_serves_another_policy_than_it_was_given_does_not_get_it_live(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        registry = registry_of(engine.weights, tmp_path, tolerance=1e-3)
        blob, digest = pack(AdapterBlob(b'{"r": 8}', b"weights of version 1"))
        reference = adapter(tmp_path, 1)
        probe = received_probe(PROBE, probe_of(server, None), probe_of(server, reference))
        offered = DownloadedPolicy(PolicyInfo(1, digest, len(blob)), blob, 0.0, probe)
        server.flags.applies_adapters = False
        assert not await registry.publish(offered)
        assert "policy v1 is refused" in caplog.text
        assert server.adapters == {}
        server.flags.applies_adapters = True
        assert not await registry.publish(offered._replace(policy=PolicyInfo(1, "0" * 64, len(blob))))
        assert "checksum mismatch" in caplog.text
        assert await registry.publish(offered)
        with registry.pin() as current:
            check_exact(server, Adapter(1, "", 0, reference.path), await generate(engine, current))


@asynchronous
async def test_a_policy_that_a_server_refuses_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        policy = adapter(tmp_path, 1)
        (policy.path / "adapter_config.json").write_text('{"r": 16}')
        with pytest.raises(AdapterRefusedError, match="LoRA rank 16 is greater than max_lora_rank 8"):
            await engine.weights.load(policy)
        assert server.adapters == {}
        assert engine.weights.needed == {}
        assert engine.outage() is None


@asynchronous
async def test_an_engine_that_dies_while_it_loads_refuses_nothing(tmp_path: Path) -> None:
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started

        def dies() -> web.Response:
            server.answers["/health"] = deque(
                [lambda: web.Response(status=503)] * 10
            )  # the regular check may take some
            return refusal(500, "EngineDeadError")

        server.answers["/v1/load_lora_adapter"] = deque([dies])
        policy = adapter(tmp_path, 1)
        await publish(engine, policy)
        check_exact(server, policy, await generate(engine, policy))


@pytest.mark.long
@asynchronous
async def test_a_server_that_comes_back_with_other_weights_is_not_used(tmp_path: Path) -> None:
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        policy = adapter(tmp_path, 1)
        await publish(engine, policy)
        await server.restart(weights="others")
        group = asyncio.create_task(generate(engine, policy))
        await until(lambda: "computes policy v1 differently" in (engine.outage() or ""))
        await server.restart(weights="small")
        check_exact(server, policy, await group)


@pytest.mark.long
@asynchronous
async def test_groups_go_where_least_is_done_and_all_servers_have_every_policy(tmp_path: Path) -> None:
    async with servers(3) as started, running(tmp_path, started) as engine:
        assert engine.capabilities.max_num_seqs == 3 * 256
        policy = adapter(tmp_path, 1)
        await publish(engine, policy)
        assert [len(server.adapters) for server in started] == [1, 1, 1]
        for server in started:
            server.is_open.clear()
        groups = [asyncio.create_task(generate(engine, policy)) for _ in range(6)]
        await until(lambda: [server.waiting for server in started] == [2, 2, 2])
        await started[0].kill()
        await until(lambda: started[1].waiting + started[2].waiting == 6)
        for server in started[1:]:
            server.is_open.set()
        for group in groups:
            check_exact(started[1], policy, await group)
        assert engine.outage() is None
        newer = adapter(tmp_path, 2)
        await publish(engine, newer)
        await started[0].start()
        await until(lambda: len(started[0].adapters) == 2 and len(engine.servers.ready) == 3)


@asynchronous
async def test_of_two_servers_the_one_that_computes_something_else_is_not_used(tmp_path: Path) -> None:
    async with servers(2) as started, running(tmp_path, started) as engine:
        started[1].flags.weights = "others"
        policy = adapter(tmp_path, 1)
        logprobs = await publish(engine, policy)
        (server,) = engine.servers.ready
        used = next(one for one in started if one.url == server.url)
        assert logprobs == pytest.approx(probe_of(used, policy), abs=1e-9)
        check_exact(used, policy, await generate(engine, policy))


@asynchronous
async def test_a_swap_asks_twice_whatever_the_number_of_rows_and_waits_for_no_second_token(tmp_path: Path) -> None:
    """Each request waits for a step of a busy server."""
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        before = server.asked["/v1/completions"]
        await engine.weights.verify(None, ROWS)
        assert server.asked["/v1/completions"] == before + 1
        bodies: list[dict[str, Any]] = []
        choice = server._choice
        server._choice = lambda body, index: bodies.append(body) or choice(body, index)  # type: ignore[method-assign]
        await engine.weights.load(policy := adapter(tmp_path, 1))
        scored = await engine.weights.verify(policy, ROWS)
        assert server.asked["/v1/completions"] == before + 3
        assert [(body["prompt"], "prompt_logprobs" in body, body["max_tokens"]) for body in bodies] == [
            (ROWS[0], False, 1),
            (ROWS[0], True, 1),
            (ROWS[1], True, 1),
        ], "what reads the prefix cache comes before what fills it"
        assert [one.logprobs for one in scored] == [
            pytest.approx(probe_of(server, policy, row), abs=1e-9) for row in ROWS
        ]
        assert [len(one.sampled) for one in scored] == [8, 0]


@asynchronous
async def test_a_cache_of_another_version_shows_in_the_next_token(tmp_path: Path) -> None:
    """The server computes requests that may use its cache as the base does."""
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        await engine.weights.load(policy := adapter(tmp_path, 1))
        logprobs = server.logprobs
        name = server.names[-1]

        def choice(body: dict[str, Any], index: int, whole: Any = server._choice) -> Any:
            is_stale = body["model"] == name and "prompt_logprobs" not in body
            model = server.flags.model if is_stale else name
            server.logprobs = lambda _, *where: logprobs(model, *where)  # type: ignore[method-assign]
            return whole(body, index)

        server._choice = choice  # type: ignore[method-assign]
        (scored,) = await engine.weights.verify(policy, [PROBE])
        base, right = (logprobs(model, PROBE, 1.0) for model in (server.flags.model, name))
        likeliest = sorted(range(len(base)), key=lambda token: -base[token])[:8]
        least = sorted(right)[-8]
        assert scored.sampled == pytest.approx([base[token] for token in likeliest], abs=1e-9)
        assert scored.rescored == pytest.approx([max(right[token], least) for token in likeliest], abs=1e-9)
        assert max(abs(a - b) for a, b in zip(scored.sampled, scored.rescored, strict=True)) > 0.1


def finds_cached(server: ScriptedVllmServer) -> None:
    """Let a server say that its prefix cache had four tokens of each prompt, as vLLM does with --enable-prompt-tokens-details."""
    server.spoil = lambda answer: answer.update(
        usage={"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    )


@asynchronous
async def test_a_server_tells_what_its_cache_had_for_the_first_request_of_a_version(tmp_path: Path) -> None:
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        for version, usage in ((1, None), (2, {"prompt_tokens_details": None})):
            server.spoil = lambda answer, usage=usage: answer.update(usage=usage)  # type: ignore[misc]
            await engine.weights.load(policy := adapter(tmp_path, version))
            assert (await engine.weights.verify(policy, [PROBE]))[0].cached == 0
        finds_cached(server)
        await engine.weights.load(policy := adapter(tmp_path, 3))
        assert (await engine.weights.verify(policy, [PROBE]))[0].cached == 4


@asynchronous
async def test_what_the_cache_has_after_a_lost_answer_counts_for_nothing(tmp_path: Path) -> None:
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        await engine.weights.load(policy := adapter(tmp_path, 1))
        finds_cached(server)
        server.answers["/v1/completions"] = deque([lambda: refusal(502, "the answer was lost")])
        assert (await engine.weights.verify(policy, [PROBE]))[0].cached == 0


@asynchronous
async def test_of_two_servers_the_one_whose_cache_is_of_another_version_is_not_used(tmp_path: Path) -> None:
    async with servers(2) as started, running(tmp_path, started) as engine:
        finds_cached(started[1])
        await engine.weights.verify(None, [PROBE])
        await engine.weights.load(policy := adapter(tmp_path, 1))
        await engine.weights.verify(policy, [PROBE])
        assert [server.url for server in engine.servers.ready] == [started[0].url]


@pytest.mark.long
@asynchronous
async def test_two_producers_share_a_server_and_the_end_of_one_takes_nothing_of_the_other(tmp_path: Path) -> None:
    async with servers() as started, running(tmp_path, started) as one:
        mine = adapter(tmp_path, 1)
        await publish(one, mine)
        async with running(tmp_path, started) as other:
            theirs = adapter(tmp_path, 2)
            await publish(other, theirs)
            assert len(started[0].adapters) == 2
        assert len(started[0].adapters) == 1
        check_exact(started[0], mine, await generate(one, mine))


@asynchronous
async def test_what_a_killed_producer_left_goes_from_server_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_TIDY_EVERY_S", 0.01)
    async with servers() as started:
        (server,) = started
        left = tmp_path / "adapters" / f"{PREFIX}0123456789ab" / "v7"
        left.mkdir(parents=True)
        (left.parent / "alive").write_bytes(adapter_folder._boot_id())
        server.adapters = {f"{left.parent.name}-v7-1": str(left), "mine": "/somewhere/mine", "deep": str(left / "x")}
        async with running(tmp_path, started):
            assert set(server.adapters) == {"mine", "deep"}, "it was inspected before it was ready"
            monkeypatch.setattr(
                servers_module, "LINGER_S", 0.0
            )  # removed earlier, the folder would not show whose it was
            await until(lambda: not left.parent.exists())


@asynchronous
async def test_a_cancelled_load_leaves_nothing(tmp_path: Path) -> None:
    async with servers() as started, running(tmp_path, started) as engine:
        (server,) = started
        await server.kill()
        loading = asyncio.create_task(engine.weights.load(adapter(tmp_path, 1)))
        await until(engine.outage)  # which it notices before anybody looks
        await asyncio.sleep(0.05)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert engine.weights.needed == {}
        await server.start()
        await until(lambda: engine.outage() is None)
        assert server.adapters == {}
