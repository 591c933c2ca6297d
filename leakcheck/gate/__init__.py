"""The nightly gate: a matrix of subjects, devices and settings, each cell in processes of its own, one report.

`matrix` makes cells of the configuration, `cells` runs one below a `guardian`, `gate` runs them all.
`gate` also has the committed baseline; `history` is a database of all reports, `watch_history` has in
it what servers held while they were watched, and `history_page` draws both.
"""
