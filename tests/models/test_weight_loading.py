"""Digests beside files: sha256sum's own format, and errors that say what to do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sam3_node.errors import ModelError
from sam3_node.models.weight_files import check_digest, digest_path, write_digest

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc": FIPS 180-2, appendix B.1


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"abc")
    return path


def test_a_file_passes_its_own_digest(weights: Path) -> None:
    assert write_digest(weights) == digest_path(weights)
    assert digest_path(weights).read_text() == f"{ABC}  model.safetensors\n"
    check_digest(weights)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_agrees(weights: Path) -> None:
    write_digest(weights)
    subprocess.run(
        ["sha256sum", "-c", digest_path(weights).name], cwd=weights.parent, check=True, capture_output=True
    )
    for option in ("--text", "--binary"):
        line = subprocess.run(
            ["sha256sum", option, weights.name], cwd=weights.parent, check=True, capture_output=True
        ).stdout
        digest_path(weights).write_bytes(line)
        check_digest(weights)


def test_another_file_is_refused_with_both_digests(weights: Path) -> None:
    write_digest(weights)
    weights.write_bytes(b"abd")
    with pytest.raises(
        ModelError, match=rf"expected sha256 {ABC}, found a52d159f[0-9a-f]+; install the package"
    ):
        check_digest(weights)


@pytest.mark.parametrize(
    "text", ["", "abc", ABC, f"{ABC}  other.safetensors", f"{ABC.upper()}  model.safetensors"]
)
def test_a_digest_that_is_none_is_refused(weights: Path, text: str) -> None:
    digest_path(weights).write_text(text)
    with pytest.raises(ModelError, match=r"as sha256sum writes it"):
        check_digest(weights)


def test_a_missing_file_or_digest_is_named(weights: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot check .*model\.safetensors.*sha256"):
        check_digest(weights)
    write_digest(weights)
    weights.unlink()
    with pytest.raises(ModelError, match=r"cannot check .*model\.safetensors"):
        check_digest(weights)
