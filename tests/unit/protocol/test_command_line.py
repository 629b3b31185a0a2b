"""Exit codes, messages and light imports of the two command lines."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

import protocol
from protocol.command_line import exit_code, main, parser, print_progress
from protocol.config.loader import load_config
from protocol.config.run import RunConfig
from protocol.errors import DeviceError, ExitCode, SlipstreamError
from protocol.gpu import nvml as device
from protocol.gpu.nvml import select_gpus
from protocol.runtime import logs
from tests.unit.protocol.config.files import MINIMAL, write_inputs
from tests.unit.protocol.gpu.models import write_model
from tests.unit.protocol.gpu.nvml import NO_DRIVER, NO_LIBRARY, TIMED_OUT, fake_nvml

REPOSITORY = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def own_environment(own_logging: None, stubs_are_slipstream: None) -> Iterator[None]:
    """A command that is called in this process sets variables."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(MINIMAL)
    write_inputs(tmp_path)
    return tmp_path


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, ["GPU-a", "GPU-b"])


Ended = subprocess.CompletedProcess[str]
HEAVY = (
    "torch",
    "vllm",
    "trl",
    "transformers",
    "peft",
    "datasets",
    "numpy",
    "pandas",
    "pyarrow",
    "uvicorn",
    "starlette",
)


def run(config: RunConfig, gpus: list[int]) -> ExitCode:
    """Says what it was given, fails with seed 1 and is interrupted with seed 2."""
    if config.seed == 3:
        print("working in", Path.cwd())
    print("running on", gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))
    if config.seed == 1:
        raise KeyError("a bug")
    if config.seed == 2:
        raise KeyboardInterrupt
    return ExitCode.OK


