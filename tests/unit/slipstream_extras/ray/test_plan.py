"""Plans of a run: command lines, exit codes, keys and resources, by hand."""

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.channel.authenticator import AuthorizedKeys
from protocol.channel.keys import producer_keys, trainer_keys
from protocol.errors import ExitCode
from protocol.runtime.supervisor import STAYS_DOWN, Restart, restart
from slipstream_extras.ray.plan import (
    Need,
    amounts_text,
    daemon_command,
    missing_text,
    new_key,
    num_places,
    prepare,
    revoke,
    without_place,
)
from tests.unit.slipstream_extras.ray.builders import PLAN, plan

FOLDER, KEYS = Path("/home/u/.cache/slipstream/x/producer-2"), Path("/tmp/slipstream-scratch-1")


def test_the_trainer_on_the_gpus_that_ray_gave_it() -> None:
    assert daemon_command(PLAN, "trainer", ["2", "3"], FOLDER, KEYS) == [
        sys.executable, "-P", "-m", "consumer.app.cli", "--gpu", "2,3", "--config", "/home/u/run.yaml",
        "--set", "pipeline.max_staleness=2", "--resume",
    ]  # fmt: skip


def test_a_producer_has_an_address_and_a_key_and_no_file_of_the_run() -> None:
    assert daemon_command(PLAN, "producer-2", ["1"], FOLDER, KEYS) == [
        sys.executable, "-P", "-m", "producer.app.cli", "--gpu", "1", "--connect", "tcp://10.0.0.5:20000", "--keys", str(KEYS),
        "--set", "transport.identity=producer-2", "--set", f"run_dir={FOLDER}",
    ]  # fmt: skip
    changed = plan(gpus=0, model="/models/a", producer_overrides=["serve.host=10.0.0.6"])
    assert daemon_command(changed, "producer-2", [], FOLDER, KEYS)[-8:-4] == [
        "--model", "/models/a", "--set", "serve.host=10.0.0.6",
    ]  # fmt: skip


def test_the_trainer_on_the_cpu() -> None:
    command = daemon_command(plan(gpus=0), "trainer", [], FOLDER, KEYS)
    assert command[4:6] == ["--gpu", "cpu"]
    assert command[-3:] == ["--resume", "--ranks", "2"]


UNIT = Path(__file__).parents[4] / "deploy/systemd/common.conf"


@pytest.mark.parametrize("code", sorted(STAYS_DOWN))
def test_what_a_start_cannot_cure_stays_down(code: ExitCode) -> None:
    assert restart(code, 1000.0, 0) is None


@pytest.mark.parametrize("code", [-9, -15, *sorted(set(ExitCode) - STAYS_DOWN), 99])
def test_the_rest_comes_back(code: int) -> None:
    assert restart(code, 10.0, 0) == Restart(1.0, 1)


def test_pauses_double_to_a_minute_and_begin_anew_after_steady_work() -> None:
    pauses, failures = [], 0
    for _ in range(9):
        again = restart(-9, 1.0, failures)
        assert again is not None
        failures = again.failures
        pauses.append(again.pause_s)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert restart(-9, 300.0, failures) == Restart(1.0, 1)
    assert restart(70, 1.0, 10**9) == Restart(60.0, 10**9 + 1)


def test_it_is_the_policy_of_the_systemd_units() -> None:
    [codes] = re.findall(r"^RestartPreventExitStatus=(.*)$", UNIT.read_text(), re.MULTILINE)
    of_success = {ExitCode.OK, ExitCode.INTERRUPTED}
    assert {int(code) for code in codes.split()} == STAYS_DOWN - of_success


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


A, B = "10.0.0.5", "10.0.0.6"
FREE = {A: {"CPU": 16.0, "GPU": 4.0, f"node:{A}": 1.0}, B: {"CPU": 16.0, "GPU": 2.0, f"node:{B}": 1.0}}
TRAINER, PRODUCER = Need("the trainer", PLAN.trainer_needs), Need("a producer", PLAN.producer_needs)


def test_a_run_that_fits() -> None:
    assert without_place([TRAINER, *[PRODUCER] * 4], FREE) == []
    assert num_places(PLAN.producer_needs, FREE, 10) == 6
    assert FREE[A]["GPU"] == 4, "what is free was only looked at"


def test_what_has_no_place_is_named_with_what_is_free() -> None:
    homeless = without_place([TRAINER, *[PRODUCER] * 6], FREE)
    assert homeless == [PRODUCER] * 2
    assert missing_text(homeless, FREE) == (
        "2 times a producer: needs 1 GPU and 4 CPU on one node. "
        "10.0.0.5 has 4 GPU and 16 CPU free; 10.0.0.6 has 2 GPU and 16 CPU free"
    )


def test_the_trainer_is_packed_on_its_host() -> None:
    assert PLAN.trainer_needs == {"CPU": 8.0, "GPU": 2.0, "node:10.0.0.5": 0.001}
    only_b = {B: FREE[B]}
    assert without_place([TRAINER], only_b) == [TRAINER]
    assert "the trainer: needs 2 GPU and 8 CPU at 10.0.0.5 on one node. 10.0.0.6 has" in missing_text([TRAINER], only_b)
    split = {A: FREE[A] | {"GPU": 1.0}, B: FREE[B] | {"GPU": 1.0}}
    assert without_place([TRAINER], split) == [TRAINER], "one GPU here and one there are not two"


def test_nothing_is_missing_and_nothing_is_there() -> None:
    assert missing_text([], FREE) == ""
    assert missing_text([PRODUCER], {}).endswith("There is no node")
    assert amounts_text({"CPU": 0.5}) == "0 GPU and 0.5 CPU"


_AMOUNTS = st.fixed_dictionaries({"CPU": st.integers(0, 8).map(float), "GPU": st.integers(0, 4).map(float)})


@pytest.mark.long
@given(st.lists(_AMOUNTS, max_size=6), st.dictionaries(st.text("ab", min_size=1, max_size=3), _AMOUNTS, max_size=4))
def test_nodes_are_never_overbooked_and_a_small_need_is_left_out_only_if_no_node_has_room(needs, free) -> None:
    asked = [Need(str(number), amounts) for number, amounts in enumerate(needs)]
    homeless = without_place(asked, free)
    placed = [need for need in asked if need not in homeless]
    for kind in ("CPU", "GPU"):
        assert sum(need.amounts[kind] for need in placed) <= sum(amounts[kind] for amounts in free.values())
    if not homeless:
        return
    assert all(without_place([need], free) == [need] or placed for need in homeless)
