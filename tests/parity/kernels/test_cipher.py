"""AES-256-XTS: the published vectors by every implementation, and all of them the same bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from harness.places import FIXTURES
from spillway_trainer.kernels import native, reference_cipher
from spillway_trainer.kernels.io_engine import Direction

VECTORS = FIXTURES / "aes_xts_cavs.rsp"
UNIT_BYTES = 512
IEEE_1619_KEY = bytes.fromhex(
    "27182818284590452353602874713526624977572470936999595749669676273141592653589793238462643383279502884197169399375105820974944592"
)
IEEE_1619_ENCRYPTED = """
1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b5d31e276f8fe4a8d66b317f9ac683f44680a86ac35adfc3345befecb
4bb188fd5776926c49a3095eb108fd1098baec70aaa66999a72a82f27d848b21d4a741b0c5cd4d5fff9dac89aeba122961d03a757123e9870f8acf10
00020887891429ca2a3e7a7d7df7b10355165c8b9a6d0a7de8b062c4500dc4cd120c0f7418dae3d0b5781c34803fa75421c790dfe1de1834f280d766
7b327f6c8cd7557e12ac3a0f93ec05c52e0493ef31a12d3d9260f79a289d6a379bc70c50841473d1a8cc81ec583e9645e07b8d9670655ba5bbcfecc6
dc3966380ad8fecb17b6ba02469a020a84e18e8f84252070c13e9f1f289be54fbc481457778f616015e1327a02b140f1505eb309326d68378f837459
5c849d84f4c333ec4423885143cb47bd71c5edae9be69a2ffeceb1bec9de244fbe15992b11b77c040f12bd8f6a975a44a0f90c29a9abc3d4d8939272
84c58754cce294529f8614dcd2aba991925fedc4ae74ffac6e333b93eb4aff0479da9a410e4450e0dd7ae4c6e2910900575da401fc07059f645e8b7e
9bfdef33943054ff84011493c27b3429eaedb4ed5376441a77ed43851ad77f16f541dfd269d50d6a5f14fb0aab1cbb4c1550be97f7ab4066193c4caa
773dad38014bd2092fa755c824bb5e54c4f36ffda9fcea70b9c6e693e148c151
"""
"""vector 10: 512 bytes 0, 1, ... 255, 0, ..., of unit 0xff"""
Cipher = native.Cipher | reference_cipher.ReferenceCipher
IMPLEMENTATIONS = ["reference", *(["scalar", "auto"] if native.available() else [])]


def transformed(
    implementation: str, key: bytes, direction: Direction, content: bytes, tweak: bytes, unit_bytes: int
) -> bytes:
    source = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    target = torch.empty_like(source)
    first_unit, sequence = (int.from_bytes(half, "little") for half in (tweak[:8], tweak[8:]))
    if implementation == "reference":
        reference_cipher.ReferenceCipher(key).apply(
            direction, target, source, first_unit=first_unit, sequence=sequence, unit_bytes=unit_bytes
        )
        return bytes(target.tolist())
    cipher = native.Cipher(key)
    cipher.apply(
        direction,
        target,
        source,
        first_unit=first_unit,
        sequence=sequence,
        unit_bytes=unit_bytes,
        instruction_set=implementation,
    )
    cipher.close()
    return bytes(target.tolist())


def vectors() -> Iterator[tuple[Direction, dict[str, bytes]]]:
    for block in VECTORS.read_text().split("\n\n")[1:]:
        fields = dict(line.split(" = ") for line in block.splitlines() if " = " in line)
        direction = Direction.WRITE if "[ENCRYPT]" in block else Direction.READ
        yield direction, {name: bytes.fromhex(fields[name]) for name in ("Key", "i", "PT", "CT")}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nist_vectors_hold(implementation: str) -> None:
    found = list(vectors())
    assert len(found) == 8
    for direction, vector in found:
        given, wanted = (vector["PT"], vector["CT"]) if direction is Direction.WRITE else (vector["CT"], vector["PT"])
        assert transformed(implementation, vector["Key"], direction, given, vector["i"], len(given)) == wanted


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vector_10_of_ieee_1619_holds(implementation: str) -> None:
    plain, tweak = bytes(range(256)) * 2, b"\xff" + bytes(15)
    wanted = bytes.fromhex(IEEE_1619_ENCRYPTED)
    assert transformed(implementation, IEEE_1619_KEY, Direction.WRITE, plain, tweak, UNIT_BYTES) == wanted
    assert transformed(implementation, IEEE_1619_KEY, Direction.READ, wanted, tweak, UNIT_BYTES) == plain


def test_every_implementation_has_the_same_bytes_of_many_units() -> None:
    content = bytes(torch.randint(0, 256, (37 * 4096,), generator=torch.Generator().manual_seed(1)).tolist())
    tweak = bytes(range(200, 216))
    found = {
        transformed(implementation, IEEE_1619_KEY, Direction.WRITE, content, tweak, 4096)
        for implementation in IMPLEMENTATIONS
    }
    assert len(found) == 1
    [encrypted] = found
    for implementation in IMPLEMENTATIONS:
        assert transformed(implementation, IEEE_1619_KEY, Direction.READ, encrypted, tweak, 4096) == content


@pytest.mark.parametrize("cipher", [native.Cipher, reference_cipher.ReferenceCipher])
def test_bytes_that_are_no_whole_units_are_rejected(cipher: type[Cipher]) -> None:
    if cipher is native.Cipher and not native.available():
        pytest.skip("no native library was built")
    memory: Tensor = torch.zeros(4000, dtype=torch.uint8)
    with pytest.raises(ValueError, match="whole units"):
        cipher().apply(Direction.WRITE, memory, memory, first_unit=0, sequence=0, unit_bytes=4096)
    with pytest.raises(ValueError, match="a key of 32 bytes"):
        cipher(bytes(32))
