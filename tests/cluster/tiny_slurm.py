"""A Slurm of three nodes on this machine, without root, munge, systemd or a database."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
NODES = ("n1", "n2", "n3")

# One node a matter: n1 for everything, n2 is where jobs are preempted, n3 is the one that breaks.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=2
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MaxArraySize={max_array_size}
ReturnToService=2
KillWait=3
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n[1-3] NodeHostname={host} NodeAddr=127.0.0.1 Port={node_ports} CPUs=16 RealMemory=24000 Gres=gpu:toy:4
PartitionName=main Nodes=n1 Default=YES MaxTime=INFINITE State=UP
PartitionName=wide Nodes=n1,n2 MaxTime=INFINITE State=UP PreemptMode=OFF
PartitionName=low Nodes=n2 PriorityTier=1 GraceTime=20 MaxTime=INFINITE State=UP
PartitionName=high Nodes=n2 PriorityTier=10 MaxTime=INFINITE State=UP
PartitionName=fragile Nodes=n3 MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Programs of Slurm that this machine lacks."""
    path = os.environ["PATH"] + ":/usr/sbin:/usr/local/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def runs(pid: int) -> bool:
    """Whether the process is there and not just the entry of one that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Cluster:
    """Its daemons, and the commands that tests give to it."""

    def __init__(self, folder: Path, max_array_size: int = 11) -> None:
        self.folder = folder
        self.max_array_size = max_array_size
        self.host = socket.gethostname().split(".")[0]
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "PATH": os.environ["PATH"] + ":/usr/sbin:/usr/local/sbin",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def start(self) -> None:
        for name in ("state", "log", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        text = CONFIGURATION.format(
            host=self.host,
            user=getpass.getuser(),
            folder=self.folder,
            max_array_size=self.max_array_size,
            port=free_port(),
            node_ports=",".join(str(free_port()) for _ in NODES),
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text("NodeName=n[1-3] Name=gpu Type=toy File=/dev/tty[0-3]\n")
        self.daemon("slurmctld")
        for node in NODES:
            self.daemon("slurmd", "-N", node)
        self.wait_for(lambda: self.run("sinfo", "-h", "-N", "-o", "%T").count("idle") >= len(NODES), 30, "idle nodes")

    def daemon(self, name: str, *options: str) -> None:
        command = [name, "-f", str(self.folder / "slurm.conf"), *options]
        subprocess.run(command, env=self.environment, check=True, capture_output=True, timeout=30)

    def stop(self) -> None:
        """Ends every job and daemon, whatever state they are in."""
        subprocess.run(
            ["scancel", "--quiet", "-u", getpass.getuser()], env=self.environment, timeout=30, capture_output=True
        )
        deadline = time.monotonic() + 10
        while self.query("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.3)
        for name in (*(f"slurmd-{node}" for node in NODES), "slurmctld"):
            self.end(name)
        # What a killed daemon leaves behind: step managers name this folder in their environment.
        for process in Path("/proc").glob("[0-9]*"):
            try:
                ours = f"SLURM_CONF={self.folder}".encode() in (process / "environ").read_bytes()
            except OSError:
                continue
            if ours and int(process.name) != os.getpid():
                os.kill(int(process.name), signal.SIGKILL)

    def end(self, name: str) -> None:
        """Ends the daemon by its pid file."""
        try:
            pid = int((self.folder / f"{name}.pid").read_text())
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + 8
            while runs(pid) and time.monotonic() < deadline:
                time.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
        except (OSError, ValueError):
            pass

    def query(self, *command: str) -> str:
        """What the command prints; nothing if it fails."""
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30)
        return result.stdout if result.returncode == 0 else ""

    def run(self, *command: str) -> str:
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30)
        assert result.returncode == 0, f"{command}: {result.stderr}"
        return result.stdout

    def wait_for(self, condition, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s in vain for {what}\n{self.query('squeue')}"
            time.sleep(0.2)
