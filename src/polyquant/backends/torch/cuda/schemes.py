"""Another name of backends/nvidia/schemes.py."""

import sys

from polyquant.backends.nvidia import schemes
from polyquant.backends.nvidia.schemes import *  # noqa: F403

sys.modules[__name__] = schemes
