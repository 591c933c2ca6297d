"""What grows turn by turn: one statistic for every quantity, and the cause of host memory that nobody names.

A turn is a test under a fixture, an inference of a life, a request, a call of a block, an interval of time, a look. Who
makes turns reads a quantity after each (`quantities`) and asks: a `TurnSeries` decides from eight turns on, and
`KeptSteps` from three, where each reading is exact; of containers it is the lengths of all that tell (`containers`).
"""
