"""What grows turn by turn: one statistic for every quantity, and the cause of host memory that nobody names.

A turn is a test under a fixture, an inference of a life, a request, a call of a block.
"""
