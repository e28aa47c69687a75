"""`python3 .ci/step.py NAME BUDGET COMMAND…`: run a step of `.ci/run`, print its processor seconds, hold its budget.

Processor seconds are those of the command and of all processes below it that were waited for. They depend less on what
else the machine does than minutes do, yet a busy one needs up to twice as many: a budget is about twice what an idle
machine takes. A step above its budget fails, also if its command succeeds.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time


def main(name: str, budget: str, *command: str) -> int:
    begin = time.monotonic()
    code = subprocess.run(command).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime
    wall = time.monotonic() - begin
    print(f"step {name}: {seconds:.0f} of {budget} processor seconds, {wall:.0f} seconds, code {code}", flush=True)
    if not code and seconds > float(budget):
        print(f"step {name} takes more than its budget", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
