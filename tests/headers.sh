#!/bin/sh
# Each public header compiles alone and twice, as C99 and as C++17, without a warning, and each INIT macro sets every
# field of its struct.
#
#   headers.sh INCLUDE_DIR      CC and CXX name the compilers
set -eu
include=$1

# program HEADER: MOE4_NOUN_INIT initialises a moe4_noun.
program() {
    printf '#include "moe4/%s"\n#include "moe4/%s"\n' "$1" "$1"
    sed -n 's/^#define \(MOE4_[A-Z0-9_]*\)_INIT .*/\1/p' "$include/moe4/$1" | while read -r macro; do
        noun=$(echo "$macro" | tr '[:upper:]' '[:lower:]')
        echo "extern $noun ${noun}_value; $noun ${noun}_value = ${macro}_INIT;"
    done
}

# compile HEADER COMPILER...
compile() {
    header=$1
    shift
    program "$header" | "$@" -pedantic-errors -Wall -Wextra -Wshadow -Wundef -Werror -I"$include" -fsyntax-only - || {
        echo "moe4/$header: refused by: $*" >&2
        exit 1
    }
}

for path in "$include"/moe4/*.h; do
    header=${path##*/}
    compile "$header" "${CC:-cc}" -xc -std=c99 -Wstrict-prototypes
    compile "$header" "${CXX:-c++}" -xc++ -std=c++17
    echo "moe4/$header: C99 and C++17"
done
