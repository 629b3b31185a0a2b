"""Leases in the hands of outside agents: what becomes of them, whatever agents do."""

import asyncio

import msgspec
import numpy as np
import pytest

from producer.groups import LeaseFailure
from protocol.wire.messages import Sampling
from slipstream_extras.endpoint.agents import Agents
from slipstream_extras.endpoint.openai import RefusedError, Sampled, ServedRequest
from tests.scripted_trainer import lease
from tests.unit.producer.cancellation import cancel_at_each_wait
from tests.unit.producer.loop import asynchronous

CALL = ServedRequest("chat", "policy", {"messages": []}, 1, {})


def sampled(prompt_ids: list[int], token_ids: list[int], version: int = 3, reason: str = "stop") -> Sampled:
    return Sampled(prompt_ids, token_ids, [-0.5] * len(token_ids), [version] * len(token_ids), reason)


def task(**changes):
    return lease(7, sampling=Sampling(2, 8, 0.7), **changes)


async def begun(agents: Agents, **changes):
    """A task that an agent has taken."""
    fulfilling = asyncio.create_task(agents.fulfil(task(**changes)))
    return fulfilling, await agents.take(5.0)


def note(agents: Agents, number: int, prompt_ids: list[int], token_ids: list[int], **how) -> None:
    """A call of an episode of the task."""
    agents.prepare(f"lease-7.{number}", CALL)[0].note(sampled(prompt_ids, token_ids, **how))


@asynchronous
async def test_two_records_of_the_same_tokens_are_told_apart():
    agents = Agents(("solved",))
    fulfilling, _ = await begun(agents)
    for number in (0, 1):
        note(agents, number, [1, 2], [3, 4])
    note(agents, 0, [1, 2], [3, 4])  # once more, and the same comes out
    note(agents, 0, [1, 2, 3, 4, 9], [5])
    for number in (0, 1):
        agents.reward(f"lease-7.{number}", {"solved": 1.0})
    (first, _), *_ = await fulfilling
    assert [record.token_ids for record in first.records] == [[1, 2, 3, 4], [1, 2, 3, 4, 9, 5]]


@asynchronous
async def test_an_episode_whose_calls_do_not_extend_each_other_is_bounded(monkeypatch):
    monkeypatch.setattr("slipstream_extras.endpoint.agents._MAX_TOKENS", 40)
    agents = Agents(("solved",))
    fulfilling, _ = await begun(agents)
    for number in range(4):
        note(agents, 0, [number] * 9, [1])
    with pytest.raises(RefusedError) as caught:
        note(agents, 0, [9], [1])
    assert caught.value.status == 400
    note(agents, 1, [9], [1])
    for number in (0, 1):
        agents.reward(f"lease-7.{number}", {"solved": 1.0})
    assert len((await fulfilling)[0][0].records) == 4


@asynchronous
async def test_a_task_goes_to_one_agent_and_its_rewards_end_it():
    agents = Agents(("solved", "style"))
    fulfilling, taken = await begun(agents)
    assert 50.0 < taken.pop("expires_in_s") <= 57.0
    assert taken == {
        "id": "lease-7",
        "prompt": "1+1=",
        "columns": {"answer": "2"},
        "episodes": ["lease-7.0", "lease-7.1"],
        "rewards": ["solved", "style"],
        "max_tokens": 8,
    }
    assert await agents.take(0.01) is None
    for number, tokens in enumerate(([10, 11], [12])):
        episode, request = agents.prepare(f"lease-7.{number}", CALL)
        assert request.fields["temperature"] == 0.7
        assert request.fields["max_completion_tokens"] == 8
        episode.note(sampled([1, 2, 3], tokens))
    assert agents.reward("lease-7.1", {"solved": 1, "style": None})["episodes_left"] == 1
    again = agents.reward("lease-7.1", {"solved": 1.0, "style": None})
    assert again == {"id": "lease-7.1", "task": "lease-7", "episodes_left": 1}
    with pytest.raises(RefusedError, match="has other rewards already"):
        agents.reward("lease-7.1", {"solved": 0.0, "style": None})
    assert agents.reward("lease-7.0", {"solved": 0.0, "style": 0.5})["episodes_left"] == 0
    episodes, rewards, _ = await fulfilling
    np.testing.assert_array_equal(rewards, np.array([[0.0, 0.5], [1.0, np.nan]], "f4"))
    assert [episode.token_ids for episode in episodes] == [[10, 11], [12]]
    with pytest.raises(RefusedError, match="no such episode"):
        agents.reward("lease-7.0", {"solved": 0.0, "style": 0.5})


