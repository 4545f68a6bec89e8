#!/bin/sh
# Installs a build into an empty folder, moves it, and builds and runs the example project against it through
# pkg-config and through the CMake package.
#
#   install.sh BUILD_DIR SOURCE_DIR
set -eu
build=$1 source=$2
checkpoint=$source/tests/data/golden/gptoss_small
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
    echo "install: $*" >&2
    exit 1
}

cmake --install "$build" --prefix "$work/first" >/dev/null
mv "$work/first" "$work/prefix"
prefix=$work/prefix
pc=$(find "$prefix" -name moe4.pc)
PKG_CONFIG_PATH=${pc%/*}
LD_LIBRARY_PATH=${pc%/pkgconfig/*}
export PKG_CONFIG_PATH LD_LIBRARY_PATH
if [ -e "$LD_LIBRARY_PATH/libmoe4.a" ]; then
    kind=static PKG_CONFIG='pkg-config --static'
else
    kind=shared PKG_CONFIG=pkg-config
fi
export PKG_CONFIG
cp -r "$source/examples/consumer" "$work/consumer"

version=$(pkg-config --modversion moe4)
command_version=$(env -u LD_LIBRARY_PATH "$prefix/bin/moe4" --version)
case $command_version in
"moe4 $version" | "moe4 $version "*) ;;
*) fail "moe4 --version says '$command_version', moe4.pc '$version'" ;;
esac

make -C "$work/consumer" >"$work/log" 2>&1 || { cat "$work/log"; fail "pkg-config: the example does not build"; }
"$work/consumer/forward" "$checkpoint" >"$work/pkg-config.out" || fail "pkg-config: the example does not run"

{
    cmake -S "$work/consumer" -B "$work/cmake" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$prefix" &&
        cmake --build "$work/cmake"
} >"$work/log" 2>&1 || { cat "$work/log"; fail "CMake: the example does not build"; }
"$work/cmake/forward" "$checkpoint" >"$work/cmake.out" || fail "CMake: the example does not run"

cat "$work/cmake.out"
[ "$(wc -l <"$work/cmake.out")" -eq 4 ] || fail "the example should print four lines"
cmp "$work/pkg-config.out" "$work/cmake.out"
echo "$kind library $version: installed, moved and used"
