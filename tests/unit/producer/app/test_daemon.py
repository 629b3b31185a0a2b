"""The order of a producer's life, with a stand-in for the engine: what ends it, and that everything is closed after."""

import asyncio
import concurrent.futures
import gc
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from producer.app import daemon
from producer.app import watchdog as supervision
from producer.app import wiring as assembly
from producer.app.wiring import Launch
from producer.engine_contract import Adapter, AdapterRefusedError, Completion, EngineCapabilities
from protocol.channel.server import ZmqServer
from protocol.config.distillation import DistillationSection, TeacherSection
from protocol.config.rewards import RewardsSection
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, EngineError, IncompatiblePeerError, PolicyRefusedError, StalledError
from protocol.exposition import Targets, Watch
from protocol.gpu import reservation as seat
from protocol.gpu import reservation as tenants
from protocol.gpu.nvml import Gpu
from protocol.runtime.health import Health, Notifier
from protocol.wire.messages import Ack, Bye, Group, Heartbeat, Hello, Nack, PolicyInfo
from tests.scripted import facts
from tests.scripted_trainer import ScriptedTrainer, lease
from tests.scripted_vllm_server import Flags, ScriptedVllmServer
from tests.unit.producer.policies.test_registry import FakeEngine, blob
from tests.unit.protocol.channel_harness import reserve_port
from tests.unit.protocol.gpu.models import run_of, write_model
from tests.unit.slipstream_extras.engine_server.test_teachers import Letters


def watch() -> Watch:
    return Watch(CollectorRegistry(), Health(60.0, Notifier(None)), Targets("run"), "127.0.0.1:9465")


class Engine(FakeEngine):
    """Dies `alive_s` after it was started."""

    alive_s = 3600.0
    out_of_order: str | None = None

    def __init__(self, config: RunConfig, num_gpus: int) -> None:
        super().__init__()
        self.capabilities = EngineCapabilities(facts(), Path("unused"), 8)
        self.num_gpus = num_gpus
        self.section = config.engine
        self.shut_down = False
        made.append(self)

    async def warm_up(self) -> None:
        self.dies_at = asyncio.get_running_loop().time() + self.alive_s

    def current_load(self) -> None:
        return None

    def watch_load(self, look: Callable[[], None]) -> None: ...

    def outage(self) -> str | None:
        return self.out_of_order

    def check_alive(self) -> None:
        if asyncio.get_running_loop().time() > self.dies_at:
            raise EngineError("the engine core has ended")

    def note_end(self) -> None:
        self.is_over = True

    def shutdown(self) -> None:
        self.shut_down = True


class Answering(Engine):
    """Answers at once."""

    async def generate(self, prompt_ids, sampling, adapter, cut):
        return [Completion([7, 8], [-0.5, -0.5], False, [adapter.version] * 2) for _ in range(sampling.num_generations)]


class Tokenizer:
    def __call__(self, text):
        return {"input_ids": [5, 6]}

    def batch_decode(self, completions, skip_special_tokens):
        return [str(ids) for ids in completions]


made: list[Engine] = []


def serve_blobs(trainer: ScriptedTrainer) -> None:
    trainer.policy, data = blob(0)
    trainer.blobs[trainer.policy.digest] = data
    trainer.loses_chunk = lambda request: False


@pytest.fixture
def config(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    made.clear()
    fake = ModuleType("producer.engine.engine")
    fake.VllmEngine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "producer.engine.engine", fake)
    monkeypatch.setattr(assembly, "load_tokenizer", lambda folder, **_: Tokenizer())
    monkeypatch.setattr(supervision, "_WATCH_EVERY_S", 0.05)
    monkeypatch.setattr(daemon, "_SIGNAL_GRACE_S", 0.05)
    return RunConfig.model_validate(
        {
            "run_dir": str(short_dir / "run"),
            "model": {"path": "unused"},
            "dataset": {"path": "unused"},
            "rewards": {"functions": [{"url": "http://localhost:9/score"}]},
        }
    )


@pytest.fixture
def scoring(config: RunConfig, short_dir: Path) -> RunConfig:
    """A process computes its rewards; the others' are a service's, which nobody asks."""
    (short_dir / "rewards.py").write_text("def reward(completions, **_):\n    return [1.0] * len(completions)\n")
    functions = [{"function": f"{short_dir}/rewards.py:reward"}]
    return config.model_copy(
        update={"rewards": RewardsSection.model_validate({"functions": functions, "num_workers": 1})}
    )


