# Completion of the moe4 command for bash.  Verbs, options and their words come from the command's own --help.

_moe4()
{
    local command=${COMP_WORDS[0]} word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
    local verb=${COMP_WORDS[1]-} help words
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        words=$("$command" --help 2>/dev/null | sed -n 's/^  \([a-z][a-z]*\)  *.*/\1/p')
        [[ $word == -* ]] && words="--help --version"
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
        return
    fi
    # Lists of words may go on in a next line after a |.
    help=$("$command" "$verb" --help 2>/dev/null | sed -e ':more' -e '/|$/{N;s/|\n */|/;b more' -e '}')
    if [[ $word == -* ]]; then
        words=$(sed -n 's/^  \(--[a-z-]*\).*/\1/p' <<<"$help")
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
        return
    fi
    [[ $previous == --* ]] || return
    words=$(sed -n "s/^  $previous \([a-z0-9_.|-]*\)\( .*\)*\$/\1/p" <<<"$help" | tr '|' ' ')
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
}

# With nothing to offer, files are completed.
complete -o default -F _moe4 moe4
