"""Matrix multiply in fp32, as versions 2 to 5 of the guide "Introduction to NKI kernel optimization" describe it.

Each returns lhsT.T @ rhs for lhsT fp32 [K, M] and rhs fp32 [K, N], a [128, 128] by [128, 512] product at a time. They
differ in what is loaded when. The published profiles leave open who issues the loads of versions 3 to 5: here it is
whoever issues a DMA without a named engine.
"""

from typing import Any

from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl

P, COLUMNS = 128, 512  # of one product: the contraction and the rows of the result; its columns
STORE_AFTER = 4  # loads of the next result tile that go ahead of a store, so that the queue needn't wait for the store


def version_2(lhsT: Any, rhs: Any) -> Any:
    """Both operands of every product are loaded right before it, and every DMA has software descriptors, as the profile
    shows."""
    (K, M), N = lhsT.shape, rhs.shape[1]
    result = _result(M, N)
    unsaved: list[Any] = []  # places in the result with their tiles
    for m in range(M // P):
        for n in range(N // COLUMNS):
            product = _product()
            for k in range(K // P):
                stationary = _load(_tile(lhsT, k, m, P), nisa.dge_mode.swdge)
                moving = _load(_tile(rhs, k, n, COLUMNS), nisa.dge_mode.swdge)
                nisa.nc_matmul(dst=product, stationary=stationary, moving=moving)
                if k == STORE_AFTER:
                    _save(unsaved)
            unsaved.append((_tile(result, m, n, COLUMNS), _copied(product)))
    _save(unsaved)
    return result


def version_3(lhsT: Any, rhs: Any) -> Any:
    """A column of lhsT tiles is loaded once, a column of rhs tiles for each of the result's tiles."""
    (K, M), N = lhsT.shape, rhs.shape[1]
    result = _result(M, N)
    for m in range(M // P):
        stationary = [_load(_tile(lhsT, k, m, P)) for k in range(K // P)]
        for n in range(N // COLUMNS):
            moving = [_load(_tile(rhs, k, n, COLUMNS)) for k in range(K // P)]
            _store(_tile(result, m, n, COLUMNS), _copied(_sum(stationary, moving)))
    return result


def version_4(lhsT: Any, rhs: Any, rows: int = 2, columns: int = 2) -> Any:
    """As version 3 for blocks of rows x columns tiles of the result, each operand tile loaded once a block."""
    (K, M), N = lhsT.shape, rhs.shape[1]
    result = _result(M, N)
    for m in range(0, M // P, rows):
        stationary = [[_load(_tile(lhsT, k, m + i, P)) for k in range(K // P)] for i in range(rows)]
        for n in range(0, N // COLUMNS, columns):
            moving = [[_load(_tile(rhs, k, n + j, COLUMNS)) for k in range(K // P)] for j in range(columns)]
            for i in range(rows):
                for j in range(columns):
                    _store(_tile(result, m + i, n + j, COLUMNS), _copied(_sum(stationary[i], moving[j])))
    return result


def version_5(lhsT: Any, rhs: Any, rows: int = 16, columns: int = 2, depth: int = 8) -> Any:
    """Blocked over the contraction too: sums of `depth` products are added up in SBUF by the Vector engine."""
    (K, M), N = lhsT.shape, rhs.shape[1]
    result = _result(M, N)
    for n in range(0, N // COLUMNS, columns):
        sums = [[_zeros() for _ in range(columns)] for _ in range(M // P)]
        for k in range(0, K // P, depth):
            moving = [_load(_wide(rhs, k + d, n, columns * COLUMNS, COLUMNS)) for d in range(depth)]
            for m in range(0, M // P, rows):
                stationary = [_load(_wide(lhsT, k + d, m, rows * P, P)) for d in range(depth)]
                for j in range(columns):
                    for i in range(rows):
                        part = _sum([_columns(t, i, P) for t in stationary], [_columns(t, j, COLUMNS) for t in moving])
                        total = sums[m + i][j]
                        nisa.tensor_tensor(dst=total, data1=total, data2=part, op=nl.add)
        for m in range(M // P):
            packed = nl.ndarray((P, columns * COLUMNS), dtype=nl.float32, buffer=nl.sbuf)
            for j in range(columns):
                nisa.tensor_copy(dst=_columns(packed, j, COLUMNS), src=sums[m][j])
            _store(_wide(result, m, n, columns * COLUMNS, COLUMNS), packed)
    return result


def _result(M: int, N: int) -> Any:
    return nl.ndarray((M, N), dtype=nl.float32, buffer=nl.shared_hbm)


def _tile(matrix: Any, row: int, column: int, width: int) -> Any:
    return matrix[row * P : (row + 1) * P, column * width : (column + 1) * width]


def _wide(matrix: Any, row: int, column: int, width: int, unit: int) -> Any:
    """`width` columns from a multiple of `unit` on."""
    return matrix[row * P : (row + 1) * P, column * unit : column * unit + width]


def _columns(tile: Any, index: int, width: int) -> Any:
    return tile[:, index * width : (index + 1) * width]


def _load(source: Any, dge_mode: Any = nisa.dge_mode.unknown) -> Any:
    tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source, dge_mode=dge_mode)
    return tile


def _store(place: Any, tile: Any) -> None:
    nisa.dma_copy(dst=place, src=tile)


def _save(unsaved: list[Any]) -> None:
    for place, tile in unsaved:
        nisa.dma_copy(dst=place, src=tile, dge_mode=nisa.dge_mode.swdge)
    unsaved.clear()


def _zeros() -> Any:
    tile = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=0.0)
    return tile


def _product() -> Any:
    return nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)


def _sum(stationary: list[Any], moving: list[Any]) -> Any:
    """The sum of the products of two columns of tiles, in PSUM."""
    product = _product()
    for left, right in zip(stationary, moving, strict=True):
        nisa.nc_matmul(dst=product, stationary=left, moving=right)
    return product


def _copied(product: Any) -> Any:
    tile = nl.ndarray(product.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=tile, src=product)
    return tile
