"""`python -m tests.matrix [sharing] [uneven] [STAGE ...]`: check that `zero train` always produces the same hash.

The runs cover every stage, number of ranks, bucket size and launcher; with `sharing`, every sharding factor, every
value of ``reshard_after_forward``, and offload to disk; with `uneven`, numbers of ranks that do not divide the
micro-batches, and collectives. Ranks that no launcher starts are forked, with the environment of torchrun.

Each line is a run of the command in processes of its own. The plain loops, which use of the library only the model of
`zero train`, `zero.clip_grad_norm_` and `zero.MicroBatchSampler`, come first. The exit code is 1 if a hash differs, or
if bytes differ from the formulas.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero.commands.cli import main as command_line
from zero.commands.train.command import parameters_sha256

from .support.example import plain_example
from .support.processes import Group, reserved_port
from .support.processor import spare_matrix_unit

STEPS, MICRO_BATCHES, BATCH, WIDTH, LAYERS = 20, 12, 2, 64, 2
TEXT = Path(torch.nn.functional.__file__)
LIMIT = 600.0  # seconds of a run
LAUNCHERS = {
    "zero": lambda ranks: ["-m", "zero.commands.cli", "train"],
    "torchrun": lambda ranks: [
        *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "zero.train")
    ],
}
SIZES = {"steps": STEPS, "micro-batches": MICRO_BATCHES, "batch": BATCH, "width": WIDTH, "layers": LAYERS}
COMMON = [f"--{name}={size}" for name, size in SIZES.items()]


@dataclass(frozen=True)
class Variant:
    name: str
    flags: tuple[str, ...] = ()
    clip: float = 1.0
    precision: torch.dtype | None = None


VARIANTS = (
    Variant("default"),
    Variant("clip", ("--clip=0.5",), clip=0.5),
    Variant("bf16", ("--precision=bf16",), precision=torch.bfloat16),
    Variant("fp16", ("--precision=fp16", "--clip=0.5"), clip=0.5, precision=torch.float16),
)


def plain_loop(variant: Variant) -> str:
    sizes: dict[str, Any] = {"width": WIDTH, "layers": LAYERS, "clip": variant.clip, "precision": variant.precision}
    return parameters_sha256(plain_example(TEXT, STEPS, MICRO_BATCHES, BATCH, **sizes))


@dataclass(frozen=True)
class Run:
    variant: Variant
    stage: int
    ranks: int
    cap: float = 0.01
    launcher: str = ""  # a key of `LAUNCHERS`; "": ranks are forked
    sharing: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        flags = [f"--stage={self.stage}", f"--bucket-cap-mb={self.cap}", *self.variant.flags, *self.sharing]
        with tempfile.TemporaryDirectory() as out:
            arguments = [*COMMON, *flags, f"--ranks={self.ranks}", f"--out={out}"]
            if self.launcher:
                command = [sys.executable, *LAUNCHERS[self.launcher](self.ranks), *arguments]
                ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
                if ended.returncode:
                    raise SystemExit(f"{' '.join(command)}\n{ended.stdout}\n{ended.stderr}")
            else:
                fork(self.ranks, arguments, out)
            record: dict[str, Any] = json.loads((Path(out) / "run.json").read_text())
            assert record["world_size"] == self.ranks, f"{self}: {record['world_size']} ranks have trained"
            return record

    def __str__(self) -> str:
        how = " ".join((self.launcher or "forked", *self.sharing))
        return f"{how:8} {self.variant.name:8} stage {self.stage} ranks {self.ranks} cap {self.cap:<6}"


def fork(ranks: int, arguments: list[str], out: str) -> None:
    """Run the command on forked ranks, or in one process without a launcher's environment."""
    with reserved_port() as port:
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        group = {**group, "LOCAL_WORLD_SIZE": str(ranks)} if ranks > 1 else {}
        codes = Group(rank_of, ranks, (arguments, group, out)).end(LIMIT)
    if any(code != 0 for code in codes):  # None: the time was over
        said = "\n".join(path.read_text() for path in sorted(Path(out).glob("rank-*.txt")))
        raise SystemExit(f"zero train {' '.join(arguments)}: {codes}\n{said}")


