"""The `rl-keys` command: makes keys, shows them, and decides which producers may connect.

Guarantee: a secret is written once and never printed, and an existing key is never overwritten. `authorize` and `revoke` take
effect within a second on a trainer that is running.
"""

import argparse
import sys
from pathlib import Path

from protocol.channel.keys import AUTHORIZED, TRAINER, check_identity, fingerprint, generate, read_public, write_public
from protocol.errors import ConfigError, ExitCode
from slipstream.command import run_tool, tool_parser

PROGRAM = "rl-keys"


def main(arguments: list[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    return run_tool(PROGRAM, lambda: _run(chosen))


def _run(chosen: argparse.Namespace) -> ExitCode:
    try:
        match chosen.command:
            case "generate":
                _generate(chosen.keys, chosen.name)
            case "show":
                _show(chosen.keys)
            case "authorize":
                _authorize(chosen.keys, chosen.key)
            case "revoke":
                _revoke(chosen.keys, chosen.name)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return ExitCode.OK


def _generate(folder: Path, name: str) -> None:
    public = generate(folder, name)
    print(f"{name}  {fingerprint(public)}")
    print(f"secret: {folder / f'{name}.secret'} (leave it on this host)")
    if name == TRAINER:
        print(f"public: {folder / f'{name}.public'} (copy it to the keys folder of every producer's host)")
    else:
        print(f"public: {folder / f'{name}.public'} (on the trainer's host: {PROGRAM} authorize FILE)")


def _show(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder. Make a key: {PROGRAM} --keys {folder} generate NAME")
    for title, place in (("keys", folder), ("authorized producers", folder / AUTHORIZED)):
        files = sorted(place.glob("*.public")) if place.is_dir() else []
        print(f"{title} in {place}:" if files else f"no {title} in {place}")
        for file in files:
            try:
                name, key = read_public(file)
            except ConfigError as error:
                print(f"  {error}")
                continue
            secret = "  and its secret" if file.with_name(f"{name}.secret").exists() else ""
            print(f"  {name}  {key.decode()}  {fingerprint(key)}{secret}")


def _authorize(folder: Path, wanted: str) -> None:
    file = Path(wanted) if wanted.endswith(".public") else folder / f"{check_identity(wanted)}.public"
    name, key = read_public(file)
    if name == TRAINER:
        raise ConfigError(f"{file} is the trainer's own key; authorize those of producers")
    place = folder / AUTHORIZED
    if not place.is_dir():
        raise ConfigError(
            f"{place}: no such folder. On the trainer's host: {PROGRAM} --keys {folder} generate {TRAINER}"
        )
    for other in sorted(place.glob("*.public")):
        owner, known = read_public(other)
        if owner == name and known == key:
            print(f"{name} is authorized already  {fingerprint(key)}")
            return
        if owner == name:
            raise ConfigError(f"{other} is another key of {name}; first: {PROGRAM} --keys {folder} revoke {name}")
        if known == key:
            raise ConfigError(f"{other} is the same key under another name; a producer has a key of its own")
    write_public(place / f"{name}.public", name, key)
    print(f"authorized {name}  {fingerprint(key)}")


def _revoke(folder: Path, name: str) -> None:
    file = folder / AUTHORIZED / f"{check_identity(name)}.public"
    try:
        file.unlink()
    except FileNotFoundError:
        known = ", ".join(sorted(other.stem for other in file.parent.glob("*.public"))) or "nobody"
        raise ConfigError(f"{file}: no such file; authorized: {known}") from None
    print(f"revoked {name}")


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(PROGRAM, "Keys of the trainer and its producers (docs/security.md).")
    parser.add_argument(
        "--keys", metavar="DIR", type=Path, default=Path("keys"), help="folder of the keys (default: %(default)s)"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    made = commands.add_parser("generate", help="make the key pair of the trainer or of a producer, on its own host")
    made.add_argument("name", metavar="NAME", help="`trainer`, or a producer's identity, such as the name of its host")
    commands.add_parser("show", help="print public keys and their fingerprints")
    authorized = commands.add_parser("authorize", help="let a producer connect; on the trainer's host")
    authorized.add_argument(
        "key", metavar="NAME|FILE.public", help="its public key: a file, or its name in the keys folder"
    )
    revoked = commands.add_parser("revoke", help="let a producer connect no more; one that is connected is cut off")
    revoked.add_argument("name", metavar="NAME", help="its identity")
    for command in commands.choices.values():  # behind the command, too
        command.add_argument("--keys", metavar="DIR", type=Path, default=argparse.SUPPRESS, help="folder of the keys")
    return parser


if __name__ == "__main__":
    sys.exit(main())
