"""NVML without a driver."""

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

import pytest


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


NOT_FOUND, NO_DRIVER, NO_LIBRARY, TIMED_OUT = 6, 9, 12, 15


def fake_nvml(
    monkeypatch: pytest.MonkeyPatch, uuids: Sequence[str], instances: Mapping[str, int] | None = None, fails: int = 0
) -> None:
    """A machine with GPUs of these UUIDs, and MIG instances on GPUs of these indexes; or every call `fails`."""

    def init() -> None:
        if fails:
            raise NVMLError(fails)

    def by_uuid(uuid: str) -> str:
        if uuid not in (instances or {}):
            raise NVMLError(NOT_FOUND)
        return uuid

    nvml = ModuleType("pynvml")
    nvml.__dict__.update(
        NVMLError=NVMLError,
        NVML_ERROR_LIBRARY_NOT_FOUND=NO_LIBRARY,
        NVML_ERROR_DRIVER_NOT_LOADED=NO_DRIVER,
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: len(uuids),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: uuids[handle].encode(),
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda handle: (instances or {})[handle],
        nvmlDeviceGetIndex=lambda handle: handle,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
