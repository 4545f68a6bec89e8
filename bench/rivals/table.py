#!/usr/bin/env python3
"""What compare.py found, as Markdown: bench/rivals/table.py RESULTS...

ms; ours with the ratio to the floor of experts touched and FLOP, a rival's with its ms over ours.  Ours ran before
every third rival and after the last, and is the median of those.  Where "dense" ran, a second table holds ours against
what that measured: floors from its rates, and its products with the bytes of the intermediate, written and read.
"""

import fileinput
import json
from collections import defaultdict
from statistics import median

INTERMEDIATE = {"oss120b": 4 * 2880, "oss20b": 4 * 2880, "dsv3": 8 * 2048, "v4flash": 6 * 2048, "k3": 16 * 3072}


def by_point(records):
    """{(shape, T): {who: median of each number}} where ours is known, in the order of the records."""
    points = defaultdict(lambda: defaultdict(list))
    for r in records:
        points[r["shape"], r["T"]][r["who"]].append(r)
    return {
        point: {
            who: {name: median(r[name] for r in runs) for name in runs[0] if isinstance(runs[0][name], float)}
            for who, runs in by_who.items()
        }
        for point, by_who in points.items()
        if "ours" in by_who
    }


def table(records):
    errors = defaultdict(dict)
    for r in records:
        if "error" in r:
            errors[r["who"]][r["shape"]] = max(r["error"], errors[r["who"]].get(r["shape"], 0))
    rivals = list(errors)
    yield ["shape, T", "ours", *rivals, "best of them / ours"]
    yield ["---"] * (len(rivals) + 3)
    for (shape, T), by_who in by_point(records).items():
        ours = by_who["ours"]["ms"]
        theirs = {who: by_who[who]["ms"] for who in rivals if who in by_who}
        cells = [f"{theirs[who]:.3g} {theirs[who] / ours:.2f}" if who in theirs else "" for who in rivals]
        best = f"{min(theirs.values()) / ours:.2f}" if theirs else ""
        yield [f"{shape} {T}", f"{ours:.3g} {ours / by_who['ours']['floor']:.2f}", *cells, best]
    for shape in {r["shape"]: None for r in records}:
        cells = [f"{errors[who][shape]:.1e}" if shape in errors[who] else "" for who in rivals]
        yield [f"error, {shape}", "", *cells, ""]


def ceilings(records):
    yield ["shape, T", "ours", "TFLOP/s, GB/s", "floor", "ours / floor", "dense + bytes", "ours / that"]
    yield ["---"] * 7
    for (shape, T), by_who in by_point(records).items():
        dense = next((by_who[who] for who in by_who if who.startswith("dense")), None)
        if not dense:
            continue
        ours = by_who["ours"]
        ms, width = ours["ms"], 2 if records[0]["compute"] == "bf16" else 1
        floor = ms * max(ours["gbs"] / dense["gbs"], ours["tflops"] / dense["tflops"])
        plain = dense["ms"] + 2 * T * INTERMEDIATE[shape] * width / dense["gbs"] / 1e6
        rates = f"{dense['tflops']:.0f}, {dense['gbs']:.0f}"
        ratios = f"{floor:.3g}", f"{ms / floor:.2f}", f"{plain:.3g}", f"{ms / plain:.2f}"
        yield [f"{shape} {T}", f"{ms:.3g}", rates, *ratios]


def main():
    records = [json.loads(line) for line in fileinput.input()]
    for compute, state in {(r["compute"], r["state"]): None for r in records}:
        chosen = [r for r in records if (r["compute"], r["state"]) == (compute, state)]
        has_rivals, has_dense = any("error" in r for r in chosen), any(r["who"].startswith("dense") for r in chosen)
        for rows in (table(chosen) if has_rivals else (), ceilings(chosen) if has_dense else ()):
            text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
            if text:
                print(f"{compute}, {state}", text, sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
