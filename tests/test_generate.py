"""gdn-kernels generate: what it prints, what it compares, and how it says that it can't."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from gdn_kernels import agreement, torch_block  # noqa: E402
from gdn_kernels.cli import main  # noqa: E402
from gdn_kernels.small_models import small_model  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    small_model("qwen3_5").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def with_tokenizer(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a tokenizer whose tokens are bytes, so that a character may take several."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("with_tokenizer")
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:127]
    vocabulary = {"<pad>": 0} | {symbol: index for index, symbol in enumerate(alphabet, 1)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
    return folder


def generate(*words: Any) -> int:
    return main(["generate", *map(str, words)])


def expected(checkpoint: Path, ids: list[int], tokens: int) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    return agreement.greedy(model, torch.tensor([ids]), tokens=tokens).row()


def test_prints_the_tokens_of_the_model(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("--checkpoint", checkpoint, "--prompt-ids", "5,6,7", "--tokens", 12) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Qwen3_5ForCausalLM, float32, 3 Gated DeltaNet layers patched" in lines[0] and "torch" in lines[1]
    assert [int(word) for word in lines[2].split()] == expected(checkpoint, [5, 6, 7], 12)
    assert lines[3].startswith("12 tokens in ")


def test_json_with_a_comparison(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("--checkpoint", checkpoint, "--prompt", "Hi", "--tokens", 16, "--json", "--compare") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["prompt_ids"] == list(b"Hi") and report["tokens"] == expected(checkpoint, list(b"Hi"), 16)
    assert report["compare"] == {"tokens": 16, "equal": 16, "first": None, "margin": None, "steps": None, "flip": None}
    assert (report["backend"], report["dtype"], report["patched_layers"]) == ("torch", "float32", 3)


@pytest.mark.filterwarnings("ignore::gdn_kernels.weights.PrecisionWarning")
def test_the_interpreter_in_bf16(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--dtype", "bf16", "--backend", "interpreter", "--tokens", 3)
    assert generate("--checkpoint", checkpoint, "--prompt-ids", "9,4", *options) == 0
    printed = capsys.readouterr().out
    assert "bfloat16" in printed and "interpreter: no device was used" in printed and "3 tokens in" in printed


def test_text_of_a_tokenizer(with_tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--checkpoint", with_tokenizer, "--prompt", "Hello", "--tokens", 24)
    assert generate(*words, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["prompt_ids"]) == 5 and isinstance(report["text"], str)
    assert generate(*words) == 0
    shown = capsys.readouterr().out.split("used\n", 1)[1].rsplit("\n24 tokens", 1)[0]
    assert shown and report["text"].startswith(shown)


def test_a_difference_is_reported_with_the_references_margin(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = torch_block.gdn_block_tkg
    monkeypatch.setattr(torch_block, "gdn_block_tkg", lambda hidden, **rest: block(-hidden, **rest))
    assert generate("--checkpoint", checkpoint, "--prompt-ids", "5,6,7", "--compare") == 0
    printed = capsys.readouterr().out
    assert re.search(r"of 64 tokens equal .* the first other one is number [2-5],.* [\d.]+ bf16 steps", printed)


def test_the_first_flip_of_a_router_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_model("qwen3_next").save_pretrained(tmp_path)

    def printed(ids: str, *more: str) -> str:
        words = ("--checkpoint", tmp_path, "--prompt-ids", ids, "--compare", "--tokens", 8, *more)
        assert generate(*words) == 0
        return capsys.readouterr().out

    none = "routers  chose the same experts as long as the text was the same"
    assert none in printed("1,2,3")
    block = torch_block.gdn_block_tkg
    monkeypatch.setattr(torch_block, "gdn_block_tkg", lambda hidden, **rest: block(-hidden, **rest))
    first = r"number 2, .*\nrouters  first chose other experts for token number 2, in model\.layers\.0\..* 0\.325 apart"
    assert re.search(first, printed("1,2,3"))
    flip = json.loads(printed("1,2,3", "--json"))["compare"]["flip"]
    assert flip == {"token": 1, "router": "model.layers.0.mlp.gate", "margin": pytest.approx(0.325, abs=0.001)}
    assert none in printed("5,6,7")  # the text is another one before


@pytest.mark.parametrize("as_json", [False, True])
def test_interruption_shows_what_there_was(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    block, calls = torch_block.gdn_block_tkg, []

    def interrupted(hidden: Any, **rest: Any) -> Any:
        calls.append(1)
        if len(calls) == 3 * 4 + 1:  # at the fifth token after the first
            raise KeyboardInterrupt
        return block(hidden, **rest)

    monkeypatch.setattr(torch_block, "gdn_block_tkg", interrupted)
    words = ("--checkpoint", checkpoint, "--prompt-ids", "5,6,7", "--compare", *(["--json"] if as_json else []))
    assert generate(*words) == 130
    printed = capsys.readouterr().out
    if as_json:
        report = json.loads(printed)
        assert report["interrupted"] and len(report["tokens"]) == 5 and report["compare"] is None
    else:
        assert "5 tokens in" in printed and ", interrupted" in printed


def test_interruption_of_the_comparison_keeps_the_tokens(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy, runs = agreement.greedy, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        runs.append(1)
        if len(runs) == 2:
            options["show"] = _interrupt
        return greedy(*arguments, **options)

    monkeypatch.setattr(agreement, "greedy", interrupted)
    assert generate("--checkpoint", checkpoint, "--prompt-ids", "5", "--tokens", 9, "--compare", "--json") == 130
    report = json.loads(capsys.readouterr().out)
    assert len(report["tokens"]) == 9 and report["interrupted"] and report["compare"]["tokens"] == 1


def _interrupt(_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt-ids", "1,x"], "expected numbers such as 1,2,3, got '1,x'"),
        (["--prompt-ids", "1,200"], "expected tokens from 0 to 127, got 1 to 200"),
        (["--prompt", ""], "at least one token"),
        (["--prompt-ids", "1", "--tokens", "0"], "--tokens: expected 1 or more, got 0"),
        (["--prompt-ids", "1", "--backend", "trn2"], "backend 'trn2' is not available"),
    ],
)
def test_bad_input_is_named(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert generate("--checkpoint", checkpoint, *words) == 2
    assert message in capsys.readouterr().err


def test_folders_that_hold_no_such_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("--checkpoint", tmp_path, "--prompt", "x") == 2
    assert "expected a folder with config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert generate("--checkpoint", tmp_path, "--prompt", "x") == 2
    assert "transformers could not load" in capsys.readouterr().err
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, **sizes)).save_pretrained(tmp_path)
    assert generate("--checkpoint", tmp_path, "--prompt", "x") == 2
    assert "got LlamaForCausalLM without any" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_library_names_the_extra(checkpoint: Path, missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from gdn_kernels.cli import main\n"
        f"sys.exit(main(['generate', '--checkpoint', {str(checkpoint)!r}, '--prompt', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"{missing} is missing: pip install 'gdn-kernels[hf]'" in done.stderr, done.stderr


def test_margins_in_bf16_steps() -> None:
    margins, steps = agreement.margins_of(np.array([[1.0, 9.0, 8.5], [-3.0, -2.0, -2.0], [0.0, 0.0, 0.0]]))
    assert margins.tolist() == [0.5, 0.0, 0.0]
    assert steps.tolist() == [8.0, 0.0, 0.0]  # bf16 numbers from 8 to 16 are 1/16 apart


def test_agreement_of_two_runs() -> None:
    def run(*rows: list[int]) -> agreement.Greedy:
        tokens = [np.array(column) for column in zip(*rows, strict=True)]
        return agreement.Greedy(tokens, [0.25 * (i + column) for i, column in enumerate(tokens)], tokens)

    same, other = agreement.agreement(run([1, 2, 3], [1, 5, 3]), run([1, 2, 3], [1, 4, 3]))
    assert same == agreement.Agreement(3, 3, None, None, None)
    assert other == agreement.Agreement(3, 2, 1, 0.25 * (1 + 4), 4)
    assert agreement.agreement(agreement.Greedy(), run([1])) == []
