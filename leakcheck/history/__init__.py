"""The residue of many runs: stored in a database, shown as trends, with the runs at which a level changed.

`tables` and `migrations` define the database, `store` writes reports to it, `trends` reads them as series,
`level_changes` finds where a series changed its level, `page` and `terminal` show it.
"""
