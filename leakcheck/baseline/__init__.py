"""What was there before, and who owns it: by storage, cache, card, file, module and setting.

`records` keeps one test's baseline, `owners` says who owns what appears, `deep_reading` names what is above it.
"""
