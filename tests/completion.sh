#!/usr/bin/env bash
# The bash completion offers the command's verbs and each verb's options.
#
#   completion.sh COMMAND COMPLETION_FILE
set -euo pipefail
command=$1
# shellcheck source=/dev/null
source "$2"

# offers EXPECTED WORD...: completing the last WORD offers EXPECTED (all words are offered in one line, sorted).
offers() {
    local expected=$1
    COMP_WORDS=("$command" "${@:2}")
    COMP_CWORD=$(($# - 1))
    _moe4
    local got
    got=$(printf '%s\n' "${COMPREPLY[@]}" | sort | tr '\n' ' ')
    [ "$got" = "$expected " ] || { echo "completion of '${*:2}': '$got', expected '$expected'" >&2; exit 1; }
}

offers inspect i
offers "route run" r
offers --check run --chec
offers --tokens run FOLDER --tok
