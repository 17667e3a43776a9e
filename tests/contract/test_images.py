"""The Dockerfiles, and what hack/images.py believes of them. Building them is the test bed's."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path

import pytest

import images
from harness.places import ROOT

RECIPES = images.RECIPES.values()
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def instructions(recipe: images.Recipe) -> list[str]:
    """One line each, without comments."""
    text = (ROOT / recipe.dockerfile).read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return [line for line in lines.replace("\\\n", " ").splitlines() if line.strip()]


@recipes
def test_the_hash_covers_what_the_dockerfile_copies(recipe: images.Recipe) -> None:
    copied: set[str] = set()
    for line in instructions(recipe):
        if line.startswith("COPY ") and "--from" not in line:
            copied.update(line.split()[1:-1])
    assert copied == set(recipe.inputs)


def test_docker_sends_what_the_dockerfiles_copy_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_through = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert let_through == {path for recipe in RECIPES for path in recipe.inputs}


@recipes
def test_it_runs_as_a_user_without_rights(recipe: images.Recipe) -> None:
    last_stage = instructions(recipe)[[line.startswith("FROM") for line in instructions(recipe)].index(True) + 1 :]
    assert [line for line in last_stage if line.startswith("USER")] == ["USER 1000:1000"]


@recipes
def test_bases_can_be_replaced_and_are_named_exactly(recipe: images.Recipe) -> None:
    found = instructions(recipe)
    assert re.fullmatch(r"ARG BASE=[\w./-]+:[\w.-]*\d[\w.-]*", found[0])
    assert {line.split()[1] for line in found if line.startswith("FROM")} == {"${BASE}"}


@recipes
def test_whatever_fetches_packages_may_use_this_networks_secrets(recipe: images.Recipe) -> None:
    for line in instructions(recipe):
        if line.startswith("RUN") and re.search(r"pip install|uv (pip|build)", line):
            assert "--mount=type=secret,id=ca," in line
            assert re.search(r"id=(pip|uv),", line)


@recipes
def test_packages_come_from_the_lock_with_their_hashes(recipe: images.Recipe) -> None:
    text = " ".join(instructions(recipe))
    assert "uv export --quiet --frozen --no-dev" in text
    assert "--require-hashes" in text


def test_operator_build_and_final_trainer_image_contain_no_compiler() -> None:
    assert "g++" not in " ".join(instructions(images.RECIPES["operator"]))
    trainer = " ".join(instructions(images.RECIPES["trainer"]))
    assert "g++" not in trainer.rpartition("FROM ${BASE}")[2]
    assert "gcc" not in trainer.rpartition("FROM ${BASE}")[2]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "src").mkdir()
    for name in ("Dockerfile", ".dockerignore", "src/a.py"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    monkeypatch.setattr(images, "ROOT", tmp_path)
    return tmp_path


TOY = images.Recipe("toy", "Dockerfile", ("src",), None, keeps_layers=False)


@pytest.mark.parametrize("edit", ["Dockerfile", ".dockerignore", "src/a.py", "src/new.py"])
def test_an_edit_of_anything_that_goes_in_makes_another_tag(tree: Path, edit: str) -> None:
    before = images.content_hash(TOY, "base")
    (tree / edit).write_text("edited", encoding="utf-8")
    assert images.content_hash(TOY, "base") != before


def test_another_base_makes_another_tag(tree: Path) -> None:
    assert images.content_hash(TOY, "base") != images.content_hash(TOY, "another")


def test_what_docker_leaves_out_changes_no_tag(tree: Path) -> None:
    before = images.content_hash(TOY, "base")
    (tree / "src" / "__pycache__").mkdir()
    (tree / "src" / "__pycache__" / "a.pyc").write_text("x", encoding="utf-8")
    (tree / "src" / "native.so").write_text("x", encoding="utf-8")
    assert images.content_hash(TOY, "base") == before


def test_layers_are_measured_uncompressed_and_in_order(tmp_path: Path) -> None:
    contents = {"b.tar": b"x" * 7, "a.tar": b"x" * 3}
    contents["manifest.json"] = json.dumps([{"Layers": ["a.tar", "b.tar"]}]).encode()
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    assert images.layer_bytes(tmp_path / "image.tar") == [3, 7]


def test_an_image_above_its_bound_is_rejected_with_both_figures() -> None:
    bounded = images.Recipe("toy", "Dockerfile", (), 10, keeps_layers=False)
    images.check_size(bounded, images.Built("toy:1", "toy.tar", (4, 6), 0.0))
    with pytest.raises(images.BuildFailed, match=r"toy image: 11 bytes.*10"):
        images.check_size(bounded, images.Built("toy:1", "toy.tar", (4, 7), 0.0))


def test_the_operators_bound_is_what_was_promised() -> None:
    assert images.RECIPES["operator"].max_bytes == 250_000_000


def test_secrets_are_this_machines_files_and_only_those_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ca.pem", "uv.toml"):
        (tmp_path / name).touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("UV_CONFIG_FILE", str(tmp_path / "uv.toml"))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "missing.conf"))
    found = images.secrets()
    assert f"id=ca,src={tmp_path / 'ca.pem'}" in found
    assert f"id=uv,src={tmp_path / 'uv.toml'}" in found
    assert not any("missing" in line for line in found)
