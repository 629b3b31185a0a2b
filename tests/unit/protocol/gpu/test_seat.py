"""Daemons on a scripted GPU: shares, refusals and words."""

import logging
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from producer.rewards.services import WorkerReward, sources_of
from protocol.config.rewards import RewardsSection
from protocol.errors import ConfigError, DeviceError, StalledError
from protocol.gpu import memory as preview
from protocol.gpu import nvml as device
from protocol.gpu import reservation as seat
from protocol.gpu import reservation as tenants
from protocol.gpu.memory import GIB
from protocol.gpu.nvml import Gpu, VisibleGpu, gpu_facts, mps_in_words
from protocol.gpu.reservation import reserve_gpu
from tests.unit.protocol.gpu.models import run_of, write_model
from tests.unit.protocol.gpu.nvml import fake_nvml

GPUS = {0: Gpu(0, "GPU-a", 80 * GIB, 79 * GIB), 1: Gpu(1, "GPU-b", 24 * GIB, 24 * GIB)}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """Of the model; GPUs 0 and 1 are there, and this test alone is on them."""
    caplog.set_level(logging.INFO)
    for module in (seat, preview):
        monkeypatch.setattr(module, "gpu_facts", GPUS.get)
    monkeypatch.setattr(tenants, "ROOT", tmp_path)
    return write_model(tmp_path / "model")


def test_both_daemons_compute_the_same_shares(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = run_of(folder)
    with reserve_gpu(config, [0], "trainer") as trainer, reserve_gpu(config, [0], "producer") as producer:
        assert trainer.shares == producer.shares
        assert trainer.shares is not None
        engine = producer.with_share(config).engine
        assert engine == {"gpu_memory_utilization": trainer.shares.utilization} == {"gpu_memory_utilization": 0.9}
    words = [record.getMessage() for record in caplog.records]
    assert words[0] == words[2]
    assert words[0].startswith("pipeline.gpu: shared: GPU 0: of 80.0 GiB the trainer may take 4.1 GiB")
    assert words[0].endswith("79.0 GiB are free")


def test_the_users_share_holds(folder: Path) -> None:
    config = run_of(folder, engine={"gpu_memory_utilization": 0.25, "max_model_len": 32})
    with reserve_gpu(config, [0], "producer") as producer:
        assert producer.with_share(config) == config
        assert producer.shares is not None
        assert producer.shares.trainer == int(0.97 * 80 * GIB) - 3 * GIB // 2 - 20 * GIB


@pytest.mark.parametrize("free", [0.0, 71.0])
def test_what_others_have_taken_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(seat, "_FREE_WITHIN_S", 0.0)
    with reserve_gpu(run_of(folder), [0], "producer") as producer:
        monkeypatch.setattr(seat, "gpu_facts", lambda index: replace(GPUS[0], free_bytes=int(free * GIB)))
        said = rf"the producer's share of GPU 0 is 72.0 GiB, and {free} GiB are free"
        with pytest.raises(DeviceError, match=said), producer.exclusive_startup(1.0):
            pass


def test_the_memory_of_a_daemon_that_was_killed_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([0, 50, 77])
    with reserve_gpu(run_of(folder), [0], "producer") as producer:
        monkeypatch.setattr(seat, "gpu_facts", lambda index: replace(GPUS[0], free_bytes=next(free) * GIB))
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        with producer.exclusive_startup(1.0):
            assert list(free) == []


@pytest.mark.parametrize("gpus", [[0], [1, 0], [0, 1]])
def test_an_engine_is_loaded_when_the_trainer_has_left_the_gpu(folder: Path, gpus: list[int]) -> None:
    config = run_of(folder, pipeline={"gpu": "turns"})
    with (
        reserve_gpu(config, gpus, "producer") as producer,
        tenants.tenancy("GPU-a", "trainer", config.run_dir) as trainer,
    ):
        with (
            trainer.alone(0.0, lambda: False, lambda: None),
            pytest.raises(StalledError),
            producer.exclusive_startup(0.0),
        ):
            pass
        with producer.exclusive_startup(0.0):
            assert producer.with_share(config) == config


def test_there_is_one_daemon_of_each_kind(folder: Path) -> None:
    config = run_of(folder)
    said = re.escape(f"GPU 0 has a trainer already, that of {config.run_dir}")
    second = reserve_gpu(config, [0], "trainer")
    with (
        reserve_gpu(config, [0], "trainer"),
        reserve_gpu(config, [1], "trainer"),
        pytest.raises(DeviceError, match=said),
        second,
    ):
        pass


def test_a_reward_model_is_elsewhere(folder: Path) -> None:
    def rewards(gpu: int) -> dict[str, object]:
        return {"functions": [{"model": "org/judge", "options": {"gpu": gpu}}]}

    with reserve_gpu(run_of(folder, rewards=rewards(1)), [0], "producer") as found:
        assert found.shares is not None
    crowded = reserve_gpu(run_of(folder, rewards=rewards(0)), [0], "producer")
    with pytest.raises(ConfigError, match=r"rewards\.functions: judge is on GPU 0, too"), crowded:
        pass
    features = {"functions": [{"function": "feature_matching", "options": {"gpu": 0}}]}
    crowded = reserve_gpu(run_of(folder, rewards=features), [0], "producer")
    with pytest.raises(ConfigError, match=r"rewards\.functions: feature_matching is on GPU 0, too"), crowded:
        pass


@pytest.mark.parametrize("section", ["rewards", "environment"])
def test_reward_workers_and_environments_are_elsewhere(folder: Path, section: str) -> None:
    values = {"rewards": {"functions": [{"function": "rewards.py:exact"}]}, "environment": {"factory": "game:Game"}}
    with reserve_gpu(run_of(folder, **{section: values[section] | {"gpu": 1}}), [0], "producer") as found:
        assert found.shares is not None
    crowded = reserve_gpu(run_of(folder, **{section: values[section] | {"gpu": 0}}), [0], "producer")
    with pytest.raises(ConfigError, match=rf"{section}\.gpu: .* is on GPU 0, too"), crowded:
        pass


def test_two_daemons_that_think_they_are_alone_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = run_of(folder, pipeline={})
    with reserve_gpu(config, [0], "trainer") as trainer, reserve_gpu(config, [1], "producer"):
        assert caplog.records == []
        with reserve_gpu(config, [1, 0], "producer"), trainer.exclusive_startup(1.0):
            [record] = caplog.records
    assert record.getMessage() == (
        f"the trainer of {config.run_dir} is on GPU 0, too, and neither daemon knows how much memory the other takes; set "
        "pipeline.gpu: shared (docs/one-gpu.md), or name another GPU with --gpu"
    )


@pytest.mark.parametrize(
    ("gpus", "error", "said"),
    [
        ([0, 1], ConfigError, "--gpu names 2"),
        ([7], DeviceError, "NVML does not know GPU 7"),
    ],
)
def test_gpus_that_cannot_be_shared(folder: Path, gpus: list[int], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"pipeline.gpu: shared.*{said}"), reserve_gpu(run_of(folder), gpus, "producer"):
        pass


def test_on_the_cpu_there_is_nothing_to_share(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = run_of(folder)
    with reserve_gpu(config, [], "trainer") as found, found.exclusive_startup(1.0):
        assert (found.shares, found.with_share(config)) == (None, config)
    assert [record.getMessage() for record in caplog.records] == [
        "pipeline.gpu: shared means nothing here, because this daemon computes on the CPU"
    ]


def test_check_shows_the_shares(folder: Path, tmp_path: Path) -> None:
    config = run_of(folder)
    [line] = preview.preview(config, "1")
    assert line.startswith("shares of GPU 1: of 24.0 GiB the trainer may take")
    [line] = preview.preview(config, "5")
    assert line.endswith("the engine 1.5 GiB; there is no such GPU here to divide")
    [line] = preview.preview(run_of(tmp_path / "elsewhere"), "1")
    assert "computed at the start" in line
    assert list(preview.preview(config, "cpu")) == list(preview.preview(run_of(folder, pipeline={}), "1")) == []


class NVMLError(Exception):
    pass


def test_what_nvml_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def mig(handle: int) -> tuple[int, int]:
        if handle == 0:
            raise NVMLError("not supported")
        return 1, 1

    nvml = ModuleType("pynvml")
    nvml.__dict__.update(
        NVMLError=NVMLError,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80, free=70 + handle),
        nvmlDeviceGetUUID=lambda handle: b"GPU-x",
        nvmlDeviceGetMigMode=mig,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_facts(0) == Gpu(0, "GPU-x", 80, 70, is_divided=False)
    assert gpu_facts(1) == Gpu(1, "GPU-x", 80, 71, is_divided=True)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_facts(0) is None


def test_a_divided_gpu_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat, "gpu_facts", lambda index: replace(GPUS[0], is_divided=True))
    with pytest.raises(ConfigError, match="GPU 0 is divided by MIG"), reserve_gpu(run_of(folder), [0], "producer"):
        pass


def test_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    file = tmp_path / "nvidia-cuda-mps-control.pid"
    for left in ("", "x", "-1", "4194305", "99999999999999999999"):  # Linux counts to 4194304
        file.write_text(left)
        assert (
            mps_in_words()
            == f"CUDA MPS does not run ({tmp_path}), so kernels of trainer and engine take turns on the GPU"
        )
    file.write_text("1\n")
    assert mps_in_words() == f"CUDA MPS runs ({tmp_path}): kernels of trainer and engine work side by side"
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "40")
    assert mps_in_words().endswith("side by side, with CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40 for this daemon")


