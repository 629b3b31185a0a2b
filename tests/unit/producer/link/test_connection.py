"""One greeting at a time, silence noticed on time, waiting said aloud."""

import pytest

from producer.link.session import Connection


@pytest.fixture
def connection(caplog) -> Connection:
    caplog.set_level("INFO", logger="producer")
    return Connection("ipc:///run", timeout_s=6.0)


def test_an_unanswered_greeting_is_given_up_and_the_next_one_waits_a_moment(connection):
    assert connection.hello_due(100.0)
    connection.hello_at = 100.0
    assert not connection.hello_due(105.9)
    assert not connection.hello_unanswered(105.9)
    assert connection.hello_unanswered(106.0)
    connection.start_over(106.0)
    assert not connection.hello_unanswered(106.0)
    assert not connection.hello_due(106.2)
    assert connection.hello_due(106.31)


def test_silence_counts_only_while_connected(connection):
    connection.heard_at = 100.0
    assert not connection.is_silent(200.0)
    connection.connected = True
    assert not connection.is_silent(106.0)
    assert connection.is_silent(106.1)
    connection.await_trainer(106.1, "the trainer has been silent for 6 s")
    assert not connection.connected
    assert not connection.is_silent(200.0)


def test_waiting_is_said_at_once_and_every_ten_seconds(connection, caplog):
    connection.await_trainer(100.0)
    for tenth in range(1, 250):
        connection.remind(100.0 + tenth / 10)
    connection.connected = True
    connection.await_trainer(200.0, "the trainer is stopping")
    assert [record.message for record in caplog.records] == [
        "waiting for the trainer at ipc:///run",
        "waiting for the trainer at ipc:///run (10 s)",
        "waiting for the trainer at ipc:///run (20 s)",
        "the trainer is stopping; waiting for it at ipc:///run",
    ]
