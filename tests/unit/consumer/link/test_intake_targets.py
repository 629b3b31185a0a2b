"""Which producers the trainer names to Prometheus."""

from protocol.exposition import Target
from protocol.wire.messages import Bye, Hello
from tests.scripted import facts
from tests.unit.consumer.link.builders import Producer, Start


def test_producers_that_can_be_reached_are_named_while_they_are_connected(start: Start) -> None:
    trainer = start()
    first, second = (Producer(trainer, trainer.channel.connect(name), name) for name in ("first", "second"))
    first.say(Hello("first", facts(), 1, host="gpu7", metrics="gpu7:9465"))
    second.say(Hello("second", facts(), 1, host="gpu8"))  # it serves its metrics for its own host alone
    assert trainer.intake.fleet.targets() == [Target("gpu7:9465", "rl-producer", "first", "gpu7")]
    first.say(Bye("stopping"))
    assert trainer.intake.fleet.targets() == []
