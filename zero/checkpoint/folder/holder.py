"""The process that holds the lock of a folder of checkpoints, as the text in the file of the lock says.

Knows: hosts, processes, jobs of a launcher. Does not know: locks, files.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

STOPPED = "T"  # by a signal, in proc(5)
_NO_JOB = "none"  # torchrun's id of a job to which nobody gave one


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        host, pid: of the process; nonce: of its run.
        started: in ticks since the boot of its host.
        job: the launcher's id of the job whose worker it is; empty if there is none.
        system: the boot of its host and its namespace of pids, since several hosts and containers may have one name.
    """

    host: str = ""
    pid: int = 0
    nonce: str = ""
    started: int = 0
    job: str = ""
    system: str = ""

    @classmethod
    def me(cls, nonce: str) -> Holder:
        job = os.environ.get("TORCHELASTIC_RUN_ID", _NO_JOB)
        _, started = _state_and_start(os.getpid())
        return cls(socket.gethostname(), os.getpid(), nonce, started, "" if job == _NO_JOB else job, _system())

    @classmethod
    def unpack(cls, text: bytes) -> Holder:
        """Read what `pack` has written; any other text makes a holder without a host."""
        try:
            found = json.loads(text)
            known = (str(found["host"]), int(found["pid"]), str(found["nonce"]))
            return cls(*known, int(found.get("started", 0)), str(found.get("job", "")), str(found.get("system", "")))
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()

    def pack(self) -> bytes:
        return json.dumps(vars(self)).encode()

    def state(self) -> str:
        """Return the state of the process, a letter of proc(5); "?" if that cannot be known; an empty text if it has
        ended, or if the new holder has not written yet."""
        if not self.host:
            return ""
        if (self.host, self.system) != (socket.gethostname(), _system()) or not self.started:
            return "?"
        state, started = _state_and_start(self.pid)
        return state if started == self.started else ""

    def has_ended(self) -> bool:
        """Return whether the process has certainly ended."""
        return bool(self.host) and not self.state()

    def is_older_worker_of_this_job(self) -> bool:
        """Return whether it is a worker of this process's job and host that has started earlier."""
        me = self.me("")
        return bool(self.job) and (self.host, self.job) == (me.host, me.job) and 0 < self.started < me.started

    def __str__(self) -> str:
        if not self.host:
            return "another run"
        me = (self.pid, self.host) == (os.getpid(), socket.gethostname())
        which = " (this process: a CheckpointManager that was not closed)" if me else ""
        return f"pid {self.pid} on host {self.host}{which}"


def _system() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, int]:
    """Return state and start of a process of this host, as proc(5) has them; no state if it has ended, although it may
    not be waited for yet; no state and 0 if there is no process, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()  # from field 3 on; the name of the process may have blanks
    has_ended = fields[0] in ("Z", "X") and int(fields[17]) <= 1  # none of its threads is left
    return "" if has_ended else fields[0], int(fields[19])
