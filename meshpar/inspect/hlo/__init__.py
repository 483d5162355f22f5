"""A parser of HLO text, and data classes of the parsed program."""
