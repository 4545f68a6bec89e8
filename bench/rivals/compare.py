#!/usr/bin/env python3
"""Times whole layers, from logits to y, as others run them, in turn with ours: JSON lines on stdout.

    bench/rivals/compare.py [--shapes NAME,..] [--counts T,..] [--states STATE,..] [--rivals NAME,..] LAYER_BENCH >RESULTS
    bench/rivals/table.py RESULTS

LAYER_BENCH is this project's program (build/tests/layer_bench).  The others are what Python finds here, built and
installed elsewhere; what is missing is skipped, with a line on stderr that says why.  GGML_CUDA names a
libggml-cuda.so.  Every run has the same sizes, random routing and biases, several calls a replay with logits of their
own, and 15 replays; at each T a rival's y is compared with a reference in f32.  Each has a process of its own, so that
it may crash.  Two are no layers but ceilings: dense products of the same sizes and a copy.

STATE is that of the chip when a point's replays begin: hot, after 0.2 s of the same; rested, after 1 s of nothing; or
plain, after whatever came before.
"""

import argparse
import gc
import importlib
import json
import multiprocessing
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

OURS_EVERY = 3  # contenders; and after the last

RIVALS = {  # name: module, class, what to compare it with
    "dense": ("rival_dense", "Dense", "bf16"),
    "dense fp8": ("rival_dense", "DenseFp8", "fp8"),
    "Triton": ("rival_triton", "Experts", "bf16"),
    "vLLM's Triton": ("rival_triton", "BundledExperts", "bf16"),
    "Marlin": ("rival_marlin", "Experts", "bf16"),
    "grouped bf16": ("rival_grouped", "Experts", "bf16"),
    "ggml": ("rival_ggml", "Experts", "bf16"),
    "humming": ("rival_humming", "Experts", "bf16"),
    "humming fp8": ("rival_humming", "ExpertsFp8", "fp8"),
}
LINE = re.compile(
    r"\w+ +(\w+) +(\w+) +T +(\d+) +([\d.]+) ms +floor +([\d.]+) +ratio +[\d.]+ +(\d+) GB/s +([\d.]+) TFLOP/s +(\w+)"
)


def rival_class(name):
    return getattr(importlib.import_module(RIVALS[name][0]), RIVALS[name][1])


def reason_to_skip(name):
    try:
        return rival_class(name).missing()
    except ImportError as error:
        return str(error)


def time_rival(name, shape, counts, states):
    import torch

    import layer

    with torch.inference_mode():
        rival = rival_class(name)(layer.Layer(layer.SHAPES[shape]))
        points = [{"T": T, "state": state} for T in counts for state in states]
        about = {"who": name, "compute": RIVALS[name][2], "shape": shape}
        records = [about | point | rival.measure(**point) for point in points]
    del rival
    gc.collect()
    torch.cuda.empty_cache()
    return records


def time_ours(program, compute, shape, counts, states):
    command = [program, shape, compute, *states, *(f"T={T}" for T in counts)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = (LINE.match(line) for line in output.splitlines())
    names = "compute", "shape", "T", "ms", "floor", "gbs", "tflops", "state"
    kinds = str, str, int, float, float, float, float, str
    return [
        {"who": "ours"} | {name: kind(word) for name, kind, word in zip(names, kinds, m.groups())} for m in found if m
    ]


def emit(records):
    for record in records:
        print(json.dumps(record), flush=True)


def compare(arguments, workers):
    points = arguments.counts, arguments.states
    for shape in arguments.shapes:
        for i, name in enumerate(list(workers)):
            if i % OURS_EVERY == 0:
                emit(time_ours(arguments.program, RIVALS[name][2], shape, *points))
            try:
                emit(workers[name].submit(time_rival, name, shape, *points).result())
            except Exception as error:  # whatever it was, the others go on
                print(f"{name}, {shape}: {error!r}", file=sys.stderr, flush=True)
                del workers[name]
        for compute in sorted({RIVALS[name][2] for name in workers}):
            emit(time_ours(arguments.program, compute, shape, *points))


def main():
    def names(text):
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", metavar="LAYER_BENCH")
    parser.add_argument("--shapes", type=names, default=["oss120b", "oss20b", "dsv3", "v4flash", "k3"])
    parser.add_argument(
        "--counts", type=lambda text: [int(T) for T in names(text)], default=[1, 8, 32, 128, 512, 2048, 8192]
    )
    parser.add_argument("--states", type=names, default=["plain"])
    parser.add_argument("--rivals", type=names, default=list(RIVALS))
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    workers = {name: ProcessPoolExecutor(1, mp_context=spawn) for name in arguments.rivals}
    reasons = {name: worker.submit(reason_to_skip, name) for name, worker in workers.items()}
    for name, reason in reasons.items():
        if reason.result():
            print(f"{name} skipped: {reason.result()}", file=sys.stderr, flush=True)
            del workers[name]
    compare(arguments, workers)


if __name__ == "__main__":
    main()
