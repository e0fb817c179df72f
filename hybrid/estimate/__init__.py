"""Estimates of what a recipe costs before it runs: parameters, FLOPs, memory, bytes sent."""