def live(
    config: RunConfig, play: Callable[[], object] | None = None, gpus: tuple[int, ...] = (0, 1), bundle: str = ""
) -> None:
    """Until it has ended, or `play` has failed, which is what a trainer does meanwhile."""

    async def body() -> None:
        playing = in_thread(play or (lambda: None))
        try:
            await asyncio.gather(daemon.live(Launch.of(config, list(gpus), bundle), watch()), playing)
        finally:
            playing.cancel()

    with asyncio.Runner(loop_factory=daemon._loop) as runner:
        runner.run(asyncio.wait_for(body(), 30))


def in_thread(play: Callable[[], object]) -> "asyncio.Future[object]":
    """Nobody waits for the end of the thread: it may wait for what a producer that failed would have sent."""
    played = concurrent.futures.Future[object]()
    played.set_running_or_notify_cancel()

    def work() -> None:
        try:
            played.set_result(play())
        except BaseException as error:
            played.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return asyncio.wrap_future(played)


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


def test_the_engine_on_a_shared_gpu_is_given_its_share(config, short_dir, monkeypatch):
    monkeypatch.setattr(Engine, "alive_s", 0.0)
    monkeypatch.setattr(seat, "gpu_facts", lambda index: Gpu(index, "GPU-a", 80 * 2**30, 80 * 2**30))
    monkeypatch.setattr(tenants, "ROOT", short_dir)
    shared = run_of(write_model(short_dir / "model"), run_dir=config.run_dir, rewards=config.rewards)
    with pytest.raises(EngineError, match="the engine core has ended"):
        live(shared, gpus=(0,))
    with pytest.raises(ConfigError, match="cannot be set with --connect"):
        live(shared, gpus=(0,), bundle="0" * 64)
    assert made[0].section == {"gpu_memory_utilization": 0.9}
    assert list(short_dir.glob("slipstream-*")) == []


def test_an_engine_that_dies_while_idle_ends_the_producer(config, monkeypatch):
    monkeypatch.setattr(Engine, "alive_s", 0.0)
    with pytest.raises(EngineError, match="the engine core has ended"):
        live(config)
    (engine,) = made
    assert engine.shut_down
    assert engine.num_gpus == 2


def test_what_is_there_when_the_engine_is_ready_is_not_searched_for_garbage_again(config, monkeypatch):
    monkeypatch.setattr(Engine, "alive_s", 0.0)
    there: list[object] = [config]
    gc.unfreeze()
    with pytest.raises(EngineError, match="the engine core has ended"):
        live(config)
    assert not any(one is there for one in gc.get_objects())  # it has none of those that are frozen
    gc.unfreeze()
    assert any(one is there for one in gc.get_objects())


def test_a_producer_that_fails_ends_its_test_also_while_a_trainer_waits_for_it(config, trainer, monkeypatch):
    monkeypatch.setattr(Engine, "alive_s", 0.0)
    with pytest.raises(EngineError, match="the engine core has ended"):
        live(config, lambda: trainer.wait_for_message(Group))


class Hanging(Engine):
    """Answers nothing any more: neither requests nor the unloading of an adapter."""

    async def generate(self, prompt_ids, sampling, adapter, cut):
        await asyncio.Event().wait()

    async def discard(self, adapter):
        await asyncio.Event().wait()


def changed(config: RunConfig, section: str, **values: object) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


@pytest.mark.long
def test_a_lease_whose_policy_never_comes_is_a_stall(scoring, trainer):
    with pytest.raises(StalledError, match=r"with 1 leases in hand") as said:
        live(changed(scoring, "pipeline", stall_timeout_s=0.5), lambda: trainer.give(lease(1, policy_floor=3)))
    assert "\n  leases waiting for policy v3 (none is loaded): 1\n" in str(said.value)
    assert "reward workers: 0 busy, 1 idle" in str(said.value)
    (timeline,) = Path(scoring.run_dir).glob("producer-*.jsonl")
    assert {"start", "stats", "stop"} == {json.loads(line)["event"] for line in timeline.read_text().splitlines()}
    trainer.wait_for_message(Bye)
    assert trainer.all(Nack) == [Nack("lease-1", "returned")]
    assert made[0].shut_down


