"""`python -m tests.zoo`: run all or some mutants, print what caught each, and compare with the README's table.

Knows: the output of the command, and when it fails. Does not know: how a mutant is run or judged.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from queue import SimpleQueue

from ..processor import spare_matrix_unit
from . import table
from .catalogue import MUTANTS
from .mutant import Mutant
from .runner import Outcome, Runner


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description="Run the mutants; each must be caught.")
    parser.add_argument("names", nargs="*", help="mutants, not compared with the README's table")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--write", action="store_true", help="write the table into tests/zoo/README.md")
    parser.add_argument("--one-in", type=int, default=1, metavar="N", help="take each Nth mutant (default: 1, all)")
    parser.add_argument("--draw", default="", metavar="TEXT", help="any text: it decides where --one-in begins")
    options = parser.parse_args(arguments)
    if not 1 <= options.one_in <= len(MUTANTS):
        parser.error(f"--one-in is {options.one_in}: it must be from 1 to {len(MUTANTS)}, the number of mutants")
    if options.names and options.one_in > 1:
        parser.error("names and --one-in exclude each other")
    if options.draw and options.one_in == 1:
        parser.error("--draw decides where --one-in begins: say --one-in too")
    if options.write and (options.names or options.one_in > 1):
        parser.error("--write needs a run of all mutants: leave out names and --one-in")
    chosen = drawn(_chosen(options.names), options.one_in, options.draw)
    spare_matrix_unit()
    begin = time.monotonic()
    runners = _Runners(options.jobs)
    with ThreadPoolExecutor(options.jobs) as pool, closing(runners):
        tests = list(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        parts = [tests[number :: options.jobs] for number in range(options.jobs)]
        for problem in pool.map(runners.unpatched, [part for part in parts if part]):
            if problem:
                print(f"without any mutant these tests must pass:\n{problem}")
                return 1
        print(f"{len(tests)} tests pass without a mutant ({time.monotonic() - begin:.0f} s)", flush=True)
        outcomes = []
        for outcome in pool.map(runners.run, chosen):
            outcomes.append(outcome)
            _show(outcome)
    failed = [outcome for outcome in outcomes if outcome.problem]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} mutants caught in {time.monotonic() - begin:.0f} s")
    for outcome in failed:
        print(f"\n{outcome.mutant.name}: {outcome.problem}")
    if failed:
        return 1
    if options.write:
        table.write(outcomes)
    elif not options.names and (difference := table.difference(outcomes)):
        print(
            f"the table in tests/zoo/README.md is not the one of this run (python -m tests.zoo --write):\n{difference}"
        )
        return 1
    return 0


class _Runners:
    """A set of runners; each call takes a free one."""

    def __init__(self, count: int) -> None:
        self._all = [Runner() for _ in range(count)]
        self._free = SimpleQueue[Runner]()
        for runner in self._all:
            self._free.put(runner)

    def unpatched(self, tests: Sequence[str]) -> str:
        with self._one() as runner:
            return runner.unpatched(tests)

    def run(self, mutant: Mutant) -> Outcome:
        with self._one() as runner:
            return runner.run(mutant)

    @contextmanager
    def _one(self) -> Iterator[Runner]:
        runner = self._free.get()
        try:
            yield runner
        finally:
            self._free.put(runner)

    def close(self) -> None:
        for runner in self._all:
            runner.close()


def drawn(mutants: Sequence[Mutant], one_in: int, draw: str) -> list[Mutant]:
    """Return each ``one_in``-th of ``mutants``; ``draw``, any text, decides which is the first."""
    return list(mutants[zlib.crc32(draw.encode()) % one_in :: one_in])


def _chosen(names: Sequence[str]) -> list[Mutant]:
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"there is no mutant {', '.join(unknown)}")
    return [known[name] for name in names] or list(MUTANTS)


def _show(outcome: Outcome) -> None:
    mutant = outcome.mutant
    caught = f"{outcome.how}: {outcome.test}" if not outcome.problem else "NOT CAUGHT"
    print(f"{' '.join(mutant.entries):<10} {mutant.name:<48} {caught} ({outcome.seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
