"""Key files, who may read them, what they say when they are wrong, and that no text ever holds a secret."""

import logging
import os
import pickle
import stat
import traceback
from pathlib import Path

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.channel import authenticator as authorized_keys
from protocol.channel.authenticator import AuthorizedKeys
from protocol.channel.keys import (
    AUTHORIZED,
    ProducerKeys,
    SecretKey,
    TrainerKeys,
    check_identity,
    fingerprint,
    generate,
    identity_of,
    producer_keys,
    read_private,
    read_public,
    read_secret,
    trainer_keys,
    write_public,
)
from protocol.errors import ConfigError, ExitCode


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a trainer's keys and those of `gpu01`."""
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    keys = tmp_path / "keys"
    generate(keys, "trainer")
    generate(keys, "gpu01")
    return keys


def refusal(function: object, *arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments)  # type: ignore[operator]
    assert caught.value.exit_code == ExitCode.CONFIG
    return str(caught.value)


def test_a_pair_of_keys_is_two_files_and_only_its_owner_reads_the_secret(folder: Path) -> None:
    files = ["authorized", "gpu01.public", "gpu01.secret", "trainer.public", "trainer.secret"]
    assert sorted(os.listdir(folder)) == files
    modes = {name: stat.S_IMODE((folder / name).stat().st_mode) for name in ("gpu01.secret", "gpu01.public")}
    assert modes == {"gpu01.secret": 0o600, "gpu01.public": 0o644}
    name, secret = read_secret(folder / "gpu01.secret")
    assert (name, secret.public()) == read_public(folder / "gpu01.public")
    assert zmq.curve_public(secret.reveal()) == secret.public()


def test_both_sides_find_their_keys(folder: Path) -> None:
    trainer, producer = trainer_keys(folder), producer_keys(folder, "gpu01")
    assert (trainer.authorized, producer.identity) == (folder / AUTHORIZED, "gpu01")
    assert producer.trainer == trainer.secret.public()
    assert read_public(folder / "gpu01.public") == ("gpu01", producer.secret.public())


def test_a_producer_takes_the_key_of_its_host_unless_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu01")
    assert producer_keys(folder, None).identity == "gpu01"
    monkeypatch.setattr("socket.gethostname", lambda: "gpu02")
    assert refusal(producer_keys, folder, None) == (
        f"transport.keys: {folder}/gpu02.secret: no such file. Make it: slipstream keys --keys {folder} generate gpu02, then "
        "authorize gpu02.public on the trainer's host; or name another key with transport.identity"
    )


