"""Single transfers from HBM to SBUF, as the DMA overview pictures them; with a way back, as a kernel has a result."""

from typing import Any

from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl


def there_and_back(x: Any) -> Any:
    """A copy of x [rows, columns], by way of SBUF; the load is the first instruction."""
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    result = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=tile)
    return result
