"""The API of Atropos over HTTP, as its client uses it: registering, generating, posting, posting again, waiting."""

import asyncio
import gzip
import json
from typing import Any

import pytest

from slipstream_extras.endpoint.atropos.bodies import parse_generate, unzip
from slipstream_extras.endpoint.openai import RefusedError
from tests.unit.producer.loop import asynchronous
from tests.unit.slipstream_extras.endpoint.atropos_scene import Scene, scene
from tests.unit.slipstream_extras.endpoint.test_endpoint import endpoint

REGISTRATION = {
    "max_token_length": 64,
    "desired_name": "maze",
    "weight": 1.0,
    "group_size": 2,
    "min_batch_allocation": None,
}


async def post(it: Scene, body, path: str = "scored_data", method: str = "POST", **headers: Any):
    """Status and JSON of the answer."""
    status, _, content = await it.post(body, f"/atropos/{path}", method, **headers)
    return status, json.loads(content)


async def ask(it: Scene, path: str, body=b""):
    """Of a GET, with a body, as aiohttp sends it."""
    return await post(it, body, path, "GET")


async def generate(it: Scene, **fields) -> dict:
    status, answer = await post(
        it, {"prompt": {"prompt_token_ids": [1, 2]}, "n": 2, "logprobs": 0} | fields, "generate"
    )
    assert status == 200, answer
    return answer


def scored(answer: dict, scores=(1.0, 0.0)) -> dict:
    tokens = answer["token_ids"]
    return {
        "tokens": [[*answer["prompt_token_ids"], *each] for each in tokens],
        "masks": [[-100] * len(answer["prompt_token_ids"]) + each for each in tokens],
        "scores": list(scores),
        "env_id": 0,
        "overrides": None,
    }


@asynchronous
async def test_an_environment_registers_and_learns_how_much_is_wanted(tmp_path):
    async with scene(tmp_path) as it:
        assert await ask(it, "wandb_info") == (200, {"group": "maze", "project": "slipstream"})
        status, answer = await post(it, REGISTRATION, "register-env")
        assert (status, answer["status"], answer["env_id"], answer["wandb_name"]) == (200, "success", 0, "maze_0")
        assert (answer["starting_step"], answer["num_steps"], answer["checkpoint_interval"]) == (12, 54, -1)
        assert await ask(it, "info") == (200, {"batch_size": 4, "max_token_len": 64})
        assert (await ask(it, "health"))[0] == 200
        _, answer = await ask(it, "status-env", {"env_id": 0})
        assert answer == {
            "current_step": 12, "queue_size": 4, "self_queue_size": 4,
            "unallocated_fraction": 1.0, "max_group_size": 2, "env_weight": 1.0,
        }  # fmt: skip
        waiting = [asyncio.create_task(it.atropos.fulfil(0)) for _ in range(3)]
        await asyncio.sleep(0)
        assert (await ask(it, "status-env", {"env_id": 0}))[1]["queue_size"] == 1
        assert (await ask(it, "status"))[1]["queue_size"] == 1
        await post(it, REGISTRATION | {"weight": 3}, "register-env")
        assert (await ask(it, "status-env", {"env_id": 0}))[1]["env_weight"] == 0.25
        assert (await post(it, {"env_id": 1}, "disconnect-env"))[1]["status"] == "success"
        assert (await post(it, {"env_id": 1}, "disconnect-env"))[1]["status"] == "failure"
        assert (await ask(it, "status-env", {"env_id": 77}))[1]["env_weight"] == 1.0
        for task in waiting:
            task.cancel()


