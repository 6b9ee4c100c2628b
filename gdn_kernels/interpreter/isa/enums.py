"""The enumerations instructions take: engines, descriptor modes, performance modes, reduce commands."""

from enum import Enum


class Engine(Enum):
    unknown = 0
    tensor = 1
    vector = 2
    scalar = 3
    gpsimd = 4
    sync = 5
    dma = 6


class DgeMode(Enum):
    unknown = 0
    none = 1
    swdge = 2
    hwdge = 3


class PerfMode(Enum):
    none = 0
    double_row = 1


class ReduceCmd(Enum):
    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
