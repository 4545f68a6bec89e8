# shellcheck shell=sh disable=SC2034
# Shared by the tests of the command, which take: COMMAND HELPERS_FOLDER DATA_FOLDER
command=$1
helpers=$2
data=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=$work/out
err=$work/err

# A sanitizer's finding is not one of the command's own exit statuses.
export ASAN_OPTIONS="exitcode=99:${ASAN_OPTIONS-}" UBSAN_OPTIONS="exitcode=99:${UBSAN_OPTIONS-}"

die() {
    echo "$*" >&2
    for file in "$out" "$err"; do
        echo "--- $file" >&2
        head -20 "$file" >&2
    done
    exit 1
}

# expect STATUS ARGUMENT...: runs the command, which must end so; its output is then in $out and $err.  A failure says why,
# and every message says whose it is.
expect() {
    wanted=$1
    shift
    status=0
    "$command" "$@" >"$out" 2>"$err" || status=$?
    [ "$status" -eq "$wanted" ] || die "moe4 $*: exit status $status, expected $wanted"
    [ "$wanted" -eq 0 ] || [ -s "$err" ] || die "moe4 $*: no explanation"
    ! grep -qv '^moe4' "$err" || die "moe4 $*: messages that are not its own"
}

# says FILE TEXT: the file has that text.
says() {
    grep -qF -e "$2" "$1" || die "no \"$2\" in:"
}

# refuses STATUS MESSAGE ARGUMENT...: the command ends so and says just that.
refuses() {
    wanted=$1
    message=$2
    shift 2
    expect "$wanted" "$@"
    [ "$(cat "$err")" = "moe4 $1: $message" ] || die "moe4 $*: expected the message \"moe4 $1: $message\""
}

# json KEY[=VALUE]...: every line of the output is a JSON object with these.
json() {
    "$helpers/json_has" "$@" <"$out" || die "bad JSON:"
}

# match RULE FILE NAME OTHER_FILE OTHER_NAME
match() {
    "$helpers/tensors_match" "$@" 2>"$err" || die "$*:"
}

# A small checkpoint of the gpt-oss layout in $1.
make_small() {
    expect 0 synth --hidden 64 --intermediate 96 --experts 8 "$@"
}
