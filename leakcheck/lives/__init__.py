"""Drives an engine through its life, reads between the stages and judges each.

`lifecycle` runs the fixed life of `lowtide run` and `lowtide check`, `checked_life` one in which every call is checked:
`fuzz` draws such lives, `sweep` fails each of their fault points, `witness` kills them.
"""
