"""Loading SAM 3.1 from Meta's names: files, folders, and what is wrong with them."""

import pytest
import torch
from safetensors.torch import save_file

from sam3_node.errors import ModelError
from sam3_node.models import load_tracker
from sam3_node.models.sam31.random_weights import random_tensors, small_sizes


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(small_sizes())


@pytest.mark.parametrize("wrapped", [False, True])
def test_torchs_format_and_safetensors_hold_the_same_model(tensors, tmp_path, wrapped):
    save_file(tensors, tmp_path / "sam3.1_multiplex.safetensors")
    torch.save({"model": tensors} if wrapped else tensors, tmp_path / "weights.pt")
    first = load_tracker(tmp_path)
    second = load_tracker(tmp_path / "weights.pt")
    assert first.name == tmp_path.name
    assert first.image_size == second.image_size == 112
    assert first.state_dict().keys() == second.state_dict().keys()
    for key, value in first.state_dict().items():
        assert value.equal(second.state_dict()[key]), key


def test_another_image_size_changes_the_grid(tensors, tmp_path):
    path = tmp_path / "small.safetensors"
    save_file(tensors, path)
    model = load_tracker(path, image_size=140)
    assert model.grid == (10, 10)
    assert model.memory_tokens == 100
    with pytest.raises(ModelError, match="image_size: expected a multiple of 14"):
        load_tracker(path, image_size=150)


@pytest.mark.parametrize("name", ["sam3.1_multiplex_fp16.safetensors", "weights.pt"])
def test_a_folder_whose_file_has_another_name_is_told(tensors, tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelError, match=rf"sam3\.1_multiplex\.safetensors or \.pt; found {name}; rename it"):
        load_tracker(tmp_path)


def test_tensors_that_lack_are_named(tensors, tmp_path):
    path = tmp_path / "small.safetensors"
    lacking = {key: value for key, value in tensors.items() if "image_cross_attn" not in key}
    save_file(lacking, path)
    with pytest.raises(ModelError, match=r"lacks 8 tensors .*image_cross_attn_q_proj"):
        load_tracker(path)


def test_weights_of_another_model_are_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"layer.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(ModelError, match=r"expected the tensors of SAM 3\.1"):
        load_tracker(path)


def test_pickled_code_never_runs(tmp_path):
    path = tmp_path / "evil.pt"
    # not print, which ray replaces in the process of its tests
    torch.save({"model": eval}, path)
    with pytest.raises(ModelError, match=r"names builtins\.eval.*was not read"):
        load_tracker(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ModelError, match="cannot read"):
        load_tracker(path)
