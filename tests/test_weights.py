"""Reading a layer from checkpoints that the tests write: K != V, several layers, both name prefixes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdn_kernels.dims import BlockDims
from gdn_kernels.dtypes import bfloat16, to_fp32
from gdn_kernels.weights import BlockWeights, CheckpointError

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]

DIMS = BlockDims(H=128, Hk=2, Hv=6, K=16, V=8, K_win=3)
TEXT_CONFIG = {
    "hidden_size": DIMS.H,
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": DIMS.Hk,
    "linear_num_value_heads": DIMS.Hv,
    "linear_key_head_dim": DIMS.K,
    "linear_value_head_dim": DIMS.V,
    "linear_conv_kernel_dim": DIMS.K_win,
    "rms_norm_eps": 1e-5,
}
MULTIMODAL, TEXT_ONLY = "model.language_model.layers.", "model.layers."


def layer_tensors(seed: int = 0) -> Tensors:
    """One layer's tensors as a checkpoint stores them."""
    generator = np.random.default_rng(seed)

    def normal(*shape: int, dtype: Any = None) -> Array:
        return generator.standard_normal(shape).astype(dtype or bfloat16())

    return {
        "in_proj_qkv.weight": normal(DIMS.conv_dim, DIMS.H),
        "in_proj_z.weight": normal(DIMS.value_dim, DIMS.H),
        "in_proj_a.weight": normal(DIMS.Hv, DIMS.H),
        "in_proj_b.weight": normal(DIMS.Hv, DIMS.H),
        "conv1d.weight": normal(DIMS.conv_dim, 1, DIMS.K_win),
        "A_log": normal(DIMS.Hv, dtype=np.float32),
        "dt_bias": normal(DIMS.Hv),
        "norm.weight": normal(DIMS.V, dtype=np.float32),
        "out_proj.weight": normal(DIMS.H, DIMS.value_dim),
    }


