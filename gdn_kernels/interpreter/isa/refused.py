"""Instructions that NKI has and the interpreter recognises but doesn't model.

Random numbers: their bit streams aren't documented. MX formats: their packed dtypes aren't modelled. topk: its text
has every partition search for itself, its layout 16 partitions together.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from gdn_kernels.interpreter.isa.operands import need_generation
from gdn_kernels.interpreter.rules import refuse


def _refused(name: str, why: str, generation: int = 3) -> Callable[..., NoReturn]:
    def refused(*_: Any, **__: Any) -> NoReturn:
        if generation > 3:
            need_generation(name, generation, name)
        refuse("not-modelled", f"{name}: {why}", name)

    refused.__name__ = refused.__qualname__ = name
    refused.__doc__ = f"Refused: {why}."
    return refused


RANDOM = "the bits of random numbers aren't documented"
MX = "MX formats, whose packed dtypes aren't modelled"

rng = _refused("rng", RANDOM)
dropout = _refused("dropout", RANDOM)
set_rng_seed = _refused("set_rng_seed", RANDOM)
rand_set_state = _refused("rand_set_state", RANDOM)
rand_get_state = _refused("rand_get_state", RANDOM)
rand2 = _refused("rand2", RANDOM, generation=4)
nc_matmul_mx = _refused("nc_matmul_mx", MX, generation=4)
quantize_mx = _refused("quantize_mx", MX, generation=4)
topk = _refused("topk", "its documentation contradicts itself about which partitions are searched together")
