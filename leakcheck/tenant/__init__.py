"""A second process that takes what a sleep claims to have freed: the proof that others can have it.

`tenant` starts it and judges what it got; `occupier` is its program; `device_memory` calls the driver for it.
"""

from lowtide.leakcheck.tenant.tenant import Tenant, freed_between

__all__ = ["Tenant", "freed_between"]
