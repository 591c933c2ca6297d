"""Python's objects, asked what they are without running their code: identity, type, module, and all there are."""
