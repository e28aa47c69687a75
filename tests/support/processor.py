"""The processor features that torch may use.

Some virtual machines list the matrix unit AMX among the processor's features, and kill a process that uses it. torch's
math library (oneDNN) trusts the list, so a product of 16-bit matrices is an illegal instruction there, in a plain loop,
too. `spare_matrix_unit` limits oneDNN to working features, in this process and in those that it starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_LIMIT, _BELOW_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
_FEATURES = Path("/proc/cpuinfo")
_PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(a, a)"


def spare_matrix_unit() -> None:
    """Disable AMX in oneDNN if it is listed but does not work. Call this before the first product of this process."""
    listed = _FEATURES.exists() and "amx_tile" in _FEATURES.read_text()
    if listed and _LIMIT not in os.environ and subprocess.run([sys.executable, "-c", _PRODUCT]).returncode != 0:
        os.environ[_LIMIT] = _BELOW_AMX
