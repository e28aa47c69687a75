"""`python -m benchmarks.gpu_host`: the host's work in a step of one rank of several, under FSDP2 and this library.

Knows: the command's flags, the order of runs, the tables. Does not know: how anything is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import tables
from .gpu_device import checked_device, in_words
from .host_job import FSDP2, PLAIN, SYSTEMS, UNIT, HeaderJob, HeaderTime, HostJob, HostTime, Traced, read, variants
from .llama import NARROW, SEVEN_BILLION, TINY, Llama
from .processes import RankError, header_times, host_times, traced
from .report import Report
from .steps import checked

MOST_RANKS = 8  # of a host; see benchmarks.answered
Result = HostTime | Traced | HeaderTime


@dataclass(frozen=True)
class Size:
    """How much to run: the narrow model and its tokens, the model on the device, steps, header rounds."""

    host: Llama
    host_tokens: int
    host_steps: int
    device: Llama
    warm: int
    steps: int
    header_rounds: int


WHOLE = Size(NARROW, 4, 20, SEVEN_BILLION, 3, 5, 100)
QUICK = Size(TINY, 4, 3, TINY, 1, 2, 10)
HEADER_BLOCKS = 9


def measure_headers(ranks: Sequence[int], size: Size, console: Console) -> Iterator[HeaderTime]:
    """Yield the times of header rounds, by the number of ranks."""
    for number in ranks:
        with console.status(f"header rounds of {number} ranks"):
            yield from header_times(HeaderJob(size.header_rounds, HEADER_BLOCKS), number)


def measure_steps(job: HostJob, size: Size, on_device: Sequence[int], console: Console) -> Iterator[HostTime | Traced]:
    """Yield the host's times of all variants, and then the steps on the device, by the number of tokens.

    A variant that fails on the device, because it has not the memory, say, is a result with an error. The plain loop
    is not among them: the states of seven billion parameters need more than one GPU has.
    """
    with console.status("the host's time"):
        yield from host_times(job)
    sharded = [variant for variant in job.variants if variant.system != PLAIN]
    for tokens in on_device:
        whole = HostJob(sharded, job.ranks, job.device, size.device, tokens, size.warm, size.steps, job.traces)
        for each in whole.apart():
            name = each.variants[0].name
            with console.status(f"{tokens} tokens, {name}"):
                try:
                    yield traced(each)
                except RankError as error:
                    shape = size.device
                    yield Traced(name, job.ranks, job.device, shape.layers, shape.width, tokens, error=_told(error))


def _told(error: RankError) -> str:
    """Return the line of an error that says what it is."""
    lines = str(error).splitlines()
    return next((line for line in reversed(lines) if "Error" in line), lines[-1])[:300]


def found(results: Sequence[Result]) -> Iterator[tables.Table]:
    """Yield the tables."""
    hosts = [each for each in results if isinstance(each, HostTime)]
    on_device = [each for each in results if isinstance(each, Traced)]
    headers = [each for each in results if isinstance(each, HeaderTime)]
    if hosts:
        yield _host_table(hosts)
    for tokens in dict.fromkeys(each.tokens for each in on_device):
        yield _device_table([each for each in on_device if each.tokens == tokens])
    if headers:
        rows = [
            [each.carrier, str(each.header_ranks), _us(each.seconds), f"{_us(each.low)}–{_us(each.high)}"]
            for each in headers
        ]
        yield tables.Table("A header round", ["carrier", "ranks", "µs", "quartiles"], rows)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def _host_table(hosts: Sequence[HostTime]) -> tables.Table:
    first = hosts[0]
    peer = next((each.total for each in hosts if each.variant == FSDP2), None)
    columns = ["system", "forward", "backward", "clip", "step", "sum", "quartiles", "÷ FSDP2", "wall", "norm"]
    heading = (
        f"The host's milliseconds in a step of rank {first.ranks - 1} of {first.ranks}, alone: {first.layers} blocks "
        f"of width {first.width} on {first.device}"
    )
    rows = []
    for each in hosts:
        times = [each.forward, each.backward, each.clip, each.step, each.total]
        rows.append(
            [
                each.variant,
                *map(tables.milliseconds, times),
                f"{tables.milliseconds(each.low)}–{tables.milliseconds(each.high)}",
                "–" if peer is None else f"{each.total / peer:.2f}",
                tables.milliseconds(each.wall),
                f"{each.norm:.3g}",
                str(each.buckets) if each.buckets else "–",
                str(each.messages) if each.messages else "–",
            ]
        )
    return tables.Table(heading, [*columns, "buckets", "headers sent"], rows)


def _device_table(on_device: Sequence[Traced]) -> tables.Table:
    first = on_device[0]
    heading = (
        f"A step on {first.device}, rank {first.ranks - 1} of {first.ranks}, alone: {first.layers} blocks of width "
        f"{first.width}, {first.tokens} tokens"
    )
    rows = []
    for each in on_device:
        measured = [tables.milliseconds(each.in_a_row), *_seen(each), f"{each.peak / 1e6:.0f}"]
        rows.append([each.variant, *(["–"] * 5 if each.error else measured), each.error or each.files])
    columns = ["system", "ms in a row", "kernels", "busy ms", "idle share", "peak MB", "files, or the error"]
    return tables.Table(heading, columns, rows)


def _seen(each: Traced) -> list[str]:
    """Return the cells of what the profiler saw on the device."""
    if each.idle is None:
        return ["–"] * 3
    return [f"{each.kernels:.0f}", tables.milliseconds(each.busy), f"{each.idle:.2f}"]


def _numbers(text: str, option: str, least: int, most: int) -> list[int]:
    try:
        found = [int(word) for word in text.split(",") if word]
    except ValueError:
        raise typer.BadParameter(f"{option} takes numbers with commas between them, not {text!r}") from None
    for number in found:
        if not least <= number <= most:
            raise typer.BadParameter(f"{option} takes numbers from {least} to {most}, not {number}")
    return found


def _caps(text: str) -> list[str]:
    for cap in (words := text.split(",")):
        try:
            fits = cap == UNIT or float(cap) > 0
        except ValueError:
            fits = False
        if not fits:
            raise typer.BadParameter(f"--cap takes numbers of MiB and {UNIT!r}, not {cap!r}")
    return words


def main(
    ranks: Annotated[int, typer.Option(help="Of how many ranks this process plays one: 2 to 8.")] = 8,
    system: Annotated[str, typer.Option(help="plain, fsdp2, zero3, with commas between them.")] = ",".join(SYSTEMS),
    tokens: Annotated[str, typer.Option(help="Tokens of a step on the device, with commas.")] = "2048,8192",
    cap: Annotated[str, typer.Option(help="Bucket caps of zero3: MiB at 7 billion parameters, or unit.")] = "25,unit",
    headers: Annotated[str, typer.Option(help="Time header rounds of these numbers of ranks, and nothing else.")] = "",
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ... or cpu.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, few steps: to see that it works.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for gpu_host.json or gpu_headers.json, traces, snapshots.")] = Path(
        "zero-bench"
    ),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")] = False,
    show_only: Annotated[Path | None, typer.Option("--show", help="Measure nothing: show this JSON.")] = None,
) -> None:
    """The host's time of a training step, and how busy the device is, with one process as one of several ranks."""
    console = tables.console(stderr=markdown)
    if show_only is not None:
        report = Report.read(show_only)
    else:
        size = QUICK if quick else WHOLE
        chosen = variants(checked(system.split(","), SYSTEMS, "system"), _caps(cap))
        of_tokens, of_ranks = _numbers(tokens, "--tokens", 1, 1 << 20), _numbers(headers, "--headers", 2, 64)
        if not 2 <= ranks <= MOST_RANKS:
            raise typer.BadParameter(f"--ranks takes 2 to {MOST_RANKS}, which is the GPUs of a host, not {ranks}")
        where = checked_device(device if not of_ranks else "cpu")
        job = HostJob(
            chosen, ranks, str(where), size.host, size.host_tokens, size.warm, size.host_steps, str(out.resolve())
        )
        on_device = of_tokens if where.type != "cpu" or quick else []  # seven billion parameters are for a GPU
        try:
            if of_ranks:
                results: list[Result] = list(measure_headers(of_ranks, size, console))
            else:
                results = list(measure_steps(job, size, on_device, console))
        except RankError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        parts = [asdict(each) for each in results]
        report = Report.of_this_machine("benchmarks.gpu_host", parts, in_words(where))
        report.write(out / ("gpu_headers.json" if of_ranks else "gpu_host.json"))
    results = [read(part) for part in report.parts]
    tables.show(report.line(), found(results), markdown, console)
    if any(isinstance(each, Traced) and each.error for each in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