def rank_of(rank: int, _: Any, __: int, case: tuple[list[str], dict[str, str], str]) -> None:
    """Run the command in this process. What it prints goes to a file."""
    arguments, group, out = case
    spare_matrix_unit()
    os.environ.update({**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} if group else {})
    with open(Path(out) / f"rank-{rank}.txt", "w") as file:
        sys.stdout = sys.stderr = file
        sys.exit(command_line(arguments, command="train"))


def all_shared(stages: list[int]) -> list[Run]:
    """Return runs of every stage, variant, bucket size and number of ranks, with one sharded copy for all ranks."""
    runs = [Run(VARIANTS[0], stage, ranks, cap) for stage in stages for ranks in (1, 2, 3, 4, 6) for cap in (0.01, 100)]
    runs += [Run(variant, stage, ranks) for variant in VARIANTS[1:] for stage in stages for ranks in (1, 3)]
    return runs + [Run(VARIANTS[0], stage, 4, launcher=launcher) for stage in stages for launcher in LAUNCHERS]


def all_sharings(stages: list[int]) -> list[Run]:
    """Return runs of every sharding factor, every ``reshard_after_forward``, and states on disk."""
    folder = f"--offload={tempfile.gettempdir()}"
    runs = []
    for variant, stage, ranks in itertools.product((VARIANTS[0], VARIANTS[2]), stages, (1, 2, 4, 6)):
        for factor in (number for number in range(1, ranks + 1) if stage and ranks % number == 0):
            kept = [n for n in range(2, factor) if factor % n == 0] if stage == 3 else []
            for reshard in ("true", *(["false"] if stage == 3 else []), *map(str, kept)):
                sharing = (f"--sharding-factor={factor}", f"--reshard-after-forward={reshard}")
                runs.append(Run(variant, stage, ranks, sharing=sharing))
            runs.append(Run(variant, stage, ranks, sharing=(f"--sharding-factor={factor}", folder)))
    return runs


def all_uneven(stages: list[int]) -> list[Run]:
    """Return runs on numbers of ranks that do not divide the micro-batches, one of them larger than their number."""
    collectives = [(f"--collective={name}",) for name in ("pairwise", "hierarchical", "all_to_all")]
    runs = [Run(variant, stage, 5) for variant in VARIANTS for stage in stages]
    runs += [Run(VARIANTS[0], stage, ranks) for stage in stages for ranks in (7, MICRO_BATCHES + 1)]
    return runs + [Run(VARIANTS[0], stage, 5, sharing=sharing) for stage in stages for sharing in collectives]


def main() -> int:
    spare_matrix_unit()
    kinds = {"sharing": all_sharings, "uneven": all_uneven}
    chosen = [kinds[text] for text in sys.argv[1:] if text in kinds] or [all_shared]
    stages = [int(text) for text in sys.argv[1:] if text not in kinds] or [0, 1, 2, 3]
    runs = [run for kind in chosen for run in kind(stages)]
    plain = {run.variant.name: run.variant for run in runs}
    hashes = {name: plain_loop(variant) for name, variant in plain.items()}
    for name, sha in hashes.items():
        print(f"plain loop, {name}: {sha}", flush=True)
    failures = 0
    for run in runs:
        begin, record = time.monotonic(), run.record()
        same = record["params_sha256"] == hashes[run.variant.name]
        own = run.sharing[:1] in [(f"--collective={name}",) for name in ("hierarchical", "all_to_all")]
        held, bound = (record["ranks"][0][name] for name in ("measured", "formula"))
        scratch = own or all(held[kind] <= bound[kind] for kind in ("scratch_peak", "gathered_peak"))
        failures += not (same and scratch)
        digest = f"{record['params_sha256'][:16]} {'same' if same else 'DIFFERS'}"
        facts = f"scratch {'of its own' if own else 'within bound' if scratch else 'OVER'}"
        print(f"{run} {digest}, {facts}, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{len(runs)} runs, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
