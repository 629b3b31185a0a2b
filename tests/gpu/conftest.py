"""Every test with the mark `stand_in` runs in a fork of a process that has the stand-in GPU; see `tests.gpu.warm`."""

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from campaigns.chaos.fleet import Zygote
from tests.gpu import reports
from tests.gpu.stand_in import building
from tests.tools import require

if TYPE_CHECKING:
    from tests.gpu.stand_in.cuda import Gpu

_LONGEST_S = 280.0

Model = Callable[[str], Path]


@functools.cache
def zygote() -> Zygote:
    """The process with the stand-in GPU that belongs to this one."""
    building.gpu_library()  # here, where an error of the compiler is seen
    building.nvml_library()
    log = Path(tempfile.mkstemp(prefix="sl-gpu-", suffix=".log")[1])
    started = Zygote("tests.gpu.warm", log, Path(tempfile.gettempdir()))
    atexit.register(log.unlink)
    atexit.register(started.close)
    try:
        started.wait_until_ready()
    except AssertionError as error:
        raise AssertionError(f"{error}:\n{log.read_text(errors='replace')[-6000:]}") from error
    return started


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Without a compiler the fixture below says why the test is not run."""
    if item.get_closest_marker("stand_in") is None or reports.are_made_here() or not shutil.which(building.COMPILER):
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    call = pytest.CallInfo.from_call(lambda: reports.of_test(item, zygote(), _LONGEST_S), when="call")
    for report in [hook.pytest_runtest_makereport(item=item, call=call)] if call.excinfo else call.result or ():
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(autouse=True)
def compiler(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("stand_in") is not None:
        require(building.COMPILER, "g++")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Builds a small random model of a family of `tests.integration.models`."""

    @functools.cache
    def build(family: str) -> Path:
        from tests.integration.models import build_model

        return build_model(family, tmp_path_factory.mktemp(family) / "model")

    return build


@pytest.fixture
def gpu() -> "Gpu":
    """The stand-in GPU of the test's process."""
    from tests.gpu.stand_in import cuda

    return cuda.install()
