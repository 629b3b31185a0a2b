"""The scripts for SLURM, run by bash with programs that stand in for the daemons and for SLURM's own."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protocol.errors import ExitCode
from slipstream.cluster.fleet.exits import STAYS_DOWN
from tests.unit.slipstream.cluster.render.rendered import KEYS, bash, calls, project, render, run_name, stand_in


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    project(tmp_path)
    return tmp_path


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    stand_in(folder, "scontrol", "[ \"$1\" != show ] || printf '%s\\n' n1 n2 n3")
    stand_in(folder, "squeue", "echo 7")
    return folder


def rendered(here: Path, programs: Path, *arguments: str) -> Path:
    """With the folder of programs in place of this Python's."""
    out = here / "out"
    assert render("slurm", out, "--trainer-node", "n2", "--cpus", "3", *arguments) == 0
    for file in out.iterdir():
        file.write_text(file.read_text().replace(str(Path(sys.executable).parent), str(programs)))
    return out


def directives(file: Path) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", file.read_text(), re.M))


JOBS = [("trainer.sbatch", "rl-trainer"), ("producers.sbatch", "rl-producer")]
OF_A_TASK = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "4"}
AGAIN = {"rl-trainer": "scontrol requeue 12", "rl-producer": "scontrol requeue 12_4"}
COMMON = Path(__file__).parents[5] / "deploy" / "systemd" / "common.conf"
SOME = [ExitCode.OK, ExitCode.CONFIG, ExitCode.STALLED]


@pytest.mark.parametrize(("job", "program", "codes"), [(*JOBS[0], [*ExitCode, 137]), (*JOBS[1], SOME)])
def test_a_job_is_queued_again_unless_a_new_start_cures_nothing(
    here: Path, programs: Path, job: str, program: str, codes: list[int]
) -> None:
    script = rendered(here, programs, "--gpus", "0") / job
    for code in codes:
        stand_in(programs, program, f"exit {code}")
        (programs / "calls").unlink(missing_ok=True)
        done = bash(script, programs, **OF_A_TASK)
        assert (done.returncode, done.stderr) == (code, "")
        assert (AGAIN[program] in calls(programs)) == (code not in STAYS_DOWN), code


@pytest.mark.parametrize(("job", "program"), JOBS)
def test_a_job_whose_time_is_almost_up_stops_and_is_queued_again(
    here: Path, programs: Path, job: str, program: str
) -> None:
    script = rendered(here, programs, "--gpus", "0") / job
    stand_in(programs, program, f"trap 'sleep 0.2; exit 0' TERM; touch {here}/up; while :; do sleep 0.05; done")
    environment = {"PATH": f"{programs}:/usr/bin:/bin"} | OF_A_TASK
    with subprocess.Popen(["bash", str(script)], env=environment, stdout=subprocess.PIPE) as process:
        while not (here / "up").exists():
            time.sleep(0.01)
        time.sleep(0.1)  # bash sets its trap
        process.send_signal(signal.SIGUSR1)
        assert process.wait(30) == 0
    assert calls(programs)[-1] == AGAIN[program]


def test_producers_do_not_come_back_without_a_trainers_job(here: Path, programs: Path) -> None:
    script = rendered(here, programs, "--gpus", "0") / "producers.sbatch"
    stand_in(programs, "rl-producer", f"exit {ExitCode.NO_ANSWER:d}")
    for answer, again in (("", False), ("echo 7", True), ("exit 1", True)):  # the last: nobody knows
        (programs / "calls").unlink(missing_ok=True)
        stand_in(programs, "squeue", answer)
        assert bash(script, programs, **OF_A_TASK).returncode == ExitCode.NO_ANSWER
        assert (AGAIN["rl-producer"] in calls(programs)) == again
        assert f"squeue --noheader --me --name={run_name(script.parent)}-trainer --format=%i" in calls(programs)


