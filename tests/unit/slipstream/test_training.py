"""A run from Python: what starts, how it ends, and what the caller gets. Small scripts are in the daemons' places."""

import asyncio
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import slipstream
from protocol.config.functions import load_function
from protocol.errors import ConfigError, ExitCode
from slipstream.launch import Launch
from tests.unit.protocol.config.files import MINIMAL

PAGE = Path(__file__).parents[3] / "docs" / "python.md"
UP = "import time, pathlib, sys\npathlib.Path(sys.argv[1], 'up').touch()\nwhile True: time.sleep(0.02)\n"
# An exception of a handler that comes in the middle of an import can be lost.
POLITE = f"import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n{UP}"
WORKS = "import pathlib, sys\npathlib.Path(sys.argv[1], 'metrics').mkdir(exist_ok=True)\n"


@pytest.fixture
def config(tmp_path: Path) -> dict:
    return yaml.safe_load(MINIMAL) | {"run_dir": str(tmp_path / "run")}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], list[dict]]:
    """Puts scripts in the places of trainer and producer; returns the content of the files that they would have read."""

    def put(trainer: str, producer: str) -> list[dict]:
        asked: list[dict] = []

        def planned(file: str, **_: object) -> Launch:
            asked.append(yaml.safe_load(Path(file).read_text()))
            run_dir = Path(asked[-1]["run_dir"])
            run_dir.mkdir(exist_ok=True)
            return Launch(run_dir, *([sys.executable, "-S", "-c", code, str(run_dir)] for code in (trainer, producer)))

        monkeypatch.setattr(Launch, "of", planned)
        return asked

    return put


def test_it_imports_no_heavy_library() -> None:
    heavy = {"torch", "vllm", "transformers", "trl", "peft", "datasets", "pandas", "numpy", "pydantic", "zmq", "rich"}
    code = "import sys, slipstream; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "slipstream.training" in loaded.split()
    assert heavy.isdisjoint(loaded.split())


def test_a_dictionary_is_checked_as_a_file_is(config: dict, tmp_path: Path) -> None:
    loaded = slipstream.load_config(config | {"run_dir": tmp_path / "run"}, ["trainer.max_steps=7"])
    assert (loaded.run_dir, loaded.trainer["max_steps"]) == (str(tmp_path / "run"), 7)
    assert slipstream.load_config(loaded) == loaded
    with pytest.raises(ConfigError, match=r"^config: pipelin: unknown key `pipelin`; did you mean `pipeline`"):
        slipstream.load_config(config | {"pipelin": {}})
    with pytest.raises(ConfigError, match="config: a value"):
        slipstream.load_config(config | {"seed": object()})


@pytest.mark.long
def test_the_daemons_get_the_rewards_and_the_caller_the_run(
    config: dict, plans: Callable[[str, str], list[dict]]
) -> None:
    asked = plans(WORKS, "pass")
    run = slipstream.train(config, ["exact_match"])
    assert [one["function"] for one in asked[0]["rewards"]["functions"]] == ["exact_match"]
    assert run.folder == Path(config["run_dir"])
    assert list(run.steps().columns) == ["step"]


@pytest.mark.long
def test_the_example_of_the_page_runs(
    config: dict, plans: Callable[[str, str], list[dict]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = '{"step": 1, "reward": 0.5}'
    asked = plans(f"{WORKS}pathlib.Path(sys.argv[1], 'steps.jsonl').write_text({line!r} + chr(10))", "pass")
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "example.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = runpy.run_path("example.py", run_name="__main__")
    assert names["run"].steps()["reward"].tolist() == [0.5]
    assert asked[0]["trainer"]["max_steps"] == 200
    (function,) = asked[0]["rewards"]["functions"]
    assert load_function(function["function"], "rewards")(["1", "2"], ["1", "1"]) == [1.0, 0.0]


@pytest.mark.long
def test_a_failure_says_what_the_exit_code_means_and_what_the_daemon_said(
    config: dict, plans: Callable[[str, str], list[dict]]
) -> None:
    plans("print('no two rewards differ'); raise SystemExit(67)", POLITE)
    with pytest.raises(slipstream.RunFailedError) as failed:
        slipstream.train(config)
    assert failed.value.exit_code == ExitCode.NO_SIGNAL
    assert ExitCode.NO_SIGNAL.meaning in str(failed.value)
    assert "trainer  | no two rewards differ" in str(failed.value)


@pytest.mark.long
def test_it_runs_below_a_running_loop_and_off_the_main_thread(
    config: dict, plans: Callable[[str, str], list[dict]]
) -> None:
    plans(WORKS, "pass")

    async def cell() -> list[slipstream.Run]:
        return [slipstream.train(config), await asyncio.to_thread(slipstream.train, config)]

    assert [run.folder for run in asyncio.run(cell())] == [Path(config["run_dir"])] * 2


@pytest.fixture
def handler() -> Iterator[object]:
    """Python's own handler of interrupts, which it does not set up below a shell that runs it in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.long
def test_an_interrupt_ends_both_daemons(config: dict, plans: Callable[[str, str], list[dict]], handler: object) -> None:
    plans(POLITE, POLITE)
    run_dir = Path(config["run_dir"])

    def interrupt() -> None:
        while not (run_dir / "up").exists():
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        slipstream.train(config)
    assert signal.getsignal(signal.SIGINT) == handler
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not [pid for pid in children if str(run_dir) in Path(f"/proc/{pid}/cmdline").read_text()]


def test_a_refused_reward_starts_nothing(config: dict, plans: Callable[[str, str], list[dict]]) -> None:
    asked = plans(POLITE, POLITE)
    with pytest.raises(ConfigError, match="rewards: <lambda>"):
        slipstream.train(config, [lambda completions, **_: [0.0]])
    assert asked == []
    assert not Path(config["run_dir"]).exists()
