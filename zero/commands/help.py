"""The help of a command: its flags in groups, and examples at the end.

Knows: the formatter of typer. Does not know: the commands.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

ARGUMENTS = "Arguments"


class GroupedCommand(TyperCommand):
    """A command whose help has a section for each ``rich_help_panel`` of its options.

    Its epilog is lines of examples: a command, or what the next command does, which begins with "#".
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for the arguments, and one for each group of options; those of none come last."""
        groups, rest = {ARGUMENTS: list[tuple[str, str]]()}, list[tuple[str, str]]()
        for param in self.get_params(ctx):
            record, name = param.get_help_record(ctx), getattr(param, "rich_help_panel", None)
            if record is not None:
                name = ARGUMENTS if param.param_type_name == "argument" else name
                (groups.setdefault(name, []) if name else rest).append(record)
        groups = {name: records for name, records in groups.items() if records}
        groups["Other options" if groups.keys() - {ARGUMENTS} else "Options"] = rest
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, each as one line, so that it can be copied."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
