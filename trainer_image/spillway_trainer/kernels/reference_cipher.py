"""AES-256 in XTS mode (FIPS 197; IEEE 1619-2007, NIST SP 800-38E) in plain torch, for whole blocks: the reference for
csrc/aes_xts*.cpp in tests, and the fallback where there is no compiler (some MB/s)."""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

from .io_engine import Direction

BLOCK_BYTES, NUM_ROUNDS, KEY_BYTES = 16, 14, 64
_REDUCED = 0x11B
"""x^8 + x^4 + x^3 + x + 1, the modulus of GF(2^8)."""


def times(a: int, b: int) -> int:
    """Returns the product in GF(2^8)."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = a << 1 ^ (_REDUCED if a & 0x80 else 0)
        b >>= 1
    return product


@cache
def substituted(value: int) -> int:
    """The S-box of FIPS 197, 5.1.1: the inverse, then an affine map."""
    inverse = next((other for other in range(256) if times(value, other) == 1), 0)
    turned = (inverse << turn | inverse >> 8 - turn for turn in range(5))
    found = 0x63
    for each in turned:
        found ^= each & 0xFF
    return found


class ReferenceCipher:
    """AES-256-XTS with `key`: 64 bytes, first the data's, then the tweak's; random if it is not given."""

    def __init__(self, key: bytes | None = None) -> None:
        key = os.urandom(KEY_BYTES) if key is None else key
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes was given, but AES-256-XTS takes {KEY_BYTES} bytes")
        self._box = [substituted(value) for value in range(256)]
        self._data_keys, self._tweak_keys = (self._expanded(half) for half in (key[:32], key[32:]))

    def apply(
        self,
        direction: Direction,
        dst: Tensor,
        src: Tensor,
        *,
        first_unit: int,
        sequence: int,
        unit_bytes: int,
        num_threads: int = 1,
    ) -> None:
        """dst = src encrypted (WRITE) or decrypted (READ), both uint8 tensors of whole units of `unit_bytes`: the same
        tensor, or two that do not overlap. The number of the i-th unit, its tweak, is sequence * 2**64 + first_unit +
        i."""
        num_units = src.numel() // unit_bytes
        if src.numel() != num_units * unit_bytes or unit_bytes % BLOCK_BYTES:
            raise ValueError(
                f"src has {src.numel()} bytes and unit_bytes is {unit_bytes}; pass whole units, and as unit_bytes a "
                "multiple of 16, the bytes of an AES block"
            )
        numbers = b"".join(
            (first_unit + i).to_bytes(8, "little") + sequence.to_bytes(8, "little") for i in range(num_units)
        )
        tweaks = self._encrypted(_blocks(numbers), self._tweak_keys) if num_units else torch.empty(0, BLOCK_BYTES)
        each = [int.from_bytes(bytes(tweak.tolist()), "little") for tweak in tweaks]
        whitening = _blocks(b"".join(self._powers(tweak, unit_bytes // BLOCK_BYTES) for tweak in each))
        move = self._encrypted if direction is Direction.WRITE else self._decrypted
        dst.copy_((move(src.view(-1, BLOCK_BYTES) ^ whitening, self._data_keys) ^ whitening).view(-1))

    def close(self) -> None:
        """Does nothing: the keys are freed with the object."""

    def _powers(self, tweak: int, count: int) -> bytes:
        """Returns tweak * x^0, x^1, ... in GF(2^128), modulo x^128 + x^7 + x^2 + x + 1."""
        found = []
        for _ in range(count):
            found.append(tweak.to_bytes(BLOCK_BYTES, "little"))
            tweak = tweak << 1 ^ ((1 << 128 | 0x87) if tweak >> 127 else 0)
        return b"".join(found)

    def _expanded(self, key: bytes) -> Tensor:
        """The key expansion of FIPS 197, 5.2, of shape (rounds + 1, 16)."""
        words, constant = [key[at : at + 4] for at in range(0, 32, 4)], 1
        for i in range(8, 4 * (NUM_ROUNDS + 1)):
            word = words[-1]
            if i % 8 == 0:
                word = bytes(self._box[byte] for byte in word[1:] + word[:1])
                word = bytes([word[0] ^ constant]) + word[1:]
                constant = times(constant, 2)
            elif i % 8 == 4:
                word = bytes(self._box[byte] for byte in word)
            words.append(bytes(a ^ b for a, b in zip(word, words[-8], strict=True)))
        return _blocks(b"".join(words))

    def _encrypted(self, blocks: Tensor, keys: Tensor) -> Tensor:
        box, turned = _table(self._box), [(i + 4 * (i % 4)) % BLOCK_BYTES for i in range(BLOCK_BYTES)]
        blocks = blocks ^ keys[0]
        for number in range(1, NUM_ROUNDS + 1):
            blocks = box[blocks.long()][:, turned]
            blocks = (_mixed(blocks, (2, 3, 1, 1)) if number < NUM_ROUNDS else blocks) ^ keys[number]
        return blocks

    def _decrypted(self, blocks: Tensor, keys: Tensor) -> Tensor:
        """The rounds of `_encrypted` in reverse: FIPS 197, 5.3."""
        inverse, turned = [0] * 256, [(i - 4 * (i % 4)) % BLOCK_BYTES for i in range(BLOCK_BYTES)]
        for value, image in enumerate(self._box):
            inverse[image] = value
        box = _table(inverse)
        for number in range(NUM_ROUNDS, 0, -1):
            blocks = blocks ^ keys[number]
            blocks = _mixed(blocks, (14, 11, 13, 9)) if number < NUM_ROUNDS else blocks
            blocks = box[blocks[:, turned].long()]
        return blocks ^ keys[0]


def _blocks(content: bytes) -> Tensor:
    """Returns `content` in shape (blocks, 16)."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, BLOCK_BYTES)


def _table(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


@cache
def _products(factor: int) -> Tensor:
    """Returns factor * 0, ... factor * 255."""
    return _table([times(value, factor) for value in range(256)])


def _mixed(blocks: Tensor, factors: tuple[int, int, int, int]) -> Tensor:
    """The column mix of FIPS 197, 5.1.3: row r of a column is the sum of factors[(c - r) % 4] times row c."""
    columns = blocks.view(-1, 4, 4).long()
    products = [_products(factor)[columns] for factor in factors]
    rows = [
        products[0][..., r]
        ^ products[1][..., (r + 1) % 4]
        ^ products[2][..., (r + 2) % 4]
        ^ products[3][..., (r + 3) % 4]
        for r in range(4)
    ]
    return torch.stack(rows, -1).view(-1, BLOCK_BYTES)
