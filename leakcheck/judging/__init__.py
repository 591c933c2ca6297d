"""What must come back, when, and whether it did.

`rules` is the one table; `metrics` and `tolerances` read its rows from a snapshot and from a test's reading; `ladder`
releases memory kind by kind; `judge` turns readings into findings; `contract` says what holds after each stage;
`exemptions` lists what is meant to stay. Nothing here knows tests, engines or paths.
"""
