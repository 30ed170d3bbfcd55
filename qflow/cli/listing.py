"""Groups of commands of which one only lists."""

from __future__ import annotations

import click


class ListingGroup(click.Group):
    """A group whose command `list` need not be named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the name of the command before what is none."""
        is_named = not args or args[0] in (*self.commands, *ctx.help_option_names)
        return super().parse_args(ctx, args if is_named else ["list", *args])
