"""``tailrace completion``: the shell's side of command line completion."""

from __future__ import annotations

import click

from .common import command as make_command

SHELLS = ("bash", "zsh", "fish")


@make_command(
    "completion",
    example="""
tailrace completion bash > ~/.local/share/bash-completion/completions/tailrace
tailrace completion zsh > ~/.zfunc/_tailrace
tailrace completion fish > ~/.config/fish/completions/tailrace.fish
""",
)
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print a completion script for your shell.

    Put the output where your shell looks for completions, or load it in your shell's startup file with
    `eval "$(tailrace completion bash)"`.
    """
    from click.shell_completion import ShellComplete, get_completion_class

    from .main import COMPLETE_VARIABLE, PROGRAM, cli

    shell_class = get_completion_class(shell)
    assert shell_class is not None
    completer = shell_class(cli, {}, PROGRAM, COMPLETE_VARIABLE)
    # the base class's method: bash's own runs the installed bash to check its version
    click.echo(ShellComplete.source(completer))
