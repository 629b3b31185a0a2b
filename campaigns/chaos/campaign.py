"""A run of both daemons under kills and stops, from its first step to its last.

Guarantee: so many processes got SIGKILL as were asked for, or more; the run then went on to its end. A daemon that ends in
any other way than by our signal, or a run in which nothing moves, ends the campaign with the reason and the daemon's log.
So does a second trainer that is let in beside one that stands still. When it has ended, no daemon of it is left.
"""

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from campaigns.chaos import aims
from campaigns.chaos.fates import NONE, Fate, FateDeck
from campaigns.chaos.fleet import Daemon, Role, Zygote
from campaigns.chaos.progress import Progress, is_training
from campaigns.chaos.slots import CampaignError, Slot, Tally
from protocol.errors import ExitCode

_TICK_S = 0.02
_STALL_S = 75.0
_SAY_EVERY_S = 5.0
_LAST_STEPS = 8  # after the last kill
_END_S = 60.0
_FAREWELL_S = 3.0  # for a goodbye to be read; whoever was not connected then gets none
_WITHOUT_A_RANK = (ExitCode.RANK_LOST, -signal.SIGTERM)  # the second when it was told to stop while it was ending
_RANK_LOST_S = 12.0  # from a rank's stop to the end of the trainer


class Campaign:
    """
    Args:
        trainer_fates: of the first trainers; all of them happen.
        producer_fates: of the first producers, likewise.
        at_the_end: where the trainers die that have no step left to take, one at each point.
    """

    def __init__(
        self,
        folder: Path,
        zygotes: Mapping[Role, Zygote],
        *,
        kills: int,
        seed: int,
        num_producers: int = 3,
        ranks: int = 1,
        full: bool = False,
        control: str | None = None,
        retention: bool = False,
        trainer_fates: tuple[Fate, ...] = (),
        producer_fates: tuple[Fate, ...] = (),
        at_the_end: tuple[str, ...] = aims.FINISH,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._folder = folder
        self._kills = kills
        self._control = control
        self._given_fates = (*trainer_fates, *producer_fates)
        self._first_fates: dict[Role, list[Fate]] = {"trainer": list(trainer_fates), "producer": list(producer_fates)}
        self._at_the_end = at_the_end
        self._say = say
        self.tally = Tally()
        self._slots = [
            Slot("trainer", "trainer", FateDeck("trainer", seed, retention=retention, ranks=ranks, full=full))
        ]
        self._ranks = ["--ranks", str(ranks)] if ranks > 1 else []
        self._full = full
        for index in range(num_producers):
            self._slots.append(
                Slot("producer", f"producer-{index}", FateDeck("producer", 1000 * seed + index, full=full))
            )
        self._zygotes = zygotes
        self._daemons: list[Daemon] = []  # all that were started
        self._progress = Progress()
        self._said_at = 0.0
        self._rival: Daemon | None = None
        self._goal: int | None = None  # max_steps, once it is known

    def run(self) -> Tally:
        for name in ("logs", "tmp"):
            (self._folder / name).mkdir(exist_ok=True)
        self._progress.moved_at = time.monotonic()
        try:
            while self.tally.kills < self._kills or self._has_given_fates:
                self._tick(armed=True)
            self._end_run()
        finally:
            for daemon in self._daemons:
                daemon.send(signal.SIGKILL)
            for daemon in self._daemons:
                daemon.wait(_END_S)
        return self.tally

    @property
    def _has_given_fates(self) -> bool:
        return any(self._first_fates.values()) or any(slot.fate in self._given_fates for slot in self._slots)

    @property
    def _trainer(self) -> Slot:
        return self._slots[0]

    # The end of the run.

    def _end_run(self) -> None:
        """The trainer stops by SIGTERM. Then it is told how many steps there are, and dies once at every point `at_the_end`
        before it may end."""
        deadline = time.monotonic() + _END_S
        asked: Daemon | None = None
        while True:
            daemon = self._trainer.daemon
            if daemon is not None and daemon is not asked and is_training(daemon):
                asked = daemon
                daemon.send(signal.SIGTERM)
            if daemon is not None and daemon is asked and daemon.poll() is not None:
                if daemon.poll() == 0:
                    break
                asked = None
            self._tick(armed=False, may_end=daemon is asked and daemon is not None)
            self._check_deadline(deadline, "the end of a trainer that was asked to stop")
        self._trainer.daemon = None
        self._progress.look(time.monotonic(), [daemon])
        self._goal = self._progress.step + _LAST_STEPS
        self._first_fates["trainer"] = [Fate("aimed kill", _END_S, point) for point in self._at_the_end]
        deadline = time.monotonic() + 3 * _END_S
        while self._trainer.daemon is None or self._trainer.daemon.poll() != 0:
            self._tick(armed=False, may_end=True)
            self._check_deadline(deadline, "the end of the run")
        self._end_producers()

    def _end_producers(self) -> None:
        """Those that heard the trainer's goodbye end by themselves; the others wait for a trainer that may come back."""
        producers = [slot for slot in self._slots if slot.daemon is not None and slot.role == "producer"]
        deadline = time.monotonic() + _FAREWELL_S
        while time.monotonic() < deadline and not all(_was_told(slot.daemon) for slot in producers):
            for slot in producers:
                self._resume_if_due(slot, time.monotonic())
            time.sleep(_TICK_S)
        for slot in producers:
            if not _was_told(slot.daemon):
                self.tally.producers_not_told += 1
                slot.daemon.send(signal.SIGTERM)
            slot.daemon.send(signal.SIGCONT)
        self._until_ended(producers)
        for slot in producers:
            if slot.daemon.poll() not in (0, -signal.SIGKILL):
                raise CampaignError(f"{slot.name} ended with {slot.daemon.poll()}:\n{slot.daemon.tail()}")

    def _until_ended(self, slots: list[Slot]) -> None:
        deadline = time.monotonic() + _END_S
        while any(slot.daemon is not None and slot.daemon.poll() is None for slot in slots):
            self._check_deadline(deadline, "the end of the producers")
            time.sleep(_TICK_S)

    def _check_deadline(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise CampaignError(f"no {what} within its time\n{self._tails()}")

    # One moment.

    def _tick(self, *, armed: bool, may_end: bool = False) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot.daemon is not None:
                self._look_at(slot, now, armed, may_end)
            if slot.daemon is None and not (may_end and slot.role == "trainer" and self._goal is None):
                self._start(slot, armed)
        self._progress.look(now, [slot.daemon for slot in self._slots if slot.daemon is not None])
        if now - self._said_at > _SAY_EVERY_S:
            self._said_at = now
            done = f"{self.tally.kills}/{self._kills} kills, {self.tally.stops} stops"
            self._say(f"{done}, step {self._progress.step}, {self._progress.acks} acknowledgements")
        if now - self._progress.moved_at > _STALL_S:
            raise CampaignError(f"no step and no acknowledgement for {_STALL_S:.0f} s\n{self._tails()}")
        time.sleep(_TICK_S)

    def _look_at(self, slot: Slot, now: float, armed: bool, may_end: bool) -> None:
        daemon, fate = slot.daemon, slot.fate
        assert daemon is not None
        status = daemon.poll()
        if status is not None:
            if status == -signal.SIGKILL or (fate.at_rank and status in _WITHOUT_A_RANK):
                self._count_kill(slot)
                slot.daemon = None
            elif not (status == 0 and may_end):
                raise CampaignError(f"{slot.name} ended by itself with {status}:\n{daemon.tail()}")
            return
        if self._resume_if_due(slot, now) or slot.stopped_until:
            return
        if fate.kind == "aimed stop" and not fate.at_rank and daemon.is_stopped:
            self._note_stop(slot, now)
            self.tally.stops_by_point[fate.point] += 1
        elif armed and now - slot.fate_from > fate.after_s:
            if fate.kind == "stop":
                daemon.send(signal.SIGSTOP)
                self._note_stop(slot, now)
            elif fate.at_rank and is_training(daemon) and now - slot.fate_from < fate.after_s + _RANK_LOST_S:
                return  # it may have lost the rank already
            elif fate.kind == "power cut":
                for other in self._slots:
                    self._kill(other, "power cut")
            else:
                self._kill(slot, "kill" if fate.kind == "kill" else "point not reached")

    def _resume_if_due(self, slot: Slot, now: float) -> bool:
        if not slot.stopped_until or now < slot.stopped_until or slot.daemon is None:
            return False
        if slot.role == "trainer" and not self._rival_was_refused(now - slot.stopped_until):
            return False
        slot.daemon.send(signal.SIGCONT)
        slot.stopped_until = 0.0
        slot.fate, slot.fate_from = slot.deck.draw_after_stop(), now
        return True

    def _note_stop(self, slot: Slot, now: float) -> None:
        self.tally.stops += 1
        slot.stopped_until = now + slot.fate.stop_s
        if slot.daemon is not None and slot.role == "trainer" and is_training(slot.daemon):
            name = f"rival-{self.tally.stops:04}"
            self._rival = self._fork("trainer", name, self._folder / f"{name}.jsonl", ["--resume"])

    def _rival_was_refused(self, waited_s: float) -> bool:
        """False while the trainer that was started beside the one that stands still has not ended."""
        if self._rival is None:
            return True
        status = self._rival.poll()
        if status is None and waited_s < _END_S:
            return False
        if status != ExitCode.ENDPOINT_IN_USE:
            raise CampaignError(f"a second trainer was not refused, it ended with {status}:\n{self._rival.tail()}")
        self._rival = None
        self.tally.rivals += 1
        return True

    def _kill(self, slot: Slot, how: str) -> None:
        if slot.daemon is not None and slot.daemon.poll() is None and slot.daemon.send(signal.SIGKILL):
            slot.killed = how

    def _count_kill(self, slot: Slot) -> None:
        self.tally.kills += 1
        if slot.daemon is not None and slot.daemon.poll() in _WITHOUT_A_RANK:
            self.tally.by_kind[f"rank: {slot.fate.kind}"] += 1
            self.tally.by_point[f"{slot.fate.point} (rank)"] += 1
        elif slot.killed:
            self.tally.by_kind[f"{slot.role}: {slot.killed}"] += 1
        elif slot.fate.kind == "aimed kill":
            self.tally.by_kind[f"{slot.role}: aimed kill"] += 1
            self.tally.by_point[slot.fate.point] += 1
        else:
            raise CampaignError(f"{slot.name} got a SIGKILL that was not ours:\n{slot.daemon.tail()}")  # type: ignore[union-attr]

    def _start(self, slot: Slot, armed: bool) -> None:
        slot.fate = slot.deck.draw() if armed else NONE
        if first := self._first_fates[slot.role]:
            slot.fate = first.pop(0)
        arguments: list[str] = []
        evidence = self._folder / f"{slot.name}.jsonl"
        options: dict[str, Any] = {}
        if slot.role == "trainer":
            evidence = self._folder / f"trainer-{slot.starts:04}.jsonl"
            arguments += ["--resume", *self._ranks]
            if self._goal is not None:
                arguments += ["--set", f"trainer.max_steps={self._goal}"]
            if self._control:
                options["control"] = self._control
        options |= {"aim": slot.fate.aim, "at_rank": slot.fate.at_rank}
        slot.daemon = self._fork(slot.role, f"{slot.name}-{slot.starts:04}", evidence, arguments, **options)
        slot.starts += 1
        slot.killed, slot.stopped_until, slot.fate_from = "", 0.0, time.monotonic()
        self.tally.restarts.append((slot.name, evidence.name, slot.daemon.started_at))

    def _fork(self, role: Role, name: str, evidence: Path, arguments: list[str], **options: Any) -> Daemon:
        daemon = self._zygotes[role].start(
            [f"rl-{role}", "--gpu", "cpu", "--config", str(self._folder / "run.yaml"), *arguments],
            log=self._folder / "logs" / f"{name}.log",
            evidence=evidence,
            child=f"campaigns.chaos.{role}_child",
            environment={"TMPDIR": str(self._folder / "tmp")},
            full=self._full,
            **options,
        )
        self._daemons.append(daemon)
        return daemon

    def _tails(self) -> str:
        return "\n".join(f"--- {slot.name}\n{slot.daemon.tail(1500)}" for slot in self._slots if slot.daemon)


def _was_told(daemon: Daemon) -> bool:
    """Whether a producer knows that the run is over."""
    return daemon.poll() is not None or "the trainer has finished" in daemon.tail()
