"""The command line `h2o completion`: a script by which a shell completes the others."""

from __future__ import annotations

import argparse
import shlex

from h2o import cli

__all__ = ["add_arguments", "run"]

DESCRIPTION = """\
A script by which bash or zsh completes commands, options and their choices.

  eval "$(h2o completion bash)"      in ~/.bashrc
  eval "$(h2o completion zsh)"       in ~/.zshrc
"""

SCRIPT = r"""
_h2o() {
    local command= word="${COMP_WORDS[COMP_CWORD]}" words= i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "${COMP_WORDS[i]}" in -*) ;; *) command="${COMP_WORDS[i]}"; break ;; esac
    done
    COMPREPLY=()
    case "$command ${COMP_WORDS[COMP_CWORD-1]}" in
@CHOICES@
    esac
    [ -n "$words" ] || case "$command" in
@OPTIONS@
    esac
    [ -n "$command" ] && [ "${word#-}" = "$word" ] && [ "${words#-}" != "$words" ] && return
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _h2o h2o
"""
"""Where no option is begun, the files of the folder are what completes."""

BEFORE = {"bash": "", "zsh": "autoload -U +X compinit && compinit; autoload -U +X bashcompinit && "
          "bashcompinit\n"}  # fmt: skip


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.description = DESCRIPTION
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("shell", choices=tuple(BEFORE))


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """The exit code."""
    print(BEFORE[options.shell] + script(), end="")
    return 0


def script() -> str:
    """Of all commands, as their parsers are now."""
    commands = [command.name for command in cli.COMMANDS]
    listed = [case("", ["--help", "--version", *commands])]
    choices = []
    for command in cli.COMMANDS:
        options: list[str] = []
        for action in cli.parser_of(command)._actions:
            long = [name for name in action.option_strings if name.startswith("--")]
            options += long[:1]  # the others are former spellings
            if action.choices is not None:
                words = list(map(str, action.choices))
                before = action.option_strings or [command.name]
                choices += [case(f"{command.name} {name}", words) for name in before]
        listed.append(case(command.name, options))
    return SCRIPT.replace("@CHOICES@", "\n".join(choices)).replace("@OPTIONS@", "\n".join(listed))


def case(pattern: str, words: list[str]) -> str:
    """A branch of the script's case."""
    return f"    {shlex.quote(pattern)}) words={shlex.quote(' '.join(words))} ;;"
