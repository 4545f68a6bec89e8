#!/bin/sh
# convert: every byte of codes, scales and biases comes back after a round trip; layers compute the same; what is refused.
set -eu
. "$(dirname "$0")/cli_lib.sh"
model=$work/model

same() { # same PATH OTHER: the same tensors
    "$helpers/same_tensors" "$1" "$2" >"$out" 2>"$err" || die "$1 and $2 differ:"
}

same_output() { # same_output PATH OTHER: layer 1 of both gives the same bytes
    expect 0 run "$1" --layer 1 --tokens 7 --output "$work/a.safetensors"
    expect 0 run "$2" --layer 1 --tokens 7 --output "$work/b.safetensors"
    same "$work/a.safetensors" "$work/b.safetensors"
}

same_experts() { # same_experts FOLDER: the model's codes and scales
    for layer in 0 1 2; do
        for part in gate_up_proj_blocks gate_up_proj_scales down_proj_blocks down_proj_scales; do
            name=model.layers.$layer.mlp.experts.$part
            "$helpers/same_tensors" "$model/model.safetensors" "$1/model.safetensors" "$name" || die "$name differs"
        done
    done
}

# gpt-oss there and back, over several shards: nothing is lost, its config neither.
make_small --layers 3 --seed 3 "$model"
expect 0 convert "$model" "$work/ct" --to compressed-tensors --json --shard-bytes 50000
json to=compressed-tensors layers=3 shards_kept=0 "from=gpt-oss released" "contents=whole checkpoint"
expect 0 inspect "$work/ct" --json
json family=gpt-oss "layout=compressed-tensors mxfp4-pack-quantized" n_moe_layers=3
same_output "$model" "$work/ct"
expect 0 convert "$work/ct" "$work/back" --to gpt-oss
same "$model" "$work/back"
grep -q '"quant_method": "mxfp4"' "$work/back/config.json" || die "config.json is not gpt-oss's"
expect 0 inspect "$work/back" --json
json family=gpt-oss "layout=gpt-oss released" n_moe_layers=3

# Quantised into one layout and converted is the same as quantised into the other.
mkdir "$work/dense"
"$helpers/dense_of" "$model" "$work/dense" stacked BF16
cp "$model/config.json" "$work/dense"
expect 0 quantize "$work/dense" "$work/q" --to compressed-tensors
same "$work/q" "$work/ct"

# DeepSeek-V4 there and back.
mkdir "$work/apart"
"$helpers/dense_of" "$model" "$work/apart" apart BF16
cat >"$work/apart/config.json" <<'END'
{"model_type": "deepseek_v4", "hidden_size": 64, "moe_intermediate_size": 96, "n_routed_experts": 8,
 "num_experts_per_tok": 2, "num_hidden_layers": 3, "swiglu_limit": 10.0, "norm_topk_prob": true,
 "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "expert_dtype": "bf16"}
END
expect 0 quantize "$work/apart" "$work/ds" --to deepseek-v4
expect 0 inspect "$work/ds" --json
json family=DeepSeek-V4 "layout=DeepSeek-V4 released" n_moe_layers=3
expect 0 convert "$work/ds" "$work/ds_ct" --to compressed-tensors
same_output "$work/ds" "$work/ds_ct"
expect 0 convert "$work/ds_ct" "$work/ds_back" --to deepseek-v4
same "$work/ds" "$work/ds_back"

# GGUF and back: the MoE layers alone, the same codes and scales; biases and router become f32 and keep their values.
gguf=$work/model.gguf
expect 0 convert "$model" "$gguf" --to gguf --json
json to=gguf layers=3 "contents=MoE layers only"
expect 0 inspect "$gguf" --json
json family=gpt-oss layout=GGUF n_moe_layers=3 n_model_layers=3
same_output "$model" "$gguf"
expect 0 convert "$gguf" "$work/from_gguf" --to gpt-oss --json
json "contents=MoE layers only" layers=3
same_experts "$work/from_gguf"
same_output "$model" "$work/from_gguf"
expect 0 convert "$work/from_gguf" "$work/again.gguf" --to gguf
cmp "$gguf" "$work/again.gguf"
expect 0 convert "$work/ct" "$work/ct.gguf" --to gguf
same "$gguf" "$work/ct.gguf"
expect 0 convert "$work/ds" "$work/ds.gguf" --to gguf
same_output "$work/ds" "$work/ds.gguf"

# Every layout there and back: what has names of its own carries the MoE layers alone, the others everything.
for to in gpt-oss-original compressed-tensors quark modelopt mlx gguf gguf-fused; do
    there=$work/oss_$to
    case $to in gguf*) there=$there.gguf ;; esac
    expect 0 convert "$model" "$there" --to $to
    same_output "$model" "$there"
    expect 0 convert "$there" "$work/oss_back" --to gpt-oss --force --json
    case $to in
    gguf*) json "contents=MoE layers only" && same_experts "$work/oss_back" ;;
    gpt-oss-original) json "contents=MoE layers only" && same "$model" "$work/oss_back" ;;
    *) json "contents=whole checkpoint" && same "$model" "$work/oss_back" ;;
    esac
