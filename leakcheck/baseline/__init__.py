"""What was there before, and whose it is: by storage, cache, card, file, module and setting.

`records` keeps one test's baseline, `owners` says who owns what appears, `deep_reading` names what is above it.
"""
