"""Completion scripts for shells, made from the parsers: `plan --completion bash|zsh|fish`. Static:
completing starts no Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHELLS = ("bash", "zsh", "fish")


Verbs = Mapping[str, tuple[str, Mapping[str, str]]]
Values = Mapping[str, Sequence[str]]


def script(shell: str, verbs: Verbs, models: Sequence[str], values: Values) -> str:
    """The script of a shell. verbs: name -> (one line about it, option -> one line about it);
    models: those that ship; values: option -> what ships for it."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](verbs, models, values)


def _bash(verbs: Verbs, models: Sequence[str], values: Values) -> str:
    cases = "\n".join(
        f'        {verb}) options="{" ".join(options)}" ;;'
        for verb, (_, options) in verbs.items()
        if verb != "make"
    )
    shipped = "\n".join(
        f'        {option}) COMPREPLY=($(compgen -W "{" ".join(names)}" -- "$current") $(compgen -f'
        ' -- "$current")); return ;;'
        for option, names in values.items()
    )
    return f"""# bash completion of plan: source it, or save it as ~/.local/share/bash-completion/completions/plan
_plan() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" options typed="${{COMP_LINE:0:COMP_POINT}}"
    typed="${{typed##* }}"
    COMPREPLY=()
    if [[ $typed == zoo:* ]]; then  # bash parts words at colons, and replaces what follows the last
        COMPREPLY=($(compgen -W "{" ".join(models)}" -- "$typed"))
        [[ $COMP_WORDBREAKS == *:* ]] && COMPREPLY=("${{COMPREPLY[@]#zoo:}}")
        return
    fi
    case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{shipped}
    esac
    case "${{COMP_WORDS[1]}}" in
{cases}
        *) options="{" ".join(verbs["make"][1])}" ;;
    esac
    if [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$current"))
    else
        [[ $COMP_CWORD -eq 1 ]] && COMPREPLY=($(compgen -W "{" ".join(verbs)}" -- "$current"))
        COMPREPLY+=($(compgen -W "zoo:" -- "$current") $(compgen -f -- "$current"))
    fi
}}
complete -o filenames -F _plan plan
"""  # noqa: E501


def _zsh(verbs: Verbs, models: Sequence[str], values: Values) -> str:
    def pairs(words: Mapping[str, str]) -> str:
        return " ".join(f"'{w}:{_quoted(about)}'" for w, about in words.items())

    cases = "\n".join(
        f"        {verb}) options=({pairs(options)}) ;;"
        for verb, (_, options) in verbs.items()
        if verb != "make"
    )
    shipped = "\n".join(
        f"        {option}) compadd -- {' '.join(names)}; _files; return ;;"
        for option, names in values.items()
    )
    return f"""#compdef plan
# zsh completion of plan: save it as _plan in a folder of $fpath, or source it
_plan() {{
    local -a verbs options
    verbs=({pairs({verb: about for verb, (about, _) in verbs.items()})})
    case "$words[CURRENT-1]" in
{shipped}
    esac
    case "$words[2]" in
{cases}
        *) options=({pairs(verbs["make"][1])}) ;;
    esac
    if [[ $PREFIX == -* ]]; then
        _describe -o option options
    else
        (( CURRENT == 2 )) && _describe command verbs
        [[ $PREFIX == z* ]] && compadd -- {" ".join(models)}
        _files
    fi
}}
if [[ $funcstack[1] == _plan ]]; then _plan "$@"; else compdef _plan plan; fi
"""


def _fish(verbs: Verbs, models: Sequence[str], values: Values) -> str:
    lines = ["# fish completion of plan: save it as ~/.config/fish/completions/plan.fish"]
    lines += [
        f"complete -c plan -n __fish_use_subcommand -a {verb} -d '{_quoted(about)}'"
        for verb, (about, _) in verbs.items()
    ]
    lines.append(
        f"complete -c plan -n 'string match -q \"z*\" (commandline -ct)' -a '{' '.join(models)}'"
    )
    for verb, (_, options) in verbs.items():
        when = (
            f"__fish_seen_subcommand_from {verb}"
            if verb != "make"
            else f"not __fish_seen_subcommand_from {' '.join(v for v in verbs if v != 'make')}"
        )
        for option, about in options.items():
            name = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            shipped = f" -r -a '{' '.join(values[option])}'" if option in values else ""
            lines.append(f"complete -c plan -n '{when}' {name}{shipped} -d '{_quoted(about)}'")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return text.replace("'", "").replace(":", " ").replace("%%", "%")