@asynchronous
async def test_an_environment_of_another_shape_is_refused_and_one_that_is_early_waits(tmp_path):
    async with scene(tmp_path) as it:
        status, answer = await post(it, REGISTRATION | {"group_size": 4}, "register-env")
        assert (status, answer["error"]["message"]) == (
            400,
            "groups of this run have sampling.num_generations=2 sequences; give the environment --env.group_size 2",
        )
        assert (await post(it, REGISTRATION | {"min_batch_allocation": 0.5}, "register-env"))[0] == 400
        assert (await post(it, REGISTRATION | {"weight": None}, "register-env"))[0] == 400
        assert (await post(it, [], "register-env"))[0] == 400
        it.registry.current = None
        assert (await post(it, REGISTRATION, "register-env"))[1] == {"status": "wait for trainer to start"}
        assert (await ask(it, "health"))[0] == 503


@asynchronous
async def test_a_group_is_trained_once_however_often_it_is_posted(tmp_path):
    async with scene(tmp_path) as it:
        answer = await generate(it, max_tokens=64, temperature=1.0, top_k=-1)
        assert answer["finish_reasons"] == ["stop", "stop"]
        assert answer["logprobs"][1] == [[{"101": -0.25}], [{"101": -0.5}]]
        assert answer["text"] == ["dd", "ee"]
        assert it.vllm.requests[0]["max_tokens"] == 8, "no more than can be trained"
        packed = gzip.compress(json.dumps(scored(answer)).encode())
        received = (200, {"status": "received", "groups_processed": 1})
        assert await post(it, packed, content_encoding="gzip") == received
        assert (await post(it, scored(answer)))[0] == 200
        rollouts = await it.atropos.fulfil(12)
        assert [episode.token_ids for episode in rollouts.episodes] == [[100, 100], [101, 101]]
        assert rollouts.own_rewards.tolist() == [[1.0], [0.0]]
        assert (await post(it, scored(answer)))[0] == 200
        assert it.atropos.outcomes == {"leased": 1, "stale": 0, "void": 0, "duplicate": 2, "refused": 0, "busy": 0}
        assert it.atropos.queue.num_groups == 0
        assert it.metrics.get_sample_value("rl_producer_atropos_groups_total", {"outcome": "duplicate"}) == 2
        assert it.metrics.get_sample_value("rl_producer_atropos_recorded_bytes") == 0


@asynchronous
async def test_of_a_list_the_good_groups_are_kept_and_the_first_bad_one_is_named(tmp_path):
    async with scene(tmp_path) as it:
        good, bad = scored(await generate(it)), scored(await generate(it))
        bad["tokens"][1][-1] = bad["masks"][1][-1] = 9
        status, answer = await post(it, [bad, good], "scored_data_list")
        assert (status, answer["error"]["type"]) == (400, "not_sampled")
        assert answer["error"]["message"].startswith("sequence 1: 1 of 2 tokens to be trained")
        assert (it.atropos.queue.num_groups, it.atropos.outcomes["refused"]) == (1, 1)


@asynchronous
async def test_advantages_of_tokens_are_taken_where_the_run_wants_them(tmp_path):
    async with scene(tmp_path, credit="given") as it:
        group = scored(await generate(it))
        bad = group | {"advantages": [[0.0, 0.0, 1.0, -1.0], [0.0, 0.0, 0.5]]}
        status, answer = await post(it, bad)
        assert (status, answer["error"]["type"]) == (400, "malformed")
        assert answer["error"]["message"].startswith("sequence 1: it has 3 advantages for 4 tokens")
        bad["advantages"][1].append(0.25)
        assert (await post(it, bad))[0] == 200
        one, other = (await it.atropos.queue.take(0)).episodes
        assert one.records[0].credit[2:].tolist() == [1.0, -1.0]
        assert other.records[0].credit[2:].tolist() == [0.5, 0.25]


@asynchronous
async def test_a_call_that_is_sampled_otherwise_is_answered_and_cannot_be_trained(tmp_path):
    async with scene(tmp_path) as it:
        other = await generate(it, temperature=0.3)
        status, answer = await post(it, scored(other))
        assert status == 400
        assert answer["error"]["message"].endswith("the last call that was not recorded asked for temperature=0.3")
        chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "n": 2}
        for path, recorded in (("v1/chat/completions", 0), ("atropos/v1/chat/completions", 2)):
            assert (await it.post(chat, f"/{path}"))[0] == 200
            assert len(it.atropos.calls) == recorded, "calls of other clients are nobody's to score"
        assert (await it.post(chat | {"model": "policy@v12"}, "/atropos/v1/chat/completions"))[0] == 200
        assert len(it.atropos.calls) == 2


