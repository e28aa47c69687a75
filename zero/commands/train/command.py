"""`zero train`: the plain training loop of a byte-level GPT, with ZeroOptimizer in the place of torch's optimizer.

Knows: the order of things. It needs torch and numpy alone; run it as `zero train`, as `python -m zero.train`
(both start their ranks) or under torchrun (`torchrun --nproc-per-node 2 -m zero.train`), which starts them itself.

    micro-batch j of the M of a global step goes to rank j mod W and is the same data for every W;
    the summed gradient is divided by M.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ... import MixedPrecision, Offload, ZeroOptimizer
from ...core.stages import check_reshard, check_sharding_factor, stage_of
from ..console import View, make_view
from .data import Corpus, load_corpus
from .loop import Loop, validate
from .memory_stats import parameters_sha256
from .model import GPT, build_model, generate
from .report import RankFacts, RunRecord, write_report
from .settings import TrainConfig, parse_arguments

__all__ = ["main", "run"]

DEFAULT_RANKS = 2
SAMPLE_PROMPT, SAMPLE_LENGTH = 48, 300
VALIDATION_WINDOWS = 256
TRACEBACK = "error.txt"
_PRECISIONS = {"fp32": None, "bf16": MixedPrecision(torch.bfloat16), "fp16": MixedPrecision(torch.float16)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; the exit code: 0, 1 after an error (told in one line), 130 if interrupted."""
    try:
        return run(parse_arguments(sys.argv[1:] if arguments is None else arguments, "python -m zero.train"))
    except ValueError as error:
        return _fail(error)


def run(config: TrainConfig) -> int:
    """Train as `config` says, on ranks that are started here unless a launcher has started this one."""
    try:
        world = _world_size(config)
        _check(config, world)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        return _fail(error)
    try:
        if "WORLD_SIZE" in os.environ or world == 1:
            _work(config, world)
        else:
            _launch(config, world)
    except KeyboardInterrupt:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _fail(error, config.out)
    return 0


def _world_size(config: TrainConfig) -> int:
    """How many ranks train together; a launcher's WORLD_SIZE has the last word."""
    started = os.environ.get("WORLD_SIZE")
    if started is None:
        return config.ranks or DEFAULT_RANKS
    if config.ranks not in (None, int(started)):
        raise ValueError(
            f"--ranks {config.ranks}, but the launcher started {started} (WORLD_SIZE): omit --ranks, or let them agree"
        )
    return int(started)


def _check(config: TrainConfig, world: int) -> None:
    """Find bad input before any process is started or any step is taken."""
    if config.micro_batches % world:
        below = config.micro_batches // world * world
        choices = f"{below} or {below + world}" if below else f"{world}"
        raise ValueError(
            f"--micro-batches {config.micro_batches} is not divisible by {world} ranks: every rank takes equally many "
            f"of a step's micro-batches. Use {choices}, or another number of ranks"
        )
    stage = stage_of(config.stage)
    check_sharding_factor(config.sharding_factor, world, stage)
    check_reshard(config.reshard, config.sharding_factor or world, stage)
    _optimizer_arguments(config)
    load_corpus(config.data, config.sequence)
    if int(os.environ.get("RANK", "0")) == 0:
        _check_output(config.out)
    if "WORLD_SIZE" not in os.environ:
        _dry_run(config)


def _check_output(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            (out / TRACEBACK).unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out {out}: cannot write there ({error.strerror}). Name a folder that can be written"
        ) from None


def _dry_run(config: TrainConfig) -> None:
    """Let the library judge the arguments that are its own (stage, optimizer, collective) on a throw-away module."""
    _make_optimizer(config, nn.Linear(1, 1), alone=True).close()


def _make_optimizer(config: TrainConfig, model: nn.Module, *, alone: bool = False) -> ZeroOptimizer:
    """``alone``: one rank, which shares nothing."""
    return ZeroOptimizer(
        model,
        _optimizer_class(config.optimizer),
        stage=config.stage,
        bucket_cap_mb=config.bucket_cap_mb,
        collective=config.collective,
        sharding_factor=None if alone else config.sharding_factor,
        reshard_after_forward=True if alone else config.reshard,
        offload=None if config.offload is None else Offload(config.offload, config.offload_parameters),
        mixed_precision=_PRECISIONS[config.precision],
        **_optimizer_arguments(config),
    )


def _optimizer_class(name: str) -> type[Optimizer]:
    """The class of torch.optim with this name in lower case."""
    found: dict[str, type[Optimizer]] = {
        item.__name__.lower(): item
        for item in vars(torch.optim).values()
        if isinstance(item, type) and issubclass(item, Optimizer) and item is not Optimizer
    }
    if name.lower() not in found:
        raise ValueError(f"--optimizer {name}: torch.optim has no such class. It has {', '.join(sorted(found))}")
    return found[name.lower()]


