"""Tests that start real processes, and the pool of workers that they share."""
