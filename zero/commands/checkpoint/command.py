"""`zero checkpoint list | verify | export`.

Knows: the arguments of each command, its help and examples, what it prints, and its exit code. Does not know: formats,
or how a conversion works.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ... import CheckpointError, open_checkpoint
from ...checkpoint.folder.directory import steps_in
from ...checkpoint.format.manifest import NAME
from ...checkpoint.read.reader import Checkpoint
from ..console import print_line, print_table
from ..flags import PATH
from ..runner import WrongInputError, checking_input, fail, one_line
from .export import EXPORTS

SHOWN = 12  # characters of a hash


def list_(
    directory: Annotated[Path, typer.Argument(parser=PATH, metavar="DIR", help="a folder of checkpoints, or one")],
) -> int:
    """List the checkpoints in a folder: step, bytes, writer, content hash, and whether the files are complete."""
    if not directory.is_dir():
        raise WrongInputError(f"{directory} is not a folder")
    if (directory / NAME).exists():
        rows = [_row(_open(directory).step, directory)]
    else:
        rows = [_row(step, folder) for step, folder in steps_in(directory).items()]
    if not rows:
        print_line(f"{directory} has no checkpoints")
        return 0
    print_table(f"checkpoints of {directory}", ["step", "bytes", "written by", "content", "files"], rows)
    return 0


def _row(step: int, folder: Path) -> list[str]:
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError as error:
        return [str(step), "?", "?", "?", one_line(error)]
    size = sum(sums.nbytes for sums in checkpoint.manifest.files.values())
    try:
        checkpoint.check_structure()
        state = "complete"
    except CheckpointError as error:
        state = one_line(error)
    by = checkpoint.manifest.written_by
    writer = f"ranks: {by['world_size']!r}, stage: {by.get('stage')!r}" if "world_size" in by else "import"
    return [str(step), f"{size:,}", writer, checkpoint.content[:SHOWN], state]


def verify(
    path: Annotated[Path, typer.Argument(parser=PATH, metavar="PATH", help="a checkpoint, or a folder of them")],
) -> int:
    """Read every byte of a checkpoint, or of each one in a folder. If one is damaged, print the file and the tensor,
    and exit with 1."""
    code = 0
    folders = list(steps_in(path).values()) if path.is_dir() and not (path / NAME).exists() else []
    for folder in folders or [_open(path).path]:
        try:
            checkpoint = open_checkpoint(folder)
            checkpoint.verify()
        except CheckpointError as error:
            code = fail(error)
        else:
            print_line(f"{folder}: whole, step {checkpoint.step}, content {checkpoint.content[:SHOWN]}")
    return code


def export(
    path: Annotated[Path, typer.Argument(parser=PATH, metavar="PATH", help="a checkpoint")],
    to: Annotated[Literal["torch", "hf", "dcp"], typer.Option(help="the format")],
    out: Annotated[Path, typer.Argument(parser=PATH, metavar="OUT", help="a path that does not exist yet")],
) -> int:
    """Convert a checkpoint to another format: torch (one file with model, optimizer and state, for torch.load with
    weights_only=True), hf (a transformers folder, with the model only), or dcp (torch.distributed.checkpoint, with the
    model and a flattened optimizer)."""
    if out.exists():
        raise WrongInputError(f"{out} exists: name another path")
    checkpoint = _open(path)
    checkpoint.verify()
    with checking_input(OSError):
        out.parent.mkdir(parents=True, exist_ok=True)
    left_out = EXPORTS[to](checkpoint, out) + ["averages"] * bool(checkpoint.average_names)
    without = f", without {' and '.join(left_out)}" if left_out else ""
    print_line(f"{path}: written to {out} for {to}{without}")
    return 0


def _open(path: Path) -> Checkpoint:
    """Open a checkpoint. Raises `WrongInputError` if there is none; one that is damaged is a `CheckpointError`."""
    try:
        return open_checkpoint(path)
    except CheckpointError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            raise WrongInputError(str(error)) from error
        raise


COMMANDS = {  # name -> function, examples
    "list": (list_, ("zero checkpoint list checkpoints",)),
    "verify": (verify, ("zero checkpoint verify checkpoints", "zero checkpoint verify checkpoints/step-00000600")),
    "export": (
        export,
        (
            "zero checkpoint export checkpoints/step-00000600 --to torch model.pt",
            "zero checkpoint export checkpoints/step-00000600 --to hf exported",
        ),
    ),
}