def _optimizer_arguments(config: TrainConfig) -> dict[str, Any]:
    """What the class is called with; ValueError where it does not take one of the flags."""
    accepted = inspect.signature(_optimizer_class(config.optimizer)).parameters
    arguments: dict[str, Any] = {"lr": config.lr}
    if config.weight_decay is not None:
        arguments["weight_decay"] = config.weight_decay
    if config.fused:
        arguments["fused"] = True
    for name in arguments:
        if name not in accepted:
            flag = name.replace("_", "-")
            raise ValueError(f"--optimizer {config.optimizer} takes no --{flag}: leave it out, or use adamw")
    return arguments


def _launch(config: TrainConfig, ranks: int) -> None:
    from ..runner import launch_ranks

    launch_ranks("zero.train", config.to_arguments(), ranks)


def _work(config: TrainConfig, world: int) -> None:
    """What one rank does, from joining the group to leaving it. Rank 0 writes the report after the group is closed."""
    torch.set_num_threads(config.threads)
    view = make_view(config.steps) if int(os.environ.get("RANK", "0")) == 0 else None
    try:
        with _group(world):
            record = _train(config, view)
    finally:
        if view is not None:
            view.finish()
    if view is not None:
        write_report(record, view)


def _group(world: int) -> AbstractContextManager[None]:
    if world == 1:
        return nullcontext()
    from ..runner import process_group

    return process_group()


def _train(config: TrainConfig, view: View | None) -> RunRecord:
    """Train, validate, and make the model plain again; every rank returns the same record."""
    corpus = load_corpus(config.data, config.sequence)
    model = build_model(config.preset, config.sequence, config.seed)
    optimizer = _make_optimizer(config, model)
    _agree_on_text(optimizer, corpus)
    loop = Loop(config, corpus, model, optimizer, view)
    facts = loop.run()
    batches = corpus.validation_batches(config.batch, config.sequence, VALIDATION_WINDOWS)
    bits_per_byte = validate(model, optimizer, batches)
    ranks = [RankFacts.from_bytes(data) for data in optimizer.exchange(facts.to_bytes())]
    description = optimizer.describe()
    backwards = config.micro_batches // optimizer.world_size
    optimizer.close()
    return RunRecord(
        config=config,
        collective=description.collective,
        corpus=corpus.summary(),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        losses=loop.losses,
        validation_bits_per_byte=bits_per_byte,
        params_sha256=parameters_sha256(model),
        step_ms=loop.step_ms,
        ranks=ranks,
        formula_traffic=description.formula_traffic_bytes(backwards, backwards),
        sample=_sample(model, corpus, config.seed) if view is not None else "",
    )


def _agree_on_text(optimizer: ZeroOptimizer, corpus: Corpus) -> None:
    """Ranks on different hosts may have found different text, whose micro-batches would be no global batch."""
    digests = [data.decode() for data in optimizer.exchange(corpus.sha256.encode())]
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ValueError(
                f"rank {rank} reads other text than rank 0 (SHA-256 {digest[:12]} and {digests[0][:12]}): give every "
                "host the same files with --data"
            )


def _sample(model: GPT, corpus: Corpus, seed: int) -> str:
    """A beginning taken from the validation text and what the model makes of it, safe to print."""
    prompt = bytes(corpus.validation[:SAMPLE_PROMPT].tolist())
    text = (prompt + generate(model, prompt, SAMPLE_LENGTH, seed)).decode(errors="replace").replace("\ufffd", "·")
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "·" for letter in text)


def _fail(error: Exception, out: Path | None = None) -> int:
    """Tell the error in one line, once (a rank that we launched leaves it to its launcher); the traceback in a file."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    if launched:
        from ..runner import record_error, started_by_us

        record_error(error)
        if started_by_us():
            return 1
    line = " ".join(str(error).split()) or type(error).__name__
    where = "" if out is None or launched else _leave_traceback(error, out)
    rank = f"rank {os.environ['RANK']}: " if launched else ""
    print(f"error: {rank}{line}{where}", file=sys.stderr, flush=True)
    return 1


def _leave_traceback(error: Exception, out: Path) -> str:
    """Write the traceback (of the rank that failed, where there is one) below `out`; returns words that say so."""
    path = out / TRACEBACK
    trace = getattr(error, "trace", None)
    if trace == "":
        return ""
    try:
        path.write_text("".join(traceback.format_exception(error)) if trace is None else trace)
    except OSError:
        return ""
    return f" (traceback in {path})"
