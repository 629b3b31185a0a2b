"""The keys of a run in the cluster.

Guarantee: every producer has a key of its own, made when its actor begins, and the key of its last actor no longer counts.
Its secret is on the disk of the trainer's node only while it is made.
"""

from pathlib import Path

from protocol.channel.keys import AUTHORIZED, TRAINER, generate, write_public
from protocol.runtime.scratch import scratch_folder


def prepare(folder: Path) -> None:
    """Makes the trainer's key if there is none; `ConfigError` if that cannot be written."""
    if not (folder / f"{TRAINER}.secret").exists():
        generate(folder, TRAINER)


def new_key(folder: Path, producer: str) -> dict[str, bytes]:
    """Authorizes a new key, in place of the producer's last one. Returns the files that the producer needs, by name."""
    revoke(folder, producer)
    with scratch_folder() as place:
        public = generate(place, producer)
        files = {file.name: file.read_bytes() for file in place.glob(f"{producer}.*")}
    write_public(folder / AUTHORIZED / f"{producer}.public", producer, public)
    return files | {f"{TRAINER}.public": (folder / f"{TRAINER}.public").read_bytes()}


def revoke(folder: Path, producer: str) -> None:
    (folder / AUTHORIZED / f"{producer}.public").unlink(missing_ok=True)
