"""A strict NumPy machine for NKI kernels: run one on a laptop and learn what the hardware would refuse."""

from gdn_kernels.interpreter.dry import Spec
from gdn_kernels.interpreter.machine import launch
from gdn_kernels.interpreter.rules import NkiRuleError, NkiRuleWarning, strict, without
from gdn_kernels.interpreter.run import Kernel, installed, simulate

__all__ = ["Kernel", "NkiRuleError", "NkiRuleWarning", "Spec", "installed", "launch", "simulate", "strict", "without"]
