"""Lives that nobody writes by hand: drawn calls (`fuzz`), every fault point (`fault_sweep`), kills (`witness`)."""
