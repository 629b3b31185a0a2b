"""The order of a producer's life, with a stand-in for the engine: what ends it, and that everything is closed after."""

import asyncio
import sys
from pathlib import Path
from types import ModuleType

import pytest

from producer import daemon
from protocol.config import RunConfig
from protocol.errors import ConfigError, EngineError, IncompatiblePeerError
from protocol.messages import Bye, Hello, Nack, PolicyInfo
from protocol.zmq_channel import ZmqServer
from tests.scripted import facts
from tests.scripted_trainer import ScriptedTrainer, lease
from tests.unit.producer.test_adapters import FakeEngine


class Engine(FakeEngine):
    """Dies `alive_s` after it was started."""

    folder = Path("unused")
    max_num_seqs = 8
    alive_s = 3600.0
    dies_in_warm_up = False

    def __init__(self, config: RunConfig, num_gpus: int) -> None:
        super().__init__()
        self.facts = facts()
        self.num_gpus = num_gpus
        self.shut_down = False
        made.append(self)

    async def warm_up(self) -> None:
        if self.dies_in_warm_up:
            raise EngineError("no warm-up")
        self.dies_at = asyncio.get_running_loop().time() + self.alive_s

    def check_alive(self) -> None:
        if asyncio.get_running_loop().time() > self.dies_at:
            raise EngineError("the engine core has ended")

    def shutdown(self) -> None:
        self.shut_down = True


made: list[Engine] = []


@pytest.fixture
def config(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    made.clear()
    fake = ModuleType("producer.engine")
    fake.Engine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "producer.engine", fake)
    monkeypatch.setattr(daemon, "load_tokenizer", lambda folder: lambda text: {"input_ids": [5, 6]})
    monkeypatch.setattr(daemon, "_WATCH_EVERY_S", 0.05)
    monkeypatch.setattr(daemon, "_SIGNAL_GRACE_S", 0.05)
    (short_dir / "rewards.py").write_text("def reward(completions, **_):\n    return [1.0] * len(completions)\n")
    return RunConfig.model_validate(
        {
            "run_dir": str(short_dir / "run"),
            "model": {"path": "unused"},
            "dataset": {"path": "unused"},
            "rewards": {"functions": [{"function": f"{short_dir}/rewards.py:reward"}], "num_workers": 1},
        }
    )


def live(config: RunConfig) -> None:
    asyncio.run(asyncio.wait_for(daemon._Producer(config, [0, 1]).live(), 30))


@pytest.fixture
def trainer(config: RunConfig):
    Path(config.run_dir).mkdir()
    server = ZmqServer(config.control_endpoint, config.blob_endpoint, config.transport.max_message_bytes)
    scripted = ScriptedTrainer(server, PolicyInfo(0, "0" * 64, 1000))
    scripted.loses_chunk = lambda request: True
    scripted.start()
    yield scripted
    scripted.stop()
    server.close()


def test_an_engine_that_dies_while_idle_ends_the_producer(config, monkeypatch):
    monkeypatch.setattr(Engine, "alive_s", 0.3)
    with pytest.raises(EngineError, match="the engine core has ended"):
        live(config)
    (engine,) = made
    assert engine.shut_down
    assert engine.num_gpus == 2


def test_an_engine_that_dies_with_leases_open_hands_them_back(config, monkeypatch, trainer):
    monkeypatch.setattr(Engine, "alive_s", 1.0)

    async def body() -> None:
        running = asyncio.create_task(daemon._Producer(config, []).live())
        await asyncio.to_thread(trainer.wait_for_message, Hello)
        trainer.send(lease(1))
        trainer.send(lease(2))
        await running

    with pytest.raises(EngineError, match="the engine core has ended"):
        asyncio.run(asyncio.wait_for(body(), 30))
    trainer.wait_for_message(Bye)
    assert sorted(trainer.all(Nack), key=lambda nack: nack.lease_id) == [
        Nack("lease-1", "returned"),
        Nack("lease-2", "returned"),
    ]
    assert made[0].shut_down


def test_a_refused_handshake_ends_the_producer(config, trainer):
    trainer.problems = ["another base model"]
    with pytest.raises(IncompatiblePeerError, match="another base model"):
        live(config)
    assert made[0].shut_down


def test_a_finished_trainer_ends_it_without_an_error(config, trainer):
    async def body() -> None:
        running = asyncio.create_task(daemon._Producer(config, []).live())
        await asyncio.to_thread(trainer.wait_for_message, Hello)
        trainer.send(Bye("finished"))
        await running

    asyncio.run(asyncio.wait_for(body(), 30))
    assert made[0].shut_down


def test_an_engine_that_fails_while_starting_is_closed(config, monkeypatch):
    monkeypatch.setattr(Engine, "dies_in_warm_up", True)
    with pytest.raises(EngineError, match="no warm-up"):
        live(config)
    assert made[0].shut_down


def test_reward_functions_are_imported_before_the_engine_is_loaded(config):
    broken = config.model_copy(
        update={"rewards": config.rewards.model_copy(update={"functions": [_missing_function(config)]})}
    )
    with pytest.raises(ConfigError, match="has no `nothing`"):
        live(broken)
    assert made == []


def _missing_function(config: RunConfig):
    (function,) = config.rewards.functions
    return function.model_copy(update={"function": function.function.replace(":reward", ":nothing")})
