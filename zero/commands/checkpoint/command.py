"""`zero checkpoint list | verify | export | import`.

Knows: what each command prints, and when it ends with 1. Does not know: formats, or how a conversion works.
"""

from __future__ import annotations

from pathlib import Path

from ... import CheckpointError, open_checkpoint
from ...checkpoint.directory import steps_in
from ...checkpoint.format.manifest import NAME
from ..console import Console
from ..runner import fail, one_line, reports_errors
from .export import EXPORTS
from .importing import import_file

__all__ = ["export", "import_", "list_", "verify"]

SHOWN = 12  # characters of a hash


@reports_errors
def list_(directory: Path) -> int:
    """Print a table of the checkpoints of a folder. A complete one has all files in their sizes; none is read."""
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is not a folder")
    console = Console()
    rows = [_row(step, folder) for step, folder in steps_in(directory).items()]
    if not rows:
        console.line(f"{directory} has no checkpoints")
        return 0
    console.table(f"checkpoints of {directory}", ["step", "bytes", "written by", "content", "files"], rows)
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


@reports_errors
def verify(path: Path) -> int:
    """Read every byte of a checkpoint, or of all checkpoints of a folder. The exit code is 1 if one is not whole."""
    console, code = Console(), 0
    folders = {} if (path / NAME).exists() else steps_in(path)
    for folder in folders.values() or [path]:
        try:
            checkpoint = open_checkpoint(folder)
            checkpoint.verify()
        except CheckpointError as error:
            code = fail(error)
        else:
            console.line(f"{folder}: whole, step {checkpoint.step}, content {checkpoint.content[:SHOWN]}")
    return code


@reports_errors
def export(path: Path, to: str, out: Path) -> int:
    """Write a checkpoint in another format. It is verified first, and nothing is written unless it is whole."""
    if out.exists():
        raise FileExistsError(f"{out} exists: name another path")
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    left_out = EXPORTS[to](checkpoint, out) + ["averages"] * bool(checkpoint.average_names)
    without = f", without {' and '.join(left_out)}" if left_out else ""
    Console().line(f"{path}: written to {out} for {to}{without}")
    return 0


@reports_errors
def import_(source: Path, out: Path) -> int:
    """Write a checkpoint from a file of ``torch.save``."""
    content = import_file(source, out)
    Console().line(f"{source}: written to {out}, content {content[:SHOWN]}")
    return 0