@pytest.mark.long
def test_an_engine_that_hangs_with_its_adapters_does_not_keep_the_process(config, trainer, monkeypatch):
    monkeypatch.setattr(sys.modules["producer.engine.engine"], "VllmEngine", Hanging)
    monkeypatch.setattr(daemon, "_UNWIND_S", 0.2)
    serve_blobs(trainer)

    def play() -> None:
        trainer.give(lease(1))
        trainer.wait_for(lambda: trainer.all(Heartbeat) and trainer.all(Heartbeat)[-1].generating == 1)
        trainer.publish(*blob(1))  # v0 is kept by its request until that is cancelled
        trainer.wait_for(lambda: trainer.all(Heartbeat)[-1].policy_version == 1)

    started = time.monotonic()
    with pytest.raises(StalledError, match=r"leases generating: 1\n"):
        live(changed(config, "pipeline", stall_timeout_s=1.0), play)
    assert time.monotonic() - started < 15
    assert made[0].shut_down


@pytest.mark.long
def test_an_outbox_that_nobody_empties_pauses_generation_until_it_is_emptied_or_is_a_stall(
    scoring, trainer, monkeypatch
):
    monkeypatch.setattr(sys.modules["producer.engine.engine"], "VllmEngine", Answering)
    monkeypatch.setattr(daemon, "_FLUSH_S", 0.2)
    serve_blobs(trainer)
    trainer.acknowledges = False

    def play() -> None:
        trainer.give(lease(1))
        trainer.wait_for_message(Group)
        trainer.give(lease(2))
        trainer.wait_for(lambda: trainer.all(Heartbeat)[-1].waiting == 1)
        trainer.send(Ack("lease-1", "accepted", trainer.policy))
        trainer.wait_for_message(Group, 2)
        trainer.give(lease(3))

    with pytest.raises(StalledError) as said:
        live(changed(changed(scoring, "transport", max_unacked_bytes=0), "pipeline", stall_timeout_s=5.0), play)
    assert "\n  leases waiting for acknowledgements: 1\n" in str(said.value)
    assert "groups waiting for the trainer's acknowledgement: 1 (" in str(said.value)
    assert "bytes, above transport.max_unacked_bytes" in str(said.value)
    assert [group.lease_id for group in trainer.all(Group)] == ["lease-1", "lease-2"]
    beats = trainer.all(Heartbeat)
    assert (1, 0, 0, 1) in {(beat.waiting, beat.generating, beat.scoring, beat.unacked) for beat in beats}


def test_a_producer_says_where_it_is_and_where_it_hands_policies_on(config, trainer):
    with ExitStack() as stack:
        port = reserve_port(stack)

        def play() -> None:
            trainer.wait_for(lambda: trainer.all(Heartbeat) and trainer.all(Heartbeat)[-1].relay)
            trainer.send(Bye("finished"))

        live(changed(config, "transport", region="eu", relay_port=port), play)
    assert trainer.all(Heartbeat)[-1].relay == f"tcp://127.0.0.1:{port}"
    assert (trainer.all(Hello)[0].host, trainer.all(Hello)[0].region) == (socket.gethostname(), "eu")
    assert "relay" not in {thread.name for thread in threading.enumerate()}


class Reading(Tokenizer, Letters):
    pass


def taught(config: RunConfig, monkeypatch: pytest.MonkeyPatch, play: Callable[[], object], **flags: int) -> None:
    """A life with a teacher, whose tokenizer is that of the policy unless `flags` say something else."""
    monkeypatch.setattr(sys.modules["producer.engine.engine"], "VllmEngine", Answering)
    monkeypatch.setattr(assembly, "load_tokenizer", lambda folder, **_: Reading())

    async def body() -> None:
        server = await ScriptedVllmServer(Flags(max_model_len=1024, **flags)).start()
        teachers = [TeacherSection(name="big", url=server.url)]
        sections = {"teachers": teachers, "distillation": DistillationSection(mode="advantage")}
        try:
            launch = Launch.of(config.model_copy(update=sections), [0, 1])
            await asyncio.gather(daemon.live(launch, watch()), in_thread(play))
        finally:
            await server.kill()

    with asyncio.Runner(loop_factory=daemon._loop) as runner:
        runner.run(asyncio.wait_for(body(), 30))


def test_a_producer_asks_the_teachers_of_its_run(scoring, trainer, monkeypatch):
    serve_blobs(trainer)

    def play() -> None:
        trainer.give(lease(1))
        trainer.wait_for_message(Group)
        trainer.send(Bye("finished"))

    taught(scoring, monkeypatch, play)
    (group,) = trainer.all(Group)
    values = np.frombuffer(group.teacher_logprobs, "<f4")
    assert len(values) == len(group.completion_ids) // 4
    assert (values < 0).all()


