"""`slipstream keys` makes keys, shows them, and decides which producers may connect.

Guarantee: a secret is written once and never printed, and an existing key is never overwritten. `authorize` and `revoke` take
effect within a second on a trainer that is running.
"""

from pathlib import Path

import click

from protocol.errors import ConfigError
from slipstream.options import Function, Group
from slipstream.tables import write_line

_FOLDER = "slipstream.keys"


def _remember(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    if value is not None:
        ctx.meta[_FOLDER] = value


def _keys_option(function: Function) -> Function:
    place = click.Path(path_type=Path)
    text = "folder of the keys (default: keys)"
    return click.option("--keys", metavar="DIR", type=place, expose_value=False, callback=_remember, help=text)(
        function
    )


def _folder() -> Path:
    folder: Path = click.get_current_context().meta.get(_FOLDER, Path("keys"))
    return folder


@click.group(cls=Group)
@_keys_option
def keys() -> None:
    """Make and authorize keys (docs/security.md)."""


@keys.command("generate")
@_keys_option
@click.argument("name")
def make(name: str) -> None:
    """Make the key pair of NAME on its own host: `trainer`, or a producer's identity, such as the name of its host."""
    from protocol.channel.keys import TRAINER, fingerprint, generate

    folder = _folder()
    public = generate(folder, name)
    write_line(f"{name}  {fingerprint(public)}")
    write_line(f"secret: {folder / f'{name}.secret'} (leave it on this host)")
    if name == TRAINER:
        write_line(f"public: {folder / f'{name}.public'} (copy it to the keys folder of every producer's host)")
    else:
        write_line(f"public: {folder / f'{name}.public'} (on the trainer's host: slipstream keys authorize FILE)")


@keys.command()
@_keys_option
def show() -> None:
    """Print public keys and their fingerprints."""
    from protocol.channel.keys import AUTHORIZED, fingerprint, read_public

    folder = _folder()
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder. Make a key: slipstream keys generate --keys {folder} NAME")
    for title, place in (("keys", folder), ("authorized producers", folder / AUTHORIZED)):
        files = sorted(place.glob("*.public")) if place.is_dir() else []
        write_line(f"{title} in {place}:" if files else f"no {title} in {place}")
        for file in files:
            try:
                name, key = read_public(file)
            except ConfigError as error:
                write_line(f"  {error}")
                continue
            secret = "  and its secret" if file.with_name(f"{name}.secret").exists() else ""
            write_line(f"  {name}  {key.decode()}  {fingerprint(key)}{secret}")


@keys.command()
@_keys_option
@click.argument("key", metavar="NAME|FILE.public")
def authorize(key: str) -> None:
    """Let a producer connect, on the trainer's host. Its public key is a file, or a name in the keys folder."""
    from protocol.channel.keys import AUTHORIZED, TRAINER, check_identity, fingerprint, read_public, write_public

    folder, wanted = _folder(), key
    file = Path(wanted) if wanted.endswith(".public") else folder / f"{check_identity(wanted)}.public"
    name, public = read_public(file)
    if name == TRAINER:
        raise ConfigError(f"{file} is the trainer's own key; authorize those of producers")
    place = folder / AUTHORIZED
    if not place.is_dir():
        raise ConfigError(
            f"{place}: no such folder. On the trainer's host: slipstream keys generate --keys {folder} {TRAINER}"
        )
    for other in sorted(place.glob("*.public")):
        owner, known = read_public(other)
        if owner == name and known == public:
            write_line(f"{name} is authorized already  {fingerprint(public)}")
            return
        if owner == name:
            raise ConfigError(f"{other} is another key of {name}; first: slipstream keys revoke --keys {folder} {name}")
        if known == public:
            raise ConfigError(f"{other} is the same key under another name; a producer has a key of its own")
    write_public(place / f"{name}.public", name, public)
    write_line(f"authorized {name}  {fingerprint(public)}")


@keys.command()
@_keys_option
@click.argument("name")
def revoke(name: str) -> None:
    """Let the producer of this identity connect no more; one that is connected is cut off."""
    from protocol.channel.keys import AUTHORIZED, check_identity

    file = _folder() / AUTHORIZED / f"{check_identity(name)}.public"
    try:
        file.unlink()
    except FileNotFoundError:
        known = ", ".join(sorted(other.stem for other in file.parent.glob("*.public"))) or "no producer"
        raise ConfigError(f"{file}: no such file; authorized: {known}") from None
    write_line(f"revoked {name}")
