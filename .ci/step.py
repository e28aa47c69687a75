"""`python3 .ci/step.py NAME BUDGET COMMAND…`: run a step of `.ci/run`, print its processor seconds, hold its budget.

Processor seconds are those of the command and of all processes below it that were waited for. They depend less on what
else the machine does than minutes do, yet one commit took 1.7 times as many on a day on which the host was slow. So
a fixed piece of work is timed before, while and after a step runs, and a budget is in seconds of a machine that takes
`REFERENCE` for it, in the median. A step above its budget fails, also if its command succeeds.
"""

from __future__ import annotations

import ast
import inspect
import os
import resource
import statistics
import subprocess
import sys
import time

REFERENCE = 0.25  # processor seconds of `work` in each of two processes, on the machine of the budgets
BETWEEN = 20.0  # seconds between two times of `work`


def work() -> None:
    """Do what tests do most, for a moment: parse, compile, allocate, call, copy."""
    text = inspect.getsource(ast) + inspect.getsource(inspect)
    for _ in range(3):
        compile(ast.parse(text), "work", "exec")
    table = {number: str(number) for number in range(200_000)}
    sum(len(table[number]) for number in range(200_000))
    for _ in range(50):
        bytearray(1 << 22)


def used() -> float:
    """Return the processor seconds of all processes that were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def slowness() -> float:
    """Return how many times `REFERENCE` the machine takes now for `work`, in two processes at once."""
    before, children = used(), []
    for _ in range(2):
        children.append(os.fork())
        if not children[-1]:
            work()
            os._exit(0)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0, "the work of a process did not end"
    return (used() - before) / 2 / REFERENCE


def ended(child: subprocess.Popen[bytes]) -> int | None:
    """Wait for a process for `BETWEEN` seconds, and return its status if it has ended."""
    try:
        return child.wait(BETWEEN)
    except subprocess.TimeoutExpired:
        return None


def main(name: str, budget: str, *command: str) -> int:
    begin, before, found = time.monotonic(), used(), [slowness()]
    child = subprocess.Popen(command)
    while (code := ended(child)) is None:
        found.append(slowness())
    found.append(slowness())
    seconds = used() - before - sum(found) * 2 * REFERENCE  # without those of `slowness`
    slow = statistics.median(found)
    wall = time.monotonic() - begin
    print(
        f"step {name}: {seconds:.0f} processor seconds, {seconds / slow:.0f} of {budget} on the machine of the budgets "
        f"(this one takes {slow:.2f} times as many), {wall:.0f} seconds, code {code}",
        flush=True,
    )
    if not code and seconds > slow * float(budget):
        print(f"step {name} takes more than its budget", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