done
expect 0 inspect "$work/oss_gpt-oss-original" --json
json "layout=gpt-oss original" family=gpt-oss n_moe_layers=3
for to in compressed-tensors quark modelopt mlx gguf gguf-fused; do
    there=$work/ds_$to
    case $to in gguf*) there=$there.gguf ;; esac
    expect 0 convert "$work/ds" "$there" --to $to
    same_output "$work/ds" "$there"
    expect 0 convert "$there" "$work/ds_back" --to deepseek-v4 --force
    case $to in gguf*) same_output "$work/ds" "$work/ds_back" ;; *) same "$work/ds" "$work/ds_back" ;; esac
done

# Other models, made by a program that shares nothing with us: through GGUF and back, whose config.json is made from the
# layers; what GGUF or a config.json has no words for is refused.
for family in deepseek_v3 deepseek_v4 kimi_k3 qwen3; do
    rm -rf "$work/family.gguf" "$work/family_back"
    expect 0 convert "$data/families/$family" "$work/family.gguf" --to gguf
    same_output "$data/families/$family" "$work/family.gguf"
    expect 0 convert "$work/family.gguf" "$work/family_back" --to quark
    same_output "$data/families/$family" "$work/family_back"
done
expect 1 convert "$data/families/minimax_m3" "$work/x.gguf" --to gguf
says "$err" "GGUF has no architecture for it"
for family in openai mlx modelopt modelopt_stacked quark; do
    rm -rf "$work/family_back"
    expect 0 convert "$data/families/$family" "$work/family_back" --to compressed-tensors
    same_output "$data/families/$family" "$work/family_back"
done

# Layers for multi-token prediction have a stem of their own in every layout.
rm -rf "$work/family_back"
expect 0 convert "$data/families/deepseek_v4" "$work/mtp" --to mlx --json
json layers=3
expect 0 convert "$work/mtp" "$work/family_back" --to deepseek-v4
same "$data/families/deepseek_v4" "$work/family_back"

# Scales of activations stay within their layout; elsewhere it is said that they are left out.
rm -rf "$work/family_back"
expect 0 convert "$data/families/quark" "$work/family_back" --to quark --json
json tensors_left_out=0 "contents=whole checkpoint"
same "$data/families/quark" "$work/family_back"
expect 0 convert "$data/families/quark" "$work/family_back" --to mlx --force
says "$out" "12 tensors that the layout has no place for"
says "$out" ".input_scale"