def test_the_commands_are_those_that_a_person_would_type(here: Path, programs: Path) -> None:
    out = rendered(here, programs, "--producers", "6", "--ranks", "2", "--set", "trainer.run_name=a 'b' $c")
    for _, program in JOBS:
        stand_in(programs, program, "exit 0")
    environment = OF_A_TASK | {"CUDA_VISIBLE_DEVICES": "2,3"}  # among which `--gpu` counts
    for job, _ in JOBS:
        assert bash(out / job, programs, **environment).returncode == 0
    producer, trainer = sorted(call for call in calls(programs) if call.startswith("rl-"))
    connect = f"--connect tcp://n2:5557 --keys {out}/keys --set transport.identity=producer-4"
    assert producer == f"rl-producer --gpu 0 {connect}"
    assert trainer == (
        f"rl-trainer --gpu 0,1 --config {here}/run.yaml --resume --set trainer.run_name=a 'b' $c "
        f"--set transport.keys={out}/keys --set transport.endpoint=tcp://0.0.0.0:5557"
    )
    of_trainer, of_producers = directives(out / "trainer.sbatch"), directives(out / "producers.sbatch")
    assert of_trainer["nodelist"] == "n2"
    assert (of_trainer["gpus-per-node"], of_trainer["cpus-per-task"], of_trainer["nodes"]) == ("2", "6", "1")
    assert (of_producers["gpus"], of_producers["cpus-per-task"], of_producers["array"]) == ("1", "3", "0-5")
    assert of_trainer["chdir"] == str(here)
    for found in (of_trainer, of_producers):
        assert {"requeue", "open-mode", "output", "signal", "job-name"} <= set(found)


def test_a_job_without_its_gpus_ends_with_the_reason(here: Path, programs: Path) -> None:
    out = rendered(here, programs)
    for job, _ in JOBS:
        done = bash(out / job, programs, **OF_A_TASK)
        assert done.returncode != 0
        assert "SLURM gave this job no GPU" in done.stderr
    assert calls(programs) == []


def test_several_nodes_begin_with_the_one_that_has_the_run(here: Path, programs: Path) -> None:
    script = rendered(here, programs, "--nodes", "3", "--gpus", "0", "--ranks", "2") / "trainer.sbatch"
    stand_in(programs, "srun", f'cat "$SLURM_HOSTFILE" >{here}/order; shift 4; SLURM_PROCID=1 exec "$@"')
    for own, others in ((77, 0), (0, 0), (78, 78), (71, 71)):
        stand_in(programs, "rl-trainer", f"exit {own}")
        done = bash(
            script, programs, SLURM_JOB_ID="12", SLURM_JOB_NODELIST="n[1-3]", SLURM_CPUS_PER_TASK="6", TMPDIR=str(here)
        )
        assert done.returncode == others, done.stderr
    assert (here / "order").read_text().split() == ["n2", "n1", "n3"]
    assert (
        f"rl-trainer --gpu cpu --node-rank 1 --config {here}/run.yaml --resume --set transport.keys={here}/out/keys --set "
        "transport.endpoint=tcp://0.0.0.0:5557 --ranks 2 --nodes 3 --rendezvous n2:5559"
    ) in calls(programs)


def test_submitting_makes_the_keys_and_both_jobs(here: Path, programs: Path) -> None:
    out = rendered(here, programs, "--producers", "2")
    stand_in(programs, "sbatch", "echo '40;cluster'")
    stand_in(programs, "rl-keys", KEYS)
    for _ in range(2):
        done = bash(out / "submit.sh", programs)
        assert done.returncode == 0, done.stderr
    assert calls(programs) == [
        "rl-keys --keys keys generate trainer",
        "rl-keys --keys keys generate producer-0",
        "rl-keys --keys keys authorize producer-0",
        "rl-keys --keys keys generate producer-1",
        "rl-keys --keys keys authorize producer-1",
        *2 * [f"sbatch --parsable {out}/trainer.sbatch", f"sbatch --parsable --dependency=after:40 {out}/producers.sbatch"],
    ]  # fmt: skip


def test_who_stays_down_is_who_stays_down_under_systemd() -> None:
    [codes] = re.findall(r"^RestartPreventExitStatus=(.*)$", COMMON.read_text(), re.M)
    assert set(map(int, codes.split())) | {ExitCode.OK, ExitCode.INTERRUPTED} == STAYS_DOWN


def test_a_node_without_a_name_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert render("slurm", here / "out", "--trainer-node", "10.0.0.5") == 78
    assert "say with --trainer-node which one is 10.0.0.5 and has run_dir" in capsys.readouterr().err