@pytest.fixture
def call(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    monkeypatch.chdir(folder)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        os.environ.pop(name, None)

    def ended(*arguments: str) -> Ended:
        try:
            code = main(parser("rl-stub", "A stub.").parse_args(arguments), "rl-stub", run)
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
        return Ended(arguments, code or 0, *capsys.readouterr())

    return ended


def test_help_and_version(call: Callable[..., Ended]) -> None:
    shown = call("--help").stdout
    assert all(flag in shown for flag in ("--config", "--set", "--check", "--gpu", "--version"))
    assert call("--version").stdout == f"rl-stub {protocol.__version__}\n"


def test_check_prints_the_resolved_file_and_does_not_run(folder: Path, call: Callable[..., Ended]) -> None:
    shown = call("--config", "run.yaml", "--check", "--set", "pipeline.max_staleness=2")
    assert (shown.returncode, shown.stderr) == (ExitCode.OK, "")
    assert "max_staleness: 2\n" in shown.stdout
    assert "# engine max_loras: 4\n" in shown.stdout
    assert "running" not in shown.stdout
    (folder / "resolved.yaml").write_text(shown.stdout)
    assert load_config("resolved.yaml") == load_config("run.yaml", ["pipeline.max_staleness=2"])
    assert "holds a run" not in shown.stdout
    (folder / "runs" / "x" / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    assert f"# run_dir: {folder}/runs/x holds a run; --resume" in call("--config", "run.yaml", "--check").stdout


@pytest.mark.parametrize("gpu", ["7", "cuda:0", "0,0"])
def test_a_check_looks_at_a_gpu_that_is_named(two_gpus: None, call: Callable[..., Ended], gpu: str) -> None:
    checked = call("--config", "run.yaml", "--check", "--gpu", gpu)
    assert (checked.returncode, checked.stdout) == (ExitCode.DEVICE, "")
    assert checked.stderr.startswith(f"rl-stub: error: --gpu {gpu}: ")
    both = call("--config", "run.yaml", "--check", "--gpu", gpu, "--set", "sed=1")
    assert (both.returncode, both.stderr.count("\n")) == (ExitCode.CONFIG, 2)
    assert call("--config", "run.yaml", "--check", "--gpu", "1").returncode == ExitCode.OK
    assert "CUDA_VISIBLE_DEVICES" not in os.environ, "a check chooses none"


def test_a_daemon_works_in_the_folder_of_its_file(
    folder: Path, call: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    given = ("--config", "../run.yaml", "--gpu", "cpu", "--set", "seed=3")
    assert f"working in {folder}\n" in call(*given).stdout
    assert f"working in {elsewhere}\n" in call(*given, "--set", "folder=.").stdout
    assert Path.cwd() == elsewhere


def test_check_says_what_each_daemon_gets_of_a_gpu_that_they_share(folder: Path, call: Callable[..., Ended]) -> None:
    shared = ["--config", "run.yaml", "--check", "--set", "pipeline.gpu=shared", "--set", "model.path=model"]
    shared += ["--set", "sampling.max_completion_length=8"]
    write_model(folder / "model")
    shown = call(*shared)
    assert "# shares of the GPU: the trainer wants 0.0 GiB and needs 0.0 GiB at least" in shown.stdout
    (folder / "resolved.yaml").write_text(shown.stdout)
    assert load_config("resolved.yaml").pipeline.gpu == "shared"
    assert "shares" not in call(*shared, "--gpu", "cpu").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--set", "sed=1"], 78, "--set sed=1: unknown key `sed`; did you mean `seed`?"),
        (["--gpu", "x"], 71, "--gpu x: expected an index such as 0, a list such as 0,1, or cpu"),
        (["--gpu", ""], 71, "--gpu : expected an index such as 0, a list such as 0,1, or cpu"),
        (
            ["--gpu", "2"],
            71,
            "--gpu 2: GPU 2 does not exist; there are GPUs 0 to 1 on this machine. Name one that exists, or use --gpu cpu",
        ),
        (
            ["--gpu", "0,-1"],
            71,
            "--gpu 0,-1: GPU -1 does not exist; there are GPUs 0 to 1 on this machine. Name one that exists, or use --gpu cpu",
        ),
        (["--gpu", "1,1"], 71, "--gpu 1,1: the same GPU is named twice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_a_user_gets_wrong(
    two_gpus: None, call: Callable[..., Ended], arguments: list[str], code: int, message: str
) -> None:
    shown = call("--config", "run.yaml", *arguments)
    assert (shown.returncode, shown.stdout, shown.stderr) == (code, "", f"rl-stub: error: {message}\n")


@pytest.mark.parametrize("arguments", [[], ["--config"], ["--config", "run.yaml", "--check=some"], ["--nonsense"]])
def test_usage_errors(call: Callable[..., Ended], arguments: list[str]) -> None:
    shown = call(*arguments)
    assert shown.returncode == ExitCode.USAGE == 2
    assert shown.stderr.startswith("usage: rl-stub")


@pytest.mark.parametrize(
    ("choice", "shown"),
    [("0", "[0] 0 PCI_BUS_ID"), ("1", "[1] 1 PCI_BUS_ID"), ("1,0", "[1, 0] 1,0 PCI_BUS_ID"), ("cpu", "[]  None")],
)
def test_exactly_the_chosen_gpus_are_visible(
    two_gpus: None, call: Callable[..., Ended], choice: str, shown: str
) -> None:
    assert call("--config", "run.yaml", "--gpu", choice).stdout == f"running on {shown}\n"


@pytest.mark.parametrize(
    ("given", "choice", "chosen", "visible"),
    [
        ("5,4", "0", [5], "5"),
        ("5,4", "1,0", [4, 5], "4,5"),
        (" 5 , 4", "1", [4], "4"),
        ("GPU-e,GPU-f", "1", [5], "5"),
        ("GPU-e,GPU-f", "GPU-f", [5], "5"),
        (None, "GPU-c", [2], "2"),
        ("MIG-1,MIG-2", "1", [3], "MIG-2"),
        ("MIG-1,MIG-2", "MIG-1", [3], "MIG-1"),
        (None, "MIG-1", [3], "MIG-1"),
        ("4,NoDevFiles,5", "0", [4], "4"),
        ("", "cpu", [], ""),
    ],
)
def test_a_choice_is_among_the_gpus_that_the_process_was_given(
    monkeypatch: pytest.MonkeyPatch, given: str | None, choice: str, chosen: list[int], visible: str
) -> None:
    fake_nvml(monkeypatch, [f"GPU-{letter}" for letter in "abcdef"], {"MIG-1": 3, "MIG-2": 3})
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    else:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert select_gpus(choice) == chosen
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ("5,4", "2"),
        ("5,4", "GPU-a"),
        ("5,9,4", "1"),
        ("4,NoDevFiles,5", "1"),
        ("GPU-", "0"),  # which of them?
        ("MIG-3", "0"),
        ("", "0"),
        ("-1", "0"),
        ("NoDevFiles", "0"),
        ("MIG-1,MIG-2", "0,1"),  # CUDA has one
        ("5,GPU-f", "0,1"),  # twice the same
    ],
)
def test_no_gpu_is_taken_that_the_process_was_not_given(
    monkeypatch: pytest.MonkeyPatch, given: str, choice: str
) -> None:
    fake_nvml(monkeypatch, [f"GPU-{letter}" for letter in "abcdef"], {"MIG-1": 3, "MIG-2": 3})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    with pytest.raises(DeviceError, match=f"--gpu {choice}"):
        select_gpus(choice)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == given


def test_fewer_gpus_than_asked_for(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Ended]) -> None:
    fake_nvml(monkeypatch, ["GPU-a"])
    shown = call("--config", "run.yaml", "--gpu", "3")
    assert shown.returncode == ExitCode.DEVICE == 71
    assert "only GPU 0 on this machine" in shown.stderr


