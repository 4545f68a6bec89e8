#!/bin/sh
# docs.sh SOURCE: what the documents name exists: tests as `file.test`, files of tests, functions and words of the API,
# verbs and options of the command.
set -eu
cd "$1"
bad=0

missing() {
    echo "$1: $2 is named, but there is none" >&2
    bad=1
}

names() { # names FILE PATTERN: what stands between backquotes and looks like that
    grep -oE "\`[^\`]+\`" "$1" | tr -d '\`' | grep -oE "$2" | sort -u
}

for doc in docs/semantics.md docs/differences.md; do
    for name in $(names "$doc" '^test_[a-z0-9_]+\.[a-z0-9_]+$'); do
        grep -qE "[(]${name#*.}[),]" "tests/${name%.*}.c" || missing "$doc" "$name"
    done
    for name in $(names "$doc" '^(test|cli)_[a-z0-9_]+$'); do
        [ -f "tests/$name.c" ] || [ -f "tests/$name.sh" ] || grep -q "$name" tests/CMakeLists.txt || missing "$doc" "$name"
    done
    for name in $(names "$doc" '(moe4|MOE4)_[A-Za-z0-9_]+'); do
        grep -qrw -- "$name" include || missing "$doc" "$name"
    done
    for option in $(names "$doc" '[-][-][a-z][a-z-]+'); do
        grep -qrF -- "\"$option\"" cli || missing "$doc" "$option"
    done
    for target in $(grep -oE '\]\([^)#]+' "$doc" | sed 's/](//' | sort -u); do
        [ -e "docs/$target" ] || missing "$doc" "$target"
    done
done
exit $bad
