"""What must come back, a module for each kind of thing: how it is read, named, excused, given back and explained.

`resource` is the interface, `table` has all of them; who judges, explains or tries knows no kind by its name.
"""

from lowtide.leakcheck.resources.table import LISTED, RESOURCES, read_items, resource_of

__all__ = ["LISTED", "RESOURCES", "read_items", "resource_of"]
