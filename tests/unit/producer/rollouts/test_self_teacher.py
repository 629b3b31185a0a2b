"""The policy as its own teacher: what it sees, which version scores, and what fails."""

import asyncio
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from producer.engine_contract import Adapter, Completion
from producer.engine_gate import EngineGate
from producer.groups import Episode, LeaseFailure, Record, group_message
from producer.metrics import Counters
from producer.rollouts.in_flight import InFlight
from producer.rollouts.prompts import PromptFormat
from producer.rollouts.self_teacher import SelfTeacher
from protocol.config.distillation import TeacherSection
from protocol.errors import EngineError
from protocol.wire.messages import Group, Sampling
from tests.policies import Policies
from tests.scripted_trainer import lease
from tests.unit.producer.cancellation import cancel_at_each_wait
from tests.unit.producer.loop import asynchronous, settle
from tests.unit.producer.rollouts.test_chat import tokenizer as tokenizer_with

TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}={% endif %}"


class Engine:
    """The log-prob of token t on version v is -t / 1000 - v."""

    capabilities = SimpleNamespace(holds_versions=True)

    def __init__(self, policies: Policies) -> None:
        self.policies = policies
        self.asked: list[tuple[str, int]] = []
        self.problem: Exception | None = None
        self.instead: float | None = None
        self.waits: asyncio.Event | None = None

    async def score(self, token_ids: list[int], adapter: Adapter) -> list[float]:
        assert self.policies.pins[adapter.version] > 0
        self.asked.append(("".join(map(chr, token_ids)), adapter.version))
        await asyncio.sleep(0)
        if self.waits is not None:
            await self.waits.wait()
        if self.problem is not None:
            raise self.problem
        found = [-token / 1000 - adapter.version for token in token_ids[1:]]
        return found if self.instead is None else [*found[:-1], self.instead]


class Observer:
    def __init__(self) -> None:
        self.calls, self.failures = Counter[str](), Counter[str]()

    def teacher_called(self, teacher: str, seconds: float) -> None:
        self.calls[teacher] += 1

    def teacher_failed(self, teacher: str) -> None:
        self.failures[teacher] += 1


class Scene:
    def __init__(self, template: str = "{prompt} ({solution})", max_model_len: int = 64) -> None:
        self.policies, self.gate, self.observer = Policies(), EngineGate(), Observer()
        self.policies.swap(3)
        self.engine = Engine(self.policies)
        in_flight = InFlight(self.engine, self.policies, Counters(), "finish", gate=self.gate)  # type: ignore[arg-type]
        section = TeacherSection.model_validate({"name": "self", "prompt": template})
        prompts = PromptFormat(tokenizer_with(TEMPLATE), max_model_len, {})
        self.teacher = SelfTeacher(section, prompts, in_flight.score, self.observer)

    async def logprobs(self, group: Group, prompt: Any = "1+1=", **columns: Any) -> list[float]:
        given = lease(7, sampling=Sampling(1, 8, 1.0), prompt=prompt, columns={"solution": "two", "n": 2} | columns)
        return (await self.teacher.logprobs(given, group)).tolist()

    async def refusal(self, group: Group, **changes: Any) -> LeaseFailure:
        with pytest.raises(LeaseFailure) as caught:
            await self.logprobs(group, **changes)
        return caught.value


def group_of(*texts: str, versions: tuple[int, ...] = (3,)) -> Group:
    episodes = [
        Episode.of(
            [1, 2],
            Completion([*map(ord, text)], [-0.5] * len(text), False, (list(versions) * len(text))[: len(text)]),
        )
        for text in texts
    ]
    return group_message("7.0", episodes, np.zeros((len(texts), 1), "f4"), 64, 0.0, 0.0)


@asynchronous
async def test_every_completion_is_scored_behind_the_teachers_prompt():
    scene = Scene()
    found = await scene.logprobs(group_of("a", "bc"))
    assert found == pytest.approx([-3.097, -3.098, -3.099]), "97, 98 and 99 on version 3"
    assert scene.engine.asked == [("1+1= (two)a", 3), ("1+1= (two)bc", 3)]
    assert (scene.observer.calls, scene.observer.failures) == ({"self": 2}, {})
    assert scene.policies.pinned() == set()


