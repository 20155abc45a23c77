"""What raises each fault that Burn has, and what shows that one is no fault here.

The faults themselves, with their answers, are those of scripts/burn_faults.toml.
"""

from burn_faults.devices import DEVICES
from burn_faults.files import FILES
from burn_faults.operations import OPERATIONS
from burn_faults.schemes import SCHEMES
from burn_faults.stores import STORES
from burn_faults.terms import EVERYWHERE, Here, Raises, Table, Works

#: Fault -> its cases.
ANSWERS: Table = DEVICES | SCHEMES | STORES | OPERATIONS | FILES

__all__ = ["ANSWERS", "EVERYWHERE", "Here", "Raises", "Works"]