def test_a_reward_model_counts_among_the_gpus_that_the_process_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, [f"GPU-{letter}" for letter in "abcdef"], {"MIG-1": 3})
    assert device.given_gpu(1) == VisibleGpu(1, "1")
    monkeypatch.setattr(device, "GIVEN", "5,GPU-e,MIG-1")
    assert [device.given_gpu(number).name for number in range(3)] == ["5", "4", "MIG-1"]
    with pytest.raises(DeviceError, match="no GPU 3 in CUDA_VISIBLE_DEVICES=5,"):
        device.given_gpu(3)
    section = RewardsSection.model_validate({"functions": [{"model": "judge", "options": {"gpu": 1}}]})
    [source] = sources_of(section)
    assert isinstance(source, WorkerReward)
    assert source.workers._environment["CUDA_VISIBLE_DEVICES"] == "4"  # type: ignore[index]


def test_of_two_producers_on_a_gpu_one_comes_or_goes_at_a_time(folder: Path) -> None:
    config = run_of(folder, pipeline={"gpu": "turns", "max_staleness": 1})
    with (
        reserve_gpu(config, [0, 1], "producer") as first,
        reserve_gpu(config, [1], "producer") as second,
        reserve_gpu(config, [0], "producer") as third,
    ):
        with first.exclusive_startup(1.0):  # as a trainer that has its turn
            moving = first.try_moving()
            assert moving is not None
            assert second.try_moving() is None
        moving.close()
        moving = second.try_moving()
        assert moving is not None
        assert first.try_moving() is None, "and it keeps nothing of those that it could have"
        assert third.try_moving() is not None
        moving.close()
