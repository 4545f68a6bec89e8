#!/bin/sh
# The library exports exactly the functions that the public headers declare, has its SONAME, and calls nothing that
# prints, exits, reads the environment or changes the process.
#
#   symbols.sh LIBRARY INCLUDE_DIR [SONAME [RUNTIME]]      LIBRARY: shared, or static without SONAME
#
# RUNTIME: the CUDA runtime is linked in, which reads and sets its own environment variables and has an exit.
set -eu
library=$1 include=$2 soname=${3-} runtime=${4-}
table=${soname:+-D} # which of nm's symbol tables
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for header in "$include"/moe4/*.h; do
    "${CC:-cc}" -E -P -I"$include" "$header"
done | grep -oE '\bmoe4_[a-z0-9_]+\(' | tr -d '(' | sort -u >"$work/declared"
nm $table --extern-only --defined-only "$library" | awk '$3 != "" {print $3}' | sort -u >"$work/exported"
[ -s "$work/declared" ] || { echo "found no function in $include/moe4" >&2; exit 1; }

if ! diff "$work/declared" "$work/exported" >"$work/difference"; then
    echo "declared in a header but not exported (<), exported but not declared (>):"
    grep '^[<>]' "$work/difference"
    exit 1
fi

if [ -n "$soname" ] && ! objdump -p "$library" | grep -q "SONAME *$soname\$"; then
    echo "$library: SONAME is not $soname"
    exit 1
fi

# What writes to a stream is fine: without stdout and stderr it writes to files.
nm $table --undefined-only "$library" | awk '{print $2}' | sed 's/@.*//' |
    grep -xE '_?exit|quick_exit|abort|(secure_)?getenv|setenv|(__)?(v?printf|puts|putchar|perror)(_chk)?|stdout|stderr|signal|sigaction|setlocale|fork|system' \
        >"$work/found" || true
grep -vxE "${runtime:+exit|getenv|setenv}" "$work/found" >"$work/forbidden" || true
if [ -s "$work/forbidden" ]; then
    echo "libmoe4 must not use: $(tr '\n' ' ' <"$work/forbidden")"
    exit 1
fi
echo "$(wc -l <"$work/exported") functions exported, all declared"
