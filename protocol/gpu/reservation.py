"""A daemon on its GPU: whether it has the GPU alone, and its part of the memory otherwise.

Guarantee: under `pipeline.gpu: shared` a daemon either has its share, the same one that the other daemon computes, or ends with a
message that says what to change. Under `own` the log warns where two daemons are on one GPU all the same. A daemon that ended,
however it did, is not seen any more, because the kernel drops its locks. Daemons of other users, and in containers that do not
share `/dev/shm`, are not seen; where there is no memory for files, no daemon is.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from protocol.config.run import RunConfig
from protocol.errors import ConfigError, DeviceError, StalledError
from protocol.gpu.memory import Shares, gib, needs_of, shares_of
from protocol.gpu.nvml import Gpu, given_gpu, gpu_facts, mps_in_words
from protocol.runtime.scratch import ROOT, common_folder, private
from protocol.wire.model_source import resolve_model

logger = logging.getLogger(__name__)

Role = Literal["trainer", "producer"]
ROLES: tuple[Role, ...] = ("trainer", "producer")

_PAUSE_S = 0.2
_LONGEST_NOTE = 4096  # bytes


@dataclass(frozen=True)
class OtherDaemon:
    """Another daemon on the GPU."""

    role: Role
    run_dir: str


@dataclass(frozen=True)
class GpuRegistry:
    """The registration of one daemon on one GPU. `neighbours` were there before it."""

    neighbours: list[OtherDaemon]
    _place: Path | None = None  # prefix of the paths of this GPU's lock files, None if /dev/shm is unusable

    @contextlib.contextmanager
    def alone(self, limit_s: float, must_stop: Callable[[], object], say: Callable[[], object]) -> Iterator[None]:
        """Exclude the other daemons on the GPU until the context ends.

        Args:
            must_stop: True ends the waiting; then it is entered all the same. It may raise.
            say: is called once if there is something to wait for.

        Raises:
            StalledError: another daemon is in here for `limit_s`.
        """
        deadline, has_said = time.monotonic() + limit_s, False
        with contextlib.ExitStack() as held:
            while not self.try_alone("memory", held) and not must_stop():
                if not has_said:
                    has_said = True
                    say()
                if time.monotonic() > deadline:
                    raise StalledError(
                        "the other daemon on this GPU has not finished its start within pipeline.stall_timeout_s="
                        f"{limit_s:g} seconds; see its log"
                    )
                time.sleep(_PAUSE_S)
            yield

    def try_alone(self, what: str, held: contextlib.ExitStack) -> bool:
        """Return whether no other daemon on the GPU does `what` until `held` ends. Does not wait."""
        return self._place is None or _try_lock(_file(self._place, what), held)


@contextlib.contextmanager
def tenancy(uuid: str, role: Role, run_dir: str) -> Iterator[GpuRegistry]:
    """Register this daemon until the context ends: others see it on the GPU with this UUID. Of two with one role they see the
    first."""
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(common_folder("gpus", ROOT)) / uuid
        except OSError:
            yield GpuRegistry([])
            return
        with open(_file(place, "registry"), "wb", opener=private) as registry:
            fcntl.flock(registry, fcntl.LOCK_EX)
            neighbours = [neighbour for other in ROLES if (neighbour := _holder(place, other)) is not None]
            note = _file(place, role)
            if _try_lock(note, stack):
                note.write_bytes(os.fsencode(run_dir)[:_LONGEST_NOTE])
        yield GpuRegistry(neighbours, place)


def _holder(place: Path, role: Role) -> OtherDaemon | None:
    file = _file(place, role)
    with contextlib.ExitStack() as tried:
        if _try_lock(file, tried):
            return None
        return OtherDaemon(role, os.fsdecode(file.read_bytes()[:_LONGEST_NOTE]))


def _file(place: Path, what: str) -> Path:
    return place.with_name(f"{place.name}.{what}")


def _try_lock(file: Path, held: contextlib.ExitStack) -> bool:
    """Return whether the lock of the file is this process's now, until `held` ends."""
    lock = private(str(file), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    held.callback(_unlock, lock)
    return True


def _unlock(lock: int) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)  # a child process may have inherited the descriptor
    os.close(lock)


_FREE_WITHIN_S = 20.0