# GGUF in several files, one a layer: the name is that of all, each part is found from any.
expect 0 convert "$model" "$work/split.gguf" --to gguf-fused --shard-bytes 1 --json
json shards=3
[ "$(ls "$work" | grep -c '^split-0000[123]-of-00003.gguf$')" -eq 3 ] || die "not three files: $(ls "$work")"
same_output "$model" "$work/split-00002-of-00003.gguf"
expect 0 convert "$work/split-00001-of-00003.gguf" "$work/joined.gguf" --to gguf
same "$gguf" "$work/joined.gguf"
expect 1 convert "$model" "$work/split.gguf" --to gguf-fused --shard-bytes 1
says "$err" "split-00001-of-00003.gguf: is there; --force replaces it"
expect 0 convert "$model" "$work/split.gguf" --to gguf-fused --shard-bytes 1 --force
rm "$work/split-00003-of-00003.gguf"
expect 1 inspect "$work/split-00001-of-00003.gguf"
says "$err" "split-00003-of-00003.gguf is missing"
expect 1 convert "$model" "$gguf" --to gguf
says "$err" "is there; --force replaces it"
expect 1 convert "$model" "$work/folder" --to gguf
says "$err" "ends in .gguf"
# gpt-oss's limit is not in a GGUF file: another one cannot be said.
cp -r "$model" "$work/limit"
sed 's/"swiglu_limit": 7.0/"swiglu_limit": 5.0/' "$model/config.json" >"$work/limit/config.json"
expect 1 convert "$work/limit" "$work/x.gguf" --to gguf
says "$err" "the activation's limit would be lost"
# Refused before the first byte: where no file may have one, this is still what is said.
(ulimit -f 0 && exec "$command" convert "$work/limit" "$work/x.gguf" --to gguf) 2>&1 | cat >"$err"
says "$err" "the activation's limit would be lost"
[ -z "$(ls "$work" | grep 'x.*gguf')" ] || die "a refusal left $(ls "$work")"

