#!/bin/sh
# Every verb has a man page, which names exactly the options that the verb's --help has.
#
#   man.sh COMMAND MAN_FOLDER
set -eu
command=$1
folder=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for verb in $("$command" --help | sed -n 's/^  \([a-z][a-z]*\)  *.*/\1/p'); do
    page=$folder/moe4-$verb.1.scd
    grep -q "moe4-$verb\*(1)" "$folder/moe4.1.scd" || { echo "moe4(1) does not name $verb" >&2; exit 1; }
    "$command" "$verb" --help | sed -n 's/^  \(--[a-z-]*\).*/\1/p' | sort >"$work/help"
    sed -n '/^# OPTIONS/,/^# [^O]/p' "$page" | grep '^\*--' | grep -o -e '\*--[a-z-]*\*' | tr -d '*' | sort >"$work/page"
    diff "$work/help" "$work/page" >&2 || { echo "$page differs from moe4 $verb --help" >&2; exit 1; }
done
