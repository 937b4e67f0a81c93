"""Counter-based random numbers: a function of (seed, sample, position), whatever else is sampled beside them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_MASK32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al., 2011) on n counters at once.

    counter: uint64 [4, n], key: uint64 [2, n], both holding 32-bit words. Returns uint64 [4, n] of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> _SHIFT32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK32, (k1 + _KEY_STEPS[1]) & _MASK32
    return np.stack([c0, c1, c2, c3])


def uniform(seeds: Sequence[int], samples: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number per (seed, sample, position), float64 [n] in [0, 1), 53 random bits each.

    seeds: any integers, taken modulo 2**64.  samples: from 0, below 2**32.  positions: from 0, below 2**64.
    """
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
    sample = np.array(samples, dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    counter = np.stack([position & _MASK32, position >> _SHIFT32, sample, np.zeros_like(sample)])
    words = philox4x32(counter, np.stack([seed & _MASK32, seed >> _SHIFT32]))
    bits = ((words[0] << _SHIFT32) | words[1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
