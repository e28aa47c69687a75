"""Hosts simulated on this machine: network namespaces, joined by a switch, each link limited to a rate both ways.

    namespace host0             namespace switch              namespace host1
    eth0 10.77.0.1 ---tbf--->  port0 | bridge | port1  <---tbf--- eth0 10.77.0.2
                   <--tbf----        |        |        ----tbf-->

The bridge has a namespace of its own, so that the machine's own network is not touched, and all links vanish with their
namespaces. Names carry this process's id; the next run removes what a killed process left behind.

Knows: `ip` and `tc`. Does not know: what runs in a namespace.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .processes import endings_as_exceptions

INTERFACE = "eth0"  # the name on each host
PREFIX = "zero-bench"
BURST = "256kb"  # below 128 KB the queue splits the sender's segments, and the counters include 4.5 % more of headers
LATENCY = "50ms"  # a packet that would wait longer in a queue is dropped
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class NetworkError(Exception):
    """The network cannot be made on this machine."""


def missing() -> list[str]:
    """Return what this process lacks; empty if it has everything."""
    if sys.platform != "linux":
        return ["Linux"]
    needs = [] if os.geteuid() == 0 else ["root (network namespaces: sudo, or a container with --privileged)"]
    return needs + [f"`{tool}` (package iproute2)" for tool in ("ip", "tc") if shutil.which(tool) is None]


@contextmanager
def hosts(count: int, megabits: int) -> Iterator[list[str]]:
    """Make ``count`` namespaces that reach each other at ``megabits`` a second; yield their names.

    They are removed afterwards, also after an interrupt or a signal to end.
    """
    switch = f"{PREFIX}-{os.getpid()}-switch"
    names = [f"{PREFIX}-{os.getpid()}-host{number}" for number in range(count)]
    with endings_as_exceptions():
        _remove(_abandoned())
        try:
            _make(switch, names, megabits)
            yield names
        finally:
            _remove([*names, switch])


def _make(switch: str, names: list[str], megabits: int) -> None:
    _call(f"ip netns add {switch}")
    _call(f"ip -n {switch} link add bridge type bridge")
    _call(f"ip -n {switch} link set bridge up")
    for number, name in enumerate(names):
        port = f"port{number}"
        _call(f"ip netns add {name}")
        _call(f"ip -n {name} link set lo up")
        _call(f"ip -n {name} link add {INTERFACE} type veth peer name {port} netns {switch}")
        _call(f"ip -n {switch} link set {port} master bridge up")
        _call(f"ip -n {name} address add 10.77.0.{number + 1}/24 dev {INTERFACE}")
        _call(f"ip -n {name} link set {INTERFACE} up")
        for namespace, device in ((name, INTERFACE), (switch, port)):
            shape = f"rate {megabits}mbit burst {BURST} latency {LATENCY}"
            _call(f"tc -n {namespace} qdisc add dev {device} root tbf {shape}")


def _call(command: str) -> str:
    # Use a new session: Ctrl-C at the terminal must not end the command that cleans up.
    done = subprocess.run(command.split(), capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise NetworkError(f"`{command}` failed: {' '.join(done.stderr.split())}")
    return done.stdout


def _names() -> list[str]:
    return [line.split()[0] for line in _call("ip netns list").splitlines()]


def _abandoned() -> list[str]:
    """Return the namespaces of processes that have ended."""
    found = ((name, re.fullmatch(rf"{PREFIX}-(\d+)-\w+", name)) for name in _names())
    return [name for name, match in found if match is not None and not os.path.exists(f"/proc/{match[1]}")]


def _remove(names: list[str]) -> None:
    """Remove those that exist; signals are blocked until this is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
    try:
        for name in set(names) & set(_names()):
            _call(f"ip netns delete {name}")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