@asynchronous
async def test_calls_that_go_on_where_a_record_ends_extend_it_and_others_fork():
    agents = Agents(("solved",))
    fulfilling, _ = await begun(agents)
    note(agents, 0, [1, 2], [10], version=3)
    note(agents, 0, [1, 2, 10, 50, 51], [11], version=4)  # 50, 51: what a tool said
    note(agents, 1, [1, 2], [12])
    note(agents, 1, [1, 2, 99], [13])  # the history was rewritten
    note(agents, 1, [1, 2, 99, 13], [14], reason="length")
    for number in range(2):
        agents.reward(f"lease-7.{number}", {"solved": float(number)})
    episodes, _, _ = await fulfilling
    assert [[record.token_ids for record in episode.records] for episode in episodes] == [
        [[1, 2, 10, 50, 51, 11]],
        [[1, 2, 12], [1, 2, 99, 13, 14]],
    ]
    assert episodes[0].records[0].versions.tolist() == [-1, -1, 3, -1, -1, 4]
    assert [(episode.prompt_length, episode.truncated) for episode in episodes] == [(2, False), (2, True)]


async def failure(fulfilling) -> tuple[str, str]:
    with pytest.raises(LeaseFailure) as failed:
        await fulfilling
    return failed.value.reason, failed.value.detail


@asynchronous
async def test_what_its_time_leaves_undone():
    agents = Agents(("solved",))
    assert await failure(agents.fulfil(task(timeout_s=0.1))) == ("returned", "no agent worked on it")
    assert await agents.take(0.0) is None
    late = agents.fulfil(task(timeout_s=60.0), waited_s=57.0)  # for its policy; 5 % are for scoring and delivery
    assert await failure(late) == ("returned", "no agent worked on it")

    fulfilling, _ = await begun(agents, timeout_s=0.1)
    assert await failure(fulfilling) == ("returned", "no agent worked on it")

    fulfilling, _ = await begun(agents, timeout_s=0.1)
    note(agents, 0, [1], [2])
    agents.reward("lease-7.0", {"solved": 1.0})
    reason, said = await failure(fulfilling)
    assert reason == "generation_failed"
    assert "left 1 of 2 episodes without a completion and 1 without rewards" in said

    fulfilling, _ = await begun(agents, timeout_s=0.1)
    for number in range(2):
        note(agents, number, [1], [2])
    agents.reward("lease-7.0", {"solved": 1.0})
    running, _ = agents.prepare("lease-7.1", CALL)
    episodes, rewards, _ = await fulfilling
    np.testing.assert_array_equal(rewards, np.array([[1.0], [np.nan]], "f4"))
    assert agents.unrewarded == 2
    running.note(sampled([1, 2], [3]))  # it was in the engine when the time was over
    assert [episode.token_ids for episode in episodes] == [[2], [2]]


@pytest.mark.parametrize("value", [{(1, 2): 3}, [{None: 1}], msgspec.msgpack.Ext(3, b"x")])
@asynchronous
async def test_a_row_that_no_agent_can_be_sent_fails_its_prompt_and_the_next_one_is_handed_out(value):
    agents = Agents(("solved",))
    asking = asyncio.create_task(agents.take(5.0))
    with pytest.raises(LeaseFailure, match="'grid'") as caught:
        await agents.fulfil(task(columns={"answer": "2", "grid": value}))
    assert (caught.value.reason, agents.num_waiting) == ("bad_prompt", 0)
    fulfilling = asyncio.create_task(agents.fulfil(task()))
    taken = await asking
    assert taken is not None
    assert taken["columns"] == {"answer": "2"}
    fulfilling.cancel()


@asynchronous
async def test_an_episode_that_failed_has_no_rewards_and_without_a_completion_costs_its_task():
    agents = Agents(("solved",))
    fulfilling, _ = await begun(agents)
    for number in range(2):
        note(agents, number, [1], [2])
    assert agents.fail("lease-7.0", "the tool hangs")["episodes_left"] == 1
    assert agents.fail("lease-7.0", "the tool hangs")["episodes_left"] == 1
    with pytest.raises(RefusedError, match="has other rewards already"):
        agents.reward("lease-7.0", {"solved": 1.0})
    agents.reward("lease-7.1", {"solved": 1.0})
    with pytest.raises(RefusedError, match="has its rewards already"):
        agents.fail("lease-7.1", "too late")
    episodes, rewards, _ = await fulfilling
    np.testing.assert_array_equal(rewards, np.array([[np.nan], [1.0]], "f4"))
    assert [episode.failure for episode in episodes] == ["the tool hangs", ""]
    assert (agents.rewarded, agents.failed) == (1, 1)

    fulfilling, _ = await begun(agents)
    agents.fail("lease-7.1", "no room")
    said = "an episode failed before anything was sampled for it: no room"
    assert await failure(fulfilling) == ("environment_failed", said)


