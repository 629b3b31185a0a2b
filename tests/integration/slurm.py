"""A SLURM of two nodes on this machine, for tests: the real daemons in a folder, on free ports, without systemd and cgroups.

Guarantee: its daemons are ended by their pid files, and jobs that still run before that.
"""

import os
import random
import signal
import socket
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.tools import require

from .runs import eventually

REPOSITORY = Path(__file__).parents[2]
_DAEMONS = ("slurmctld", "slurmd-n1", "slurmd-n2")
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=all Nodes=n1,n2 Default=YES
"""


def free_ports(count: int) -> list[int]:
    """In a row, below those that the kernel gives to connections."""
    while True:
        first = random.randrange(15_000, 30_000)
        with ExitStack() as taken, suppress(OSError):
            for port in range(first, first + count):
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
            return list(range(first, first + count))


def edited_scripts(folder: Path, programs: Path, endpoint: str, model: Path, nodes: int = 1) -> None:
    """Copy deploy/slurm into the run's folder, with the edits of a person whose run is on CPUs and at the node n2."""
    edits = {
        "/opt/slipstream/bin": str(programs), "node=NODE": "node=n2", "=tcp://NODE:5557": f"={endpoint}", "_gpu=0": "_gpu=cpu",
        "# EDIT: arguments+=(--model /FOLDER)": f"arguments+=(--model {model}) #",
        "nodelist=NODE": "nodelist=n2", "#SBATCH --gpus-per-node=1\n": "", "#SBATCH --gpus=1\n": "",
        "--cpus-per-task=8": "--cpus-per-task=1", "--nodes=1\n#SBATCH --ntasks-per": f"--nodes={nodes}\n#SBATCH --ntasks-per",
    }  # fmt: skip
    for file in (REPOSITORY / "deploy" / "slurm").iterdir():
        text = file.read_text()
        for old, new in edits.items():
            text = text.replace(old, new)
        (folder / file.name).write_text(text)
        (folder / file.name).chmod(0o755)


class Slurm:
    """Ended by `close`."""

    def __init__(self) -> None:
        for program in ("slurmctld", "slurmd", "sbatch"):
            require(program, "slurm-wlm")
        self._temporary = TemporaryDirectory(prefix="sl-", dir="/tmp")
        self.folder = Path(self._temporary.name)
        for name in ("state", "n1", "n2"):
            (self.folder / name).mkdir()
        host, user = socket.gethostname().partition(".")[0], _user()
        text = _CONFIGURATION.format(folder=self.folder, host=host, user=user, ports=free_ports(3))
        (self.folder / "slurm.conf").write_text(text)
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        for command in (["slurmctld", "-c"], ["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"]):
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30)
            assert done.returncode == 0, done.stderr
        eventually(lambda: self.ask("sinfo", "--noheader", "--format=%T").split() == ["idle"])

    def ask(self, *command: str) -> str:
        """What a command of SLURM says; nothing where it fails."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60).stdout

    def state(self, job: str) -> str:
        """Such as RUNNING."""
        return self.fields(job).get("JobState", "")

    def fields(self, job: str) -> dict[str, str]:
        words = self.ask("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def begin_again(self, job: str) -> None:
        """Has a job that was queued again run soon; it would wait for two minutes. Not in the second in which it ended: a node
        takes it for the old one then."""
        eventually(lambda: self.fields(job).get("Reason") == "BeginTime")
        self.ask("scontrol", "update", f"jobid={job}", "starttime=now+3")
        again = {"JobState": "RUNNING", "Restarts": "1"}
        eventually(lambda: again.items() <= self.fields(job).items())

    def close(self) -> None:
        for job in self.ask("squeue", "--noheader", "--array", "--format=%A").split():
            self.ask("scancel", "--full", "--signal=KILL", job)
            self.ask("scancel", job)
        with suppress(AssertionError):
            eventually(lambda: not self.ask("squeue", "--noheader").strip(), 20)
        for name in reversed(_DAEMONS):
            self._end(self.folder / f"{name}.pid")
        self._temporary.cleanup()

    def _end(self, file: Path) -> None:
        with suppress(OSError, ValueError):
            pid = os.pidfd_open(int(file.read_text()))
            signal.pidfd_send_signal(pid, signal.SIGTERM)
            os.close(pid)
            with suppress(AssertionError):
                eventually(lambda: not file.exists(), 20)


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name
