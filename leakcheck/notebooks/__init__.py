"""`%%leakcheck` in IPython and Jupyter: a cell that is judged, and what it leaves in a notebook's own words."""
