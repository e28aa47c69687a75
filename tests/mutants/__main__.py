"""`python -m tests.mutants`: random mutants of the library, each judged by the tests that reach its line.

    --map [ARGUMENTS of pytest]           run the default tests, and note which lines each reaches
    --changed-since C --map               likewise, of the files that are not as in the commit C
    --draw 60 --seed 7                    draw mutants of lines that tests reach, and judge them
    --draw 60 --seed 7 --changed-since C  draw them of functions that are not as in the commit C
    --draw 400 --seed 7 --to FILE         write them into a file
    --judge FILE                          judge those of a file, by the tests of the last --map

Each mutant runs its tests in a fork, the likeliest first, until one fails. A mutant survives if none does, or if a
fork hangs without a time limit of a test. Mutants of lines that no test reaches are drawn never, and survive --judge.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .sites import Site, changed_lines, describe, sites

LIMIT = 1200  # seconds for all tests of one mutant, by default
FEW = 30  # mutants, of which fewer say little about the tests: some are equivalents


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: processes with further threads cannot be forked
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="How many mutants do tests kill?")
    parser.add_argument("--map", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="run pytest, and note lines")
    parser.add_argument("--draw", type=int, metavar="N", help="draw mutants")
    parser.add_argument("--seed", default="0", help="any text: it decides which are drawn")
    parser.add_argument("--changed-since", metavar="COMMIT", help="draw of functions that changed")
    parser.add_argument("--to", type=Path, metavar="FILE", help="write what was drawn, and judge nothing")
    parser.add_argument("--judge", type=Path, metavar="FILE", help="judge the mutants of a file")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write each mutant with its outcome and test")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds for one mutant (default: {LIMIT})")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="PART", help="fail if fewer are killed")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    options = parser.parse_args(arguments)
    if [options.map is not None, options.draw is not None, options.judge is not None].count(True) != 1:
        parser.error("say one of --map, --draw and --judge")
    from . import lines

    among = None if options.changed_since is None else changed_lines(options.changed_since)
    if options.map is not None:
        if among is not None:
            os.environ[lines.FILES] = " ".join(among)
        for old in lines.FOLDER.glob("lines-*"):
            old.unlink()
        noting = [] if among == {} else ["-p", "tests.mutants.lines"]  # it costs half as much again
        return subprocess.run([sys.executable, "-m", "pytest", *noting, *options.map]).returncode
    if among == {}:
        print(f"no function differs from {options.changed_since}")
        return 0
    if not any(lines.FOLDER.glob("lines-*.json")):
        parser.error(f"there are no lines of tests in {lines.FOLDER}: run --map first")
    reaching = lines.reaching()
    if options.judge is not None:
        chosen = [Site.of(text) for text in options.judge.read_text().split()]
    else:
        chosen = drawn(reaching, options.draw, options.seed, among)
    if options.to is not None:
        options.to.write_text("".join(f"{site}\n" for site in chosen))
        return 0
    return judged(chosen, reaching, options)


def drawn(
    reaching: dict[str, dict[int, list[str]]], count: int, seed: str, among: dict[str, set[int]] | None
) -> list[Site]:
    """Return mutants of lines that tests reach, ``count`` or all there are. ``among``: lines by file; None: any."""
    reached = [
        site
        for site in sites()
        if reaching.get(site.file, {}).get(site.line) and (among is None or site.line in among.get(site.file, ()))
    ]
    print(f"{len(reached)} mutants lie on lines that tests reach")
    return random.Random(seed).sample(reached, min(count, len(reached)))


def judged(chosen: Sequence[Site], reaching: dict[str, dict[int, list[str]]], options: argparse.Namespace) -> int:
    """Judge mutants, and print the outcome: the survivors, and the numbers by room."""
    from ..support.processor import spare_matrix_unit
    from ..zoo import forked

    spare_matrix_unit()
    begin, outcomes = time.monotonic(), dict[str, tuple[str, str]]()

    def note(name: str, outcome: str, test: str, seconds: float) -> None:
        outcomes[name] = outcome, test
        print(f"{outcome:<9} {name} {test} ({seconds:.1f} s)", flush=True)

    def show(verdict: forked.Verdict) -> None:
        outcome = {"failed": "killed", "died": "killed", "stale": "stale"}.get(verdict.outcome, "survived")
        remark = verdict.test or verdict.error or ("" if verdict.entered else "its code did not run")
        note(verdict.trial.name, outcome, remark, verdict.seconds)

    trials = []
    for site in chosen:
        if tests := reaching.get(site.file, {}).get(site.line, []):
            trials.append(forked.Trial(str(site), ("tests.mutants.sites:apply", str(site)), tuple(tests)))
        else:
            note(str(site), "survived", "no test reaches its line", 0.0)
    files = sorted({f"tests/{test.partition('::')[0]}" for trial in trials for test in trial.tests})
    status = forked.run(trials, files, show, jobs=options.jobs, limit=options.limit) if trials else 0
    counts = Counter((_room(Site.of(name).file), outcome) for name, (outcome, _) in outcomes.items())
    counts.update(("all", outcome) for outcome, _ in outcomes.values())
    print(f"\n{'room':<24} killed survived stale   ({time.monotonic() - begin:.0f} s)")
    for room in [*sorted({room for room, _ in counts} - {"all"}), "all"]:
        print(f"{room:<24} {counts[room, 'killed']:>6} {counts[room, 'survived']:>8} {counts[room, 'stale']:>5}")
    for name, (outcome, remark) in sorted(outcomes.items()):
        if outcome == "survived":
            print(f"\n{name} {remark}\n    {describe(Site.of(name))}")
    if options.results is not None:
        options.results.write_text("".join(f"{name} {' '.join(told)}\n" for name, told in outcomes.items()))
    if options.draw is not None and counts["all", "stale"]:
        print(f"\n{counts['all', 'stale']} are stale, which were drawn of this tree")
        return 1
    killed, fit = counts["all", "killed"], len(outcomes) - counts["all", "stale"]
    if fit >= FEW and killed < options.at_least * fit:
        print(f"\n{killed} of {fit} are killed: at least {options.at_least:.0%} must be")
        return 1
    return int(status not in (0, 5) or len(outcomes) < len({*map(str, chosen)}))


def _room(file: str) -> str:
    parts = file.split("/")
    return "/".join(parts[:2]) if parts[0] == "zero" and len(parts) > 2 else parts[0]


if __name__ == "__main__":
    sys.exit(main())
