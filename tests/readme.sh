#!/bin/sh
# The C example of README.md is the example project's file, to the byte, and short.
#
#   readme.sh SOURCE_DIR
set -eu
example=$1/examples/consumer/forward.c
sed -n '/^```c$/,/^```$/p' "$1/README.md" | sed '1d;$d' | diff - "$example"
[ "$(wc -l <"$example")" -lt 40 ] || { echo "$example: 40 lines or more" >&2; exit 1; }
