"""`qflow completion`."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script for SHELL that completes commands, options, paths, and the names of queues and streams.

    \b
        eval "$(qflow completion bash)"                               # in ~/.bashrc
        eval "$(qflow completion zsh)"                                # in ~/.zshrc, after compinit
        qflow completion fish > ~/.config/fish/completions/qflow.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "qflow", "_QFLOW_COMPLETE").source())
