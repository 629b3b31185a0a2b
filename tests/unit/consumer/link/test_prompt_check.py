"""The trainer compares the tokens that producers make of prompts with its own, now and then."""

import logging
from typing import Any

import msgspec
import numpy as np
import pytest

from consumer.link.dispatcher import EVERY, PromptCheck
from protocol.wire.messages import Ack, Group
from tests.unit.consumer.link.builders import Start, Trainer, answer, only


def tokens_of(prompt: str) -> list[int]:
    """Token 7, then one for each digit."""
    return [7, *map(int, prompt)]


def checking(start: Start, tokens: Any = tokens_of, **budget: int) -> Trainer:
    trainer = start(**budget)
    trainer.intake._dispatcher.prompt_check = PromptCheck(tokens)
    return trainer


def of_tokens(group: Group, *token_ids: int) -> Group:
    return msgspec.structs.replace(group, prompt_ids=np.array(token_ids, "<i4").tobytes())


def test_equal_tokens_are_no_difference(start: Start) -> None:
    trainer = checking(start, groups_per_step=3)
    producer = trainer.producer()
    for lease in producer.leases:
        producer.say(of_tokens(answer(lease), *tokens_of(lease.prompt)))
    assert trainer.replay.totals["prompts_differ"] == 0
    assert trainer.replay.totals["accepted"] == 3


@pytest.mark.parametrize(
    ("theirs", "where"),
    [
        ((7, 5), "makes 2 tokens of a prompt of which the trainer makes 2, and number 1 is"),
        ((7,), "makes 1 tokens of a prompt of which the trainer makes 2, and number 1 is"),
        ((7, 0, 0), "makes 3 tokens of a prompt of which the trainer makes 2, and number 2 is"),
    ],
)
def test_a_difference_is_counted_and_told_and_the_group_is_kept(
    start: Start, caplog: pytest.LogCaptureFixture, theirs: tuple[int, ...], where: str
) -> None:
    trainer = checking(start, groups_per_step=1)
    producer = trainer.producer()
    [lease] = producer.leases
    assert lease.prompt == "0"
    with caplog.at_level(logging.WARNING):
        assert only(producer.say(of_tokens(answer(lease), *theirs)), Ack).outcome == "accepted"
    assert trainer.replay.totals["prompts_differ"] == 1
    assert where in caplog.text


def test_the_first_answer_is_compared_whichever_it_is_and_then_none_for_long(start: Start) -> None:
    trainer = checking(start, groups_per_step=3)
    producer = trainer.producer()
    first, second, third = producer.leases
    for lease in (third, first, second):
        producer.say(of_tokens(answer(lease), 9))
    assert trainer.replay.totals["prompts_differ"] == 1


def test_one_of_every_few_leases_is_compared_and_no_more_are_remembered(start: Start) -> None:
    check = PromptCheck(tokens_of)
    trainer = start(groups_per_step=3)
    producer = trainer.producer()
    [session] = trainer.intake.fleet.sessions.values()
    group = answer(producer.leases[0])
    for number in range(1000):  # of which none is answered
        check.note(session, f"lost-{number}", "1")
    assert 0 < len(session.noted_prompts) < 100
    compared = []
    for number in range(3 * EVERY):
        check.note(session, f"lease-{number}", "1")
        if check.difference(session, msgspec.structs.replace(group, lease_id=f"lease-{number}")):
            compared.append(number)
    assert compared == [0, EVERY, 2 * EVERY]


def test_a_template_that_raises_is_told(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(prompt: str) -> list[int]:
        raise ValueError("no system message")

    trainer = checking(start, refuse, groups_per_step=1)
    producer = trainer.producer()
    with caplog.at_level(logging.WARNING):
        assert only(producer.say(answer(producer.leases[0])), Ack).outcome == "accepted"
    assert "no system message" in caplog.text


def test_bytes_that_are_no_tokens_are_refused_as_ever(start: Start) -> None:
    trainer = checking(start, groups_per_step=1)
    producer = trainer.producer()
    producer.say(msgspec.structs.replace(answer(producer.leases[0]), prompt_ids=b"\0\0\0"))
    assert trainer.replay.totals["failed_invalid"] == 1
