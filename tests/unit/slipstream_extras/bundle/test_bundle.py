"""Bundles are bytes and back, equal bundles are equal bytes, and nothing is ever written outside of the folder."""

import errno
import os
import random
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import BundleError, ExitCode
from slipstream_extras.bundle import bundle as bundles
from slipstream_extras.bundle.bundle import (
    CONFIG_FILE,
    Bundle,
    BundledFile,
    Requirement,
    decode,
    digest_of,
    encode,
    unpack,
)
from tests.unit.replay.builders import memory_folder

CONFIG = BundledFile(CONFIG_FILE, b"seed: 1\n")
HOSTILE = [
    "é" * 200 + ".py",
    "/etc/cron.d/x.py",
    "../x.py",
    "a/../../x.py",
    "a/./x.py",
    "./x.py",
    "a//x.py",
    "",
    "x.py/",
    "a\\..\\x.py",
    "a\0.py",
    "a\n.py",
    "x" * 253 + ".py",
    "/".join(["d"] * 600) + "/x.py",
    "..",
    "x.sh",
    "run.yaml/x.py",
    "sitecustomize.so",
]
PARTS = st.text("ab._-é", min_size=1, max_size=6).filter(lambda part: part not in (".", ".."))
NAMES = st.lists(PARTS, min_size=1, max_size=3).map(lambda parts: "/".join(parts) + ".py")


def of(*names: str) -> Bundle:
    return Bundle([CONFIG, *(BundledFile(name, name.encode()) for name in names)])


def unchecked(bundle: Bundle) -> bytes:
    """As a trainer that means harm would send it."""
    return msgspec.msgpack.encode(bundle)


def test_what_was_encoded_is_decoded_and_unpacked(tmp_path: Path) -> None:
    needs = [Requirement("yaml", "PyYAML", "6.0", "a.py")]
    made = Bundle([CONFIG, BundledFile("lib/a.py", b"A = 1\n")], needs, ["model.path"])
    data = encode(made)
    assert decode(data) == Bundle([made.files[1], CONFIG], needs, ["model.path"])
    unpack(decode(data), tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"run.yaml", "lib", "lib/a.py"}
    assert (tmp_path / "lib" / "a.py").read_bytes() == b"A = 1\n"
    assert stat.S_IMODE((tmp_path / "lib" / "a.py").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "lib").stat().st_mode) == 0o700


@pytest.mark.long
@given(names=st.lists(NAMES, unique=True, max_size=5), seed=st.integers())
def test_equal_content_has_equal_bytes_whatever_its_order(names: list[str], seed: int) -> None:
    files = [CONFIG, *(BundledFile(name, name.encode()) for name in names)]
    needs = [Requirement(name, name, "1", name) for name in names]
    shuffled = random.Random(seed)
    data = encode(Bundle(files, needs, names))
    other = Bundle(
        shuffled.sample(files, len(files)), shuffled.sample(needs, len(needs)), shuffled.sample(names, len(names))
    )
    assert digest_of(encode(other)) == digest_of(data)
    assert sorted(file.name for file in decode(data).files) == sorted([CONFIG_FILE, *names])


@pytest.mark.long
@given(
    names=st.lists(
        st.one_of(
            st.sampled_from(HOSTILE),
            st.text("/.ab\\\0", max_size=12).map(lambda name: name + ".py"),
            st.text(max_size=8).map(lambda name: name + ".py"),
            NAMES,
        ),
        max_size=4,
    )
)
def test_nothing_is_written_outside_of_the_folder(names: list[str]) -> None:
    """Either the whole bundle is refused, or every file is where its name says, below the folder."""
    with memory_folder() as around:
        folder = around / "inner" / "most"
        folder.mkdir(parents=True)
        try:
            bundle = decode(unchecked(of(*names)))
        except BundleError:
            bundle = None
        if bundle is not None:
            unpack(bundle, folder)
        written = [path for path in around.rglob("*") if path.is_file()]
        assert all(path.is_relative_to(folder) for path in written)
        assert {str(path.relative_to(folder)) for path in written} == set(
            () if bundle is None else ["run.yaml", *names]
        )
        assert bundle is None or not any(
            os.path.isabs(file.name) or ".." in file.name.split("/") for file in bundle.files
        )


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_leads_elsewhere_or_is_no_python_is_refused_by_both_sides(name: str) -> None:
    for refuses in (lambda: decode(unchecked(of(name))), lambda: encode(of(name))):
        with pytest.raises(BundleError, match="the bundle has") as caught:
            refuses()
        assert caught.value.exit_code == ExitCode.BUNDLE == 80


def test_a_name_twice_or_as_file_and_folder_is_refused() -> None:
    for names in (("a.py", "a.py"), ("a.py", "a.py/b.py")):
        with pytest.raises(BundleError, match=r"'a\.py' twice"):
            decode(unchecked(of(*names)))


def test_without_a_configuration_there_is_no_bundle() -> None:
    with pytest.raises(BundleError, match=r"no run\.yaml"):
        decode(unchecked(Bundle([BundledFile("a.py", b"")])))


def test_a_link_that_was_there_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.py").symlink_to(tmp_path / "outside.py")
    with pytest.raises(BundleError, match="File exists"):
        unpack(of("a.py"), tmp_path / "folder")
    assert not (tmp_path / "outside.py").exists()


def test_a_full_disk_is_said_with_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, flags: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(bundles, "_private", full)
    with pytest.raises(BundleError, match=r"cannot be written to .*No space left on device.*TMPDIR"):
        unpack(of("a.py"), tmp_path)


@given(data=st.binary(max_size=200))
def test_whatever_else_arrives_is_refused_with_a_reason(data: bytes) -> None:
    with pytest.raises(BundleError):
        decode(data)


def test_bytes_files_and_texts_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    many = Bundle([CONFIG, *(BundledFile(f"{number}.py", b"") for number in range(bundles.MOST_FILES))])
    with pytest.raises(BundleError, match="length"):
        decode(unchecked(many))
    monkeypatch.setattr(bundles, "LARGEST_BUNDLE_BYTES", 100)
    large = Bundle([BundledFile(CONFIG_FILE, b"x" * 100)])
    for refuses in (lambda: decode(unchecked(large)), lambda: encode(large)):
        with pytest.raises(
            BundleError, match=r"has 1\d\d bytes, and 100 are allowed: .* install large code as a package"
        ):
            refuses()


def test_fields_of_a_newer_release_are_passed_over() -> None:
    body = msgspec.msgpack.decode(unchecked(of("a.py"))) | {"data": ["later"]}
    assert decode(msgspec.msgpack.encode(body)) == of("a.py")
