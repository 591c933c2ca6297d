"""What must come back, when, and whether it did.

`judge` turns readings into findings; `metrics` and `tolerances` are the tables of what is judged, for an engine's
shutdown and for a test; `contract` says what holds after each stage; `ladder` releases kind by kind; `exemptions` lists
what is meant to stay. Nothing here knows tests, engines or paths.
"""
