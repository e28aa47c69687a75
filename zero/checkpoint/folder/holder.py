"""The process that holds the lock of a folder of checkpoints, as the text in the file of the lock says.

Knows: hosts, processes. Does not know: locks, files.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        host, pid: of the process; nonce: of its run.
        started: in ticks since the boot of its host.
        system: the boot of its host and its namespace of pids, since several hosts and containers may have one name.
    """

    host: str = ""
    pid: int = 0
    nonce: str = ""
    started: int = 0
    system: str = ""

    @classmethod
    def me(cls, nonce: str) -> Holder:
        return cls(socket.gethostname(), os.getpid(), nonce, _start_of(os.getpid()), _system())

    @classmethod
    def unpack(cls, text: bytes) -> Holder:
        """Read what `pack` has written; any other text makes a holder without a host."""
        try:
            found = json.loads(text)
            known = (str(found["host"]), int(found["pid"]), str(found["nonce"]))
            return cls(*known, int(found.get("started", 0)), str(found.get("system", "")))
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()

    def pack(self) -> bytes:
        return json.dumps(vars(self)).encode()

    def has_ended(self) -> bool:
        """Return whether the process has certainly ended."""
        is_here = self.host and (self.host, self.system) == (socket.gethostname(), _system())
        return bool(is_here and self.started) and _start_of(self.pid) != self.started

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


def _start_of(pid: int) -> int:
    """Return the start of a process of this host, as proc(5) has it; 0 if it has ended, although it may not be waited
    for yet, or if there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()  # from field 3 on; the name of the process may have blanks
    has_ended = fields[0] in ("Z", "X") and int(fields[17]) <= 1  # none of its threads is left
    return 0 if has_ended else int(fields[19])
