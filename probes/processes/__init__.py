"""Processes of a program: seen from outside, and asked through an agent in each; what dead ones have left."""