def test_a_bug_ends_with_its_traceback_and_code(call: Callable[..., Ended]) -> None:
    shown = call("--config", "run.yaml", "--gpu", "cpu", "--set", "seed=1")
    assert shown.returncode == ExitCode.BUG == 70
    assert "Traceback (most recent call last)" in shown.stderr
    assert shown.stderr.endswith("KeyError: 'a bug'\nrl-stub: this is a bug; please report it with its traceback\n")


def test_what_a_library_raises_is_no_bug_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        from yaml import safe_load

        return len(safe_load("a: ["))

    assert exit_code("slipstream export", work) == ExitCode.BUG
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "error: yaml failed" in shown
    assert "bug" not in shown


def test_a_device_without_memory_is_no_bug_wherever_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    def work() -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    assert exit_code("slipstream export", work) == ExitCode.DEVICE
    shown = capsys.readouterr().err
    assert "Tried to allocate 2.00 GiB" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (["--set", "sed=1"], ExitCode.CONFIG, "error: --set sed=1: unknown key `sed`; did you mean `seed`?"),
        (["--set", "seed=1"], ExitCode.BUG, "this is a bug; please report it with its traceback"),
    ],
)
def test_under_systemd_the_last_words_are_a_record(
    call: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, changes: list[str], code: ExitCode, message: str
) -> None:
    """Also when the configuration, which may choose the format, cannot be read."""
    monkeypatch.setattr(logs, "running_under_systemd", lambda: True)
    shown = call("--config", "run.yaml", "--gpu", "cpu", *changes)
    assert shown.returncode == code
    [line] = shown.stderr.splitlines()
    assert line.startswith("<2>")
    record = json.loads(line[3:])
    assert (record["role"], record["level"], record["msg"]) == ("rl-stub", "critical", message)
    assert (record["exit_code"], record["exit_name"]) == (code, code.name)
    assert ("KeyError: 'a bug'" in record.get("exc", "")) == (code is ExitCode.BUG)


def test_an_interrupt_has_a_code(call: Callable[..., Ended]) -> None:
    shown = call("--config", "run.yaml", "--gpu", "cpu", "--set", "seed=2")
    assert (shown.returncode, shown.stderr) == (ExitCode.INTERRUPTED, "")
    assert ExitCode.INTERRUPTED == 130


