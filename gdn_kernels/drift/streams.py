"""Input streams: the hidden states that a rollout decodes, block after block of tokens.

A block depends on the seed and on its index alone, so that a rollout may be cut or resumed anywhere. All have unit
variance where they are not silent, and come as float32 values that the form's dtype can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gdn_kernels.drift.noise import generator, hashed
from gdn_kernels.dtypes import Array, round_to, to_fp32

TOKENS, NOISE, SCHEDULE = 3, 4, 5  # purposes of `noise.generator` and keys of `noise.hashed`
RHO = 0.99  # of the AR(1) stream
SEGMENT, LULL = 64, 1024  # tokens of a burst or a pause, and of a long pause
BEFORE_SILENCE = 64  # tokens that fill the state first
CONTEXT = 512  # tokens of text a model sees at once

Block = Callable[[int], Array]


class Stream:
    """A named stream: `block(index)` is tokens [index * size, (index + 1) * size) as float32 [size, B, H]."""

    def __init__(self, name: str, B: int, H: int, size: int, seed: int, form: str) -> None:
        """name: as in RolloutConfig.stream. size: tokens of a block. form: "bf16" or "fp32".

        Raises:
            ValueError: for an unknown name, or a recording that does not fit.
        """
        kind, _, option = name.partition(":")
        if kind not in _KINDS:
            raise ValueError(f"stream must be one of {', '.join(_KINDS)}, got {name!r}")
        self.size, self.form = size, form
        self._make = _KINDS[kind]((size, B, H), seed, option)
        self._last: tuple[int, Array] | None = None

    def block(self, index: int) -> Array:
        if self._last is None or self._last[0] != index:
            self._last = index, round_to(self._make(index).astype(np.float32), self.form)
        return self._last[1]


def _normal(shape: tuple[int, int, int], seed: int, index: int) -> Array:
    return generator(seed, TOKENS, index).standard_normal(shape, np.float32)


def _independent(shape: tuple[int, int, int], seed: int, option: str) -> Block:
    return lambda index: _normal(shape, seed, index)


def _repeated(shape: tuple[int, int, int], seed: int, option: str) -> Block:
    """One token, the same for ever."""
    token = _normal(shape, seed, 0)[:1]
    return lambda index: np.broadcast_to(token, shape)


def _ar1(shape: tuple[int, int, int], seed: int, option: str) -> Block:
    """x[t] = rho * x[t-1] + sqrt(1 - rho^2) * noise: neighbours correlate by rho, 0.99 unless named otherwise."""
    return _Correlated(shape, seed, float(option or RHO))


class _Correlated:
    """The AR(1) stream. The last value is kept for the next block; any other block is reached from the start."""

    def __init__(self, shape: tuple[int, int, int], seed: int, rho: float) -> None:
        self.shape, self.seed, self.rho = shape, seed, rho
        self.next, self.value = 0, np.zeros(shape[1:])

    def __call__(self, index: int) -> Array:
        if index < self.next:
            self.next = 0
        while self.next < index:
            self._advance()
        return self._advance()

    def _advance(self) -> Array:
        if self.next == 0:
            self.value = generator(self.seed, NOISE).standard_normal(self.shape[1:])
        block = _normal(self.shape, self.seed, self.next) * np.sqrt(1 - self.rho**2)
        for t in range(len(block)):
            self.value = block[t] = self.rho * self.value + block[t]
        self.next += 1
        return block


def _bursts(shape: tuple[int, int, int], seed: int, option: str) -> Block:
    """Independent tokens in bursts of 64, a quarter of the time; every other stretch of 1024, by chance, is silent."""

    def block(index: int) -> Array:
        t = index * shape[0] + np.arange(shape[0])
        chance, lull = (hashed(SCHEDULE + seed, 0, int(t[-1]) // n + 1)[t // n] for n in (SEGMENT, LULL))
        on = (t < SEGMENT) | ((chance < 2**62) & (lull % 2 == 0))
        return _normal(shape, seed, index) * on[:, None, None]

    return block


def _silence(shape: tuple[int, int, int], seed: int, option: str) -> Block:
    """64 independent tokens, then zeros: v, k and the gates' inputs are all silent, and the state only decays."""

    def block(index: int) -> Array:
        t = index * shape[0] + np.arange(shape[0])
        return _normal(shape, seed, index) * (t < BEFORE_SILENCE)[:, None, None]

    return block


