"""`python -m tests.zoo`: known bugs, put into the live library one at a time; a test must notice each.

Libraries like this one are wrong in silence: training goes on and a number is wrong. A bug was published for another
library or read in its source; here it is other text of a live function. A test's own assertion, a documented error or a
time limit of a test catches it; a crash does not (`judge`). One that does not fit the code any more is stale: it is
named, and a few may be.

To add one, write its row into ``zoo.csv``, with the links of its reports and a test that takes a second or two. Run it
by ``--only NAME``; if it survives, write the missing test.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

STALE = 5  # bugs that may be stale


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: processes with further threads cannot be forked
    os.environ.setdefault("TESTS_ROWS", "all")  # the default run leaves out some killers
    from ..support.processor import spare_matrix_unit
    from . import forked
    from .live import bugs

    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description="Run the bugs; each must be caught.")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="some bugs")
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time (default: 2)")
    options = parser.parse_args(arguments)
    known = bugs()
    if unknown := sorted({*options.only} - {*known}):
        parser.error(f"there is no bug {', '.join(unknown)}")
    spare_matrix_unit()
    chosen = [each for name, each in known.items() if not options.only or name in options.only]
    begin, verdicts = time.monotonic(), dict[str, forked.Verdict]()

    def show(verdict: forked.Verdict) -> None:
        name = verdict.trial.name
        verdicts[name] = verdict
        said = "stale" if verdict.outcome == "stale" else "caught" if verdict.caught else "NOT CAUGHT"
        print(f"{name:<56} {said} ({verdict.seconds:.1f} s)", flush=True)

    trials = [forked.Trial(each.name, ("tests.zoo.live:make", each.name), (each.killer,)) for each in chosen]
    files = sorted({f"tests/{each.killer.partition('::')[0]}" for each in chosen})
    status = forked.run(trials, [file for file in files if os.path.exists(file)], show, jobs=options.jobs)
    stale = [verdict for verdict in verdicts.values() if verdict.outcome == "stale"]
    failed = [verdict for verdict in verdicts.values() if verdict not in stale and not verdict.caught]
    seconds = time.monotonic() - begin
    caught = len(verdicts) - len(stale) - len(failed)
    print(f"{caught} of {len(trials)} bugs caught in {seconds:.0f} s, {len(stale)} stale")
    for verdict in (*stale, *failed):
        remarks = "crashed " * verdict.crash + "its code did not run " * (not verdict.entered and verdict in failed)
        print(f"\n{verdict.trial.name}: {verdict.test or 'no test failed'} {remarks}{verdict.error}")
    return int(bool(failed) or len(stale) > STALE or len(verdicts) < len(trials) or status not in (0, 5))


if __name__ == "__main__":
    sys.exit(main())