def write(folder: Path, layers: dict[int, Tensors], prefix: str = MULTIMODAL, shards: int = 1, **config: Any) -> Path:
    """A checkpoint folder: the layers' tensors dealt out to `shards` files; `config` changes TEXT_CONFIG."""
    from safetensors.numpy import save_file

    named = {f"{prefix}{n}.linear_attn.{name}": t for n, tensors in layers.items() for name, t in tensors.items()}
    named["model.embed_tokens.weight"] = np.zeros((4, DIMS.H), bfloat16())
    text = {name: value for name, value in {**TEXT_CONFIG, **config}.items() if value is not None}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"text_config": text} if prefix == MULTIMODAL else text))
    if shards == 1:
        save_file(named, folder / "model.safetensors")
        return folder
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(sorted(named))}
    for file in files:
        save_file({name: t for name, t in named.items() if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def refused(path: Path, layer: int = 0) -> str:
    with pytest.raises(CheckpointError) as error:
        BlockWeights.from_checkpoint(path, layer)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("prefix", [MULTIMODAL, TEXT_ONLY])
@pytest.mark.parametrize("shards", [1, 3])
def test_reads_the_layer_asked_for(tmp_path: Path, prefix: str, shards: int) -> None:
    layers = {n: layer_tensors(n) for n in (0, 1, 5)}
    weights = BlockWeights.from_checkpoint(str(write(tmp_path, layers, prefix, shards)), 5)
    stored = layers[5]
    assert weights.dims == DIMS
    assert weights.norm_eps == 1e-5
    for name, field in (("qkv", weights.W_in_qkv), ("z", weights.W_in_z), ("a", weights.W_in_a), ("b", weights.W_in_b)):
        assert field.dtype == bfloat16()
        np.testing.assert_array_equal(field, stored[f"in_proj_{name}.weight"].T)
    assert weights.out_proj is not None
    np.testing.assert_array_equal(weights.out_proj, stored["out_proj.weight"].T)
    np.testing.assert_array_equal(weights.conv_weight, to_fp32(stored["conv1d.weight"])[:, 0, :])
    for name, field in (("A_log", weights.A_log), ("dt_bias", weights.dt_bias), ("norm.weight", weights.norm_weight)):
        np.testing.assert_array_equal(field, to_fp32(stored[name]))
    for name in ("conv_weight", "A_log", "dt_bias", "norm_weight"):
        assert getattr(weights, name).dtype == np.float32
    for array in (*weights.arguments().values(), weights.out_proj):
        assert array.flags.c_contiguous


def test_arguments_are_those_of_the_block(tmp_path: Path) -> None:
    arguments = BlockWeights.from_checkpoint(write(tmp_path, {0: layer_tensors()}), 0).arguments()
    d = DIMS
    rest = {"hidden": (1, 1, d.H), "conv_state": (1, d.conv_dim, d.K_win), "recurrent_state": (1, d.Hv, d.K, d.V)}
    assert len(arguments) == 8
    assert BlockDims.from_shapes(**{name: array.shape for name, array in arguments.items()}, **rest) == DIMS


def test_fp32_form_has_the_same_values(tmp_path: Path) -> None:
    weights = BlockWeights.from_checkpoint(write(tmp_path, {0: layer_tensors()}), 0)
    fp32 = weights.astype_fp32()
    assert fp32.out_proj is not None and fp32.out_proj.dtype == np.float32
    for name, array in fp32.arguments().items():
        assert array.dtype == np.float32 and array.flags.c_contiguous
        np.testing.assert_array_equal(array, to_fp32(getattr(weights, name)))
    assert (fp32.dims, fp32.norm_eps) == (weights.dims, weights.norm_eps)


def test_fp32_checkpoint_gives_the_fp32_form(tmp_path: Path) -> None:
    tensors = {name: tensor.astype(np.float32) for name, tensor in layer_tensors().items()}
    weights = BlockWeights.from_checkpoint(write(tmp_path, {0: tensors}), 0)
    assert {array.dtype for array in weights.arguments().values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("gain", [0.01, 1.0])
def test_gain_is_read_plainly(tmp_path: Path, gain: float) -> None:
    # The other norms of the same checkpoint are stored as w for a gain of 1 + w; this one is not.
    tensors = layer_tensors() | {"norm.weight": np.full(DIMS.V, gain, np.float32)}
    weights = BlockWeights.from_checkpoint(write(tmp_path, {0: tensors}), 0)
    np.testing.assert_array_equal(weights.norm_weight, np.float32(gain))


def test_bf16_A_log_is_upcast_with_a_warning(tmp_path: Path) -> None:
    tensors = layer_tensors()
    tensors["A_log"] = tensors["A_log"].astype(bfloat16())
    with pytest.warns(UserWarning, match=r"layers\.0\.linear_attn\.A_log is stored in bf16") as caught:
        weights = BlockWeights.from_checkpoint(write(tmp_path, {0: tensors}), 0)
    assert caught[0].filename == __file__
    assert weights.A_log.dtype == np.float32
    np.testing.assert_array_equal(weights.A_log, to_fp32(tensors["A_log"]))


def test_only_this_layers_shards_are_opened(tmp_path: Path) -> None:
    write(tmp_path, {0: layer_tensors(0), 1: layer_tensors(1)})
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    weight_map = {f"{MULTIMODAL}0.linear_attn.{name}": "a.safetensors" for name in layer_tensors()}
    weight_map |= {f"{MULTIMODAL}1.linear_attn.{name}": "absent.safetensors" for name in layer_tensors()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    BlockWeights.from_checkpoint(tmp_path, 0)
    assert "absent.safetensors: expected a safetensors file, found none" in refused(tmp_path, 1)


def test_full_attention_layer_is_refused_by_name(tmp_path: Path) -> None:
    message = "layer 3 is a full_attention layer; GDN layers of this checkpoint are 0, 1, 2, 4, 5, 6"
    assert refused(write(tmp_path, {0: layer_tensors()}), 3) == message
    assert refused(write(tmp_path, {0: layer_tensors()}, layer_types=None), 3) == message
    long = write(tmp_path, {0: layer_tensors()}, layer_types=None, full_attention_interval=2, num_hidden_layers=40)
    assert refused(long, 1).endswith("0, 2, 4, 6, 8, ...")


@pytest.mark.parametrize("layer", [-1, 8, 100])
def test_layer_out_of_range_is_refused(tmp_path: Path, layer: int) -> None:
    message = refused(write(tmp_path, {0: layer_tensors()}), layer)
    assert message == f"layer: expected 0 to 7, this checkpoint has 8 layers, got {layer}"


def test_layer_without_tensors_is_refused(tmp_path: Path) -> None:
    message = refused(write(tmp_path, {0: layer_tensors()}), 1)
    assert "model.language_model.layers.1.linear_attn.* or model.layers.1.linear_attn.*, found none" in message


def test_packed_projections_are_refused_by_name(tmp_path: Path) -> None:
    tensors = layer_tensors()
    tensors["in_proj_qkvz.weight"] = np.concatenate(
        [tensors.pop("in_proj_qkv.weight"), tensors.pop("in_proj_z.weight")]
    )
    message = refused(write(tmp_path, {0: tensors}, TEXT_ONLY))
    assert "model.layers.0.linear_attn.in_proj_qkvz.weight packs q, k, v and z" in message and "Qwen3-Next" in message


@pytest.mark.parametrize("name", layer_tensors())
@pytest.mark.parametrize("shards", [1, 2])
def test_missing_tensor_is_named(tmp_path: Path, name: str, shards: int) -> None:
    tensors = layer_tensors()
    shape = list(tensors.pop(name).shape)
    message = refused(write(tmp_path, {0: tensors}, shards=shards))
    assert str(tmp_path / "model.safetensors") in message
    assert f"expected {MULTIMODAL}0.linear_attn.{name} of shape {shape}, found no such tensor" in message


@pytest.mark.parametrize("name", layer_tensors())
@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: t[None]], ids=["size", "rank"])
def test_wrong_shape_is_named(tmp_path: Path, name: str, change: Callable[[Array], Array]) -> None:
    tensors = layer_tensors()
    right, tensors[name] = tensors[name].shape, np.ascontiguousarray(change(tensors[name]))
    message = refused(write(tmp_path, {0: tensors}))
    full_name = f"{MULTIMODAL}0.linear_attn.{name}"
    shapes = f"expected shape {list(right)} by config.json, found {list(tensors[name].shape)}"
    assert message == f"{tmp_path / 'model.safetensors'}: {full_name}: {shapes}"


def test_transposed_projection_is_refused(tmp_path: Path) -> None:
    tensors = layer_tensors()
    tensors["in_proj_z.weight"] = np.ascontiguousarray(tensors["in_proj_z.weight"].T)
    assert "in_proj_z.weight: expected shape [48, 128] by config.json, found [128, 48]" in refused(
        write(tmp_path, {0: tensors})
    )


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8"])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: str) -> None:
    tensors = layer_tensors()
    tensors["in_proj_z.weight"] = tensors["in_proj_z.weight"].astype(np.float32).astype(dtype)
    assert "in_proj_z.weight: expected dtype BF16 or F32, found" in refused(write(tmp_path, {0: tensors}))


def test_projections_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    tensors = layer_tensors()
    tensors["in_proj_b.weight"] = tensors["in_proj_b.weight"].astype(np.float32)
    message = refused(write(tmp_path, {0: tensors}))
    assert "expected one dtype for all projections" in message and "in_proj_b.weight float32" in message


@pytest.mark.parametrize("length", [0, 5, 300, -1])
def test_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    file = write(tmp_path, {0: layer_tensors()}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    assert refused(tmp_path).startswith(f"{file}: expected a whole safetensors file, could not read it: ")


def test_index_that_names_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    index = write(tmp_path, {0: layer_tensors()}, shards=2) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    content["weight_map"] = {name: files[file == files[0]] for name, file in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    assert "as model.safetensors.index.json says, found no such tensor" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '"weight_map"', "{}", '{"weight_map": []}'])
def test_damaged_index_is_refused(tmp_path: Path, text: str) -> None:
    index = write(tmp_path, {0: layer_tensors()}, shards=2) / "model.safetensors.index.json"
    index.write_text(text)
    assert refused(tmp_path).startswith(f"{index}: expected ")


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'absent' / 'config.json'}: expected" in refused(tmp_path / "absent")
    (write(tmp_path, {0: layer_tensors()}) / "model.safetensors").unlink()
    assert refused(tmp_path) == f"{tmp_path}: expected model.safetensors or model.safetensors.index.json, found neither"
    (tmp_path / "config.json").write_text("{")
    assert refused(tmp_path).startswith(f"{tmp_path / 'config.json'}: expected JSON, could not parse it: ")


@pytest.mark.parametrize("name", [name for name in TEXT_CONFIG if "layer" not in name])
@pytest.mark.parametrize("value", [None, "256"])
def test_missing_or_wrong_config_entry_is_named(tmp_path: Path, name: str, value: Any) -> None:
    message = refused(write(tmp_path, {0: layer_tensors()}, **{name: value}))
    assert message == f"{tmp_path / 'config.json'}: expected a number under {name!r}, found {value!r}"


def test_dimensions_out_of_range_are_refused(tmp_path: Path) -> None:
    message = refused(write(tmp_path, {0: layer_tensors()}, linear_num_value_heads=5))
    assert message.startswith(f"{tmp_path / 'config.json'}: Hv must be a multiple of Hk")


def test_nothing_heavy_is_imported_with_the_module() -> None:
    import subprocess

    code = "import sys, gdn_kernels.weights; sys.exit(bool({'ml_dtypes', 'torch', 'safetensors'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