def _text(shape: tuple[int, int, int], seed: int, option: str) -> Block:
    """Hidden states of a small random Qwen3.5 reading the text of Python's own documentation, byte by byte.

    A sequence starts a context of its own, 512 bytes long, at every multiple of 512 tokens. Needs the extra `hf`.
    """
    size, B, H = shape
    text = _documentation()

    @cache
    def context(number: int) -> Array:
        """Tokens [512 * number, 512 * (number + 1)) as [512, B, H]."""
        starts = (number + np.arange(B) * 1013) * CONTEXT  # sequences read different places
        return _hidden_states(H, seed, text[(starts[:, None] + np.arange(CONTEXT)) % len(text)])

    def block(index: int) -> Array:
        t = index * size + np.arange(size)
        parts = [context(int(number))[t[t // CONTEXT == number] % CONTEXT] for number in np.unique(t // CONTEXT)]
        context.cache_clear() if t[-1] % CONTEXT == CONTEXT - 1 else None
        return np.concatenate(parts)

    return block


def _documentation() -> Array:
    """Text that ships with Python's standard library, as bytes: uint8 [some 700 thousand]."""
    from pydoc_data import topics

    return np.frombuffer("\n".join(topics.topics.values()).encode(), np.uint8)


@cache
def _model(H: int, seed: int) -> Any:
    """A random Qwen3.5 of four layers, one of them full attention, that reads bytes."""
    try:
        import torch
        from transformers import Qwen3_5TextConfig, Qwen3_5TextModel
    except ImportError as error:
        raise ImportError(f"the stream of text needs pip install 'gdn-kernels[hf]': {error}") from error

    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=H,
        intermediate_size=2 * H,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3_5TextModel(config).eval()


def _hidden_states(H: int, seed: int, tokens: Array) -> Array:
    """tokens [B, n] -> the model's last hidden states, normed by itself, [n, B, H]."""
    model = _model(H, seed)  # which tells if torch is missing
    import torch

    with torch.no_grad():
        states = model(input_ids=torch.from_numpy(tokens.astype(np.int64)), use_cache=False)
    return states.last_hidden_state.numpy().swapaxes(0, 1)


def _recorded(shape: tuple[int, int, int], seed: int, option: str) -> Block:
    """A recording, [tokens, H] or [tokens, B, H], from the start again when it ends."""
    recording = load_recording(Path(option), shape[1], shape[2])
    return lambda index: recording[(index * shape[0] + np.arange(shape[0])) % len(recording)]


def load_recording(path: Path, B: int, H: int) -> Array:
    """The hidden states in a .npy file, or under "hidden" in an .npz file, as float32 [tokens, B, H].

    Raises:
        ValueError: naming the file, what was expected and what came.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        array = loaded if isinstance(loaded, np.ndarray) else loaded["hidden"]
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise ValueError(
            f"stream: expected hidden states in {path}, as .npy or under 'hidden' in an .npz file; could not read "
            f"them: {error}"
        ) from error
    if array.dtype.kind not in "f" or array.ndim not in (2, 3) or array.shape[-1] != H or not len(array):
        raise ValueError(
            f"stream: expected floats [tokens, {H}] or [tokens, {B}, {H}] in {path}, got {array.dtype} {array.shape}"
        )
    if array.ndim == 2:
        array = np.broadcast_to(array[:, None], (len(array), B, H))
    if array.shape[1] != B:
        raise ValueError(f"stream: expected {B} sequences in {path}, got {array.shape[1]}")
    return to_fp32(array)


_KINDS: dict[str, Callable[[tuple[int, int, int], int, str], Block]] = {
    "independent": _independent,
    "repeated": _repeated,
    "ar1": _ar1,
    "bursts": _bursts,
    "silence": _silence,
    "text": _text,
    "file": _recorded,
}
