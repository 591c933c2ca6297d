"""What must come back, when, and whether it did.

`rules` is the one table; `metrics` and `tolerances` say how a snapshot and a test's reading tell each row; `ladder`
releases kind by kind; `judge` turns readings into findings; `contract` says what holds after each stage; `exemptions`
lists what is meant to stay. Nothing here knows tests, engines or paths.
"""
