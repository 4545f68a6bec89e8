#!/bin/sh
# synth: what it writes, when it keeps what is there, and that inspect sees it.
set -eu
. "$(dirname "$0")/cli_lib.sh"
model=$work/model

make_small --layers 2 --seed 7 --json "$model"
json layers=2 n_experts=8 hidden_size=64 intermediate_size=96 seed=7 reused=false bytes
cp "$model/model.safetensors" "$work/first"

# The same again is kept, and so is a config that someone has edited.
echo '{}' >"$model/config.json"
make_small --layers 2 --seed 7 --json "$model"
json reused=true
[ "$(cat "$model/config.json")" = "{}" ] || die "config.json was touched"
rm "$model/config.json"
make_small --layers 2 --seed 7 "$model"
says "$out" "it was there already"

# Other parameters are refused and nothing is lost; --force replaces; the same parameters give the same bytes.
expect 1 synth --hidden 64 --intermediate 96 --experts 8 --layers 2 --seed 8 "$model"
says "$err" "--force replaces it"
cmp "$model/model.safetensors" "$work/first"
make_small --layers 2 --seed 8 --force "$model"
! cmp -s "$model/model.safetensors" "$work/first" || die "another seed, the same bytes"
make_small --layers 2 --seed 7 --force "$model"
cmp "$model/model.safetensors" "$work/first"
[ "$(ls "$model" | wc -l)" -eq 2 ] || die "left something behind: $(ls "$model")"

# A checkpoint of someone else's is not ours to replace.
mkdir "$work/other"
echo '{"model_type": "llama"}' >"$work/other/config.json"
expect 1 synth --hidden 64 --intermediate 96 --experts 8 "$work/other"
says "$err" "holds another checkpoint"
expect 1 synth --hidden 64 --intermediate 96 --experts 8 "$work/first/model"
says "$err" "$work/first/model"

expect 0 inspect "$model" --json
json family=gpt-oss n_moe_layers=2 n_model_layers=2 n_tensors=16 layers
expect 0 inspect "$model"
for text in "Layer 1" "swiglu_oai, alpha 1.702, beta 1, limit 7" "interleaved" "renormalize, BF16 weights, bias" \
    "model.layers.1.mlp.experts.gate_up_proj_blocks" "[8, 192, 2, 16]"; do
    says "$out" "$text"
done

# Shapes are the model's unless told otherwise.
expect 0 synth --like gpt-oss-120b --hidden 32 --intermediate 32 --json "$work/large"
json n_experts=128 top_k=4

# Every model in every layout that can hold it: what is read back is the same layer, whose outputs are those of the
# model's own layout; a layout of another model is refused.
for like in gpt-oss-20b deepseek-v3 deepseek-v4-flash kimi-k3; do
    small="--like $like --hidden 64 --intermediate 96 --experts 16 --layers 2 --seed 1"
    # shellcheck disable=SC2086 # a list of words
    expect 0 synth $small "$work/own_$like"
    expect 0 run "$work/own_$like" --layer 1 --tokens 9 --check --output "$work/own.safetensors"
    for layout in gpt-oss gpt-oss-original compressed-tensors deepseek-v4 quark modelopt mlx gguf gguf-fused; do
        made=$work/like_$layout
        rm -rf "$made" "$made.gguf"
        case $layout in gguf*) made=$made.gguf ;; esac
        case $like/$layout in
        gpt-oss*/deepseek-v4 | deepseek-v3/gpt-oss* | deepseek-v3/deepseek-v4 | deepseek-v4*/gpt-oss* | kimi*/gpt-oss* | kimi*/deepseek-v4)
            # shellcheck disable=SC2086
            expect 1 synth $small --layout $layout "$made"
            says "$err" "would lose its activation and router parameters"
            [ ! -e "$made" ] || die "a refusal left $made"
            continue
            ;;
        esac
        # shellcheck disable=SC2086
        expect 0 synth $small --layout $layout "$made" --json
        json like=$like layout=$layout layers=2 reused=false
        # shellcheck disable=SC2086
        expect 0 synth $small --layout $layout "$made" --json
        json reused=true
        expect 0 run "$made" --layer 1 --tokens 9 --output "$work/other.safetensors"
        "$helpers/same_tensors" "$work/own.safetensors" "$work/other.safetensors" || die "$like in $layout runs otherwise"
    done
done
for layout in "deepseek-v3 compressed-tensors mxfp4-pack-quantized" "deepseek-v4-flash DeepSeek-V4 released"; do
    expect 0 inspect "$work/own_${layout%% *}" --json
    json "layout=${layout#* }"
done

# Layers that choose by token id, in tensors and in GGUF.
for layout in deepseek-v4 gguf; do
    expect 0 synth --like deepseek-v4-flash --hidden 64 --intermediate 32 --experts 8 --layers 2 --hash-layers 1 \
        --layout $layout "$work/t.gguf"
    expect 0 run "$work/t.gguf" --layer 1 --tokens 3 --check
    expect 0 inspect "$work/t.gguf"
    says "$out" "hash"
    rm -r "$work/t.gguf"
done
expect 2 synth --like kimi-k3 --hash-layers 1 "$work/x"
says "$err" "at most 0 can"
expect 2 synth --like kimi-k3 --experts 8 "$work/x"
says "$err" "a token takes 16"
expect 2 synth --like deepseek-v3 --experts 12 "$work/x"
says "$err" "multiple of 8 groups"

# In several files, with an index or as parts.
expect 0 synth --hidden 64 --intermediate 32 --experts 8 --layers 3 --shard-bytes 10000 "$work/shards"
[ -e "$work/shards/model.safetensors.index.json" ] || die "no index"
expect 0 run "$work/shards" --layer 2 --tokens 3 --check
expect 0 synth --hidden 64 --intermediate 32 --experts 8 --layers 3 --layout gguf --shard-bytes 10000 "$work/parts.gguf"
expect 0 run "$work/parts-00002-of-00003.gguf" --layer 2 --tokens 3 --check

# The router's loads fall off by Zipf's law whatever the scores are: the busiest of 32 experts has several times the load of
# the laziest.
for like in gpt-oss-20b deepseek-v3 deepseek-v4-flash kimi-k3; do
    expect 0 synth --like $like --hidden 128 --intermediate 32 --experts 32 "$work/wide_$like"
    expect 0 run "$work/wide_$like" --tokens 2048 --repeat 1 --json
    loads=$(sed -n 's/.*"expert_load":\[\([0-9,]*\)\].*/\1/p' "$out" | tr ',' '\n' | sort -n)
    [ "$(echo "$loads" | wc -l)" -eq 32 ] || die "not 32 loads"
    least=$(echo "$loads" | head -1)
    most=$(echo "$loads" | tail -1)
    times=6
    [ $like != kimi-k3 ] || times=3 # which takes every second expert
    [ "$most" -gt $((times * least)) ] && [ "$most" -lt $((30 * least + 30)) ] ||
        die "$like: loads $least to $most, expected about 1:11"
done
