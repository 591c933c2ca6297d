"""What must come back, when, whose it is, and whether it did.

`rules` is the one table; `metrics` reads its rows from a snapshot and from a test's reading; `ladder` releases memory
kind by kind; `judge` turns readings into findings; `contract` says what holds after each stage; `exemptions` lists what
is meant to stay. `owners` keeps one test's baseline, and says who owns what appears; `storages`, `filled_caches` and
`device_memory` say what of it is new. Nothing here knows tests, engines or paths.
"""