@asynchronous
async def test_the_tasks_of_an_agent_that_is_gone_fail_at_once_and_waiting_ones_stay():
    agents = Agents(("solved",))
    fulfilling, _ = await begun(agents)
    note(agents, 0, [1], [2])
    other = asyncio.create_task(agents.fulfil(lease(8, sampling=Sampling(2, 8, 0.7))))
    await asyncio.sleep(0)
    agents.fail_taken("killed")
    assert await failure(fulfilling) == ("environment_failed", "killed")
    assert agents.failed == 2
    assert (await agents.take(1.0) or {})["id"] == "lease-8"
    other.cancel()


@asynchronous
async def test_what_could_not_be_trained_is_refused():
    agents = Agents(("solved",))
    fulfilling, _ = await begun(agents)
    for changes, said in (
        ({"temperature": 0.2}, "episodes are sampled with temperature=0.7, as the run is; leave it out"),
        ({"top_p": 0.9}, "top_p=1"),
        ({"presence_penalty": 1.5}, "presence_penalty=0"),
    ):
        with pytest.raises(RefusedError, match=said):
            agents.prepare("lease-7.0", CALL.with_fields(changes))
    for values, said in (
        ({}, "for each of solved"),
        ({"solved": float("inf")}, "expected a finite number"),
        ({"solved": True}, "expected a finite number"),
        ({"solved": 1.0, "other": 1.0}, "expected a finite number"),
        ({"solved": 1.0}, "nothing was sampled"),
    ):
        with pytest.raises(RefusedError, match=said):
            agents.reward("lease-7.0", values)
    for name in ("lease-7.2", "lease-8.0", ""):
        with pytest.raises(RefusedError, match="no such episode"):
            agents.prepare(name, CALL)
    fulfilling.cancel()


