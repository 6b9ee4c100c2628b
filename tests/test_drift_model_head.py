"""The model's own head behind a block: read from a checkpoint that has one, and the same logits as transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdn_kernels.checkpoint import CheckpointError
from gdn_kernels.drift.config import RolloutConfig
from gdn_kernels.drift.heads import layer_weights
from gdn_kernels.drift.model_head import ModelHead
from gdn_kernels.drift.rollout import Rollout
from gdn_kernels.sample import PATH as SAMPLE

HEAD = ("head_top1_agreement", "head_top_k_agreement", "head_kl", "head_greedy_divergence")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A small random Qwen3.5 of transformers, and the folder it was saved to."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.Qwen3_5TextConfig(
        vocab_size=300, hidden_size=128, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=24, tie_word_embeddings=request.param,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = transformers.Qwen3_5ForCausalLM(config).eval()
        torch.nn.init.normal_(made.model.norm.weight, std=0.1)
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    return made, folder


def head_of(folder: Path) -> ModelHead:
    weights = layer_weights(RolloutConfig(checkpoint=str(folder), layer=1, form="fp32"))
    head = ModelHead.from_checkpoint(str(folder), weights)
    assert head is not None
    return head


def test_logits_are_transformers_own(model: tuple[Any, Path]) -> None:
    import torch

    made, folder = model
    core_out = np.random.default_rng(0).standard_normal((3, 48)).astype(np.float32)
    with torch.no_grad():
        behind = made.model.layers[1].linear_attn.out_proj(torch.from_numpy(core_out))
        expected = made.lm_head(made.model.norm(behind)).numpy()
    found = head_of(folder).logits(core_out)
    assert found.shape == (3, 300)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def test_a_rollout_records_it_and_resumes(model: tuple[Any, Path]) -> None:
    config = RolloutConfig(checkpoint=str(model[1]), layer=1, tau=(1, 1e6), policy="bf16_state", tokens=400, B=2)
    whole, cut = Rollout(config), Rollout(config)
    whole.advance(400)
    cut.advance(150)
    cut = Rollout.from_arrays(config, cut.to_arrays())
    cut.advance(400)
    records = whole.records
    for name in HEAD:
        assert records[name].shape == (len(records["tokens"]), 2)
        assert records[name].tobytes() == cut.records[name].tobytes()
    agrees, first = records["head_top1_agreement"], records["head_greedy_divergence"]
    assert (records["head_kl"] > 0).all() and (records["head_top_k_agreement"] <= 1).all()
    for b in range(2):
        wrong = records["tokens"][agrees[:, b] < 1]
        assert first[-1, b] == (wrong[0] if wrong.size else -1)


def test_a_checkpoint_without_a_head_records_none() -> None:
    config = RolloutConfig(checkpoint=str(SAMPLE), tokens=2)
    run = Rollout(config)
    run.advance(2)
    assert not set(HEAD) & set(run.records)
    assert ModelHead.from_checkpoint(str(SAMPLE), layer_weights(config)) is None


def test_another_vocabulary_is_named(model: tuple[Any, Path], tmp_path: Path) -> None:
    for file in model[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    for vocabulary, words in ((301, r"expected shape \[301, 128\]"), (None, "expected a number under 'vocab_size'")):
        (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": vocabulary}))
        with pytest.raises(CheckpointError, match=words):
            head_of(tmp_path)
