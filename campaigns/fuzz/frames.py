"""A campaign of spoiled frames against `protocol.wire.codec`: `python -m campaigns.fuzz.frames --count 1000000 --seed 1`.

Guarantee: a campaign that ends without a `Defect` has shown, for each of its frames, that
- `decode` raised `CodecError` or returned a message that encodes and decodes to itself;
- without a new checksum, only a frame that is byte for byte a valid one was accepted;
- `decode` took less than `SLOWEST_S` for a frame of up to 64 KiB;
- for every `MEMORY_EVERY`-th frame, `decode` never held more than `memory_bound` allows.
"""

import argparse
import json
import re
import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from protocol.wire.codec import CodecError, SchemaMismatchError, decode, encode
from protocol.wire.messages import Message

from .mutations import Mutant, Mutator

SLOWEST_S = 0.05
MEMORY_EVERY = 100
_RETRIES = 5  # a measurement that the machine disturbed is repeated, and the best counts
_SUSPICIOUS_S = 0.01

REASONS = (
    ("too_short", "shorter than the"),
    ("magic", "^frame starts with"),
    ("checksum", "^checksum mismatch"),
    ("truncated", "truncated"),
    ("trailing", "trailing"),
    ("nesting", "recursion|levels deep"),
    ("large_map_keys", "needs text for keys"),
    ("unknown_field", "unknown field"),
    ("missing_field", "missing required field"),
    ("value", r"Invalid enum value|Invalid value|matching regex|of length|`(int|float)` (<|>)"),
    ("timestamp", "[Tt]imestamp"),
    ("wrong_type", "Expected"),
    ("utf8", "codec can't decode"),
    ("malformed", "malformed"),
)


class Defect(AssertionError):
    """The codec broke a promise. The text names the frame, so that it can be made again with --only."""


@dataclass
class Report:
    seed: int
    frames: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    accepted_unchanged: int = 0
    accepted_changed: int = 0  # under a new checksum, a different but valid message
    mutations: Counter[str] = field(default_factory=Counter)
    slowest_decode_ms: float = 0.0
    memory_samples: int = 0
    memory_peak_bytes: int = 0
    memory_peak_frame_bytes: int = 0
    longest_frame_bytes: int = 0
    seconds: float = 0.0

    @property
    def summary(self) -> str:
        reasons = ", ".join(f"{name} {count}" for name, count in self.refused.most_common())
        return (
            f"{self.frames} frames in {self.seconds:.1f} s: {self.refused.total()} refused ({reasons}), "
            f"{self.accepted_unchanged} accepted unchanged, {self.accepted_changed} accepted under a new checksum; "
            f"slowest decode {self.slowest_decode_ms:.2f} ms, largest peak {self.memory_peak_bytes} bytes for a bad frame "
            f"of {self.memory_peak_frame_bytes} bytes ({self.memory_samples} measured); no defect"
        )


def reason_of(error: CodecError) -> str:
    if isinstance(error, SchemaMismatchError):
        return "other_schema"
    text = str(error)
    return next((name for name, pattern in REASONS if re.search(pattern, text)), "other")


def memory_bound(frame: bytes) -> int:
    """Python objects are larger than msgpack: an empty map is 1 byte there and 64 here. Only a lease has such fields."""
    return (192 if b"lease" in frame else 16) * len(frame) + 262_144


def attempt(frame: bytes) -> Message | CodecError:
    try:
        return decode(frame)
    except CodecError as error:
        return error


def seconds_to_decode(frame: bytes) -> tuple[float, Message | CodecError]:
    """Time on the processor, because another process's turn is not the codec's."""
    start = time.thread_time()
    outcome = attempt(frame)
    seconds = time.thread_time() - start
    for _ in range(_RETRIES if seconds > _SUSPICIOUS_S else 0):
        start = time.thread_time()
        attempt(frame)
        seconds = min(seconds, time.thread_time() - start)
    return seconds, outcome


def peak_of_decode(frame: bytes) -> int:
    tracemalloc.start()
    try:
        attempt(frame)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def check_accepted(message: Message) -> None:
    again = encode(message)
    copy = decode(again)
    assert type(copy) is type(message), f"{message} came back as {copy}"
    assert encode(copy) == again, f"{message} came back as {copy}"


def examine(mutant: Mutant, number: int, valid: set[bytes], report: Report) -> None:
    """Adds one frame to `report`, or raises."""
    frame = mutant.frame
    seconds, outcome = seconds_to_decode(frame)
    report.frames += 1
    report.mutations[mutant.mutation] += 1
    report.longest_frame_bytes = max(report.longest_frame_bytes, len(frame))
    report.slowest_decode_ms = max(report.slowest_decode_ms, seconds * 1000)
    assert seconds < SLOWEST_S, f"decode took {seconds * 1000:.1f} ms for {len(frame)} bytes"
    if isinstance(outcome, CodecError):
        report.refused[reason_of(outcome)] += 1
    else:
        assert mutant.resealed or frame in valid, "a damaged frame was accepted"
        check_accepted(outcome)
        report.accepted_unchanged += frame in valid
        report.accepted_changed += frame not in valid
    if number % MEMORY_EVERY == 0 and isinstance(outcome, CodecError):
        peak = peak_of_decode(frame)
        report.memory_samples += 1
        if peak > report.memory_peak_bytes:
            report.memory_peak_bytes, report.memory_peak_frame_bytes = peak, len(frame)
        assert peak < memory_bound(frame), f"decode held {peak} bytes for a frame of {len(frame)}"


def campaign(seed: int, numbers: range) -> Report:
    mutator, report, start = Mutator(seed), Report(seed), time.monotonic()
    for number in tqdm(numbers, disable=None):  # None: without a terminal
        mutant = mutator.mutant(number)
        try:
            examine(mutant, number, mutator.valid, report)
        except Exception as error:
            raise Defect(
                f"frame {number} of seed {seed} ({mutant.mutation}, {'new' if mutant.resealed else 'old'} checksum, "
                f"{len(mutant.frame)} bytes): {type(error).__name__}: {error}\n{mutant.frame[:512].hex()}"
            ) from error
    report.seconds = time.monotonic() - start
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000, help="frames (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="make and examine this one frame of the seed")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    arguments = parser.parse_args(argv)
    numbers = range(arguments.count) if arguments.only is None else range(arguments.only, arguments.only + 1)
    try:
        report = campaign(arguments.seed, numbers)
    except Defect as defect:
        print(f"DEFECT: {defect}", file=sys.stderr)
        return 1
    print(report.summary)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(vars(report), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