@asynchronous
async def test_in_messages_the_text_stands_in_place_of_the_last_one():
    scene, messages = Scene("{n}{{{solution}}}: {prompt}"), [{"role": "system", "content": "s"}]
    await scene.logprobs(group_of("a"), prompt=[*messages, {"role": "user", "content": "q"}])
    assert scene.engine.asked == [("<s><2{two}: q>=a", 3)]
    failure = await scene.refusal(group_of("a"), prompt=[{"role": "user", "content": [{"type": "text", "text": "q"}]}])
    assert failure.reason == "bad_prompt"


@asynchronous
async def test_tokens_of_several_versions_are_scored_on_the_newest_and_if_it_is_gone_on_the_current_one():
    scene = Scene()
    group = group_of("abcd", versions=(2, 3))
    await scene.logprobs(group)
    scene.policies.swap(5)
    assert await scene.logprobs(group) == pytest.approx([-5.097, -5.098, -5.099, -5.1])
    assert [version for _, version in scene.engine.asked] == [3, 5]


@asynchronous
async def test_what_was_shown_is_seen_and_has_no_log_prob():
    record = Record.of([1, 2])
    record.sampled(Completion([97], [-0.5], False, [3]))
    record.show([98])
    record.sampled(Completion([99], [-0.5], False, [3]))
    scene = Scene()
    group = group_message("7.0", [Episode(2, [record])], np.zeros((1, 1), "f4"), 64, 0.0, 0.0)
    assert await scene.logprobs(group) == pytest.approx([-3.097, 0, -3.099])
    assert scene.engine.asked == [("1+1= (two)abc", 3)]


@asynchronous
async def test_a_failure_is_one_of_the_lease_and_never_a_zero():
    scene = Scene()
    scene.engine.problem = LeaseFailure("generation_failed", "vLLM refused: no")
    failure = await scene.refusal(group_of("a"))
    assert (failure.reason, failure.detail) == ("generation_failed", "teacher self: vLLM refused: no")
    scene.engine.problem = None
    for instead in (math.nan, 0.5, math.inf):
        scene.engine.instead = instead
        assert (await scene.refusal(group_of("a"))).reason == "generation_failed"
    assert scene.observer.failures == {"self": 4}
    scene.engine.instead = -math.inf
    assert await scene.logprobs(group_of("a")) == [-9999.0], "as over HTTP"
    scene.engine.problem = EngineError("it died")
    with pytest.raises(EngineError):
        await scene.logprobs(group_of("a", "b"))


@asynchronous
async def test_a_row_without_the_column_and_a_prompt_that_leaves_no_room_are_refused():
    scene = Scene(max_model_len=18)  # a prompt of 9, a completion of 8, and the token that vLLM samples
    for solution in (None, "", ["two"], True):
        failure = await scene.refusal(group_of("a"), solution=solution)
        assert failure.reason == "bad_prompt"
        assert "'solution'" in failure.detail
    assert await scene.logprobs(group_of("a"), solution="xx")
    assert (await scene.refusal(group_of("a"), solution="xxx")).reason == "prompt_too_long"


@asynchronous
async def test_it_waits_outside_the_engine_while_the_trainer_has_its_turn():
    scene = Scene()
    await scene.gate.close(0.0)
    scoring = asyncio.create_task(scene.logprobs(group_of("a")))
    await settle()
    assert scene.engine.asked == []
    scene.gate.open()
    assert await scoring == pytest.approx([-3.097])


@asynchronous
async def test_what_is_cancelled_anywhere_leaves_no_request_and_no_pin():
    scene = Scene()

    def check() -> None:
        assert scene.policies.pinned() == set()

    await cancel_at_each_wait(lambda: scene.logprobs(group_of("a", "b")), check)
