"""What an engine offers so that it can be driven, the engines that lowtide brings, and how a call of theirs fails.

A user's target implements what `target` describes, and imports it from `lowtide.targets`; `reference` and
`transformers_target` are two that do.
"""