def test_secrets_may_be_credentials_of_systemd(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They carry an access list, which shows as a mode that the group can read, and say themselves whose they are."""
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    for secret, credential in (("trainer", "trainer"), ("gpu01", "producer")):
        (folder / f"{secret}.secret").rename(credentials / f"{credential}.secret")
        (credentials / f"{credential}.secret").chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    assert trainer_keys(folder).secret.public() == read_public(folder / "trainer.public")[1]
    assert producer_keys(folder, None).identity == "gpu01"
    message = refusal(producer_keys, folder, "gpu02")
    assert message == f"transport.keys: {credentials}/producer.secret is the key of gpu01, not of gpu02"
    (folder / "server.key").write_text("secret")
    (folder / "server.key").chmod(0o440)
    assert "others can read this secret" in refusal(read_private, folder / "server.key")
    (folder / "server.key").rename(credentials / "server.key")
    assert read_private(credentials / "server.key", "engine_server.key_file") == b"secret"


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_secret_that_others_can_read_is_refused(folder: Path, mode: int) -> None:
    file = folder / "trainer.secret"
    file.chmod(mode)
    assert refusal(trainer_keys, folder) == f"{file}: others can read this secret. Fix: chmod 600 {file}"
    file.chmod(0o600)
    trainer_keys(folder)


@pytest.mark.parametrize("place", ["", AUTHORIZED])
@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_folder_that_others_can_write_to_is_refused(folder: Path, place: str, mode: int) -> None:
    (folder / place).chmod(mode)
    found = Path(folder / place)
    expected = f"transport.keys: others may write to {found}, and so add keys. Fix: chmod go-w {found}"
    assert refusal(trainer_keys, folder) == refusal(producer_keys, folder, "gpu01") == expected
    assert refusal(generate, folder, "gpu02") == expected


@pytest.mark.parametrize("name", ["trainer", "gpu01"])
@pytest.mark.parametrize("left", ["secret", "public"])
def test_a_key_is_never_overwritten(folder: Path, name: str, left: str) -> None:
    (folder / f"{name}.{'public' if left == 'secret' else 'secret'}").unlink()
    before = (folder / f"{name}.{left}").read_bytes()
    message = refusal(generate, folder, name)
    assert message == f"{folder}/{name}.{left} exists and is not overwritten; move it away first"
    assert (folder / f"{name}.{left}").read_bytes() == before
    with pytest.raises(FileExistsError):
        write_public(folder / "authorized", name, b"x" * 40)
    assert not [file for file in os.listdir(folder) if file.startswith(".")]


@pytest.mark.parametrize("name", ["gpu01", "trainer-host.example", "a", "A_1", "x" * 64, "a-1"])
def test_names_of_keys(name: str) -> None:
    assert check_identity(name) == name
    assert identity_of(f"{name}-4711-ab12") == name, "it cannot be stretched into another one"


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-rf", "a/b", "../x", "a b", "a\n", "é", "x" * 65, "a@b"])
def test_what_is_no_name_of_a_key(folder: Path, name: str) -> None:
    expected = f"{name!r} is no name for a key: use up to 64 letters, digits, `.`, `_` and `-`, beginning with a letter or digit"
    assert refusal(generate, folder, name) == expected
    assert not name or refusal(producer_keys, folder, name) == expected


def test_a_key_under_a_wrong_name_is_refused(folder: Path) -> None:
    (folder / "gpu01.secret").rename(folder / "gpu02.secret")
    assert refusal(producer_keys, folder, "gpu02") == (
        f"transport.keys: {folder}/gpu02.secret is the key of gpu01, not of gpu02"
    )
    assert refusal(producer_keys, folder, "trainer") == (
        f"transport.keys: {folder}/trainer.secret is the trainer's key; a producer needs one of its own"
    )
    (folder / "gpu02.secret").replace(folder / "trainer.secret")
    message = refusal(trainer_keys, folder)
    assert message == f"transport.keys: {folder}/trainer.secret is the key of gpu01, not of the trainer"


def test_what_a_producer_needs_of_the_trainer(folder: Path) -> None:
    file = folder / "trainer.public"
    file.write_bytes((folder / "gpu01.public").read_bytes())
    message = refusal(producer_keys, folder, "gpu01")
    assert message == f"transport.keys: {file} is the key of gpu01, not of the trainer"
    file.unlink()
    message = refusal(producer_keys, folder, "gpu01")
    assert message == f"transport.keys: {file}: no such file. Copy it from the trainer's host"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "is not a key file; expected one line `slipstream-secret-key NAME KEY`, as slipstream keys writes it"),
        ("slipstream-public-key a {key}", "holds a slipstream-public-key; expected one line `slipstream-secret-key"),
        ("slipstream-secret-key a/b {key}", "the name in it is none that slipstream keys would give"),
        ("slipstream-secret-key a {key}x", "the key in it is damaged: it is not 40 characters of Z85"),
        ("slipstream-secret-key a ~{key:.39}", "the key in it is damaged: it is not 40 characters of Z85"),
    ],
)
def test_a_damaged_key_file_says_what_is_wrong_without_quoting_it(tmp_path: Path, content: str, problem: str) -> None:
    key = "Zb" * 20
    file = tmp_path / "a.secret"
    file.write_text(content.format(key=key))
    file.chmod(0o600)
    message = refusal(read_secret, file)
    assert message.startswith(f"{file}: {problem}")
    assert "ZbZb" not in message


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(max_size=60), cut=st.integers(0, 40), kind=st.sampled_from(["secret", "public"]))
def test_no_error_quotes_a_secret(tmp_path: Path, garbage: bytes, cut: int, kind: str) -> None:
    key = b"s3cretS3CRETs3cretS3CRETs3cretS3CRETabcd"
    file = tmp_path / "a.secret"
    file.write_bytes(f"slipstream-{kind}-key a ".encode() + key[:cut] + garbage + key[cut:])
    file.chmod(0o600)
    try:
        shown = repr(read_secret(file))
    except ConfigError as error:
        shown = "".join(traceback.format_exception(error))
    assert not any(key[start : start + 6].decode() in shown for start in range(34))


def test_no_text_and_no_copy_of_the_keys_holds_a_secret(folder: Path) -> None:
    keys: list[TrainerKeys | ProducerKeys] = [trainer_keys(folder), producer_keys(folder, "gpu01")]
    for held in keys:
        secret = held.secret.reveal().decode()
        assert secret not in f"{held} {held!r} {held.secret} {held.secret!r} {vars(held)} {[held]}"
        with pytest.raises(TypeError, match="does not leave its process"):
            pickle.dumps(held.secret)
    assert repr(SecretKey(b"x" * 40)) == "SecretKey(...)"


def test_fingerprints_are_those_of_other_tools() -> None:
    """sha256sum of the 32 bytes that `Z85` stands for, in base64."""
    assert fingerprint(b"0" * 40) == "SHA256:Zmh6rfhivXdsj8GLjp+OIAiXFIVu4jOzkCpZHQ1fKSU"


# The folder of authorized keys.


def names(authorized: AuthorizedKeys, keys: dict[str, bytes]) -> set[str]:
    authorized.refresh()
    found = {name for name, key in keys.items() if authorized.identity(key) is not None}
    assert all(authorized.identity(keys[name]) == name for name in found)
    return found


def test_authorized_keys_follow_their_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(authorized_keys, "_LOOK_EVERY_S", 0.0)
    keys = {name: generate(tmp_path, name) for name in ("a", "b", "trainer")}
    folder = tmp_path / AUTHORIZED
    authorized = AuthorizedKeys(folder)
    assert names(authorized, keys) == set()
    write_public(folder / "a.public", "a", keys["a"])
    write_public(folder / "b.public", "b", keys["b"])
    assert names(authorized, keys) == {"a", "b"}
    (folder / "a.public").unlink()
    assert names(authorized, keys) == {"b"}
    (folder / "b.public").write_bytes((tmp_path / "a.public").read_bytes())
    assert names(authorized, keys) == set(), "the file says that it is another one's"
    assert sorted(caplog.messages) == [
        "authorized: a",
        "authorized: b",
        "no longer authorized: a",
        "no longer authorized: b",
        "no producer is authorized, so none can connect: authorize one with `slipstream keys authorize`",
        f"not authorized: {folder}/b.public holds the key of a",
    ]


def test_every_file_is_looked_at_when_the_folder_changed_and_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authorized_keys, "_LOOK_EVERY_S", 3600.0)
    keys = {name: generate(tmp_path, name) for name in ("trainer", "a", "b")}
    folder = tmp_path / AUTHORIZED
    authorized = AuthorizedKeys(folder)
    write_public(folder / "a.public", "a", keys["a"])
    os.utime(folder, ns=(1, 1))  # as if the clock of files had moved on since the last look
    assert names(authorized, keys) == {"a"}
    revision = authorized.revision
    with monkeypatch.context() as patched:
        patched.setattr(authorized, "_look", lambda: pytest.fail("nothing has changed"))
        assert names(authorized, keys) == {"a"}
    (folder / "a.public").unlink()
    os.utime(folder, ns=(2, 2))
    assert names(authorized, keys) == set()
    assert authorized.revision == revision + 1


def test_a_key_that_was_replaced_is_not_authorized_any_more(tmp_path: Path) -> None:
    (tmp_path / AUTHORIZED).mkdir()
    file = tmp_path / AUTHORIZED / "a.public"
    old, new = (zmq.curve_keypair()[0] for _ in range(2))
    write_public(file, "a", old)
    authorized = AuthorizedKeys(tmp_path / AUTHORIZED)
    assert authorized.identity(old) == "a"
    file.unlink()
    write_public(file, "a", new)
    authorized.refresh()
    assert (authorized.identity(old), authorized.identity(new)) == (None, "a")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"slipstream-public-key b " + b"1" * 40])
def test_a_file_that_authorizes_nobody_hurts_nobody(tmp_path: Path, content: bytes) -> None:
    key = zmq.curve_keypair()[0]
    write_public(tmp_path / "good.public", "good", key)
    (tmp_path / "a.public").write_bytes(content)
    (tmp_path / "README").write_text("not a key")
    authorized = AuthorizedKeys(tmp_path)
    assert names(authorized, {"good": key, "b": b"1" * 40}) == {"good"}


def test_one_key_has_one_name(tmp_path: Path) -> None:
    key = zmq.curve_keypair()[0]
    for name in ("a", "b"):
        write_public(tmp_path / f"{name}.public", name, key)
    assert AuthorizedKeys(tmp_path).identity(key) == "a"


def test_a_folder_that_is_gone_authorizes_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = zmq.curve_keypair()[0]
    folder = tmp_path / AUTHORIZED
    folder.mkdir()
    write_public(folder / "a.public", "a", key)
    authorized = AuthorizedKeys(folder)
    folder.rename(tmp_path / "away")
    for _ in range(3):
        assert names(authorized, {"a": key}) == set()
    assert caplog.text.count("cannot be read, so no producer is authorized: No such file or directory") == 1
    (tmp_path / "away").rename(folder)
    assert names(authorized, {"a": key}) == {"a"}