class Tokenizer:
    """Each token from 100 on is a character of its own, and each below two; 3 has no text."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join("" if each == 3 else "é!" if each < 100 else chr(each) for each in ids)


def credit(episode) -> list[list[float | None]]:
    return [[None if np.isnan(each) else float(each) for each in record.credit] for record in episode.records]


@asynchronous
async def test_rewards_of_spans_and_turns_lie_on_their_tokens_with_their_weights():
    agents = Agents(("solved", "style", "seen"), {"solved": 2.0, "style": 1.0, "seen": 0.0})
    agents.read_with(Tokenizer())
    fulfilling, _ = await begun(agents)
    note(agents, 0, [1, 2], [10, 11])
    note(agents, 0, [1, 2, 10, 11, 50], [12])  # 50: what a tool said
    note(agents, 0, [1, 2, 99], [13, 14])  # another record
    note(agents, 1, [1, 2], [112, 3, 20, 113])  # pé!q
    posted = {"solved": {"turns": [0.5, None, -1.0]}, "style": {"tokens": [[2, 0.25]]}, "seen": {"turns": [1, 1, 1]}}
    agents.reward("lease-7.0", posted)
    assert agents.reward("lease-7.0", posted)["episodes_left"] == 1, "the same ones a second time are harmless"
    with pytest.raises(RefusedError, match="has other rewards already"):
        agents.reward("lease-7.0", posted | {"style": {"tokens": [[2, 0.5]]}})
    agents.reward("lease-7.1", {"solved": None, "style": {"characters": [[1, 1.0], [2, 2.0], [4, 4.0]]}, "seen": 1.0})
    (one, other), rewards, _ = await fulfilling
    np.testing.assert_array_equal(rewards, np.array([[-0.5, 0.25, 3.0], [np.nan, 7.0, 1.0]], "f4"))
    assert credit(one) == [[None, None, None, 1.0, None, None], [None, None, None, 0.25, -2.0]]
    assert credit(other) == [[None, None, 1.0, None, 2.0, 4.0]]


@asynchronous
async def test_rewards_of_parts_that_do_not_fit_are_refused_and_change_nothing():
    agents = Agents(("solved", "style"))
    fulfilling, _ = await begun(agents)
    note(agents, 0, [1, 2], [10, 11])
    for value, said in (
        ({"tokens": [[2, 1.0], [2, 1.0]]}, "solved has span 1, which ends at 2 and begins at 2"),
        ({"tokens": [[3, 1.0]]}, "solved has a span that ends at 3, and the completion has 2 tokens"),
        ({"tokens": [[1.5, 1.0]]}, "solved has span 0"),
        ({"tokens": [[1, None]]}, "solved has span 0, whose reward is None"),
        ({"tokens": [[1, 3e38], [2, 3e38]]}, "solved has a sum of rewards"),
        ({"tokens": []}, "solved is"),
        ({"words": [[1, 1.0]]}, "solved is"),
        ({"characters": [[1, 1.0]]}, "give them in tokens"),
        ({"turns": [1.0, 1.0]}, "for each of 1 answered calls"),
        ({"turns": 1.0}, "for each of 1 answered calls"),
        ({"turns": ["x"]}, "solved has turn 0, whose reward is 'x'"),
        ({"turns": [1.0], "tokens": []}, "for each of 1 answered calls"),
    ):
        with pytest.raises(RefusedError, match=said):
            agents.reward("lease-7.0", {"style": {"turns": [1.0]}, "solved": value})
    note(agents, 1, [1, 2], [10])
    for number in range(2):
        agents.reward(f"lease-7.{number}", {"style": None, "solved": {"turns": [None]}})
    episodes, rewards, _ = await fulfilling
    assert np.isnan(rewards).all()
    assert [credit(each) for each in episodes] == [[[None] * 4], [[None] * 3]]


@asynchronous
async def test_an_agent_that_is_cancelled_anywhere_leaves_its_task_to_another():
    agents = Agents(("solved",))
    leases: list[asyncio.Task] = []

    async def take() -> None:
        taken = await agents.take(60.0)
        assert taken is not None
        agents.fail(taken["episodes"][0], "it goes on")

    async def offer() -> None:  # before the agent comes, and while it waits
        leases.append(asyncio.ensure_future(agents.fulfil(lease(len(leases), sampling=Sampling(1, 8, 0.7)))))
        if len(leases) % 2:
            await asyncio.sleep(0)

    def check() -> None:
        left = [one for one in leases if not one.done()]
        assert agents.num_waiting == len(left) == len(agents._episodes)

    await cancel_at_each_wait(take, check, offer)
    for one in leases:
        one.cancel()
    assert await asyncio.gather(*leases, return_exceptions=True)
    assert (agents.num_waiting, agents._episodes) == (0, {})


@asynchronous
async def test_an_agent_gets_tasks_of_its_environment_alone_and_posts_what_that_asks_for():
    agents = Agents(environments={"maze": {"environment": 0.5}, "shop": {"solved": 1.0, "environment": 1.0}})
    works = [task(columns={"environment": name}) for name in ("maze", "shop")]
    works[1] = msgspec.structs.replace(works[1], lease_id="lease-8")
    fulfilling = [asyncio.create_task(agents.fulfil(work, environment=work.columns["environment"])) for work in works]
    with pytest.raises(RefusedError, match="agents play maze, shop"):
        await agents.take(0.0)
    with pytest.raises(RefusedError, match="'mze'"):
        await agents.take(0.0, "mze")
    taken = await agents.take(1.0, "shop")
    assert taken is not None
    assert (taken["id"], taken["rewards"]) == ("lease-8", ["solved", "environment"])
    assert await agents.take(0.0, "shop") is None
    assert agents.num_waiting == 1
    agents.prepare("lease-8.0", CALL)[0].note(sampled([1], [2]))
    with pytest.raises(RefusedError, match="solved, environment"):
        agents.reward("lease-8.0", {"environment": 1.0})
    agents.reward("lease-8.0", {"solved": 1.0, "environment": 2.0})
    agents.fail_taken("its agent has ended", "maze")
    assert not any(each.done() for each in fulfilling)
    agents.prepare("lease-8.1", CALL)[0].note(sampled([1], [2]))
    agents.reward("lease-8.1", {"solved": None, "environment": 0.0})
    _, rewards, _ = await fulfilling[1]
    np.testing.assert_array_equal(rewards, [[1.0, 2.0], [np.nan, 0.0]])
    fulfilling[0].cancel()


@asynchronous
async def test_one_environment_that_agents_play_need_not_be_named():
    agents = Agents(environments={"maze": {"environment": 1.0}})
    fulfilling = asyncio.create_task(agents.fulfil(task(), environment="maze"))
    taken = await agents.take(1.0)
    assert taken is not None
    assert taken["id"] == "lease-7"
    agents.fail_taken("its agent has ended", "maze")
    with pytest.raises(LeaseFailure, match="has ended"):
        await fulfilling
    with pytest.raises(RefusedError, match="without `environments`"):
        await Agents(("solved",)).take(0.0, "maze")