@asynchronous
async def test_when_nothing_more_is_wanted_the_environment_is_told_to_come_again_and_nothing_is_lost(tmp_path):
    async with scene(tmp_path) as it:
        for _ in range(4):
            assert (await post(it, scored(await generate(it))))[0] == 200
        late = scored(await generate(it))
        status, answer = await post(it, late)
        assert (status, answer["error"]["type"]) == (503, "busy")  # which Atropos tries again
        assert (await ask(it, "status"))[1]["queue_size"] == 8
        await it.atropos.fulfil(12)
        assert (await post(it, late))[0] == 200
        assert (await post(it, late))[0] == 200, "it was accepted before it was full"
        late["tokens"][0][-1] = late["masks"][0][-1] = 9
        assert (await post(it, late))[0] == 400, "coming again would not help"
        it.registry.swap(14)  # two versions later no step takes what v12 sampled
        assert (await ask(it, "status"))[1]["queue_size"] == 4
        assert it.atropos.outcomes == {"leased": 1, "stale": 4, "void": 0, "duplicate": 1, "refused": 1, "busy": 1}


@asynchronous
async def test_no_environment_leaves_before_the_run_has_ended(tmp_path):
    async with scene(tmp_path, version=50) as it:  # the last one
        for _ in range(4):
            await post(it, scored(await generate(it)))
        num_steps = (await post(it, REGISTRATION, "register-env"))[1]["num_steps"]
        status = (await ask(it, "status-env", {"env_id": 0}))[1]
        batch_size = (await ask(it, "info"))[1]["batch_size"]
        at_most = status["current_step"] + status["queue_size"] * REGISTRATION["group_size"] // batch_size
        assert at_most <= num_steps, "this is when BaseEnv ends, and groups in the queue may have no signal"


@asynchronous
async def test_another_trainer_process_makes_what_was_sampled_void(tmp_path):
    async with scene(tmp_path) as it:
        kept, posted = scored(await generate(it)), scored(await generate(it))
        assert (await post(it, posted))[0] == 200
        it.atropos.forget()
        assert it.atropos.outcomes["void"] == 1
        assert (await post(it, kept))[0] == 400


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "text"},
        {"prompt": {"prompt_token_ids": []}},
        {"prompt": {"prompt_token_ids": [True]}},
        {"prompt": {"prompt_token_ids": [[1]]}},
        {"prompt": {"prompt_token_ids": [1]}, "logprobs": 5},
        {"prompt": {"prompt_token_ids": [1]}, "stream": True},
        {"prompt": {"prompt_token_ids": [1]}, "logits_processors": ["x"]},
        {"prompt": {"prompt_token_ids": [1]}, "prompt_logprobs": 1},
    ],
)
def test_what_generate_does_not_serve_is_refused(body):
    with pytest.raises(RefusedError) as refused:
        parse_generate(json.dumps(body).encode())
    assert (refused.value.status, refused.value.reason) == (400, "malformed")


def test_a_body_is_bounded_when_it_is_unpacked():
    bomb = gzip.compress(bytes(2**20))
    assert unzip(bomb, 2**20) == bytes(2**20)
    for wrong, status in ((bomb, 413), (bomb[:-9], 400), (b"{}", 400)):
        with pytest.raises(RefusedError) as refused:
            unzip(wrong, 2**20 - 1 if status == 413 else 2**20)
        assert refused.value.status == status


@asynchronous
async def test_without_the_key_in_the_configuration_there_is_no_such_api(tmp_path):
    async with endpoint(tmp_path) as it:
        for path in ("scored_data", "register-env", "generate", "v1/completions"):
            assert (await it.post({}, f"/atropos/{path}"))[0] == 404
