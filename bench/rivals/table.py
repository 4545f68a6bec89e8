#!/usr/bin/env python3
"""What compare.py found, as Markdown: bench/rivals/table.py RESULTS...

ms; ours with the ratio to the floor of experts touched and FLOP, a rival's with its ms over ours.  Ours ran before
every second rival and after the last, and is the median of those.
"""

import fileinput
import json
from collections import defaultdict
from statistics import median


def table(records):
    ms, floors, errors, points, rivals = defaultdict(list), {}, defaultdict(dict), [], []
    for r in records:
        point = r["shape"], r["T"]
        ms[r["who"], point].append(r["ms"])
        if point not in points:
            points.append(point)
        if r["who"] == "ours":
            floors[point] = r["floor"]
            continue
        errors[r["who"]][r["shape"]] = max(r["error"], errors[r["who"]].get(r["shape"], 0))
        if r["who"] not in rivals:
            rivals.append(r["who"])
    yield ["shape, T", "ours", *rivals, "best of them / ours"]
    yield ["---"] * (len(rivals) + 3)
    for point in points:
        ours = median(ms["ours", point])
        theirs = {who: median(ms[who, point]) for who in rivals if ms[who, point]}
        cells = [f"{theirs[who]:.3g} {theirs[who] / ours:.2f}" if who in theirs else "" for who in rivals]
        best = min(theirs.values()) / ours if theirs else 0
        yield [f"{point[0]} {point[1]}", f"{ours:.3g} {ours / floors[point]:.2f}", *cells, f"{best:.2f}"]
    for shape in {point[0]: None for point in points}:
        cells = [f"{errors[who][shape]:.1e}" if shape in errors[who] else "" for who in rivals]
        yield [f"error, {shape}", "", *cells, ""]


def main():
    records = [json.loads(line) for line in fileinput.input()]
    for compute in ("bf16", "fp8"):
        chosen = [r for r in records if r["compute"] == compute]
        if chosen:
            print("\n".join("| " + " | ".join(row) + " |" for row in table(chosen)), end="\n\n")


if __name__ == "__main__":
    main()
