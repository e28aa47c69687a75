"""Output of the commands: progress, tables and lines.

Knows: rich, and what it prints on a terminal and in a file. Does not know: training. No other module here imports rich.
"""

from __future__ import annotations

from collections.abc import Sequence

INSTALL_HINT = "pip install 'zero-optimizer[cli]'"


class Console:
    """The output of a command: lines, tables and the progress of so many steps, if there are any.

    Progress is a bar on a terminal, and in a file a line for the first step and for about ten others. `finish` ends the
    bar; lines and tables may come before and after it.
    """

    def __init__(self, steps: int = 0) -> None:
        from rich import console, progress

        self._steps = steps
        self._begins, self._tenths = True, 0
        self._output = console.Console(markup=False, highlight=False, emoji=False)
        self._bar = progress.Progress(
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.description}"),
            progress.TimeRemainingColumn(),
            console=self._output,
            disable=not (steps and self._output.is_interactive),
        )
        self._task = self._bar.add_task("starting", total=steps)
        self._bar.start()

    def advance(self, step: int, text: str) -> None:
        """Show that so many steps are done, and a text about the last one."""
        self._bar.update(self._task, completed=step, description=text)
        tenths = step * 10 // self._steps
        if self._bar.disable and (self._begins or tenths > self._tenths):
            self._begins, self._tenths = False, tenths
            self.line(f"step {step}/{self._steps}  {text}")

    def finish(self) -> None:
        self._bar.stop()

    def line(self, text: str) -> None:
        self._output.print(text, soft_wrap=True)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print the title and then the columns, the first one to the left and the others to the right."""
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        self.line(title)
        for row in (header, ["-" * width for width in widths], *rows):
            first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            self.line("  ".join([first.strip().ljust(widths[0]), *rest]).rstrip())
