"""`slipstream keys`: what it does to the folder, what it says, and what it never says."""

import os
from pathlib import Path

import pytest

from protocol.channel.keys import fingerprint, read_public
from slipstream.cli import run


class Command:
    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys
        self.printed = ""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        assert run(["keys", "--keys", str(self.folder), *arguments]) == code
        out, err = self._capsys.readouterr()
        self.printed += out + err
        assert bool(err) == bool(code)
        return err if code else out

    def print_of(self, name: str) -> str:
        return fingerprint(read_public(self.folder / f"{name}.public")[1])

    def authorized(self) -> list[str]:
        return sorted(os.listdir(self.folder / "authorized"))


@pytest.fixture
def rl_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path / "keys", capsys)


def test_from_nothing_to_a_producer_that_may_connect_and_back(rl_keys: Command) -> None:
    folder = rl_keys.folder
    assert rl_keys("generate", "trainer").splitlines() == [
        f"trainer  {rl_keys.print_of('trainer')}",
        f"secret: {folder}/trainer.secret (leave it on this host)",
        f"public: {folder}/trainer.public (copy it to the keys folder of every producer's host)",
    ]
    rl_keys("generate", "gpu.1")
    assert rl_keys("authorize", "gpu.1") == f"authorized gpu.1  {rl_keys.print_of('gpu.1')}\n"
    assert rl_keys("authorize", "gpu.1") == f"gpu.1 is authorized already  {rl_keys.print_of('gpu.1')}\n"
    assert rl_keys.authorized() == ["gpu.1.public"]
    keys = {name: read_public(folder / f"{name}.public")[1].decode() for name in ("gpu.1", "trainer")}
    assert rl_keys("show").splitlines() == [
        f"keys in {folder}:",
        f"  gpu.1  {keys['gpu.1']}  {rl_keys.print_of('gpu.1')}  and its secret",
        f"  trainer  {keys['trainer']}  {rl_keys.print_of('trainer')}  and its secret",
        f"authorized producers in {folder}/authorized:",
        f"  gpu.1  {keys['gpu.1']}  {rl_keys.print_of('gpu.1')}",
    ]
    assert rl_keys("revoke", "gpu.1") == "revoked gpu.1\n"
    assert rl_keys.authorized() == []
    assert f"no authorized producers in {folder}/authorized" in rl_keys("show")
    for secret in folder.glob("*.secret"):
        assert secret.read_text().split()[2] not in rl_keys.printed


def test_a_key_from_another_host_is_authorized_by_its_file(rl_keys: Command, tmp_path: Path) -> None:
    rl_keys("generate", "trainer")
    assert run(["keys", "--keys", str(tmp_path / "other"), "generate", "gpu02"]) == 0
    (tmp_path / "other" / "gpu02.public").rename(tmp_path / "from-mail.public")
    rl_keys("authorize", str(tmp_path / "from-mail.public"))
    assert rl_keys.authorized() == ["gpu02.public"]


def test_refusals_name_file_and_fix(rl_keys: Command, tmp_path: Path) -> None:
    folder = rl_keys.folder

    def refused(*arguments: str) -> str:
        return rl_keys(*arguments, code=78)

    assert f"{folder}: no such folder. Make a key: slipstream keys generate --keys {folder}" in refused("show")
    rl_keys("generate", "gpu01")
    told = refused("authorize", "gpu01")
    assert f"{folder}/authorized: no such folder." in told
    assert f"slipstream keys generate --keys {folder} trainer" in told
    rl_keys("generate", "trainer")
    assert f"{folder}/trainer.public is the trainer's own key" in refused("authorize", "trainer")
    assert "'../x' is no name for a key" in refused("authorize", "../x")
    assert f"{folder}/authorized/gpu01.public: no such file; authorized: no producer" in refused("revoke", "gpu01")
    rl_keys("authorize", "gpu01")
    for suffix in ("secret", "public"):
        (folder / f"gpu01.{suffix}").rename(tmp_path / f"old.{suffix}")
    rl_keys("generate", "gpu01")
    assert f"first: slipstream keys revoke --keys {folder} gpu01" in refused("authorize", "gpu01")
    renamed = tmp_path / "renamed.public"
    renamed.write_text((tmp_path / "old.public").read_text().replace("gpu01", "gpu02"))
    assert "gpu01.public is the same key under another name" in refused("authorize", str(renamed))
    assert "No such file or directory" in refused("authorize", f"{tmp_path}/old.secret.public")
    assert rl_keys.authorized() == ["gpu01.public"]


def test_show_goes_on_behind_a_damaged_file(rl_keys: Command) -> None:
    rl_keys("generate", "gpu01")
    (rl_keys.folder / "a.public").write_text("?")
    assert "a.public: is not a key file" in rl_keys("show").splitlines()[1]
    assert "  gpu01  " in rl_keys("show")


def test_the_folder_may_be_named_behind_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keys", "generate", "trainer", "--keys", str(tmp_path / "keys")]) == 0
    assert (tmp_path / "keys" / "trainer.public").is_file()
    assert run(["keys", "--keys", str(tmp_path / "keys"), "show"]) == 0
    assert "trainer" in capsys.readouterr().out
