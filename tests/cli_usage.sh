#!/bin/sh
# What the command says to what is on its command line: help, mistakes, exit statuses, colours.
set -eu
. "$(dirname "$0")/cli_lib.sh"

verbs="synth inspect run combine check route bench tune quantize convert"

expect 0 --help
for verb in $verbs; do says "$out" "  $verb "; done
expect 0 --version
grep -Eqx 'moe4 [0-9]+\.[0-9]+\.[0-9]+ \(([0-9a-f]+|unknown)\)' "$out" || die "odd version:"
status=0
"$command" >"$out" 2>"$err" || status=$?
[ $status -eq 2 ] && [ ! -s "$out" ] || die "no verb: exit status $status, expected 2 and nothing on stdout"

for verb in $verbs; do
    expect 0 "$verb" --help
    says "$out" "Usage: moe4 $verb [options]"
    says "$out" "  --json "
    says "$out" "  --help "
    [ ! -s "$err" ] || die "moe4 $verb --help: messages"
    [ "$(wc -L <"$out")" -le 80 ] || die "moe4 $verb --help: lines over 80 columns"
    refuses 2 "unknown option \"--nonsense\" (see moe4 $verb --help)" "$verb" --nonsense
done

expect 2 frobnicate
says "$err" 'moe4: unknown verb "frobnicate"'

refuses 2 "PATH is missing (see moe4 run --help)" run
refuses 2 "--method is missing (see moe4 route --help)" route
refuses 2 'unexpected argument "b"' run a b
refuses 2 "--tokens needs a value" run a --tokens
refuses 2 '--json takes no value, but is given "yes"' run a --json=yes
for bad in abc "" 0 -1 1048577 1.5 "7 " 99999999999999999999; do
    refuses 2 "--tokens: \"$bad\" is not a number in 1..1048576" run a --tokens "$bad"
done
refuses 2 '--backend: "gpu" is not one of auto, ref, cpu, cuda' run a --backend gpu
refuses 2 '--experts: "3" is not a pair (8:4) of numbers in 0..32767' run a --experts 3
refuses 2 '--tokens: "1,,2" is not a list (1,2,3) of numbers in 1..1048576' bench --tokens 1,,2
refuses 2 '--scale: "nan" is not a finite number' route --scale nan
refuses 2 "--tokens generates tokens, but --input brings them" run a --input b --tokens 3
refuses 2 "--hidden: 100 is not a multiple of 32" synth --hidden 100 "$work/x"

refuses 1 "$work/none/config.json: cannot open: No such file or directory" run "$work/none"
refuses 1 "$work/none: cannot open: No such file or directory" route --method topk --top-k 1 \
    --input "$work/none" --output "$work/o"
make_small "$work/model"
refuses 1 "$work/none: cannot open: No such file or directory" run "$work/model" --input "$work/none"
expect 1 run "$work/model" --layer 5
says "$err" "layer 5"

# A full disk is a failure, not a silence.
if [ -e /dev/full ]; then
    status=0
    "$command" --help >/dev/full 2>"$err" || status=$?
    [ $status -eq 1 ] || die "a full disk: exit status $status, expected 1"
fi

# Colours and progress are for terminals.
expect 0 run "$work/model" --tokens 2
! grep -q "$(printf '\033')" "$out" "$err" || die "escape sequences off a terminal:"
if command -v script >/dev/null; then
    on_terminal() { TERM=xterm script -qec "$*" /dev/null </dev/null >"$out"; }
    on_terminal "$command" inspect "$work/model"
    grep -q "$(printf '\033')" "$out" || die "no colours on a terminal:"
    NO_COLOR=1 on_terminal "$command" inspect "$work/model"
    ! grep -q "$(printf '\033')" "$out" || die "colours in spite of NO_COLOR:"
fi