# Limits that differ by layer, which GGUF has and config.json has not: refused before a folder is made.
cp "$work/ds.gguf" "$work/limits.gguf"
key=swiglu_clamp_exp # its value: types of the array and its elements, their number, then layer 0's
at=$(LC_ALL=C grep -abo $key "$work/limits.gguf" | head -1 | cut -d: -f1)
printf '\000\000\240\100' | dd of="$work/limits.gguf" bs=1 seek=$((at + ${#key} + 16 + 4)) conv=notrunc 2>"$err"
expect 1 convert "$work/limits.gguf" "$work/x" --to deepseek-v4
says "$err" "the activation's limit would be lost: config.json has one for all layers"
[ ! -e "$work/x" ] || die "a refusal left $work/x"
expect 0 convert "$work/limits.gguf" "$work/one_limit" --to deepseek-v4 --layers 1
says "$work/one_limit/config.json" '"swiglu_limit": 5.0'
expect 0 convert "$work/limits.gguf" "$work/limits_too.gguf" --to gguf-fused
same_output "$work/limits.gguf" "$work/limits_too.gguf"

# Experts of a model beside the model cannot be converted; within their layout they are copied.
mkdir "$work/beside"
LC_ALL=C sed 's/model\.layers\.2\.mlp/mtp.layers.0000.mm/g' "$work/q/model.safetensors" >"$work/beside/model.safetensors"
sed 's/"num_hidden_layers": 3/"num_hidden_layers": 2/' "$work/q/config.json" >"$work/beside/config.json"
expect 1 convert "$work/beside" "$work/x" --to mlx
says "$err" "mtp.layers.0000.mm.experts."
says "$err" "an expert of a model beside the model, U8 in the source's layout: it cannot be converted"
[ ! -e "$work/x" ] || die "a refusal left $work/x"
expect 0 convert "$work/beside" "$work/beside_same" --to compressed-tensors
same "$work/beside" "$work/beside_same"
expect 0 convert "$work/beside" "$work/beside_mlx" --to mlx --layers 0,1

# Some layers alone: part of a model, and it says so.
expect 0 convert "$model" "$work/part" --to compressed-tensors --layers 1 --json
json layers=1 "contents=MoE layers only"
expect 0 inspect "$work/part" --json
json n_moe_layers=1 n_model_layers=3
same_output "$model" "$work/part"

# Refusals name what would be lost; nothing is written.
expect 1 convert "$work/ds" "$work/x" --to gpt-oss
says "$err" 'model_type "deepseek_v4": the layout gpt-oss would lose its activation and router parameters'
expect 1 convert "$model" "$work/x" --to deepseek-v4
says "$err" 'model_type "gpt_oss": the layout deepseek-v4 would lose'
expect 1 convert "$model" "$work/x" --to compressed-tensors --layers 7
says "$err" "--layers: 7 is no MXFP4 layer"
[ ! -e "$work/x" ] || die "a refusal left $work/x"
expect 1 convert "$model" "$work/part" --to compressed-tensors
says "$err" "holds a checkpoint; --force replaces it"
expect 0 convert "$model" "$work/part" --to compressed-tensors --force
same "$work/part" "$work/ct"

# A folder is not written into itself, and --force leaves no shard of what was there.
expect 1 convert "$model" "$work/../$(basename "$work")/model/" --to mlx --force
says "$err" "itself; another folder is wanted"
[ -e "$model/config.json" ] || die "the source lost its config.json"
expect 0 convert "$model" "$work/forced" --to compressed-tensors --shard-bytes 50000
expect 0 convert "$model" "$work/forced" --to compressed-tensors --force
[ "$(ls "$work/forced" | tr '\n' ' ')" = "config.json model.safetensors " ] || die "stale: $(ls "$work/forced")"
rm "$work/forced/config.json"
expect 1 convert "$model" "$work/forced" --to compressed-tensors --shard-bytes 50000
says "$err" "forced/model.safetensors: is there, but not of this job"
expect 0 convert "$model" "$work/forced" --to compressed-tensors --shard-bytes 50000 --force
[ ! -e "$work/forced/model.safetensors" ] || die "a single file beside the shards"

# Unfinished, then finished: what was there is kept.
rm "$work/ct/config.json" "$work/ct/model.safetensors.index.json" "$work/ct/model-00003-of-"*
expect 0 convert "$model" "$work/ct" --to compressed-tensors --json --shard-bytes 50000
shards=$(ls "$work/ct" | grep -c '^model-')
json shards=$shards shards_kept=$((shards - 1))
same_output "$model" "$work/ct"

# A cut shard is no finished one.
rm "$work/ct/config.json"
cut=$(echo "$work/ct/model-00002-of-"*)
head -c 9000 "$cut" >"$work/cut" && cp "$work/cut" "$cut"
expect 1 convert "$model" "$work/ct" --to compressed-tensors --shard-bytes 50000
says "$err" "is there, but not of this job"

# Nor is one that was made of another config.json, be it of the same size.
rm -rf "$work/ct" "$work/edited"
cp -r "$model" "$work/edited"
expect 0 convert "$work/edited" "$work/ct" --to compressed-tensors
rm "$work/ct/config.json"
touch -d '2001-01-01' "$work/edited/config.json"
expect 1 convert "$work/edited" "$work/ct" --to compressed-tensors
says "$err" "is there, but not of this job"

# A full disk leaves no half-written file.
status=0
(ulimit -f 100 && exec "$command" convert "$model" "$work/full" --to compressed-tensors) \
    >"$out" 2>"$err" || status=$?
[ $status -eq 1 ] || die "a full disk: exit status $status, expected 1"
[ -z "$(ls "$work/full")" ] || die "a full disk left $(ls "$work/full")"
status=0
(ulimit -f 100 && exec "$command" convert "$model" "$work/full.gguf" --to gguf) >"$out" 2>"$err" || status=$?
[ $status -eq 1 ] || die "a full disk: exit status $status, expected 1"
[ -z "$(ls "$work" | grep full.)" ] || die "a full disk left $(ls "$work")"

# Killed at any time: what has a shard's name is whole, config.json comes last, and the next run makes the rest.
n_killed=0
for delay in 0.001 0.002 0.004 0.006 0.008 0.01 0.015 0.02 0.03 0.05; do
    rm -rf "$work/killed"
    status=0
    timeout -s KILL $delay "$command" convert "$model" "$work/killed" --to compressed-tensors --shard-bytes 20000 \
        >"$out" 2>"$err" || status=$?
    [ $status -eq 0 ] || n_killed=$((n_killed + 1))
    for shard in "$work/killed/model-"*.safetensors; do
        [ ! -e "$shard" ] || "$helpers/same_tensors" "$shard" "$shard" >"$out" 2>"$err" || die "$shard is cut:"
    done
    [ ! -e "$work/killed/config.json" ] || same "$work/part" "$work/killed"
    expect 0 convert "$model" "$work/killed" --to compressed-tensors --shard-bytes 20000 --force
    same "$work/part" "$work/killed"
done
[ "$n_killed" -gt 0 ] || die "nothing was killed"

expect 0 synth --hidden 512 --intermediate 512 --experts 48 --layers 4 "$work/four"

count() { # count FILE...: those that are there
    n=0
    for file in "$@"; do [ ! -e "$file" ] || n=$((n + 1)); done
    echo $n
}

# Terminated: it dies of the signal, and leaves nothing but complete files.
for to in compressed-tensors gguf; do
    status=0
    for attempt in 1 2 3 4 5; do
        rm -rf "$work/ended" && mkdir "$work/ended"
        "$command" convert "$work/four" "$work/ended/x.gguf" --to $to --shard-bytes 9000000 >"$out" 2>"$err" &
        until [ "$(count "$work/ended/"*.tmp "$work/ended/x.gguf/"*.tmp)" -gt 0 ]; do kill -0 $! || break; done
        kill -TERM $! 2>/dev/null || true
        status=0
        wait $! || status=$?
        ! grep -q interrupted "$err" || break
    done
    [ $status -eq 143 ] || die "terminated: exit status $status, expected 143"
    says "$err" "interrupted"
    [ "$(find "$work/ended" -name '*.tmp' | wc -l)" -eq 0 ] || die "terminated, it left $(find "$work/ended")"
done

# GGUF files: killed behind the first of four, the next run keeps it; one of another layout begins anew.
n_kept=0
for attempt in 1 2 3 4 5; do
    rm -f "$work/parts"*
    "$command" convert "$work/four" "$work/parts.gguf" --to gguf --shard-bytes 1 >"$out" 2>"$err" &
    until [ "$(count "$work/parts"*-00001-of-00004.gguf)" -gt 0 ]; do kill -0 $! || die "nothing was written:"; done
    kill -KILL $! 2>/dev/null || true
    wait $! 2>/dev/null || true
    [ ! -e "$work/parts-00001-of-00004.gguf" ] || continue # it was faster
    n_kept=$(count "$work/parts.unfinished-"*-of-00004.gguf)
    break
done
[ "$n_kept" -gt 0 ] || die "never killed in time"
expect 0 convert "$work/four" "$work/parts.gguf" --to gguf-fused --shard-bytes 1 --json
json shards=4 shards_kept=0
[ "$(count "$work/parts.unfinished-"*.gguf)" -eq "$n_kept" ] || die "another job's files went: $(ls "$work")"
rm "$work/parts-"*
expect 0 convert "$work/four" "$work/parts.gguf" --to gguf --shard-bytes 1 --json
json shards=4 "shards_kept=$n_kept"
expect 0 convert "$work/four" "$work/whole.gguf" --to gguf --shard-bytes 1
for i in 1 2 3 4; do cmp "$work/parts-0000$i-of-00004.gguf" "$work/whole-0000$i-of-00004.gguf"; done
[ "$(count "$work/parts"*unfinished*.gguf)" -eq 0 ] || die "finished, but: $(ls "$work")"

# A layer whose tensors are larger than the memory there is: one expert at a time.  (Not with a sanitizer's shadow.)
if (ulimit -v 50000 && exec "$command" --version) >/dev/null 2>&1; then
    expect 0 synth --hidden 1024 --intermediate 1024 --experts 48 "$work/large"
    (ulimit -v 50000 && exec "$command" convert "$work/large" "$work/large_ct" --to compressed-tensors) >"$out" 2>"$err" ||
        die "not enough memory for one expert:"
    (ulimit -v 50000 && exec "$command" convert "$work/large_ct" "$work/large_oss" --to gpt-oss) >"$out" 2>"$err" ||
        die "not enough memory for one expert:"
    same "$work/large" "$work/large_oss"
    (ulimit -v 50000 && exec "$command" convert "$work/large" "$work/large.gguf" --to gguf) >"$out" 2>"$err" ||
        die "not enough memory for one expert:"
fi
