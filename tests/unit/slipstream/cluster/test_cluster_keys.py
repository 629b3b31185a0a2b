"""Keys of producers that come and go."""

from pathlib import Path

from protocol.channel.authenticator import AuthorizedKeys
from protocol.channel.keys import producer_keys, trainer_keys
from slipstream.cluster.plan import new_key, prepare, revoke


def written(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(mode=0o700)
    for name, content in files.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)
    return folder


def test_a_producer_gets_a_key_of_its_own_and_the_last_one_no_longer_counts(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    prepare(keys)
    prepare(keys)
    authorized = AuthorizedKeys(trainer_keys(keys).authorized)
    first = producer_keys(written(tmp_path / "1", new_key(keys, "producer-1")), "producer-1")
    other = producer_keys(written(tmp_path / "2", new_key(keys, "producer-2")), "producer-2")
    authorized.refresh()
    assert authorized.identity(first.secret.public()) == "producer-1"
    assert authorized.identity(other.secret.public()) == "producer-2"
    assert first.trainer == trainer_keys(keys).secret.public()

    second = producer_keys(written(tmp_path / "3", new_key(keys, "producer-1")), "producer-1")
    revoke(keys, "producer-2")
    revoke(keys, "producer-2")
    authorized.refresh()
    assert authorized.identity(first.secret.public()) is None
    assert authorized.identity(second.secret.public()) == "producer-1"
    assert authorized.identity(other.secret.public()) is None
    assert [path.name for path in keys.rglob("*.secret")] == ["trainer.secret"]
