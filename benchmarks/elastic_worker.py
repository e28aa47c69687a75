"""The least that a worker of torchrun does: it imports torch and this library, enters the process group, and waits.

Knows: the default process group. Does not know: that it will be killed. Prints when it is in the group.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import zero


def main() -> int:
    with zero.process_group("gloo"):
        print(f"in the group at {time.time():.3f}, of {dist.get_world_size()}", flush=True)
        flag = torch.zeros(1)
        try:
            while True:
                dist.all_reduce(flag)
                time.sleep(0.02)
        except RuntimeError:
            return 1  # a rank was lost


if __name__ == "__main__":
    sys.exit(main())
