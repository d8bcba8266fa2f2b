"""Tests of the arithmetic: layout, noise, the eager twin, and its identity across ISAs."""
