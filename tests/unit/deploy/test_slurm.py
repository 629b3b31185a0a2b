"""The scripts for SLURM, run by bash with programs that stand in for the daemons and for SLURM's own."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from protocol.errors import ExitCode
from protocol.runtime.supervisor import STAYS_DOWN
from tests.unit.deploy.scripts import KEYS, REPOSITORY, bash, calls, stand_in

COMMON = REPOSITORY / "deploy" / "systemd" / "common.conf"
JOBS = [("trainer.sbatch", "rl-trainer"), ("producers.sbatch", "rl-producer")]
OF_A_TASK = {
    "SLURM_JOB_ID": "12",
    "SLURM_ARRAY_JOB_ID": "12",
    "SLURM_ARRAY_TASK_ID": "4",
    "CUDA_VISIBLE_DEVICES": "2,3",
}
AGAIN = {"rl-trainer": "scontrol requeue 12", "rl-producer": "scontrol requeue 12_4"}
SOME = [ExitCode.OK, ExitCode.CONFIG, ExitCode.STALLED]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    stand_in(folder, "scontrol", "[ \"$1\" != show ] || printf '%s\\n' n1 n2 n3")
    stand_in(folder, "squeue", "echo 7")
    stand_in(folder, "sbatch", "echo '40;cluster'")
    stand_in(folder, "slipstream", KEYS)
    return folder


@pytest.fixture
def jobs(tmp_path: Path, programs: Path) -> Path:
    """The files with the settings of a run."""
    folder = shutil.copytree(REPOSITORY / "deploy" / "slurm", tmp_path / "jobs")
    settings = (folder / "settings.sh").read_text()
    (folder / "settings.sh").write_text(settings.replace("/opt/slipstream/bin", str(programs)).replace("NODE", "n2"))
    return folder


@pytest.mark.parametrize(("job", "program", "codes"), [(*JOBS[0], [*ExitCode, 137]), (*JOBS[1], SOME)])
def test_a_job_is_queued_again_unless_a_new_start_cures_nothing(
    jobs: Path, programs: Path, job: str, program: str, codes: list[int]
) -> None:
    for code in codes:
        stand_in(programs, program, f"exit {code}")
        (programs / "calls").unlink(missing_ok=True)
        done = bash(jobs / job, programs, **OF_A_TASK)
        assert (done.returncode, done.stderr) == (code, "")
        assert (AGAIN[program] in calls(programs)) == (code not in STAYS_DOWN), code


@pytest.mark.parametrize(("job", "program"), JOBS)
def test_a_job_whose_time_is_almost_up_stops_and_is_queued_again(
    jobs: Path, programs: Path, job: str, program: str
) -> None:
    stand_in(programs, program, f"trap 'sleep 0.2; exit 0' TERM; touch {jobs}/up; while :; do sleep 0.05; done")
    environment = {"PATH": f"{programs}:/usr/bin:/bin"} | OF_A_TASK
    with subprocess.Popen(["bash", job], cwd=jobs, env=environment, stdout=subprocess.PIPE) as process:
        while not (jobs / "up").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(30) == 0
    assert calls(programs)[-1] == AGAIN[program]


@pytest.mark.parametrize(("job", "program"), JOBS)
def test_a_job_whose_time_is_up_before_its_program_runs_stops_it_and_is_queued_again(
    jobs: Path, programs: Path, job: str, program: str
) -> None:
    stand_in(programs, program, "exec sleep 600")
    with (jobs / "settings.sh").open("a") as settings:
        settings.write('kill -USR1 "$$"\n')
    assert bash(jobs / job, programs, **OF_A_TASK).returncode == 128 + signal.SIGTERM
    assert calls(programs)[-1] == AGAIN[program]


def test_producers_do_not_come_back_without_a_trainers_job(jobs: Path, programs: Path) -> None:
    stand_in(programs, "rl-producer", f"exit {ExitCode.NO_ANSWER:d}")
    [name] = re.findall(r"^#SBATCH --job-name=(.*)$", (jobs / "trainer.sbatch").read_text(), re.M)
    for answer, again in (("", False), ("echo 7", True), ("exit 1", True)):  # the last: SLURM does not answer
        (programs / "calls").unlink(missing_ok=True)
        stand_in(programs, "squeue", answer)
        assert bash(jobs / "producers.sbatch", programs, **OF_A_TASK).returncode == ExitCode.NO_ANSWER
        assert (AGAIN["rl-producer"] in calls(programs)) == again
        assert f"squeue --noheader --me --name={name} --format=%i" in calls(programs)


def test_the_commands_are_those_that_a_person_would_type(jobs: Path, programs: Path) -> None:
    for job, program in JOBS:
        stand_in(programs, program, "exit 0")
        assert bash(jobs / job, programs, **OF_A_TASK).returncode == 0
    assert sorted(call for call in calls(programs) if call.startswith("rl-")) == [
        "rl-producer --gpu 0 --connect tcp://n2:5557 --keys keys --set transport.identity=producer-4",
        "rl-trainer --gpu 0 --config run.yaml --resume",
    ]


def test_a_job_without_its_gpus_ends_with_the_reason(jobs: Path, programs: Path) -> None:
    for job, _ in JOBS:
        done = bash(jobs / job, programs, **OF_A_TASK | {"CUDA_VISIBLE_DEVICES": ""})
        assert done.returncode != 0
        assert "SLURM gave this job no GPU" in done.stderr
    assert calls(programs) == []


def test_several_nodes_begin_with_the_one_that_has_the_run(jobs: Path, programs: Path) -> None:
    stand_in(programs, "srun", f'cat "$SLURM_HOSTFILE" >{jobs}/order; shift 4; SLURM_PROCID=1 exec "$@"')
    several = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CPUS_PER_TASK": "6"}
    for own, others in ((77, 0), (0, 0), (78, 78), (71, 71)):
        stand_in(programs, "rl-trainer", f"exit {own}")
        done = bash(jobs / "trainer.sbatch", programs, TMPDIR=str(jobs), **OF_A_TASK, **several)
        assert done.returncode == others, done.stderr
    assert (jobs / "order").read_text().split() == ["n2", "n1", "n3"]
    command = "rl-trainer --gpu 0 --node-rank 1 --config run.yaml --resume --nodes 3 --rendezvous n2:5559"
    assert command in calls(programs)


def test_submitting_makes_the_keys_and_both_jobs(jobs: Path, programs: Path) -> None:
    for arguments in (("2",), ("2",), ("--more", "2-2")):
        done = bash(jobs / "submit.sh", programs, *arguments)
        assert done.returncode == 0, done.stderr
    keys = [[f"slipstream keys generate producer-{n}", f"slipstream keys authorize producer-{n}"] for n in range(3)]
    submitted = [
        "sbatch --parsable trainer.sbatch",
        "sbatch --parsable --dependency=after:40 --array=0-1 producers.sbatch",
    ]
    assert calls(programs) == [
        "slipstream keys generate trainer", *keys[0], *keys[1], *submitted, *submitted,
        *keys[2], "sbatch --parsable --array=2-2 producers.sbatch",
    ]  # fmt: skip


def test_a_job_stays_down_where_a_unit_of_systemd_does() -> None:
    [codes] = re.findall(r"^RestartPreventExitStatus=(.*)$", COMMON.read_text(), re.M)
    assert set(map(int, codes.split())) | {ExitCode.OK, ExitCode.INTERRUPTED} == STAYS_DOWN


def test_the_script_that_a_person_starts_can_be_started(jobs: Path) -> None:
    assert os.access(jobs / "submit.sh", os.X_OK)
