"""Another name of backends/nvidia/tiles.py."""

import sys

from polyquant.backends.nvidia import tiles
from polyquant.backends.nvidia.tiles import *  # noqa: F403

sys.modules[__name__] = tiles
