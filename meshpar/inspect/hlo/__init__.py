"""A parser of HLO text and the program that it yields."""
