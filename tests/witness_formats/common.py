"""What the witnesses share: a layer as our library reads it, and comparing values."""
import json
import subprocess
import sys

import numpy as np

GATE_FIRST, INTERLEAVED = 2, 1


class Layer:
    """A layer as tests/dump_layer.c prints it."""

    def __init__(self, tool, path, number):
        output = subprocess.run([tool, path, str(number)], stdout=subprocess.PIPE, check=True).stdout
        line, _, data = output.partition(b"\n")
        self.words = json.loads(line)
        self._values = np.frombuffer(data, np.float32)
        E, H, I = self.words["n_experts"], self.words["hidden_size"], self.words["intermediate_size"]
        self.experts = [
            {"gate_up": self._take(2 * I, H), "gate_up_bias": self._take(2 * I), "down": self._take(H, I),
             "down_bias": self._take(H)} for _ in range(E)]
        self.router = self._take(E, self.words["router_size"])
        self.router_bias = self._take(E)
        self.selection_bias = self._take(E)
        assert not len(self._values), "values left over"

    def _take(self, *shape):
        n = int(np.prod(shape))
        taken, self._values = self._values[:n], self._values[n:]
        return taken.reshape(shape)


def same(what, ours, theirs):
    """Equal, value for value."""
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    if ours.shape != theirs.shape:
        sys.exit("%s: our shape is %s, theirs %s" % (what, ours.shape, theirs.shape))
    wrong = np.argwhere(ours != theirs)
    if len(wrong):
        at = tuple(wrong[0])
        sys.exit("%s: %d values differ, first at %s: ours %r, theirs %r" % (what, len(wrong), at, ours[at], theirs[at]))
    print("%s: %d values are the same" % (what, ours.size))


def weights(seed, *shape):
    """Normal values over many binades."""
    generator = np.random.default_rng(seed)
    spread = 2.0 ** generator.integers(-12, 4, shape[:-1] + (1,))
    return (generator.standard_normal(shape) * spread).astype(np.float32)
