"""A Slurm of one node, real daemons in a folder of its own, for tests of what is handed to it."""

import contextlib
import getpass
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
REMEDY = "install Slurm first: apt-get install --no-install-recommends slurm-wlm munge"
_SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

_CONF = """\
ClusterName=swerve
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


class SlurmCluster:
    """A running cluster.

    Attributes:
        environment: What clients need to find it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def client(self, *words: str) -> str:
        """Runs one of Slurm's commands."""
        done = subprocess.run(
            words, env=os.environ | self.environment, capture_output=True, text=True, check=True, timeout=30
        )
        return done.stdout.strip()

    def state(self, identifier: str) -> str:
        """State of a job, in the controller's word."""
        shown = self.client("scontrol", "--oneliner", "show", "job", identifier)
        return shown.partition("JobState=")[2].split()[0]

    def start_soon(self, identifier: str) -> None:
        """Starts a requeued job, which Slurm would let wait for two minutes, once it has left the node.

        Not at once: what it may do on the node was revoked to the second, and a start in that second is refused.
        """
        wait_until(lambda: self.state(identifier) == "PENDING")
        wait_until(lambda: self.client("scontrol", "update", f"JobId={identifier}", "StartTime=now+3") == "")

    def end(self, identifier: str, timeout_s: float) -> str:
        """Waits until a job has ended; returns its state."""
        wait_until(lambda: self.state(identifier) not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED"), timeout_s)
        return self.state(identifier)

    def site_file(self, path: Path, **more: str) -> Path:
        """Writes a site file for jobs that work beside it.

        Args:
            path: The file.
            more: Further sections by name, as lines of TOML.
        """
        prefixes = ("JAX", "XLA", "OMP_", "OPENBLAS_", "RAYON_", "TOKENIZERS_", "SWERVE_", "PYTHON")
        inherit = sorted(name for name in os.environ if name.startswith(prefixes))
        sections = {
            "paths": f'work = "{path.parent}"',
            "environment": f"inherit = {json.dumps(inherit)}",
            **more,
        }
        path.write_text("".join(f"[{name}]\n{lines}\n" for name, lines in sections.items()))
        return path


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Starts munge, the controller and the node's daemon; ends them, and waits for their end."""
    programs = {name: shutil.which(name, path=_SEARCH) for name in PROGRAMS}
    assert None not in programs.values(), REMEDY
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    host = socket.gethostname().partition(".")[0]
    ports = [_free_port(), _free_port()]
    conf = _CONF.format(host=host, ports=ports, user=getpass.getuser(), folder=folder)
    (folder / "slurm.conf").write_text(conf)
    # Jobs are not confined by cgroups; older versions have no word for that, and load a plugin that then does nothing.
    version = subprocess.run(
        [str(programs["slurmd"]), "-V"], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    plugin = "disabled" if [int(part) for part in version.split(".")[:2]] >= [23, 11] else "cgroup/v1"
    (folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
    made = SlurmCluster(folder)
    munge = ["socket", "key-file", "pid-file", "log-file", "seed-file"]
    with contextlib.ExitStack() as stack:
        options = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in munge]
        _daemon(stack, folder, "munged", programs["munged"], "--foreground", "--force", *options)
        wait_until(lambda: (folder / "munge.socket").exists())
        _daemon(stack, folder, "slurmctld", programs["slurmctld"], "-D", "-c", "-f", folder / "slurm.conf")
        _daemon(stack, folder, "slurmd", programs["slurmd"], "-D", "-c", "-f", folder / "slurm.conf", "-N", host)
        try:
            wait_until(lambda: made.client("sinfo", "--noheader", "--format=%t") == "idle")
            yield made
        finally:
            with contextlib.suppress(subprocess.SubprocessError):
                made.client("scancel", "--user", getpass.getuser())
                wait_until(lambda: not made.client("squeue", "--noheader"))


def _daemon(stack: contextlib.ExitStack, folder: Path, name: str, *words: object) -> None:
    log = stack.enter_context((folder / f"{name}.log").open("wb"))
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    process = subprocess.Popen(
        [str(word) for word in words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
    )

    def end() -> None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def wait_until(ready: Callable[[], object], timeout_s: float = 120) -> None:
    """Waits for something to become true; a command of Slurm's that fails says that it is not yet."""
    until = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(subprocess.CalledProcessError):
            if ready():
                return
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