@pytest.mark.long
@pytest.mark.parametrize("module", ["producer.app.cli", "consumer.app.cli"])
def test_the_daemons_import_nothing_heavy_for_help_and_check(folder: Path, module: str) -> None:
    program = (
        f"import atexit, sys\nfrom {module} import main\n"
        f"atexit.register(lambda: print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr))\n"
        "sys.argv[1:] = ['--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "sys.argv[1:] = ['--config', 'run.yaml', '--check']\nmain()"
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-P", "-c", program]
    shown = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert (shown.stderr, shown.returncode) == ("[]\n", 0)


@pytest.mark.long
def test_a_process_leaves_when_all_that_has_to_be_done_is_done_and_looks_at_no_object() -> None:
    program = (
        "import atexit, threading, time\nfrom protocol.command_line import leave\n"
        "class Seen:\n    def __del__(self): print('looked at')\n"
        "seen = Seen()\n"
        "atexit.register(print, 'registered')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('waited for'))).start()\n"
        "leave(68)"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (shown.stdout, shown.stderr, shown.returncode) == ("waited for\nregistered\n", "", 68)


def test_every_error_has_a_code_of_its_own() -> None:
    own = [error for error in SlipstreamError.__subclasses__() if error.__module__ == SlipstreamError.__module__]
    assert {error.__name__.removesuffix("Error"): int(error.exit_code) for error in own} == {
        "Config": 78, "Dataset": 65, "DataFailures": 66, "NoSignal": 67, "NotFinite": 72, "Engine": 69, "Device": 71,
        "EndpointInUse": 73, "Journal": 74, "Stalled": 75, "IncompatiblePeer": 76, "RankLost": 77,
        "NoAnswer": 68, "NoResources": 79, "Bundle": 80, "PolicyRefused": 81,
    }  # fmt: skip


def test_a_machine_whose_driver_does_not_answer_or_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_nvml(monkeypatch, [], fails=TIMED_OUT)
    with pytest.raises(DeviceError, match=r"the NVIDIA driver does not answer: .* --gpu cpu"):
        select_gpus("0")
    for value in (NO_LIBRARY, NO_DRIVER):
        fake_nvml(monkeypatch, [], fails=value)
        with pytest.raises(DeviceError, match=r"--gpu 0: .* no NVIDIA GPU"):
            select_gpus("0")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(device, "_DRIVER", tmp_path / "missing")
    with pytest.raises(DeviceError, match=r"--gpu 0: .* no NVIDIA GPU"):
        select_gpus("0")
    monkeypatch.setattr(device, "_DRIVER", tmp_path)
    with pytest.raises(DeviceError, match="pip install nvidia-ml-py"):
        select_gpus("0")


@pytest.mark.long
@pytest.mark.parametrize("unreadable", ["nobody reads", "full disk"])
def test_output_that_goes_nowhere(folder: Path, unreadable: str) -> None:
    """`--check | head` is no error, and a full disk is one line."""
    if unreadable == "full disk":
        output = os.open("/dev/full", os.O_WRONLY)
        expected = (ExitCode.CONFIG, "rl-trainer: error: standard output: No space left on device\n")
    else:
        reader, output = os.pipe()
        os.close(reader)
        expected = (ExitCode.OK, "")
    command = [sys.executable, "-m", "consumer.app.cli", "--config", str(folder / "run.yaml"), "--check"]
    ended = subprocess.run(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(output)
    assert (ended.returncode, ended.stderr) == expected


def test_progress_that_nobody_reads_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, output = os.pipe()
    os.close(reader)
    with open(output, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        print_progress("step 1/2")
        print_progress("step 2/2")
        monkeypatch.undo()
        with pytest.raises(BrokenPipeError):
            stdout.close()


@pytest.mark.long
def test_what_standard_output_cannot_show_is_escaped(folder: Path) -> None:
    """Of a terminal that shows ASCII alone, as of a service without a locale."""
    chosen = ["--config", str(folder / "run.yaml"), "--check", "--set", "run_dir=Läufe/…"]
    command = [sys.executable, "-m", "consumer.app.cli", *chosen]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (ExitCode.OK, "")
    assert r"/L\xe4ufe/\u2026" in ended.stdout
