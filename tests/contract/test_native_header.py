"""csrc/include/spillway.h = spillway_trainer/kernels/native.py: functions, argument types, structs, enums."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest
import torch

from harness.places import ROOT
from spillway.update_rules import BLOCK_VALUES
from spillway_trainer.kernels import io_engine, native

HEADER_PATH = ROOT / "csrc" / "include" / "spillway.h"
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.c"))
HEADER = re.sub(r"/\*.*?\*/", " ", HEADER_PATH.read_text(), flags=re.DOTALL)

SCALARS = {
    "float": ctypes.c_float,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "spillway_io_call": native.IO_CALL,
}
STRUCTS = {
    "spillway_update_scalars": native.UpdateScalarsStruct,
    "spillway_states": native.StatesStruct,
    "spillway_map": native.MapStruct,
    "spillway_square_sum": native.SquareSumStruct,
    "spillway_copy": native.CopyStruct,
    "spillway_io_request": native.IoRequestStruct,
}
needs_library = pytest.mark.skipif(native.load_library() is None, reason="no native library was built")


def ctype_of(declaration: str) -> object:
    """ctypes type of a parameter, a field or a result: "const float* master" -> c_void_p."""
    words = declaration.replace("const ", " ").replace("*", " * ").split()
    kind, stars = words[0], words.count("*")
    if stars == 0:
        return None if kind == "void" else SCALARS[kind]
    if kind == "char":
        return ctypes.c_char_p
    if kind in ("spillway_io", "spillway_cipher"):
        return ctypes.c_void_p if stars == 1 else ctypes.POINTER(ctypes.c_void_p)
    return ctypes.POINTER(STRUCTS[kind]) if kind in STRUCTS else ctypes.c_void_p


def arguments_of(text: str) -> tuple[object, ...]:
    return () if text.strip() == "void" else tuple(ctype_of(argument) for argument in text.split(","))


def functions_of_header() -> dict[str, tuple[object, tuple[object, ...]]]:
    found = re.findall(r"SPILLWAY_API\s+([\w\s*]+?)\s*(spillway_\w+)\(([^)]*)\);", HEADER)
    return {name: (ctype_of(result + " "), arguments_of(arguments)) for result, name, arguments in found}


def enum_of_header(name: str) -> dict[str, int]:
    body = re.search(r"typedef enum " + name + r" \{(.*?)\}", HEADER, flags=re.DOTALL)
    assert body is not None
    return {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", body[1])}


def test_every_function_has_the_same_result_and_arguments() -> None:
    assert functions_of_header() == native.SIGNATURES


def test_the_header_declares_what_this_test_can_see() -> None:
    assert len(functions_of_header()) == HEADER.count("SPILLWAY_API ") - HEADER.count("define SPILLWAY_API ")


@pytest.mark.parametrize("name", STRUCTS)
def test_every_struct_has_the_same_fields_in_the_same_order(name: str) -> None:
    body = re.search(r"typedef struct " + name + r" \{(.*?)\}", HEADER, flags=re.DOTALL)
    assert body is not None
    wanted = []
    for declaration in filter(None, (line.strip() for line in body[1].split(";"))):
        array = re.match(r"(\w+) (\w+)\[SPILLWAY_NUM_LIMBS\]", declaration)
        kind = SCALARS[array[1]] * native.NUM_LIMBS if array else ctype_of(declaration)
        wanted.append((array[2] if array else re.split(r"[\s*]+", declaration)[-1], kind))
    assert [(field[0], field[1]) for field in STRUCTS[name]._fields_] == wanted


def test_the_test_hook_has_the_same_signature() -> None:
    found = re.search(r"typedef (\w+) \(\*spillway_io_call\)\(([^)]*)\);", HEADER)
    assert found is not None
    assert (native.IO_CALL._restype_, native.IO_CALL._argtypes_) == (ctype_of(found[1]), arguments_of(found[2]))


def test_every_number_is_the_same() -> None:
    assert f"#define SPILLWAY_ABI_VERSION {native.ABI_VERSION}\n" in HEADER
    assert f"#define SPILLWAY_NUM_LIMBS {native.NUM_LIMBS}\n" in HEADER
    isa = {f"SPILLWAY_ISA_{name.upper()}": code for name, code in native.ISA_CODES.items()}
    assert enum_of_header("spillway_isa") == {"SPILLWAY_ISA_AUTO": 0, **isa}
    rules = {f"SPILLWAY_{rule.name}": code for rule, code in native.RULE_CODES.items()}
    assert enum_of_header("spillway_rule") == rules
    types = {f"SPILLWAY_{str(dtype).removeprefix('torch.').upper()}": code for dtype, code in native.TYPE_CODES.items()}
    blocks = {"SPILLWAY_INT8": native.MOMENT_TYPES[torch.uint8]}
    assert enum_of_header("spillway_type") == {"SPILLWAY_NONE": 0, **types, **blocks}
    assert {native.MOMENT_TYPES[dtype] for dtype in native.TYPE_CODES if dtype in native.MOMENT_TYPES} == {1, 2}
    assert f"#define SPILLWAY_BLOCK_VALUES {BLOCK_VALUES}\n" in HEADER
    assert f"#define SPILLWAY_NUM_BUCKETS {native.NUM_BUCKETS}\n" in HEADER
    directions = {f"SPILLWAY_{direction.name}": direction.value for direction in io_engine.Direction}
    assert enum_of_header("spillway_direction") == directions
    errors = enum_of_header("spillway_error")
    assert all(errors[f"SPILLWAY_{failure.name}"] == failure for failure in io_engine.TransferFailure if failure)
    assert errors["SPILLWAY_NO_MEMORY"] == native.NO_MEMORY


@pytest.mark.parametrize("source", BENCHMARKS, ids=lambda source: source.name)
def test_benchmark_sources_compile_against_the_header_without_warnings(source: Path) -> None:
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    command = [compiler, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{HEADER_PATH.parent}", str(source)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_benchmarks_have_sources_in_c() -> None:
    assert BENCHMARKS


@needs_library
def test_every_error_code_has_a_sentence_of_its_own() -> None:
    sentences = {native.strerror(code) for code in enum_of_header("spillway_error").values()}
    assert len(sentences) == len(enum_of_header("spillway_error"))
    assert "does not define" not in " ".join(sentences)


@needs_library
def test_an_unknown_error_code_has_a_sentence_too() -> None:
    assert "does not define" in native.strerror(12345)


@needs_library
def test_the_library_exports_the_header_and_nothing_else() -> None:
    if shutil.which("nm") is None:
        pytest.skip("nm (binutils) is not installed")
    path = str(resources.files("spillway_trainer").joinpath(native.LIBRARY_NAME))
    listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1] for line in listed.splitlines()} == set(native.SIGNATURES)


@needs_library
def test_the_library_holds_no_fused_multiply_add() -> None:
    if shutil.which("objdump") is None:
        pytest.skip("objdump (binutils) is not installed")
    path = str(resources.files("spillway_trainer").joinpath(native.LIBRARY_NAME))
    code = subprocess.run(["objdump", "-d", path], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"\b(vfn?m(?:add|sub)\w*|f(?:n)?madd\w*|fml[as]\w*)\b", code) == []