@dataclass(frozen=True)
class GpuReservation:
    """The GPUs of one daemon, and its share of them.

    Attributes:
        shares: None where the GPU is its own, or there is none.
    """

    role: Role
    shares: Shares | None = None
    _gpus: tuple[Gpu, ...] = ()  # that the other daemon may use, too
    _tenancies: tuple[GpuRegistry, ...] = ()  # on them

    def with_share(self, config: RunConfig) -> RunConfig:
        """The configuration with the producer's share in `engine:`, where the GPU is shared."""
        if self.shares is None:
            return config
        engine = config.engine | {"gpu_memory_utilization": self.shares.utilization}
        return config.model_copy(update={"engine": engine})

    @contextlib.contextmanager
    def exclusive_startup(self, limit_s: float, must_stop: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Take the share alone: vLLM counts as its own whatever becomes less while it measures, and fails if it becomes
        more, so the daemons do it one after the other. Where they have the GPU in turns, the trainer is not on it meanwhile.

        Raises:
            StalledError: the other daemon does it for longer than `limit_s`.
            DeviceError: less is free than the share, and stays so: that of a process that was killed comes back in seconds.
        """
        with contextlib.ExitStack() as held:
            for own in self._tenancies:
                held.enter_context(own.alone(limit_s, must_stop, log_waiting))
            if self.shares is not None:
                self._wait_for_room(self.shares, self._gpus[0].index, must_stop)
            yield

    def try_moving(self) -> contextlib.ExitStack | None:
        """Return a context in which this producer alone enters or leaves its GPUs; None if another producer does."""
        with contextlib.ExitStack() as held:
            if all(own.try_alone("moves", held) for own in self._tenancies):
                return held.pop_all()
        return None

    def _wait_for_room(self, shares: Shares, index: int, must_stop: Callable[[], bool]) -> None:
        share = shares.trainer if self.role == "trainer" else shares.producer
        deadline = time.monotonic() + _FREE_WITHIN_S
        while (now := gpu_facts(index)) is not None and now.free_bytes < share and not must_stop():
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"pipeline.gpu: shared: the {self.role}'s share of GPU {index} is {gib(share)}, and {gib(now.free_bytes)} "
                    "are free; end what else is on it (nvidia-smi shows that), and start trainer and producer with the same "
                    "engine.gpu_memory_utilization, or with none"
                )
            time.sleep(_PAUSE_S)


def log_waiting() -> None:
    logger.info("waiting for the other daemon on this GPU, which is taking its share of the memory or has its turn")


@contextlib.contextmanager
def reserve_gpu(config: RunConfig, gpus: list[int], role: Role) -> Iterator[GpuReservation]:
    """The seat of this daemon, which others see while it lasts.

    Args:
        gpus: of this daemon, as nvidia-smi counts; none for the CPU.

    Raises:
        SlipstreamError: the GPU is to be shared and cannot be.
    """
    is_shared = config.pipeline.gpu == "shared"
    if is_shared and not gpus:
        logger.info("pipeline.gpu: shared means nothing here, because this daemon computes on the CPU")
    if is_shared and len(gpus) > 1:
        raise ConfigError(
            f"pipeline.gpu: shared is for one GPU that trainer and producer both name, and --gpu names {len(gpus)}; give each "
            "daemon GPUs of its own (pipeline.gpu: own)"
        )
    found = [facts for index in sorted(gpus) if (facts := gpu_facts(index)) is not None]  # all lock them in one order
    with contextlib.ExitStack() as stack:
        tenancies = [stack.enter_context(tenancy(gpu.uuid, role, config.run_dir)) for gpu in found]
        if is_shared and gpus:
            yield _shared_seat(config, role, _usable(found, gpus[0]), tenancies[0])
            return
        if config.pipeline.gpu == "own":
            for gpu, own in zip(found, tenancies, strict=True):
                _say_crowded(gpu, own, role)
        if config.pipeline.gpu == "turns":
            yield GpuReservation(role, None, tuple(found), tuple(tenancies))
            return
        yield GpuReservation(role)


def _shared_seat(config: RunConfig, role: Role, gpu: Gpu, own: GpuRegistry) -> GpuReservation:
    for neighbour in own.neighbours:
        if neighbour.role == role:
            raise DeviceError(
                f"pipeline.gpu: shared: GPU {gpu.index} has a {role} already, that of {neighbour.run_dir}, and one of each kind "
                "can share it; stop that one, or name another GPU"
            )
    for place, number in _other_users(config):
        if number is not None and given_gpu(number).index == gpu.index:
            raise ConfigError(
                f"{place} is on GPU {gpu.index}, too. Trainer and producer use all of it (pipeline.gpu: shared): leave its "
                "`gpu` out, or name another one"
            )
    model = config.model
    folder = resolve_model(model.path, model.revision, trust_remote_code=model.trust_remote_code)
    shares = shares_of(config, gpu.total_bytes, *needs_of(config, folder))
    logger.info("pipeline.gpu: shared: GPU %d: %s; %s are free", gpu.index, shares.in_words(), gib(gpu.free_bytes))
    logger.info("%s", mps_in_words())
    return GpuReservation(role, shares, (gpu,), (own,))


def _other_users(config: RunConfig) -> Iterator[tuple[str, int | None]]:
    """Yield the other parts to which the configuration gives a GPU, and its number, counted as for --gpu."""
    yield "rewards.gpu: each reward worker", config.rewards.gpu
    for section in config.by_environment.values():
        yield f"{section.key}.gpu: the environment", section.gpu
    for function in config.rewards.functions:
        yield f"rewards.functions: {function.name}", getattr(function.settings, "gpu", None)


def _usable(found: list[Gpu], index: int) -> Gpu:
    if not found:
        raise DeviceError(
            f"pipeline.gpu: shared: NVML does not know GPU {index}, so its memory is unknown; install "
            "nvidia-ml-py and see whether nvidia-smi answers, or set pipeline.gpu: own"
        )
    if found[0].is_divided:
        raise ConfigError(
            f"pipeline.gpu: shared: GPU {index} is divided by MIG, and NVML does not say what an instance has; switch MIG off, "
            "or give each daemon a GPU of its own (pipeline.gpu: own)"
        )
    return found[0]


def _say_crowded(gpu: Gpu, own: GpuRegistry, role: Role) -> None:
    for neighbour in own.neighbours:
        if neighbour.role != role:
            text = (
                "the %s of %s is on GPU %d, too, and neither daemon knows how much memory the other takes; set pipeline.gpu: "
                "shared (docs/one-gpu.md), or name another GPU with --gpu"
            )
            logger.warning(text, neighbour.role, neighbour.run_dir, gpu.index)