def test_a_teacher_of_another_vocabulary_ends_the_start(config, monkeypatch):
    with pytest.raises(ConfigError, match="another tokenizer"):
        taught(config, monkeypatch, lambda: None, characters=9)
    assert made[0].shut_down


def test_a_refused_handshake_ends_the_producer(config, trainer):
    trainer.problems = ["another base model"]
    with pytest.raises(IncompatiblePeerError, match="another base model"):
        live(config)
    assert made[0].shut_down


def test_a_finished_trainer_ends_it_without_an_error(config, trainer):
    live(config, lambda: trainer.give(Bye("finished")))
    assert made[0].shut_down


async def _fail(engine: Engine) -> None:
    raise EngineError("no warm-up")


async def _hang(engine: Engine) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("warm_up", "said"),
    [(_fail, "no warm-up"), (_hang, r"did not answer its first request within pipeline\.stall_timeout_s=0\.05 s")],
)
def test_an_engine_that_does_not_start_is_closed(config, monkeypatch, warm_up, said):
    monkeypatch.setattr(Engine, "warm_up", warm_up)
    with pytest.raises((EngineError, StalledError), match=said):
        live(changed(config, "pipeline", stall_timeout_s=0.05))
    assert made[0].shut_down


def test_a_policy_that_is_refused_for_good_sends_its_leases_back_and_ends_the_producer_with_its_trainer(
    config, trainer, monkeypatch
):
    serve_blobs(trainer)
    monkeypatch.setattr(Engine, "load", refuse)

    def play() -> None:
        trainer.wait_for(lambda: trainer.all(Heartbeat) and trainer.all(Heartbeat)[-1].num_refused == 1, 20)
        trainer.give(lease(1))
        trainer.wait_for(lambda: trainer.all(Nack), 20)
        assert trainer.all(Nack) == [Nack("lease-1", "returned")]
        trainer.send(Bye("stopping"))

    with pytest.raises(
        PolicyRefusedError, match=r"no policy version is served here: v0 is refused: rank 512 is too large"
    ):
        live(config, play)
    assert made[0].shut_down


async def refuse(engine: Engine, adapter: Adapter) -> None:
    raise AdapterRefusedError("rank 512 is too large")


@pytest.mark.long
def test_reward_functions_are_imported_before_the_engine_is_loaded(scoring):
    (function,) = scoring.rewards.functions
    missing = function.model_copy(update={"function": function.function.replace(":reward", ":nothing")})
    with pytest.raises(ConfigError, match="has no `nothing`"):
        live(changed(scoring, "rewards", functions=[missing]))
    assert made == []


@pytest.mark.long
def test_while_the_engine_is_out_of_order_leases_go_back_and_none_are_asked_for(scoring, trainer, monkeypatch):
    """The trainer gives leases all the same, as one does that has not heard it yet."""
    serve_blobs(trainer)
    monkeypatch.setattr(sys.modules["producer.engine.engine"], "VllmEngine", Answering)

    def play() -> None:
        trainer.wait_for(lambda: any(beat.policy_version == 0 for beat in trainer.all(Heartbeat)), 20)
        assert trainer.all(Heartbeat)[-1].capacity == trainer.all(Hello)[0].capacity > 0
        (engine,) = made
        engine.out_of_order = "the server is away"
        trainer.wait_for(lambda: trainer.all(Heartbeat)[-1].capacity == 0, 20)
        trainer.give(lease(1, policy_floor=7))
        trainer.wait_for(lambda: trainer.all(Nack), 20)
        assert trainer.all(Nack) == [Nack("lease-1", "returned")]
        engine.out_of_order = None
        trainer.give(lease(2))
        trainer.wait_for(lambda: trainer.all(Group), 20)
        trainer.wait_for(lambda: trainer.all(Heartbeat)[-1].capacity > 0, 20)
        trainer.send(Bye("finished"))

    live(scoring, play)


def test_the_loop_is_that_of_uvloop_where_vllm_has_brought_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, found in ((ModuleType("uvloop"), "brought"), (None, "asyncio")):
        if module is not None:
            module.new_event_loop = lambda: SimpleNamespace(close=lambda: None, name="brought")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "uvloop", module)
        loop = daemon._loop()
        assert getattr(loop, "name", "asyncio") == found
        loop.close()
