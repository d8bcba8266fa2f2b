"""Tests of the stores of references and of the plan of a step."""
