"""The 64-bit FarmHash fingerprint, the hash of LSH_PROJECTION."""

from __future__ import annotations

_M = 2**64 - 1
_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F


def _u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _rotate(value: int, by: int) -> int:
    value &= _M
    return (value >> by | value << (64 - by)) & _M


def _mix(value: int) -> int:
    value &= _M
    return value ^ value >> 47


def _of_two(u: int, v: int, factor: int) -> int:
    a = _mix(((u & _M) ^ (v & _M)) * factor)
    return _mix(((v & _M) ^ a) * factor) * factor & _M


def _hash_up_to_16(data: bytes) -> int:
    n = len(data)
    factor = _K2 + n * 2
    if n >= 8:
        a, b = _u64(data, 0) + _K2, _u64(data, n - 8)
        c = _rotate(b, 37) * factor + a
        return _of_two(c, (_rotate(a, 25) + b) * factor, factor)
    if n >= 4:
        return _of_two(n + (_u32(data, 0) << 3), _u32(data, n - 4), factor)
    if n == 0:
        return _K2
    y, z = data[0] + (data[n >> 1] << 8), n + (data[n - 1] << 2)
    return _mix(y * _K2 ^ z * _K0) * _K2 & _M


def _hash_up_to_32(data: bytes) -> int:
    n = len(data)
    factor = _K2 + n * 2
    a, b = _u64(data, 0) * _K1, _u64(data, 8)
    c, d = _u64(data, n - 8) * factor, _u64(data, n - 16) * _K2
    return _of_two(_rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c, factor)


def _hash_up_to_64(data: bytes) -> int:
    n = len(data)
    factor = _K2 + n * 2
    a, b = _u64(data, 0) * _K2, _u64(data, 8)
    c, d = _u64(data, n - 8) * factor, _u64(data, n - 16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    z = _of_two(y, a + _rotate(b + _K2, 18) + c, factor)
    e, f = _u64(data, 16) * factor, _u64(data, 24)
    g, h = (y + _u64(data, n - 32)) * factor, (z + _u64(data, n - 24)) * factor
    return _of_two(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, factor)


def _hash_32(data: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    """Hash 32 bytes with two seeds."""
    w, x, y, z = (_u64(data, at + i) for i in (0, 8, 16, 24))
    a += w
    b = _rotate(b + a + z, 21)
    c = a
    a += x + y
    b += _rotate(a, 44)
    return (a + z) & _M, (b + c) & _M


def fingerprint64(data: bytes) -> int:
    """Return the fingerprint of bytes as an unsigned number."""
    n = len(data)
    if n <= 64:
        return (_hash_up_to_16 if n <= 16 else _hash_up_to_32 if n <= 32 else _hash_up_to_64)(data)
    seed = 81
    x, y = seed * _K2 + _u64(data, 0) & _M, seed * _K1 + 113 & _M
    z = _mix(y * _K2 + 113) * _K2 & _M
    v, w = (0, 0), (0, 0)

    def block(at: int, x: int, y: int, z: int, factor: int, more: int) -> tuple[int, int, int]:
        x = _rotate(x + y + v[0] + _u64(data, at + 8), 37) * factor
        y = _rotate(y + v[1] + _u64(data, at + 48), 42) * factor
        x ^= w[1] * more
        y += v[0] * more + _u64(data, at + 40)
        return x & _M, y & _M, _rotate(z + w[0], 33) * factor & _M

    end = (n - 1) // 64 * 64
    for at in range(0, end, 64):
        x, y, z = block(at, x, y, z, _K1, 1)
        v, w = _hash_32(data, at, v[1] * _K1, x + w[0]), _hash_32(data, at + 32, z + w[1], y + _u64(data, at + 16))
        z, x = x, z
    last, factor = n - 64, _K1 + ((z & 0xFF) << 1)
    w = (w[0] + ((n - 1) & 63) & _M, w[1])
    v = (v[0] + w[0] & _M, v[1])
    w = (w[0] + v[0] & _M, w[1])
    x, y, z = block(last, x, y, z, factor, 9)
    v, w = _hash_32(data, last, v[1] * factor, x + w[0]), _hash_32(data, last + 32, z + w[1], y + _u64(data, last + 16))
    z, x = x, z
    return _of_two(_of_two(v[0], w[0], factor) + _mix(y) * _K0 + z, _of_two(v[1], w[1], factor) + x, factor)
