"""Two commands behind one name: `python -m quantize MODEL …` and `python -m quantize check …`.

Building is what the tool is for, so it needs no word of its own; a model folder that is called
`check` is given as `./check`.
"""

from __future__ import annotations

from typing import Any

import click


class BuildOrCheck(click.Command):
    """A command that hands over to `check` when that is its first argument."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if args[:1] != ["check"]:
            return super().make_context(info_name, args, parent, **extra)
        from .check import check

        return check.make_context(f"{info_name} check", args[1:], parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_usage(ctx, formatter)
        formatter.write_usage(f"{ctx.command_path} check", "[OPTIONS] FOLDER", prefix=" " * 7)
